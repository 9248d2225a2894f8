"""Split a dense convolution into launches, to bound its workspace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from convgrad.errors import ProblemTooLarge
from convgrad_service.plans.cpu_dense import (
    Dense,
    Tiles,
    gather_tiles,
    weight_chunks,
    weight_tiles,
)
from convgrad_service.plans.cpu_device import CpuDevice
from convgrad_service.plans.cpu_first import first_chunks, first_tiles

__all__ = [
    "PANEL_LIMIT_BYTES",
    "SCRATCH_LIMIT_BYTES",
    "DensePlan",
    "Part",
    "first_plan",
    "gather_plan",
    "weight_plan",
]

# Limits on the weight panels of one channel tile and on the scratch of one thread. Above them the
# direct kernels run. They do not depend on the workspace limit because dense and direct kernels sum
# in different orders, and a setting must not change the bits of a result.
PANEL_LIMIT_BYTES = 64 * 1024 * 1024
SCRATCH_LIMIT_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Part:
    """One launch: a range of groups, and a range of result channels in each.

    The result channels of a weight gradient are the output channels.
    """

    groups: tuple[int, int]
    channels: tuple[int, int]
    tiles: Tiles


@dataclass(frozen=True, slots=True)
class DensePlan:
    """The launches of a dense convolution, and the number of threads that its memory allows."""

    parts: tuple[Part, ...]
    threads: int
    workspace_bytes: int


def gather_plan(
    dense: Dense, *, backward: bool, sum_bytes: int, device: CpuDevice
) -> DensePlan | None:
    """Plan a forward pass or an input gradient; None if a tile is too large.

    Raises
    ------
    ProblemTooLarge
        The smallest possible launch exceeds the workspace limit.
    """
    columns = 2 * device.vector_bytes // sum_bytes
    source = dense.out_channels if backward else dense.in_channels
    result = dense.in_channels if backward else dense.out_channels
    panel_bytes = dense.taps * source * columns * sum_bytes

    def tiles(part: Dense, threads: int) -> Tiles:
        return gather_tiles(
            part,
            backward=backward,
            sum_bytes=sum_bytes,
            vector_bytes=device.vector_bytes,
            threads=threads,
        )

    def narrowed(groups: int, channels: int) -> Dense:
        if backward:
            return replace(dense, groups=groups, in_channels=channels)
        return replace(dense, groups=groups, out_channels=channels)

    return _in_parts(dense, narrowed, result, columns, panel_bytes, tiles, device)


def weight_plan(dense: Dense, *, sum_bytes: int, device: CpuDevice) -> DensePlan | None:
    """Plan a weight gradient; None if a tile is too large.

    Raises
    ------
    ProblemTooLarge
        The smallest possible launch exceeds the workspace limit.
    """
    chunks = weight_chunks(dense, sum_bytes)
    lanes = device.vector_bytes // sum_bytes
    padded_c = -(-dense.in_channels // lanes) * lanes
    row_bytes = chunks * dense.taps * padded_c * sum_bytes

    def tiles(part: Dense, threads: int) -> Tiles:
        return weight_tiles(
            part,
            whole_out_channels=dense.out_channels,
            chunks=chunks,
            sum_bytes=sum_bytes,
            vector_bytes=device.vector_bytes,
            threads=threads,
        )

    def narrowed(groups: int, channels: int) -> Dense:
        return replace(dense, groups=groups, out_channels=channels)

    return _in_parts(dense, narrowed, dense.out_channels, 1, row_bytes, tiles, device)


def first_plan(dense: Dense, *, sum_bytes: int, device: CpuDevice) -> DensePlan | None:
    """Plan the weight gradient of a first layer; None if a tile is too large.

    Raises
    ------
    ProblemTooLarge
        The smallest possible launch exceeds the workspace limit.
    """
    chunks = first_chunks(dense, sum_bytes)
    lanes = device.vector_bytes // sum_bytes
    vector_terms = chunks * dense.taps * dense.in_channels * device.vector_bytes

    def tiles(part: Dense, threads: int) -> Tiles:
        return first_tiles(
            part,
            chunks=chunks,
            sum_bytes=sum_bytes,
            vector_bytes=device.vector_bytes,
            threads=threads,
        )

    def narrowed(groups: int, channels: int) -> Dense:
        return replace(dense, groups=groups, out_channels=channels)

    return _in_parts(dense, narrowed, dense.out_channels, lanes, vector_terms, tiles, device)


def _in_parts(
    dense: Dense,
    narrowed: Callable[[int, int], Dense],
    channels: int,
    unit: int,
    unit_bytes: int,
    tiles: Callable[[Dense, int], Tiles],
    device: CpuDevice,
) -> DensePlan | None:
    """Split by groups, then by result channels, until workspace takes at most half of the limit.

    Each result belongs to one part, so the split does not affect the order of summation. The choice
    of the dense engine does, so it is made for one thread, whose scratch is the largest.
    """
    if unit_bytes > PANEL_LIMIT_BYTES or tiles(dense, 1).scratch_bytes > SCRATCH_LIMIT_BYTES:
        return None
    limit = device.workspace_limit_bytes
    half = limit // 2
    group_bytes = -(-channels // unit) * unit_bytes
    groups_a_part = max(1, min(dense.groups, half // group_bytes))
    channels_a_part = channels if group_bytes <= half else max(1, half // unit_bytes) * unit
    parts = []
    for group in range(0, dense.groups, groups_a_part):
        groups = (group, min(group + groups_a_part, dense.groups))
        for channel in range(0, channels, channels_a_part):
            span = (channel, min(channel + channels_a_part, channels))
            part = narrowed(groups[1] - groups[0], span[1] - span[0])
            parts.append(Part(groups, span, tiles(part, device.threads)))
    scratch = max(part.tiles.scratch_bytes for part in parts)
    shared = max(part.tiles.workspace_bytes for part in parts)
    if shared + scratch > limit:
        raise ProblemTooLarge(
            f"the smallest step of this convolution needs {shared + scratch} bytes of work memory; "
            f"the CPU is allowed {limit}"
        )
    threads = min(device.threads, (limit - shared) // scratch)
    return DensePlan(tuple(parts), threads, shared + threads * scratch)
