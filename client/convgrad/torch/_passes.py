"""A layer's forward and backward passes on a backend."""

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
    convolution_double_backward,
    max_pool,
)
from convgrad.torch._report import Counter
from convgrad.torch._tensors import DTYPES, INDICES, dense, is_channels_last, uses_tf32

__all__ = [
    "PoolGeometry",
    "computable",
    "compute",
    "conv_backward",
    "conv_double_backward",
    "conv_forward",
    "pool_backward",
    "pool_forward",
]

PoolGeometry = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...], bool]
"""kernel_size, stride, padding, dilation, ceil_mode."""

Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
_GRADIENTS = ("grad_input", "grad_weight", "grad_bias")
_SECOND = ("grad_grad_output", "grad_input", "grad_weight")


def computable(*tensors: torch.Tensor) -> str | None:
    """Return why no backend can compute on these tensors, or None if one can."""
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


class _Pass(NamedTuple):
    """A prepared pass of one layer.

    Attributes
    ----------
    channels_last : bool
        Whether it computes in a channels-last memory format.
    runner : Runner
    inputs, outputs : tuple of int
        The indices of the runner's tensors and results among those of the pass.
    scattered : tuple of int
        The indices, among the runner's tensors, of those to be copied into the memory format.
    counter : Counter
        Counts the calls for `report`.
    """

    channels_last: bool
    runner: Runner
    inputs: tuple[int, ...]
    scattered: tuple[int, ...]
    outputs: tuple[int, ...]
    counter: Counter


# Prepared passes, and refusals, by backend, shapes, strides, dtypes, device and geometry.
_PASSES: dict[Any, _Pass | ServiceError] = {}
# More layers and batch sizes than a process trains; beyond that the cache is cleared.
_MOST_PASSES = 65_536


def _key(backend: Backend, tensors: Sequence[torch.Tensor], *rest: Any) -> Any:
    first = tensors[0]
    key = [backend, first.is_cuda and uses_tf32(first), first.device, rest]
    for tensor in tensors:
        key += tensor.shape, tensor.stride(), tensor.dtype
    return tuple(key)


