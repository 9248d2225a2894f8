"""The tensor formats of Ascend's 3D operations, and exact conversions to and from plain arrays.

==============  ================================================================
NCDHW, NDHWC    activations (N, C, D, H, W) and (N, D, H, W, C); for weights the
                same letters mean (K, C/G, T, R, S) and (K, T, R, S, C/G)
NDC1HWC0        activations (N, D, C1, H, W, C0), channel c = c1*C0 + c0
FRACTAL_Z_3D    weights (G * T*C1*R*S, N1, N0, C0), K/G = N1*N0, C/G = C1*C0
==============  ================================================================

C0 is 16 for 16-bit types and 8 for float32, N0 is 16. Padding channels are written as zero and
ignored on reading. In FRACTAL_Z_3D the first axis has one group after another.
Source: Ascend C's Conv3DBackpropInput.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgrad.dtypes import DType
from convgrad.errors import InvalidProblem
from convgrad_service.problems.sizes import Size, check_shape, tuple_text

__all__ = [
    "ACTIVATION_FORMATS",
    "N0",
    "WEIGHT_FORMATS",
    "ActivationFormat",
    "WeightFormat",
    "channel_block",
]

N0 = 16
_C0 = {DType.FLOAT16: 16, DType.BFLOAT16: 16, DType.FLOAT32: 8}


def channel_block(format: str, dtype: DType) -> int:
    """Return C0; raise InvalidProblem if the format does not exist for this dtype."""
    if dtype not in _C0:
        raise InvalidProblem(f"{format} holds {dtype}; expected one of {', '.join(_C0)}")
    return _C0[dtype]


def _ceil(channels: int, block: int) -> int:
    return -(-channels // block)


def _check_rank(tensor: str, shape: Sequence[int], format: str, order: str) -> Size:
    rank = order.count(",") + 1
    if len(shape) != rank:
        raise InvalidProblem(
            f"{tensor} has shape {tuple_text(shape)}; expected {rank} dimensions ({order}) in "
            f"format {format}"
        )
    return check_shape(tensor, shape)


class ActivationFormat(ABC):
    """The format of an activation."""

    __slots__ = ()

    name: str
    order: str
    depth_axis: int

    @abstractmethod
    def shape(self, dtype: DType, batch: int, channels: int, size: Size) -> Size:
        """Return the array's shape."""

    @abstractmethod
    def spatial(self, shape: Sequence[int]) -> Size:
        """Return (D, H, W) of an array's shape."""

    @abstractmethod
    def unpack(self, array: NDArray[Any], channels: int) -> NDArray[Any]:
        """Return (N, C, D, H, W), a view if the format is plain, else a copy."""

    @abstractmethod
    def pack(self, plain: NDArray[Any], array: NDArray[Any]) -> None:
        """Write (N, C, D, H, W) into an array of this format, padded channels as zero."""

    def check_rank(self, tensor: str, shape: Sequence[int]) -> Size:
        """Raise InvalidProblem unless the shape has this format's rank and sane extents."""
        return _check_rank(tensor, shape, self.name, self.order)


@dataclass(frozen=True, slots=True)
class _PlainActivation(ActivationFormat):
    name: str
    order: str
    depth_axis: int
    axes: tuple[int, ...]
    """The axes of N, C, D, H, W."""

    def shape(self, dtype: DType, batch: int, channels: int, size: Size) -> Size:
        sizes = dict(zip(self.axes, (batch, channels, *size), strict=True))
        return tuple(sizes[axis] for axis in range(5))

    def spatial(self, shape: Sequence[int]) -> Size:
        return tuple(shape[axis] for axis in self.axes[2:])

    def unpack(self, array: NDArray[Any], channels: int) -> NDArray[Any]:
        return array.transpose(self.axes)

    def pack(self, plain: NDArray[Any], array: NDArray[Any]) -> None:
        array.transpose(self.axes)[...] = plain


@dataclass(frozen=True, slots=True)
class _BlockedActivation(ActivationFormat):
    name: str = "NDC1HWC0"
    order: str = "N, D, C1, H, W, C0"
    depth_axis: int = 1

    def shape(self, dtype: DType, batch: int, channels: int, size: Size) -> Size:
        c0 = channel_block(self.name, dtype)
        depth, height, width = size
        return batch, depth, _ceil(channels, c0), height, width, c0

    def spatial(self, shape: Sequence[int]) -> Size:
        return shape[1], shape[3], shape[4]

    def unpack(self, array: NDArray[Any], channels: int) -> NDArray[Any]:
        batch, depth, _, height, width, c0 = array.shape
        plain = np.empty((batch, channels, depth, height, width), array.dtype)
        for c1, (start, stop) in enumerate(_blocks(channels, c0)):
            block = array[:, :, c1, :, :, : stop - start]
            plain[:, start:stop] = block.transpose(0, 4, 1, 2, 3)
        return plain

    def pack(self, plain: NDArray[Any], array: NDArray[Any]) -> None:
        for c1, (start, stop) in enumerate(_blocks(plain.shape[1], array.shape[-1])):
            block = array[:, :, c1]
            block[..., : stop - start] = plain[:, start:stop].transpose(0, 2, 3, 4, 1)
            block[..., stop - start :] = 0


