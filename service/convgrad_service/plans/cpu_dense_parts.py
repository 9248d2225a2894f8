"""Split a dense convolution into launches, to bound its workspace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from convgrad.errors import ProblemTooLarge
from convgrad_service.plans.base import round_up
from convgrad_service.plans.cpu_dense import (
    Dense,
    Tiles,
    gather_tiles,
    weight_chunks,
    weight_tiles,
)
from convgrad_service.plans.cpu_device import CpuDevice
from convgrad_service.plans.cpu_first import first_chunks, first_tiles

__all__ = ["PANEL_LIMIT_BYTES", "SCRATCH_LIMIT_BYTES", "DensePlan", "Part", "first_plan"]
__all__ += ["gather_plan", "weight_plan"]

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
    """The launches of a dense convolution, and the number of threads that its memory allows.

    ``alone`` are the tiles of the whole for one thread.
    """

    parts: tuple[Part, ...]
    threads: int
    workspace_bytes: int
    alone: Tiles = field(repr=False)


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
    source, result = "in_channels", "out_channels"
    if backward:
        source, result = result, source
    panel_bytes = dense.taps * getattr(dense, source) * columns * sum_bytes
    tiles = partial(
        gather_tiles, backward=backward, sum_bytes=sum_bytes, vector_bytes=device.vector_bytes
    )
    return _in_parts(dense, result, columns, panel_bytes, tiles, device)


def weight_plan(dense: Dense, *, sum_bytes: int, device: CpuDevice) -> DensePlan | None:
    """Plan a weight gradient; see `gather_plan`."""
    chunks, lanes = weight_chunks(dense, sum_bytes), device.vector_bytes // sum_bytes
    row_bytes = chunks * dense.taps * round_up(dense.in_channels, lanes) * sum_bytes
    tiles = partial(
        weight_tiles,
        whole_out_channels=dense.out_channels,
        chunks=chunks,
        sum_bytes=sum_bytes,
        vector_bytes=device.vector_bytes,
    )
    return _in_parts(dense, "out_channels", 1, row_bytes, tiles, device)


def first_plan(dense: Dense, *, sum_bytes: int, device: CpuDevice) -> DensePlan | None:
    """Plan the weight gradient of a first layer; see `gather_plan`."""
    chunks, lanes = first_chunks(dense, sum_bytes), device.vector_bytes // sum_bytes
    vector_terms = chunks * dense.taps * dense.in_channels * device.vector_bytes
    tiles = partial(
        first_tiles, chunks=chunks, sum_bytes=sum_bytes, vector_bytes=device.vector_bytes
    )
    return _in_parts(dense, "out_channels", lanes, vector_terms, tiles, device)


def _in_parts(
    dense: Dense,
    side: str,
    unit: int,
    unit_bytes: int,
    tiles: Callable[..., Tiles],
    device: CpuDevice,
) -> DensePlan | None:
    """Split by groups, then by channels of the result (``side``), until workspace takes at most
    half of the limit.

    Each result belongs to one part, so the split does not affect the order of summation. The choice
    of the dense engine does, so it is made for one thread, whose scratch is the largest.
    """
    alone, channels = tiles(dense, threads=1), getattr(dense, side)
    if unit_bytes > PANEL_LIMIT_BYTES or alone.scratch_bytes > SCRATCH_LIMIT_BYTES:
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
            narrowed = {"groups": groups[1] - groups[0], side: span[1] - span[0]}
            part = tiles(replace(dense, **narrowed), threads=device.threads)
            parts.append(Part(groups, span, part))
    scratch = max(part.tiles.scratch_bytes for part in parts)
    shared = max(part.tiles.workspace_bytes for part in parts)
    if shared + scratch > limit:
        raise ProblemTooLarge(
            f"the smallest step of this convolution needs {shared + scratch} bytes of work memory; "
            f"the CPU is allowed {limit}"
        )
    threads = min(device.threads, (limit - shared) // scratch)
    return DensePlan(tuple(parts), threads, shared + threads * scratch, alone)
