"""Average, adaptive and max unpooling with the signatures of ``torch.nn.functional``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.nn import functional

from convgrad.torch._drop_in import drop_in
from convgrad.torch._functional import Sizes, batched, per_dimension, window
from convgrad.torch._pool_ops import OPS

__all__ = [
    "adaptive_avg_pool1d",
    "adaptive_avg_pool2d",
    "adaptive_avg_pool3d",
    "adaptive_max_pool1d",
    "adaptive_max_pool2d",
    "adaptive_max_pool3d",
    "avg_pool1d",
    "avg_pool2d",
    "avg_pool3d",
    "max_unpool1d",
    "max_unpool2d",
    "max_unpool3d",
]

Tensor: TypeAlias = torch.Tensor
_INPUT = "(N, C, *in), or (C, *in); float16, bfloat16, float32 or float64."
_RAISES = """Raises
    ------
    RuntimeError
        As PyTorch, where the sizes contradict each other.
    convgrad.ConvgradError
        The backend failed or, with ``use(..., fallback=False)``, refused.
    """


def _make_avg_pool(ndim: int) -> Callable[..., Tensor]:
    def avg_pool(
        input: Tensor,
        kernel_size: Sizes,
        stride: Sizes | None = None,
        padding: Sizes = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Tensor:
        kernel, steps = window(kernel_size, stride, ndim)
        pads = per_dimension(padding, ndim)
        whole, unbatched = batched(input, ndim)
        output = OPS.avg_pool(
            whole, kernel, steps, pads, ceil_mode, count_include_pad, divisor_override
        )
        return output.squeeze(0) if unbatched else output

    return drop_in(
        avg_pool,
        _avg_pool1d if ndim == 1 else getattr(functional, f"avg_pool{ndim}d"),
        f"avg_pool{ndim}d",
        f"""Average pooling in {ndim}D, forward and backward on the backend, deterministic.

    As ``torch.nn.functional.avg_pool{ndim}d``.

    Parameters
    ----------
    input : Tensor
        {_INPUT}
    kernel_size, stride, padding : int or sequence of int
        One value, or one per spatial dimension; ``stride`` defaults to ``kernel_size``.
    ceil_mode : bool
        Round the output's size up.
    count_include_pad : bool
        Count the padding's positions in a window's divisor.
    divisor_override : int, optional
        The divisor of every window.

    Returns
    -------
    Tensor
        (N, C, *out).

    {_RAISES}""",
    )


def _make_adaptive_avg_pool(ndim: int) -> Callable[..., Tensor]:
    def adaptive_avg_pool(input: Tensor, output_size: int | Sequence[int | None]) -> Tensor:
        whole, unbatched = batched(input, ndim)
        output: Tensor = OPS.adaptive_avg_pool(whole, _asked(whole, output_size))
        return output.squeeze(0) if unbatched else output

    return drop_in(
        adaptive_avg_pool,
        getattr(functional, f"adaptive_avg_pool{ndim}d"),
        f"adaptive_avg_pool{ndim}d",
        f"""Adaptive average pooling in {ndim}D, forward and backward on the backend, deterministic.

    As ``torch.nn.functional.adaptive_avg_pool{ndim}d``.

    Parameters
    ----------
    input : Tensor
        {_INPUT}
    output_size : int or sequence of (int or None)
        One value, or one per spatial dimension; None is the input's own.

    Returns
    -------
    Tensor
        (N, C, *output_size).

    {_RAISES}""",
    )


def _make_adaptive_max_pool(ndim: int) -> Callable[..., Any]:
    def adaptive_max_pool(
        input: Tensor, output_size: int | Sequence[int | None], return_indices: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        whole, unbatched = batched(input, ndim)
        output, indices = OPS.adaptive_max_pool(whole, _asked(whole, output_size))
        if unbatched:
            output, indices = output.squeeze(0), indices.squeeze(0)
        return (output, indices) if return_indices else output

    return drop_in(
        adaptive_max_pool,
        getattr(functional, f"adaptive_max_pool{ndim}d"),
        f"adaptive_max_pool{ndim}d",
        f"""Adaptive max pooling in {ndim}D, forward and backward on the backend, deterministic.

    As ``torch.nn.functional.adaptive_max_pool{ndim}d``.

    Parameters
    ----------
    input : Tensor
        {_INPUT}
    output_size : int or sequence of (int or None)
        One value, or one per spatial dimension; None is the input's own.
    return_indices : bool
        Also return the flat index of each maximum in its plane.

    Returns
    -------
    Tensor, or tuple of Tensor
        (N, C, *output_size); with ``return_indices`` the indices too.

    {_RAISES}""",
    )


def _make_max_unpool(ndim: int) -> Callable[..., Tensor]:
    def max_unpool(
        input: Tensor,
        indices: Tensor,
        kernel_size: Sizes,
        stride: Sizes | None = None,
        padding: Sizes = 0,
        output_size: Sequence[int] | None = None,
    ) -> Tensor:
        kernel, steps = window(kernel_size, stride, ndim)
        pads = per_dimension(padding, ndim)
        whole, unbatched = batched(input, ndim)
        places, _ = batched(indices, ndim)
        if output_size is None:
            sides = zip(whole.shape[2:], kernel, steps, pads, strict=True)
            size = [(n - 1) * step - 2 * pad + taps for n, taps, step, pad in sides]
        else:
            size = list(output_size)[-ndim:]
        output = OPS.max_unpool(whole, places, kernel, steps, pads, size)
        return output.squeeze(0) if unbatched else output

    return drop_in(
        max_unpool,
        getattr(functional, f"max_unpool{ndim}d"),
        f"max_unpool{ndim}d",
        f"""Max unpooling in {ndim}D, forward and backward on the backend, deterministic.

    As ``torch.nn.functional.max_unpool{ndim}d``. Of elements with the same index the last one wins.

    Parameters
    ----------
    input, indices : Tensor
        (N, C, *in), or (C, *in), as max pooling returned them.
    kernel_size, stride, padding : int or sequence of int
        Those of the max pooling; ``stride`` defaults to ``kernel_size``.
    output_size : sequence of int, optional
        Spatial, or the full shape.

    Returns
    -------
    Tensor
        (N, C, *out).

    {_RAISES}""",
    )


def _avg_pool1d(
    input: Tensor,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    """Compute it by PyTorch in 2D: in 1D it has no ``divisor_override``."""
    kernel, steps = window(kernel_size, stride, 1)
    sizes = (1, *kernel), (1, *steps), (0, *per_dimension(padding, 1))
    rest = ceil_mode, count_include_pad, divisor_override
    return functional.avg_pool2d(input.unsqueeze(-2), *sizes, *rest).squeeze(-2)


def _asked(input: Tensor, output_size: int | Sequence[int | None]) -> list[int]:
    """Return a size for each spatial dimension, with None replaced by the input's."""
    extents = list(input.shape[2:])
    if isinstance(output_size, (int, np.integer)):
        return [int(output_size)] * len(extents)
    if len(output_size) != len(extents):
        raise ValueError(
            f"output_size has {len(output_size)} values; expected one, or {len(extents)}"
        )
    asked = zip(output_size, extents, strict=True)
    return [extent if size is None else size for size, extent in asked]


avg_pool1d, avg_pool2d, avg_pool3d = map(_make_avg_pool, (1, 2, 3))
adaptive_avg_pool1d, adaptive_avg_pool2d, adaptive_avg_pool3d = map(
    _make_adaptive_avg_pool, (1, 2, 3)
)
adaptive_max_pool1d, adaptive_max_pool2d, adaptive_max_pool3d = map(
    _make_adaptive_max_pool, (1, 2, 3)
)
max_unpool1d, max_unpool2d, max_unpool3d = map(_make_max_unpool, (1, 2, 3))
