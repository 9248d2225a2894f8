"""`use`: the backward passes of every convolution and max pooling through a backend.

ATen's operators are overridden for the CPU and CUDA, once; the override asks which backend is in
use and calls PyTorch's own kernel where there is none. It sees what autograd runs, whichever thread
runs it, and what ``torch.compile`` leaves to ATen.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch

from convgrad.errors import (
    InvalidProblem,
    PayloadTooLarge,
    ProblemTooLarge,
    ServiceError,
    UnsupportedProblem,
)
from convgrad.torch._backends import Backend
from convgrad.torch._passes import conv_backward, conv_double_backward, pool_backward
from convgrad.torch._report import count_left

__all__ = ["backend_in_use", "use"]

DEVICES = ("CPU", "CUDA")
# A wrong key, a fault of the server and all else is an error of the caller's program.
_DECLINED = (InvalidProblem, UnsupportedProblem, ProblemTooLarge, PayloadTooLarge)


class _Choice:
    """The backend in use, of the whole process: autograd runs on threads of its own."""

    def __init__(self) -> None:
        self.backend: Backend | None = None
        self.fallback = True
        self.libraries: list[Any] = []
        self.lock = threading.Lock()


_CHOICE = _Choice()


class use:  # noqa: N801 - called like a function, as torch.no_grad is
    """Compute the backward passes of convolutions and max pooling on a backend.

    In effect from the call on, in all threads of the process; as a context manager, until the block
    ends. ``use(None)`` gives them back to PyTorch. Forward passes stay PyTorch's.

    Parameters
    ----------
    backend : Backend or None
        `Local` or `Remote`, or any object of the protocol.
    fallback : bool
        Leave to PyTorch what the backend does not take (other dtypes, empty tensors, problems that
        it refuses), and count it in `report`. Otherwise its refusal is raised. Where a server
        cannot be reached, that is raised either way.

    Examples
    --------
    >>> convgrad.torch.use(convgrad.torch.Local())          # for good
    >>> with convgrad.torch.use(convgrad.torch.Remote("http://gpu-host:8000")):
    ...     loss.backward()
    """

    def __init__(self, backend: Backend | None, *, fallback: bool = True) -> None:
        _override_once()
        self._before = _CHOICE.backend, _CHOICE.fallback
        _CHOICE.backend, _CHOICE.fallback = backend, fallback

    def __enter__(self) -> use:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _CHOICE.backend, _CHOICE.fallback = self._before


def backend_in_use() -> Backend | None:
    """What `use` was last given."""
    return _CHOICE.backend


def _override_once() -> None:
    with _CHOICE.lock:
        if _CHOICE.libraries:
            return
        library = torch.library.Library("aten", "IMPL")
        devices = [name for name in DEVICES if name == "CPU" or torch.backends.cuda.is_built()]
        keys = [(_OVERRIDES, device) for device in devices]
        keys += [(_COMPOSITIONS, f"Autograd{device}") for device in devices]
        for operators, key in keys:
            for operator, make in operators.items():
                own = torch.library.get_kernel(f"aten::{operator}", key)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # that it overrides is what is meant
                    library.impl(operator, make(own), key, with_keyset=True)
        _CHOICE.libraries.append(library)


def _left_to_pytorch(error: ServiceError, input: torch.Tensor) -> bool:
    """Whether the backend declined the problem, rather than failed to run it, and may."""
    return isinstance(error, _DECLINED) and (_CHOICE.fallback or input.numel() == 0)


def _convolution_backward(own: Any) -> Callable[..., Any]:
    def override(
        keyset: Any,
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
        backend = _CHOICE.backend
        if backend is not None and any(output_mask):
            geometry = _geometry(stride, padding, dilation, transposed, output_padding, groups)
            try:
                return conv_backward(backend, grad_output, input, weight, geometry, output_mask)
            except ServiceError as error:
                if not _left_to_pytorch(error, input):
                    raise
                count_left("convolution_backward", _shapes(input, weight), error.detail)
        return own.call_boxed(
            keyset,
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


def _convolution_double_backward(own: Any) -> Callable[..., Any]:
    def override(keyset: Any, *given: Any) -> Any:
        backend = _CHOICE.backend
        *second, grad_output, weight, input = given[:6]
        *rest, mask = given[6:]
        # Where a third derivative may follow, PyTorch's composition stays, which has one.
        if backend is not None and not torch.is_grad_enabled():
            tensors = grad_output, input, weight
            try:
                return conv_double_backward(backend, second, tensors, _geometry(*rest), tuple(mask))
            except ServiceError as error:
                if not _left_to_pytorch(error, input):
                    raise
                count_left("convolution_double_backward", _shapes(input, weight), error.detail)
        return own.call_boxed(keyset, *given)

    return override


def _max_pool_backward(own: Any) -> Callable[..., Any]:
    def override(
        keyset: Any,
        grad_output: torch.Tensor,
        input: torch.Tensor,
        kernel_size: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        ceil_mode: bool,
        indices: torch.Tensor,
    ) -> Any:
        backend = _CHOICE.backend
        # An unbatched input has the rank of a batched one of a dimension less.
        if backend is not None and input.dim() == len(kernel_size) + 2:
            ndim = input.dim() - 2
            kernel = _per_dimension(kernel_size, ndim)
            geometry = (
                kernel,
                _per_dimension(stride, ndim) if len(stride) else kernel,
                _per_dimension(padding, ndim),
                _per_dimension(dilation, ndim),
                ceil_mode,
            )
            try:
                return pool_backward(backend, grad_output, input, geometry)
            except ServiceError as error:
                if not _left_to_pytorch(error, input):
                    raise
                count_left("max_pool_backward", _shapes(input), error.detail)
        return own.call_boxed(
            keyset,
            grad_output,
            input,
            kernel_size,
            stride,
            padding,
            dilation,
            ceil_mode,
            indices,
        )

    return override


# The operators of a device, and those that autograd composes of others.
_OVERRIDES: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "convolution_backward": _convolution_backward,
    "max_pool2d_with_indices_backward": _max_pool_backward,
    "max_pool3d_with_indices_backward": _max_pool_backward,
}


_COMPOSITIONS: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "_convolution_double_backward": _convolution_double_backward,
}


def _geometry(
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> tuple[Any, ...]:
    """The fields of a `Geometry`, from ATen's arguments."""
    return (
        tuple(stride),
        tuple(padding),
        tuple(dilation),
        groups,
        transposed,
        tuple(output_padding),
    )


def _per_dimension(values: Sequence[int], ndim: int) -> tuple[int, ...]:
    """ATen's lists hold one value for all dimensions, or one for each."""
    return tuple(values) if len(values) == ndim else (values[0],) * ndim


def _shapes(*tensors: torch.Tensor) -> str:
    return " * ".join("x".join(map(str, tensor.shape)) for tensor in tensors)
