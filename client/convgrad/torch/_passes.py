"""A layer's forward and backward passes on a backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from convgrad.torch._backends import (
    Backend,
    Geometry,
    Operation,
    convolution,
    convolution_backward,
    convolution_double_backward,
    max_pool,
    named,
)
from convgrad.torch._prepared import PASSES, Pass, key_of, prepared
from convgrad.torch._tensors import dtype_name, is_channels_last, uses_tf32

__all__ = [
    "PoolGeometry",
    "compute",
    "conv_backward",
    "conv_backward_pass",
    "conv_double_backward",
    "conv_forward",
    "pool_backward",
    "pool_forward",
    "pool_forward_with_indices",
]

PoolGeometry = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...], bool]
"""kernel_size, stride, padding, dilation, ceil_mode."""

Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
_GRADIENTS = ("grad_input", "grad_weight", "grad_bias")
_SECOND = ("grad_grad_output", "grad_input", "grad_weight")


def conv_forward(
    backend: Backend,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    geometry: Geometry,
) -> torch.Tensor:
    """Compute the output of a convolution, transposed or not."""
    tensors = (input, weight) if bias is None else (input, weight, bias)

    kept = prepared(key_of(backend, tensors, geometry), _forward, backend, tensors, geometry)
    (output,) = kept(tensors)
    assert output is not None  # noqa: S101 - the operation's one output
    return output


def _forward(backend: Backend, tensors: Sequence[torch.Tensor], geometry: Geometry) -> Pass:
    input, weight, *_ = tensors
    return Pass(
        backend,
        convolution(geometry, bias=len(tensors) > 2),
        ("input", "weight", "bias"),
        tensors,
        ["output"],
        _layer(input, weight, geometry),
        is_channels_last(input, weight),
    )


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
    grad_input, grad_weight, grad_bias = conv_backward_pass(backend, tensors, geometry, mask)(
        tensors
    )
    return grad_input, grad_weight, grad_bias


def conv_backward_pass(
    backend: Backend,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    geometry: tuple[Any, ...],
    mask: Sequence[bool],
) -> Pass:
    """Return the pass that `conv_backward` runs on grad_output, input and weight."""
    grad_output, input, weight = tensors
    # As of `key_of`, written out, and looked up here first: it halves the time of both.
    key = (
        backend,
        grad_output.dtype is torch.float32 and uses_tf32(grad_output),
        geometry,
        *mask,
        grad_output.device,
        grad_output.shape,
        grad_output.stride(),
        grad_output.dtype,
        input.shape,
        input.stride(),
        input.dtype,
        input.get_device(),
        weight.shape,
        weight.stride(),
        weight.dtype,
        weight.get_device(),
    )
    kept = PASSES.get(key)
    if isinstance(kept, Pass):
        return kept
    return prepared(key, _backward, backend, tensors, geometry, mask)


def _backward(
    backend: Backend,
    tensors: Sequence[torch.Tensor],
    geometry: tuple[Any, ...],
    mask: Sequence[bool],
) -> Pass:
    _, input, weight = tensors
    own = Geometry.of(geometry, input.dim() - 2)
    wanted = tuple(name for name, asked in zip(_GRADIENTS, mask, strict=True) if asked)
    return Pass(
        backend,
        convolution_backward(own, wanted, tuple(input.shape[2:]), tuple(weight.shape[2:])),
        ("grad_output", "input", "weight"),
        tensors,
        _GRADIENTS,
        _layer(input, weight, own),
        is_channels_last(input, weight),
    )


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

    key = key_of(backend, every, geometry, given, wanted)
    kept = prepared(key, _double_backward, backend, every, geometry, given, wanted)
    grad_grad_output, grad_input, grad_weight = kept(every)
    return grad_grad_output, grad_input, grad_weight


def _double_backward(
    backend: Backend,
    tensors: Sequence[torch.Tensor],
    geometry: tuple[Any, ...],
    given: tuple[str, ...],
    wanted: tuple[str, ...],
) -> Pass:
    _, input, weight, *_ = tensors
    own = Geometry.of(geometry, input.dim() - 2)
    return Pass(
        backend,
        convolution_double_backward(own, given, wanted),
        ("grad_output", "input", "weight", *given),
        tensors,
        _SECOND,
        _layer(input, weight, own),
        is_channels_last(input, weight),
    )


def pool_forward(backend: Backend, input: torch.Tensor, geometry: PoolGeometry) -> torch.Tensor:
    """Compute the output of max pooling."""
    (output,) = _pooled(backend, (input,), geometry, ("output",))
    return output


def pool_forward_with_indices(
    backend: Backend, input: torch.Tensor, geometry: PoolGeometry
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the output of max pooling, and its indices as int64."""
    output, indices = _pooled(backend, (input,), geometry, ("output", "indices"))
    return output, indices


