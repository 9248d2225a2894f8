"""`use`: computes the backward passes of all convolutions and poolings on a backend.

ATen's operators are overridden for the CPU and CUDA once per process. The overrides look up the
backend in use, and call PyTorch's own kernel if there is none. They catch what autograd runs on any
thread, and the calls of ATen's operators in graphs of ``torch.compile``. For `Local` on CUDA,
native kernels are put in front of them (``_front.py``).
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, TypeAlias

import torch

from convgrad.errors import (
    InvalidProblem,
    PayloadTooLarge,
    ProblemTooLarge,
    ServiceError,
    UnsupportedProblem,
)
from convgrad.torch._backends import Backend
from convgrad.torch._front import Front, install
from convgrad.torch._local import Local
from convgrad.torch._passes import conv_backward_pass, conv_double_backward, pool_backward
from convgrad.torch._pool_passes import POOL_BACKWARDS
from convgrad.torch._report import count_left
from convgrad.torch._timed import timed

__all__ = ["backend_in_use", "use"]

Own: TypeAlias = Callable[..., Any]
"""PyTorch's own kernel for an operator, which takes the operator's arguments."""

DEVICES = ("CPU", "CUDA")
# Any other error, such as a wrong API key or a failed server, is raised to the caller.
_DECLINED = (InvalidProblem, UnsupportedProblem, ProblemTooLarge, PayloadTooLarge)


class _Choice:
    """The backend in use. Process-wide, because autograd uses its own threads."""

    def __init__(self) -> None:
        self.backend: Backend | None = None
        self.fallback = True
        self.libraries: list[Any] = []
        self.overrides: dict[str, dict[str, Callable[..., Any]]] = {}  # by dispatch key
        self.front: Front | None = None
        self.tried = False  # to have a front
        self.lock = threading.Lock()

    def set(self, backend: Backend | None, fallback: bool) -> None:
        self.backend, self.fallback = backend, fallback
        if isinstance(backend, Local):
            self._install_once()
        if self.front is not None:
            self.front.choose(backend, fallback)

    def _install_once(self) -> None:
        with self.lock:
            if not self.tried:
                self.tried = True
                self.front = install(self.overrides["CUDA"]) if torch.cuda.is_available() else None


_CHOICE = _Choice()


class use:  # noqa: N801 - called like a function, as torch.no_grad is
    """Compute the backward passes of convolutions and poolings on a backend.

    It takes effect at the call, in all threads of the process; as a context manager, until the
    block ends. After ``use(None)`` PyTorch computes them again. PyTorch computes forward passes.

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

    Examples
    --------
    >>> convgrad.torch.use(convgrad.torch.Local())  # until the next call
    >>> with convgrad.torch.use(convgrad.torch.Remote("http://gpu-host:8000")):
    ...     loss.backward()
    """

    def __init__(
        self, backend: Backend | None, *, fallback: bool = True, time_calls: bool = False
    ) -> None:
        _override_once()
        self._before = _CHOICE.backend, _CHOICE.fallback
        if backend is not None and time_calls:
            hashable: Any = backend  # as all that is a part of the passes' keys
            backend = timed(hashable)
        _CHOICE.set(backend, fallback)

    def __enter__(self) -> use:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _CHOICE.set(*self._before)


def backend_in_use() -> Backend | None:
    """Return the backend in use."""
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
                kernel = torch.library.get_kernel(f"aten::{operator}", key)
                # Overrides that take the dispatcher's set cost every call half a microsecond more.
                keys_of = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
                own = partial(kernel.call_boxed, keys_of)
                override = make(own)
                _CHOICE.overrides.setdefault(key, {})[operator] = override
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # the override is intended
                    library.impl(operator, override, key)
        _CHOICE.libraries.append(library)


def _left_to_pytorch(error: ServiceError, input: torch.Tensor) -> bool:
    """Return whether the error is a refusal that `use` leaves to PyTorch."""
    return isinstance(error, _DECLINED) and (_CHOICE.fallback or input.numel() == 0)


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
        backend = _CHOICE.backend
        if backend is not None and True in output_mask:
            geometry = _geometry(stride, padding, dilation, transposed, output_padding, groups)
            tensors = grad_output, input, weight
            try:
                kept = conv_backward_pass(backend, tensors, geometry, output_mask)
                if kept.left is None or not _CHOICE.fallback:
                    return tuple(kept(tensors))
                kept.leave(kept.left)
            except ServiceError as error:
                if not _left_to_pytorch(error, input):
                    raise
                count_left("convolution_backward", _shapes(input, weight), error.detail)
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
        backend = _CHOICE.backend
        *second, grad_output, weight, input = given[:6]
        *rest, mask = given[6:]
        # A third derivative may follow, which only PyTorch's composition has.
        if backend is not None and not torch.is_grad_enabled():
            tensors = grad_output, input, weight
            try:
                return conv_double_backward(backend, second, tensors, _geometry(*rest), tuple(mask))
            except ServiceError as error:
                if not _left_to_pytorch(error, input):
                    raise
                count_left("convolution_double_backward", _shapes(input, weight), error.detail)
        return own(*given)

    return override


def _max_pool_backward(own: Own) -> Callable[..., Any]:
    def override(
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
        # The rank of an unbatched input is that of a batched one with a dimension less.
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
        return own(
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


def _pool_backward(
    operator: str, compute: Callable[..., torch.Tensor | None]
) -> Callable[[Own], Callable[..., Any]]:
    def make(own: Own) -> Callable[..., Any]:
        def override(grad_output: torch.Tensor, input: torch.Tensor, *rest: Any) -> Any:
            backend = _CHOICE.backend
            if backend is not None:
                try:
                    found = compute(backend, grad_output, input, *rest)
                    if found is not None:
                        return found
                except ServiceError as error:
                    if not _left_to_pytorch(error, input):
                        raise
                    count_left(operator, _shapes(input), error.detail)
            return own(grad_output, input, *rest)

        return override

    return make


# Operators overridden for each device, and those that autograd composes of other operators.
_OVERRIDES: dict[str, Callable[[Own], Callable[..., Any]]] = {
    "convolution_backward": _convolution_backward,
    "max_pool2d_with_indices_backward": _max_pool_backward,
    "max_pool3d_with_indices_backward": _max_pool_backward,
    **{name: _pool_backward(name, compute) for name, compute in POOL_BACKWARDS.items()},
}


_COMPOSITIONS: dict[str, Callable[[Own], Callable[..., Any]]] = {
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
    """Make ATen's arguments hashable, in the order of `Geometry`'s fields."""
    return (
        tuple(stride),
        tuple(padding),
        tuple(dilation),
        groups,
        transposed,
        tuple(output_padding),
    )


def _per_dimension(values: Sequence[int], ndim: int) -> tuple[int, ...]:
    """Return one value per dimension; ATen's lists hold one per dimension or one for all."""
    return tuple(values) if len(values) == ndim else (values[0],) * ndim


def _shapes(*tensors: torch.Tensor) -> str:
    return " * ".join("x".join(map(str, tensor.shape)) for tensor in tensors)
