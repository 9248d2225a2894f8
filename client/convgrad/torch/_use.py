"""`use`: computes backward passes of convolutions and both passes of poolings on a backend.

ATen's operators are overridden for the CPU and CUDA once per process. The overrides look up the
backend in use, and call PyTorch's own kernel if there is none. They catch what autograd runs on any
thread, and the calls of ATen's operators in graphs of ``torch.compile``. For `Local` on CUDA,
native kernels are put in front of them (``_front.py``).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import torch

from convgrad.errors import ServiceError
from convgrad.torch._backends import Backend
from convgrad.torch._choice import CHOICE, left_to_pytorch, shapes
from convgrad.torch._passes import conv_backward_pass, conv_double_backward
from convgrad.torch._pool_overrides import POOLING_COMPOSITIONS, POOLINGS, Own
from convgrad.torch._report import count_left
from convgrad.torch._tensors import is_forward_mode
from convgrad.torch._timed import timed

__all__ = ["use"]

DEVICES = ("CPU", "CUDA")


class use:  # noqa: N801 - called like a function, as torch.no_grad is
    """Compute the backward passes of convolutions and poolings on a backend.

    It takes effect at the call, in all threads of the process; as a context manager, until the
    block ends. After ``use(None)`` PyTorch computes them again.

    PyTorch computes forward passes, except those of poolings on devices that are among the
    backend's ``forward_devices``: for `Local`, CUDA tensors. Maxima have the bits of PyTorch's.

    Parameters
    ----------
    backend : Backend or None
        A `Local`, a `Remote`, or any other object that implements `Backend`.
    fallback : bool
        Leave to PyTorch what the backend does not support (other dtypes, empty tensors, problems
        that it refuses), and gradients of convolutions that PyTorch's kernels were measured to
        compute faster on this model of GPU; count both in `report`. If False, refusals are raised.
        An error such as an unreachable server is always raised.
    time_calls : bool
        Time each call for `report`: on a GPU from Python and by events on the stream, which costs
        the host some tens of microseconds a call.

    Raises
    ------
    TypeError
        ``backend`` is not a `Backend`.

    Examples
    --------
    >>> convgrad.torch.use(convgrad.torch.Local())  # until the next call
    >>> with convgrad.torch.use(convgrad.torch.Remote("http://gpu-host:8000")):
    ...     loss.backward()
    """

    def __init__(
        self, backend: Backend | None, *, fallback: bool = True, time_calls: bool = False
    ) -> None:
        given: Any = backend
        if given is not None and (isinstance(given, type) or not hasattr(given, "prepare")):
            raise TypeError(f"expected a backend, such as Local(), or None; got {backend!r}")
        _override_once()
        self._before = CHOICE.backend, CHOICE.fallback
        if backend is not None and time_calls:
            hashable: Any = backend  # as all that is a part of the passes' keys
            backend = timed(hashable)
        CHOICE.set(backend, fallback)

    def __enter__(self) -> use:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        CHOICE.set(*self._before)


def _override_once() -> None:
    with CHOICE.lock:
        if CHOICE.libraries:
            return
        library = torch.library.Library("aten", "IMPL")
        devices = [name for name in DEVICES if name == "CPU" or torch.backends.cuda.is_built()]
        keys = [(_OVERRIDES, device) for device in devices]
        keys += [(_COMPOSITIONS, f"Autograd{device}") for device in devices]
        for operators, key in keys:
            for operator, make in operators.items():
                override = make(_own(f"aten::{operator}", key))
                CHOICE.overrides.setdefault(key, {})[operator] = override
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # the override is intended
                    library.impl(operator, override, key)
        CHOICE.libraries.append(library)


def _own(operator: str, key: str) -> Own:
    """Return PyTorch's kernel for a dispatch key."""
    if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(operator, key):
        missing: Own = getattr(torch.ops.aten, operator.removeprefix("aten::"))
        return missing  # it says so when called
    kernel = torch.library.get_kernel(operator, key)
    # Overrides that take the dispatcher's set cost every call half a microsecond more.
    device = key.removeprefix("Autograd")  # whose kernel that of autograd calls
    one, other = (
        torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, each)) for each in (key, device)
    )
    return partial(kernel.call_boxed, one | other)


def _convolution_backward(own: Own) -> Callable[..., Any]:
    def override(
        grad_output: torch.Tensor,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias_sizes: Sequence[int] | None,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        transposed: bool,
        output_padding: Sequence[int],
        groups: int,
        output_mask: Sequence[bool],
    ) -> Any:
        backend = CHOICE.backend
        if backend is not None and True in output_mask:
            geometry = _geometry(stride, padding, dilation, transposed, output_padding, groups)
            tensors = grad_output, input, weight
            try:
                kept = conv_backward_pass(backend, tensors, geometry, output_mask)
                if kept.left is None or not CHOICE.fallback:
                    return tuple(kept(tensors))
                kept.leave(kept.left)
            except ServiceError as error:
                if not left_to_pytorch(error, input):
                    raise
                count_left("convolution_backward", shapes(input, weight), error.detail)
        return own(
            grad_output,
            input,
            weight,
            bias_sizes,
            stride,
            padding,
            dilation,
            transposed,
            output_padding,
            groups,
            output_mask,
        )

    return override


def _convolution_double_backward(own: Own) -> Callable[..., Any]:
    def override(*given: Any) -> Any:
        backend = CHOICE.backend
        *second, grad_output, weight, input = given[:6]
        *rest, mask = given[6:]
        # A third derivative may follow, which only PyTorch's composition has; so do tangents.
        third = torch.is_grad_enabled() or is_forward_mode()
        if backend is not None and not third:
            tensors = grad_output, input, weight
            try:
                return conv_double_backward(backend, second, tensors, _geometry(*rest), tuple(mask))
            except ServiceError as error:
                if not left_to_pytorch(error, input):
                    raise
                count_left("convolution_double_backward", shapes(input, weight), error.detail)
        return own(*given)

    return override


# Operators overridden for each device, and those that autograd composes of other operators.
_OVERRIDES: dict[str, Callable[[Own], Callable[..., Any]]] = {
    "convolution_backward": _convolution_backward,
    **POOLINGS,
}


_COMPOSITIONS: dict[str, Callable[[Own], Callable[..., Any]]] = {
    "_convolution_double_backward": _convolution_double_backward,
    **POOLING_COMPOSITIONS,
}


def _geometry(
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> tuple[Any, ...]:
    """Make ATen's arguments hashable, in the order of `Geometry`'s fields."""
    return (
        tuple(stride),
        tuple(padding),
        tuple(dilation),
        groups,
        transposed,
        tuple(output_padding),
    )
