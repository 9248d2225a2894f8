"""A layer's forward and backward pass on a backend, from and to PyTorch's tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from convgrad.errors import InvalidProblem, ServiceError, UnsupportedProblem
from convgrad.torch._backends import (
    Backend,
    Geometry,
    Operation,
    Runner,
    convolution,
    convolution_backward,
    max_pool,
)
from convgrad.torch._report import Counter
from convgrad.torch._tensors import DTYPES, INDICES, dense, is_channels_last, uses_tf32

__all__ = [
    "PoolGeometry",
    "computable",
    "compute",
    "conv_backward",
    "conv_forward",
    "pool_backward",
    "pool_forward",
    "transposed_output_size",
]

PoolGeometry = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...], bool]
"""kernel_size, stride, padding, dilation, ceil_mode."""

Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
_GRADIENTS = ("grad_input", "grad_weight", "grad_bias")


def computable(*tensors: torch.Tensor) -> str | None:
    """Why a backend cannot take these tensors; None where it can."""
    first = tensors[0]
    for tensor in tensors:
        if tensor.dtype not in DTYPES:
            return f"dtype {tensor.dtype}"
        if tensor.dtype is not first.dtype or tensor.device != first.device:
            return "tensors of different dtypes or devices"
        if tensor.numel() == 0:
            return "an empty tensor"
        if tensor.layout is not torch.strided or not 3 <= tensor.dim() <= 5:
            return f"a {tensor.dim()}-dimensional {tensor.layout} tensor"
    return None


class _Bound(NamedTuple):
    """An operation bound to a backend: which tensors it takes, which results it gives."""

    runner: Runner
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    counter: Counter


class _Pass(NamedTuple):
    """What one pass of one layer runs; kept, so that a later call only looks it up."""

    channels_last: bool
    steps: tuple[_Bound, ...]


# By backend, shapes, strides, dtypes, device and geometry; also what was refused for good.
_PASSES: dict[Any, _Pass | ServiceError] = {}
# More layers, with their batch sizes, than a process trains; then all are prepared anew.
_MOST_PASSES = 65_536


def _key(backend: Backend, tensors: Sequence[torch.Tensor], *rest: Any) -> Any:
    first = tensors[0]
    return (
        backend,
        uses_tf32(first),
        first.device,
        *[(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors],
        *rest,
    )


def _prepared(key: Any, prepare: Callable[[], _Pass]) -> _Pass:
    """What is kept under a key, or made now.

    Raises
    ------
    convgrad.ServiceError
        The backend refuses the problem.
    """
    if len(_PASSES) >= _MOST_PASSES:
        _PASSES.clear()
    kept = _PASSES.get(key)
    if isinstance(kept, ServiceError):
        raise kept
    if kept is None:
        try:
            kept = prepare()
        except ServiceError as error:
            # Not a subclass, which may mean a refusal for now.
            if type(error) in (InvalidProblem, UnsupportedProblem):
                _PASSES[key] = error
            raise
        _PASSES[key] = kept
    return kept


def _bind(
    backend: Backend,
    operations: Sequence[Operation],
    names: Sequence[str],
    tensors: Sequence[torch.Tensor],
    results: Sequence[str],
    layer: str,
    *,
    channels_last: bool,
) -> _Pass:
    # Indices have a dtype of their own.
    floating = (tensor for tensor in tensors if tensor.dim() > 1 and tensor.dtype not in INDICES)
    reason = computable(*floating)
    if reason is not None:
        raise UnsupportedProblem(f"{backend.name} does not take {reason}")
    steps = []
    for operation in operations:
        if uses_tf32(tensors[0]) and "pool" not in operation.name:
            parameters = {**operation.parameters, "precision": "high"}
            operation = replace(operation, parameters=parameters)
        inputs = tuple(names.index(ours) for ours in operation.inputs.values())
        outputs = tuple(results.index(ours) for ours in operation.outputs.values())
        given = [dense(tensors[index], channels_last) for index in inputs]
        runner = backend.prepare(operation, given, channels_last=channels_last)
        counter = Counter(operation.name, layer, backend.name, runner)
        steps.append(_Bound(runner, inputs, outputs, counter))
    return _Pass(channels_last, tuple(steps))


def _run(
    pass_: _Pass, tensors: Sequence[torch.Tensor], found: list[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    last = pass_.channels_last
    for runner, inputs, outputs, counter in pass_.steps:
        results = runner([dense(tensors[index], last) for index in inputs])
        for index, result in zip(outputs, results, strict=True):
            found[index] = result
        counter.calls += 1
    return found


def conv_forward(
    backend: Backend,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    geometry: Geometry,
) -> torch.Tensor:
    """The output of a convolution, transposed or not."""
    fused = bias is not None and not geometry.transposed
    tensors = (input, weight, bias) if fused and bias is not None else (input, weight)

    def prepare() -> _Pass:
        size: tuple[int, ...] = ()
        if geometry.transposed:
            size = transposed_output_size(input.shape[2:], weight.shape[2:], geometry)
        return _bind(
            backend,
            [convolution(geometry, size, bias=fused)],
            ("input", "weight", "bias"),
            tensors,
            ["output"],
            _layer(input, weight, geometry),
            channels_last=is_channels_last(input, weight),
        )

    kept = _prepared(_key(backend, tensors, geometry), prepare)
    (output,) = _run(kept, tensors, [None])
    assert output is not None  # noqa: S101 - the operation's one output
    if geometry.transposed and bias is not None:
        output = output + bias.view(1, -1, *(1,) * (input.dim() - 2))
    return output


def conv_backward(
    backend: Backend,
    grad_output: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    geometry: tuple[Any, ...],
    mask: Sequence[bool],
) -> Gradients:
    """grad_input, grad_weight and grad_bias of a convolution; None for what ``mask`` leaves out.

    ``geometry`` holds the fields of a `Geometry`.
    """
    tensors = grad_output, input, weight

    def prepare() -> _Pass:
        own = Geometry(*geometry)
        wanted = tuple(name for name, asked in zip(_GRADIENTS, mask, strict=True) if asked)
        return _bind(
            backend,
            convolution_backward(own, wanted, tuple(input.shape[2:]), tuple(weight.shape[2:])),
            ("grad_output", "input", "weight"),
            tensors,
            _GRADIENTS,
            _layer(input, weight, own),
            channels_last=is_channels_last(input, weight),
        )

    kept = _prepared(_key(backend, tensors, geometry, *mask), prepare)
    grad_input, grad_weight, grad_bias = _run(kept, tensors, [None, None, None])
    if mask[2] and grad_bias is None:
        grad_bias = grad_output.sum((0, *range(2, grad_output.dim())))
    return grad_input, grad_weight, grad_bias


def pool_forward(backend: Backend, input: torch.Tensor, geometry: PoolGeometry) -> torch.Tensor:
    """The output of max pooling."""
    return _pooled(backend, (input,), geometry, backward=False)


def pool_backward(
    backend: Backend, grad_output: torch.Tensor, input: torch.Tensor, geometry: PoolGeometry
) -> torch.Tensor:
    """The gradient of max pooling's input; the maxima are found again in the input."""
    return _pooled(backend, (input, grad_output), geometry, backward=True)


