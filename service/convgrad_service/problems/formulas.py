"""Sizes of outputs, inputs and kernels from one another, and the errors where they do not exist."""

from __future__ import annotations

from convgrad.errors import InvalidProblem
from convgrad_service.problems.lattice import count_residues_from
from convgrad_service.problems.sizes import (
    MAX_EXTENT,
    InconsistentSizes,
    Pads,
    Size,
    by,
    pads_text,
    show,
    tuple_text,
)

__all__ = ["conv_output_size", "implied_kernel_size", "minimal_input_size", "pool_output_size"]


def conv_output_size(
    name: str,
    input_size: Size,
    kernel_size: Size,
    stride: Size,
    padding: Pads,
    dilation: Size,
    *,
    ceil_mode: bool = False,
) -> Size:
    """Return (in + pad_before + pad_after - dilation*(k-1) - 1) // stride + 1, per dimension.

    ``name`` is the input's name in error messages. ``ceil_mode`` rounds the quotient up.

    Raises
    ------
    InvalidProblem
        The kernel does not fit, or an extent exceeds MAX_EXTENT.
    """
    out = []
    for i, (size, k, s, (before, after), d) in enumerate(
        zip(input_size, kernel_size, stride, padding, dilation, strict=True)
    ):
        reach = d * (k - 1) + 1
        # Rounding up is rounding down with a last window that ends up to stride - 1 later.
        padded = size + before + after + (s - 1 if ceil_mode else 0)
        if reach > padded:
            raise InconsistentSizes(
                f"the kernel spans {show(reach)} positions in spatial dimension {i} "
                f"(size {show(k)}, dilation {show(d)}); expected at most {show(padded)}, {name}'s "
                f"{show(size)} with padding [{show(before)}, {show(after)}]"
                + (f" and, in ceil_mode, stride {show(s)} - 1" if ceil_mode else "")
            )
        out.append((padded - reach) // s + 1)
    return _representable("the output", tuple(out))


def minimal_input_size(
    output_size: Size,
    kernel_size: Size,
    stride: Size,
    padding: Pads,
    dilation: Size,
    output_padding: Size | None = None,
    *,
    transposed: bool = False,
) -> Size:
    """Return (out - 1)*stride + dilation*(k-1) + 1 - pad_before - pad_after, per dimension.

    That is the smallest input whose convolution has ``output_size``; ``output_padding`` is added.
    For error messages about a ``transposed`` convolution, it is the output.

    Raises
    ------
    InvalidProblem
        The input would be empty, or an extent exceeds MAX_EXTENT.
    """
    size = tuple(
        (out - 1) * s + d * (k - 1) + 1 - before - after + extra
        for out, k, s, (before, after), d, extra in zip(
            output_size,
            kernel_size,
            stride,
            padding,
            dilation,
            output_padding or (0,) * len(output_size),
            strict=True,
        )
    )
    if min(size) < 1:
        one = "the output of an input" if transposed else "the input that yields an output"
        raise InconsistentSizes(
            f"{one} of size {tuple_text(output_size)} has size {tuple_text(size)} with kernel "
            f"{by(kernel_size)}, padding {pads_text(padding)}; expected at least 1 in every "
            "dimension"
        )
    return _representable("the output" if transposed else "the input", size)


def implied_kernel_size(
    input_size: Size, output_size: Size, stride: Size, padding: Pads, dilation: Size
) -> Size:
    """Return the only kernel size for which ``input_size`` gives ``output_size``.

    A kernel that spans d*(k-1) + 1 positions gives ``out`` if and only if that is in
    (room - stride, room], with room = in + pad_before + pad_after - (out-1)*stride.

    Raises
    ------
    InvalidProblem
        There is no such kernel, or there are several.
    """
    kernel = []
    for i, (size, out, s, (before, after), d) in enumerate(
        zip(input_size, output_size, stride, padding, dilation, strict=True)
    ):
        room = size + before + after - (out - 1) * s
        largest = (room - 1) // d + 1
        smallest = max(0, -(-(room - s) // d)) + 1
        found = (
            f"in spatial dimension {i} input has {show(size)} positions and grad_output "
            f"{show(out)}, with stride {show(s)}, padding [{show(before)}, {show(after)}] and "
            f"dilation {show(d)}"
        )
        if largest < smallest:
            raise InconsistentSizes(f"{found}; expected sizes that some kernel size connects")
        if largest > smallest:
            raise InvalidProblem(
                f"weight_size is missing; expected it, since {found}: kernels of "
                f"{show(smallest)} to {show(largest)} are possible"
            )
        kernel.append(largest)
    return tuple(kernel)


def pool_output_size(
    input_size: Size,
    kernel_size: Size,
    stride: Size,
    padding: Pads,
    dilation: Size,
    *,
    ceil_mode: bool,
) -> Size:
    """Return the output size as in PyTorch: a convolution's, rounded up with ``ceil_mode``.

    With ``ceil_mode``, a last window that would start past the input and the padding before it is
    dropped.

    Raises
    ------
    InvalidProblem
        The padding is not less than the effective kernel, the kernel does not fit, an extent
        exceeds MAX_EXTENT, or a (dilated) window contains no input element.
    """
    for i, (k, d, pair) in enumerate(zip(kernel_size, dilation, padding, strict=True)):
        reach = d * (k - 1) + 1
        if max(pair) >= reach:
            raise InvalidProblem(
                f"padding is [{show(pair[0])}, {show(pair[1])}] in spatial dimension {i}; "
                f"expected less than the effective kernel, {show(reach)} (size {show(k)}, "
                f"dilation {show(d)})"
            )
    rounded = conv_output_size(
        "input", input_size, kernel_size, stride, padding, dilation, ceil_mode=ceil_mode
    )
    output_size = tuple(
        out - 1 if ceil_mode and (out - 1) * s >= size + before else out
        for out, size, s, (before, _) in zip(rounded, input_size, stride, padding, strict=True)
    )
    _check_windows(input_size, output_size, stride, padding, dilation)
    return output_size


def _check_windows(
    input_size: Size, output_size: Size, stride: Size, padding: Pads, dilation: Size
) -> None:
    """Raise InvalidProblem if a window contains no input element.

    A window that starts at a >= 0 contains its start. One that starts in the padding, which only
    windows o < pad_before/stride do, steps over the input if its first tap at or past zero,
    a mod dilation, is past the end.
    """
    for i, (size, out, s, (before, _), d) in enumerate(
        zip(input_size, output_size, stride, padding, dilation, strict=True)
    ):
        early = min(out, -(-before // s))
        if d > size and count_residues_from(size, early, s, -before, d):
            raise InvalidProblem(
                f"a pooling window holds no input element in spatial dimension {i}: with dilation "
                f"{show(d)} and padding {show(before)} before it, it steps over the input's "
                f"{show(size)}; expected every window to hold at least one"
            )


def _representable(name: str, size: Size) -> Size:
    if max(size) > MAX_EXTENT:
        raise InvalidProblem(
            f"{name} would have spatial size {tuple_text(size)}; expected at most {MAX_EXTENT} in "
            "any dimension"
        )
    return size
