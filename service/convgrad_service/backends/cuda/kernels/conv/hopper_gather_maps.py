"""The operands of hopper_gather and their tensor maps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.conv.hopper_gather_tiles import ROW_BYTES, HopperTile
from convgrad_service.backends.cuda.kernels.core.gather_axes import Axes, Axis, Combined, Phase
from convgrad_service.backends.cuda.kernels.core.tensor_maps import Im2colMap, TiledMap
from convgrad_service.backends.cuda.kernels.layout.channels_last import (
    CHUNK_BYTES,
    every_channel,
    overlapping,
    prepare_side,
    prepare_weight,
)
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import Step, Workspace, ceil_div
from convgrad_service.plans.cuda.works import ConvWork, Operand

__all__ = ["LAUNCHED_PHASES", "Sides", "launched", "lowest", "sides_of"]

LAUNCHED_PHASES = 8
"""The most phases of a launch."""

# The largest im2col offset of a tap from the first one, by the rank of the tensor map.
MOST_OFFSET = {3: 65535, 4: 255, 5: 31}


def launched(axes: Axes) -> list[list[Combined]]:
    """Return the phases, divided into launches of about as many each."""
    phases = axes.phases
    launches = ceil_div(len(phases), LAUNCHED_PHASES)
    return [phases[first::launches] for first in range(launches)]


def lowest(axis: Axis, phase: Phase) -> int:
    """Return the lowest source position that a phase's first result reads."""
    return min(phase.x0, phase.x0 + (phase.taps - 1) * axis.x_tap) if phase.taps else 0


@dataclass(frozen=True, slots=True)
class Sides:
    """The operands as the kernel reads and writes them, and the steps that prepare them.

    ``copy_s`` are the expected seconds of the source's copy.
    """

    work: ConvWork
    x: Operand
    w: Operand
    result: Operand
    steps: tuple[Step, ...]
    workspace: tuple[Workspace, ...]
    parts: int = 1
    copy_s: float = 0.0

    @property
    def across(self) -> bool:
        """Whether the weight is N-major, that is, contiguous along result channels."""
        return self.work.direction == "bwd_data" and not _turned(self.work)

    @property
    def weight_rows(self) -> int:
        """Rows of a group's weight, as `weight_map` has it."""
        return self.work.in_channels if _turned(self.work) else self.work.out_channels

    @property
    def _dims(self) -> int:
        """Spatial dimensions of the maps."""
        return self.work.conv.ndim

    def source_map(
        self, axes: Sequence[Axis], phase: Combined, tile: HopperTile, images_first: bool
    ) -> Im2colMap:
        """Return the tensor map of the pixels that a phase reads with its lowest tap."""
        x = self.x
        channels = every_channel(x, self.work.groups, self.work.channels[0])
        item, halo = x.dtype.itemsize, tile.halo(axes[2], phase[2])
        dims = []  # size, stride, step, corners
        for dim in (2, 1, 0)[: self._dims]:
            axis, along = axes[dim], phase[dim]
            low = lowest(axis, along)
            high = (along.count - 1) * axis.x_step + low + 1 - axis.x_size
            if dim == 2:
                high += halo
            if not all(each.taps for each in phase):
                low = high = 0  # a phase without taps reads nothing
            dims.append((axis.x_size, x.strides[3 + dim] * item, axis.x_step, low, high))
        images = (self.parts * self.work.batch, x.strides[0] * item, 1, 0, 0)
        dims = [images, *dims] if images_first else [*dims, images]
        return Im2colMap(
            x.dtype,
            (channels, *(size for size, *_ in dims)),
            tuple(stride if size > 1 else _row_bytes(x, channels) for size, stride, *_ in dims),
            swizzle=ROW_BYTES,
            steps=(1, *(step for _, _, step, _, _ in dims)),
            round_to_tf32=x.dtype is DType.FLOAT32,
            lower=tuple(low for *_, low, _ in dims[:-1]),
            upper=tuple(high for *_, high in dims[:-1]),
            channels=ROW_BYTES // item,
            pixels=tile.m + halo,
        )

    def weight_map(self, tile: HopperTile) -> TiledMap:
        """Return the tensor map of the weight, whose box is a k-tile of one tap for a block's share
        of the N tile."""
        item = self.w.dtype.itemsize
        _, k, c, *kernel = self.w.strides
        work = self.work
        # The innermost extent, and the stride of rows.
        channels, step = (work.out_channels, c) if _turned(work) else (work.in_channels, k)
        row = _row_bytes(self.w, channels)
        sizes = *reversed(work.kernel), self.parts * work.groups * self.weight_rows
        strides = *reversed(kernel), step
        depth = ROW_BYTES // item
        return TiledMap(
            self.w.dtype,
            (channels, *sizes),
            tuple(
                stride * item if size > 1 else row
                for size, stride in zip(sizes, strides, strict=True)
            ),
            swizzle=ROW_BYTES,
            round_to_tf32=self.w.dtype is DType.FLOAT32,
            box=(depth, 1, 1, 1, tile.weight_rows(depth if self.across else None)),
        )

    def why_not(self, axes: Axes, tile: HopperTile) -> str | None:
        """Return why TMA cannot read the pixels in their natural order, or None."""
        for phase in axes.phases:
            reason = self.source_map(axes, phase, tile, images_first=False).why_not()
            if reason is not None:
                return reason
            for axis, along in zip(axes, phase, strict=True):
                if abs(axis.x_tap) * (along.taps - 1) > MOST_OFFSET[self._dims + 2]:
                    return f"taps {abs(axis.x_tap)} apart reach beyond the copy engine's offsets"
        return None


def _turned(work: ConvWork) -> bool:
    """Return whether the weight is copied with out_channels contiguous: TF32 wgmma requires K-major
    operands."""
    return work.direction == "bwd_data" and work.dtype is DType.FLOAT32


@lru_cache(maxsize=16)
def sides_of(work: ConvWork, device: CudaDevice, parts: int = 1) -> Sides:
    """Return the operands in channels-last layout, in whole chunks; of operands in ``parts``, which
    are channels last, those of the first part."""
    if parts > 1:
        return Sides(work, work.sides[0], work.w, work.result, (), (), parts)
    x = prepare_side(work, "source", device)
    w = prepare_weight(work, device, out_channels_last=_turned(work), whole_lines=work.follows)
    return Sides(
        work,
        x.operand,
        w.operand,
        work.result,
        overlapping((*x.steps, *w.steps), device, first=work.follows),
        (*x.workspace, *w.workspace),
        copy_s=x.expected_s,
    )


def _row_bytes(operand: Operand, channels: int) -> int:
    """Return a stride in bytes that TMA accepts, for a dimension of extent 1."""
    return ceil_div(channels * operand.dtype.itemsize, CHUNK_BYTES) * CHUNK_BYTES