def _prepared(key: Any, prepare: Callable[[], _Pass]) -> _Pass:
    """Return the cached pass of a key, or prepare it.

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
            # Subclasses are not cached: they may be temporary refusals, such as NotCompiled.
            if type(error) in (InvalidProblem, UnsupportedProblem):
                _PASSES[key] = error
            raise
        _PASSES[key] = kept
    return kept


def _bind(
    backend: Backend,
    operation: Operation,
    names: Sequence[str],
    tensors: Sequence[torch.Tensor],
    results: Sequence[str],
    layer: str,
    *,
    channels_last: bool,
) -> _Pass:
    floating = (tensor for tensor in tensors if tensor.dim() > 1 and tensor.dtype not in INDICES)
    reason = computable(*floating)
    if reason is not None:
        raise UnsupportedProblem(f"{backend.name} does not take {reason}")
    if uses_tf32(tensors[0]) and "pool" not in operation.name:
        parameters = {**operation.parameters, "precision": "high"}
        operation = replace(operation, parameters=parameters)
    inputs = tuple(names.index(ours) for ours in operation.inputs.values())
    outputs = tuple(results.index(ours) for ours in operation.outputs.values())
    given = [dense(tensors[index], channels_last) for index in inputs]
    # The key holds the strides, so that the same tensors need a copy in every call.
    scattered = tuple(
        place for place, index in enumerate(inputs) if given[place] is not tensors[index]
    )
    runner = backend.prepare(operation, given, channels_last=channels_last)
    counter = Counter(operation.name, layer, backend.name, runner)
    return _Pass(channels_last, runner, inputs, scattered, outputs, counter)


def _run(
    pass_: _Pass, tensors: Sequence[torch.Tensor], found: list[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    last, runner, inputs, scattered, outputs, counter = pass_
    given = [tensors[index] for index in inputs]
    for place in scattered:
        given[place] = dense(given[place], last)
    results = runner(given)
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
    """Compute the output of a convolution, transposed or not."""
    tensors = (input, weight) if bias is None else (input, weight, bias)

    def prepare() -> _Pass:
        return _bind(
            backend,
            convolution(geometry, bias=bias is not None),
            ("input", "weight", "bias"),
            tensors,
            ["output"],
            _layer(input, weight, geometry),
            channels_last=is_channels_last(input, weight),
        )

    kept = _prepared(_key(backend, tensors, geometry), prepare)
    (output,) = _run(kept, tensors, [None])
    assert output is not None  # noqa: S101 - the operation's one output
    return output


def conv_backward(
    backend: Backend,
    grad_output: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    geometry: tuple[Any, ...],
    mask: Sequence[bool],
) -> Gradients:
    """Compute grad_input, grad_weight and grad_bias; None for those that ``mask`` leaves out.

    ``geometry`` holds what `Geometry.of` takes.
    """
    tensors = grad_output, input, weight

    def prepare() -> _Pass:
        own = Geometry.of(geometry, input.dim() - 2)
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
    return grad_input, grad_weight, grad_bias


def conv_double_backward(
    backend: Backend,
    second: Sequence[torch.Tensor | None],
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    geometry: tuple[Any, ...],
    mask: Sequence[bool],
) -> Gradients:
    """Compute the gradients of a backward pass's tensors that ``mask`` selects.

    Parameters
    ----------
    second : sequence of Tensor or None
        The gradients of the backward pass's grad_input, grad_weight and grad_bias.
    tensors : tuple of Tensor
        The backward pass's grad_output, input and weight.
    geometry : tuple
        What `Geometry.of` takes.
    mask : sequence of bool
        Which of the gradients of ``tensors`` to compute.

    Returns
    -------
    tuple of Tensor or None
        None for those that ``mask`` leaves out, and for those that are zero because they depend
        only on gradients that are None.
    """
    of_input, of_weight, _ = (each is not None for each in second)
    there = (any(each is not None for each in second), of_weight, of_input)
    wanted = tuple(name for name, *both in zip(_SECOND, mask, there, strict=True) if all(both))
    if not wanted:
        return None, None, None
    given = tuple(
        f"grad_{name}" for name, each in zip(_GRADIENTS, second, strict=True) if each is not None
    )
    every = (*tensors, *(each for each in second if each is not None))

    def prepare() -> _Pass:
        _, input, weight = tensors
        own = Geometry.of(geometry, input.dim() - 2)
        return _bind(
            backend,
            convolution_double_backward(own, given, wanted),
            ("grad_output", "input", "weight", *given),
            every,
            _SECOND,
            _layer(input, weight, own),
            channels_last=is_channels_last(input, weight),
        )

    kept = _prepared(_key(backend, every, geometry, given, wanted), prepare)
    grad_grad_output, grad_input, grad_weight = _run(kept, every, [None, None, None])
    return grad_grad_output, grad_input, grad_weight


def pool_forward(backend: Backend, input: torch.Tensor, geometry: PoolGeometry) -> torch.Tensor:
    """Compute the output of max pooling."""
    return _pooled(backend, (input,), geometry, backward=False)


def pool_backward(
    backend: Backend, grad_output: torch.Tensor, input: torch.Tensor, geometry: PoolGeometry
) -> torch.Tensor:
    """Compute the gradient of max pooling's input, finding the maxima in the input again."""
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
    """Compute one operation on a layer's tensors.

    Parameters
    ----------
    backend : Backend
    make : callable
        Returns the operation; called when the tensors' shapes and ``key`` are new.
    tensors : mapping of str to Tensor
        By the layer's names.
    layer : callable
        Returns the layer's description for reports; called when ``make`` is.
    *key
        What distinguishes the operation from others on the same tensors.
    channels_last : bool
        Whether to compute in a channels-last memory format.

    Raises
    ------
    convgrad.ServiceError
        The backend refuses the problem, or failed.
    """

    def prepare() -> _Pass:
        operation = make()
        return _bind(
            backend,
            operation,
            list(tensors),
            list(tensors.values()),
            list(operation.outputs.values()),
            layer(),
            channels_last=channels_last,
        )

    given = list(tensors.values())
    kept = _prepared(_key(backend, given, channels_last, *key), prepare)
    found: list[torch.Tensor | None] = [None] * len(kept.outputs)
    return [result for result in _run(kept, given, found) if result is not None]


def _layer(input: torch.Tensor, weight: torch.Tensor, geometry: Geometry) -> str:
    """Describe a layer, e.g. ``8x64x56x56 * 128x64x3x3 s2x2 p1x1 d1x1 g1 bfloat16``."""
    text = f"{_by(input.shape)} * {_by(weight.shape)} s{_by(geometry.stride)}"
    text += f" p{_by(geometry.padding)} d{_by(geometry.dilation)} g{geometry.groups}"
    return f"{text}{' transposed' if geometry.transposed else ''} {DTYPES[input.dtype]}"


def _pool(input: torch.Tensor, geometry: PoolGeometry) -> str:
    kernel, stride, padding, _, _ = geometry
    return f"{_by(input.shape)} k{_by(kernel)} s{_by(stride)} p{_by(padding)} {DTYPES[input.dtype]}"


def _by(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes))