def _pooled(
    backend: Backend, tensors: Sequence[torch.Tensor], geometry: PoolGeometry, *, backward: bool
) -> torch.Tensor:
    input = tensors[0]
    (result,) = compute(
        backend,
        lambda: max_pool(input.dim() - 2, *geometry, backward=backward),
        dict(zip(("input", "grad_output"), tensors, strict=False)),
        lambda: _pool(input, geometry),
        geometry,
        channels_last=is_channels_last(input),
    )
    return result


def compute(
    backend: Backend,
    make: Callable[[], Operation],
    tensors: Mapping[str, torch.Tensor],
    layer: Callable[[], str],
    *key: Any,
    channels_last: bool,
) -> list[torch.Tensor]:
    """The results of one operation on a layer's tensors, by the layer's names for them.

    ``make`` and ``layer`` give the operation and its name in reports, where the tensors' shapes and
    ``key`` are new.

    Raises
    ------
    convgrad.ServiceError
        The backend refuses the problem, or failed.
    """

    def prepare() -> _Pass:
        operation = make()
        return _bind(
            backend,
            [operation],
            list(tensors),
            list(tensors.values()),
            list(operation.outputs.values()),
            layer(),
            channels_last=channels_last,
        )

    given = list(tensors.values())
    kept = _prepared(_key(backend, given, channels_last, *key), prepare)
    found: list[torch.Tensor | None] = [None] * len(kept.steps[0].outputs)
    return [result for result in _run(kept, given, found) if result is not None]


def transposed_output_size(
    input_size: Sequence[int], kernel_size: Sequence[int], geometry: Geometry
) -> tuple[int, ...]:
    """The spatial size that a transposed convolution makes of its input's."""
    return tuple(
        (size - 1) * stride - 2 * pad + dilation * (kernel - 1) + extra + 1
        for size, kernel, stride, pad, dilation, extra in zip(
            input_size,
            kernel_size,
            geometry.stride,
            geometry.padding,
            geometry.dilation,
            geometry.output_padding,
            strict=True,
        )
    )


def _layer(input: torch.Tensor, weight: torch.Tensor, geometry: Geometry) -> str:
    """E.g. ``8x64x56x56 * 128x64x3x3 s2 p1 g1 bfloat16``."""
    text = f"{_by(input.shape)} * {_by(weight.shape)} s{_by(geometry.stride)}"
    text += f" p{_by(geometry.padding)} d{_by(geometry.dilation)} g{geometry.groups}"
    return f"{text}{' transposed' if geometry.transposed else ''} {DTYPES[input.dtype]}"


def _pool(input: torch.Tensor, geometry: PoolGeometry) -> str:
    kernel, stride, padding, _, _ = geometry
    return f"{_by(input.shape)} k{_by(kernel)} s{_by(stride)} p{_by(padding)} {DTYPES[input.dtype]}"


def _by(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes))