def _blocks(channels: int, c0: int) -> list[tuple[int, int]]:
    return [(start, min(start + c0, channels)) for start in range(0, channels, c0)]


class WeightFormat(ABC):
    """The format of a weight."""

    __slots__ = ()

    name: str
    order: str
    self_describing: bool
    """Whether the shape implies K, C/G and the kernel."""

    @abstractmethod
    def shape(self, dtype: DType, groups: int, sizes: Size) -> Size:
        """Return the array's shape for sizes (K, C/G, T, R, S)."""

    @abstractmethod
    def sizes(self, shape: Sequence[int]) -> Size:
        """Return (K, C/G, T, R, S) of a shape that implies them."""

    @abstractmethod
    def unpack(self, array: NDArray[Any], groups: int, sizes: Size) -> NDArray[Any]:
        """Return (K, C/G, T, R, S), a view if the format is plain, else a copy."""

    @abstractmethod
    def pack(self, plain: NDArray[Any], groups: int, array: NDArray[Any]) -> None:
        """Write (K, C/G, T, R, S) into an array of this format, padded channels as zero."""

    def check_rank(self, tensor: str, shape: Sequence[int]) -> Size:
        """Raise InvalidProblem unless the shape has this format's rank and sane extents."""
        return _check_rank(tensor, shape, self.name, self.order)


@dataclass(frozen=True, slots=True)
class _PlainWeight(WeightFormat):
    name: str
    order: str
    axes: tuple[int, ...]
    """The axes of K, C, T, R, S."""
    self_describing: bool = True

    def shape(self, dtype: DType, groups: int, sizes: Size) -> Size:
        placed = dict(zip(self.axes, sizes, strict=True))
        return tuple(placed[axis] for axis in range(5))

    def sizes(self, shape: Sequence[int]) -> Size:
        return tuple(shape[axis] for axis in self.axes)

    def unpack(self, array: NDArray[Any], groups: int, sizes: Size) -> NDArray[Any]:
        return array.transpose(self.axes)

    def pack(self, plain: NDArray[Any], groups: int, array: NDArray[Any]) -> None:
        array.transpose(self.axes)[...] = plain


@dataclass(frozen=True, slots=True)
class _FractalWeight(WeightFormat):
    name: str = "FRACTAL_Z_3D"
    order: str = "G*T*C1*R*S, N1, N0, C0"
    self_describing: bool = False

    def shape(self, dtype: DType, groups: int, sizes: Size) -> Size:
        c0 = channel_block(self.name, dtype)
        out_channels, in_channels, *kernel = sizes
        rows = groups * _ceil(in_channels, c0) * prod(kernel)
        return rows, _ceil(out_channels // groups, N0), N0, c0

    def sizes(self, shape: Sequence[int]) -> Size:
        raise NotImplementedError("FRACTAL_Z_3D does not carry its own sizes")

    def unpack(self, array: NDArray[Any], groups: int, sizes: Size) -> NDArray[Any]:
        out_channels, in_channels, *kernel = sizes
        blocks = self._blocks(array, groups, in_channels, kernel)
        padded = blocks.reshape(groups, blocks.shape[1] * N0, -1, *kernel)
        return padded[:, : out_channels // groups, :in_channels].reshape(sizes)

    def pack(self, plain: NDArray[Any], groups: int, array: NDArray[Any]) -> None:
        out_channels, in_channels, *kernel = plain.shape
        per_group = out_channels // groups
        blocks = self._blocks(array, groups, in_channels, kernel)
        padded = np.zeros(
            (groups, array.shape[1] * N0, blocks.shape[3] * array.shape[3], *kernel), array.dtype
        )
        padded[:, :per_group, :in_channels] = plain.reshape(groups, per_group, in_channels, *kernel)
        blocks[...] = padded.reshape(blocks.shape)

    @staticmethod
    def _blocks(
        array: NDArray[Any], groups: int, in_channels: int, kernel: Sequence[int]
    ) -> NDArray[Any]:
        """Return a view as (G, N1, N0, C1, C0, T, R, S)."""
        depth, height, width = kernel
        _, n1, n0, c0 = array.shape
        c1 = _ceil(in_channels, c0)
        # Splitting the first axis gives a view for any strides of the others.
        rows = array.reshape(groups, depth, c1, height, width, n1, n0, c0)
        return rows.transpose(0, 5, 6, 2, 7, 1, 3, 4)


ACTIVATION_FORMATS: Mapping[str, ActivationFormat] = {
    "NCDHW": _PlainActivation("NCDHW", "N, C, D, H, W", 2, (0, 1, 2, 3, 4)),
    "NDHWC": _PlainActivation("NDHWC", "N, D, H, W, C", 1, (0, 4, 1, 2, 3)),
    "NDC1HWC0": _BlockedActivation(),
}
WEIGHT_FORMATS: Mapping[str, WeightFormat] = {
    "NCDHW": _PlainWeight("NCDHW", "K, C/G, T, R, S", (0, 1, 2, 3, 4)),
    "NDHWC": _PlainWeight("NDHWC", "K, T, R, S, C/G", (0, 4, 1, 2, 3)),
    "FRACTAL_Z_3D": _FractalWeight(),
}