def pool_backward(
    backend: Backend, grad_output: torch.Tensor, input: torch.Tensor, geometry: PoolGeometry
) -> torch.Tensor:
    """Compute the gradient of max pooling's input, finding the maxima in the input again."""
    (grad_input,) = _pooled(backend, (input, grad_output), geometry, ("grad_input",))
    return grad_input


def _pooled(
    backend: Backend,
    tensors: tuple[torch.Tensor, ...],
    geometry: PoolGeometry,
    wanted: tuple[str, ...],
) -> list[Any]:
    key = key_of(backend, tensors, geometry, wanted)
    return prepared(key, _pooling, backend, tensors, geometry, wanted)(tensors)


def _pooling(
    backend: Backend,
    tensors: Sequence[torch.Tensor],
    geometry: PoolGeometry,
    wanted: tuple[str, ...],
) -> Pass:
    input = tensors[0]
    return Pass(
        backend,
        max_pool(input.dim() - 2, *geometry, wanted),
        ("input", "grad_output"),
        tensors,
        wanted,
        _pool(input, geometry),
        is_channels_last(input),
    )


def compute(
    backend: Backend,
    name: str,
    tensors: Mapping[str, torch.Tensor],
    results: tuple[str, ...],
    parameters: Mapping[str, Any],
    layer: Callable[..., str],
    channels_last: bool,
) -> list[Any]:
    """Compute one operation whose tensors have the contract's names.

    Parameters
    ----------
    backend : Backend
    name : str
        The operation's name in the contract.
    tensors : mapping of str to Tensor
        By the contract's names.
    results : tuple of str
        The names of the tensors to return.
    parameters : mapping
        The other fields of a request, all hashable.
    layer : callable
        Returns the layer's description for reports from the first tensor and ``parameters``.
    channels_last : bool
        Whether to compute in a channels-last memory format.

    Raises
    ------
    convgrad.ServiceError
        The backend refuses the problem, or failed.
    """
    given = tuple(tensors.values())
    key = key_of(backend, given, channels_last, name, *parameters.values())
    fixed = name, tensors, results, parameters, layer, channels_last
    return prepared(key, _computation, backend, *fixed)(given)


def _computation(
    backend: Backend,
    name: str,
    tensors: Mapping[str, torch.Tensor],
    results: tuple[str, ...],
    parameters: Mapping[str, Any],
    layer: Callable[..., str],
    channels_last: bool,
) -> Pass:
    given = list(tensors.values())
    return Pass(
        backend,
        Operation(name, named(tuple(tensors)), named(results), parameters),
        list(tensors),
        given,
        results,
        layer(given[0], parameters),
        channels_last,
    )


def _layer(input: torch.Tensor, weight: torch.Tensor, geometry: Geometry) -> str:
    """Describe a layer, e.g. ``8x64x56x56 * 128x64x3x3 s2x2 p1x1 d1x1 g1 bfloat16``."""
    text = f"{_by(input.shape)} * {_by(weight.shape)} s{_by(geometry.stride)}"
    text += f" p{_by(geometry.padding)} d{_by(geometry.dilation)} g{geometry.groups}"
    return f"{text}{' transposed' if geometry.transposed else ''} {dtype_name(input.dtype)}"


def _pool(input: torch.Tensor, geometry: PoolGeometry) -> str:
    kernel, stride, padding, _, _ = geometry
    text = f"{_by(input.shape)} k{_by(kernel)} s{_by(stride)} p{_by(padding)}"
    return f"{text} {dtype_name(input.dtype)}"


def _by(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes))
