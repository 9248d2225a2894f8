"""The gradient of a first layer's input on Hopper: groups of positions, all kernel rows at once."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.channels_last import CHUNK_BYTES, prepare_activation
from convgrad_service.backends.cuda.kernels.elements import CUDA_TYPES, MAX_BLOCKS
from convgrad_service.backends.cuda.kernels.first_groups import (
    Cut,
    FirstGroupsArgs,
    groups_args,
    why_not_groups,
)
from convgrad_service.backends.cuda.kernels.tensor_maps import (
    MAP_ALIGNMENT,
    MapField,
    TileMap,
    pack_maps,
)
from convgrad_service.plans.cuda_device import HOPPER, CudaDevice
from convgrad_service.plans.cuda_program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda_works import ConvWork, Operand

__all__ = ["HopperFirstData"]

DTYPES = (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32)
COLUMNS, CHANNELS = 8, 64
"""Of a group; of grad_output, at most."""
LEAST_CHANNELS = 16
MOST_STRIDE = 2
GROUPS = 64
"""Of a warpgroup."""
MOST_WARPGROUPS = 2
# Of instances: kernel rows, steps along W, steps of 16 channels.
ROWS, TAPS, STEPS = (4, 7, 8), (2, 4), (2, 4)
SPLIT_ROWS = ROWS[:-1]
"""With more, the sums do not fit into the registers."""
ROW_BYTES, ALIGNMENT, STATIC_BYTES = 128, 1024, 1024
MAX_BYTES = 2**31 - 1
# What the cuts are weighed with, clocks fitted to an H200: what a row of y takes of a multiprocessor
# beside its products; that a block alone waits in it; that a block takes to start.
ROW_CLOCKS, WAIT_CLOCKS, START_CLOCKS = 100, 400, 6000


class HopperFirstDataArgs(FirstGroupsArgs):
    """See ``hopper_first_data.cu``."""

    _fields_ = (
        ("_", ctypes.c_char * (-ctypes.sizeof(FirstGroupsArgs) % MAP_ALIGNMENT)),
        ("y_map", MapField),
        ("sub_bytes", ctypes.c_uint32),
        ("w_bytes", ctypes.c_uint32),
    )


@dataclass(frozen=True, slots=True)
class Form:
    """An instance: of a type, whether float32 is split, and what it has room for."""

    dtype: DType
    split: bool
    rows: int
    taps: int
    steps: int

    @property
    def wide(self) -> bool:
        return self.dtype is DType.FLOAT32

    @property
    def stages(self) -> int:
        return 3 if self.wide else 4

    @property
    def blocks(self) -> int:
        """Together on a multiprocessor."""
        return 1 if self.wide else 2

    @property
    def loaders(self) -> int:
        """Threads beside those that multiply; those that split take a warpgroup's registers."""
        return 128 if self.split else 32

    @property
    def weight_bytes(self) -> int:
        subs = 3 if self.split else 2 if self.wide else 1
        return subs * self.taps * self.rows * COLUMNS * ROW_BYTES

    @property
    def product_clocks(self) -> float:
        """Of all that 64 groups have with a row of y."""
        columns = self.rows * COLUMNS
        each = max(columns / 2, 16 + columns / 4)
        return self.taps * self.steps * each * (6 if self.split else 2 if self.wide else 1)

    def positions(self, warpgroups: int) -> int:
        """Of y, that so many warpgroups' groups meet."""
        return warpgroups * GROUPS + self.taps - 1

    def sub_bytes(self, warpgroups: int) -> int:
        return ceil_div(self.positions(warpgroups) * ROW_BYTES, ALIGNMENT) * ALIGNMENT

    def stage_bytes(self, warpgroups: int) -> int:
        return self.sub_bytes(warpgroups) * (2 if self.wide else 1)

    def shared_bytes(self, warpgroups: int) -> int:
        """What aligns it, the ring, and the weights of each step."""
        return ALIGNMENT + self.stages * self.stage_bytes(warpgroups) + self.weight_bytes


class HopperFirstData:
    """bwd_data of first layers with up to ``CHANNELS`` channels, as products of warpgroups: 16 bits,
    float32 in TF32 (``precision: high``), or true float32 in six products of bfloat16."""

    name = "hopper_first_data"

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`. Judged by what a cut along N, D or H does not change."""
        if device.architecture not in HOPPER:
            return f"{device.name} has no products of warpgroups"
        reason = why_not_groups(work, device, DTYPES)
        if reason is not None:
            return reason
        if work.kernel[1] > max(_rows(work)) or work.stride[1] > MOST_STRIDE:
            return f"{work.kernel[1]} kernel rows, a stride of {work.stride[1]}"
        if work.out_channels < LEAST_CHANNELS:
            return "a product's depth would be mostly empty"
        if work.out_channels > CHANNELS or work.stride[2] * work.in_channels > COLUMNS:
            return f"{work.out_channels} channels, {work.stride[2]} x {work.in_channels} columns"
        if _taps(work)[1] > max(TAPS):
            return f"{_taps(work)[1]} steps along W"
        return None

    def launches(self, work: ConvWork, device: CudaDevice, cut: Cut | None = None) -> Fragment:
        """See `Family.launches`; ``cut`` where another than the chosen one is tried."""
        y = prepare_activation(
            work.y,
            work.batch,
            1,
            work.out_channels,
            work.output,
            f"{work.prefix}source_channels_last",
            device,
        )
        form = _form(work)
        if cut is None:
            cut = _cut(work, form, device)
        args = HopperFirstDataArgs()
        groups_args(args, work, y.operand, work.stride[2], cut)
        args.hop = 1
        args.first_tap, args.taps = _taps(work)[0], form.taps
        args.positions = form.positions(cut.warp_groups)
        args.segments = _segments(work, cut.warp_groups)
        args.sub_bytes = form.sub_bytes(cut.warp_groups)
        args.w_bytes = _whole_bytes(work, 2 * form.stage_bytes(cut.warp_groups))
        launch = Launch(
            _instance(form),
            (_blocks(work, cut), 1, 1),
            (128 * cut.warp_groups + form.loaders, 1, 1),
            pack_maps(
                args,
                {"y_map": (y.operand, _map(work, y.operand, form, cut))},
                y=y.operand,
                w=work.w,
                x=work.x,
                accumulate=work.accumulate,
                bias=work.bias,
            ),
            form.shared_bytes(cut.warp_groups),
        )
        return Fragment(self.name, (*y.steps, launch), y.workspace)

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`."""
        kinds = [(dtype, False) for dtype in DTYPES] + [(DType.FLOAT32, True)]
        return [
            _instance(Form(dtype, split, rows, taps, steps))
            for dtype, split in kinds
            for rows in (SPLIT_ROWS if split else ROWS)
            for taps in TAPS
            for steps in STEPS
        ]


def _form(work: ConvWork) -> Form:
    return Form(
        work.dtype,
        _splits(work),
        min(rows for rows in _rows(work) if rows >= work.kernel[1]),
        _taps(work)[1],
        min(steps for steps in STEPS if steps * 16 >= work.out_channels),
    )


def _splits(work: ConvWork) -> bool:
    """Whether true float32 is asked for."""
    return work.dtype is DType.FLOAT32 and work.precision != "high"


def _rows(work: ConvWork) -> tuple[int, ...]:
    return SPLIT_ROWS if _splits(work) else ROWS


def _taps(work: ConvWork) -> tuple[int, int]:
    """The first step along W at which a group meets y, and an instance's number of them, or a
    larger one where that many are too few."""
    stride, pad = work.stride[2], work.pad[2]
    first = ceil_div(pad - work.kernel[2] + 1, stride)
    needed = (stride - 1 + pad) // stride - first + 1
    return first, min((taps for taps in TAPS if taps >= needed), default=needed)


def _whole_bytes(work: ConvWork, room: int) -> int:
    """Of the weights, where they are whole 16 bytes side by side in any order and fit; else 0."""
    extents = (1, work.out_channels, work.in_channels, *work.kernel)
    reach = 1 + sum(
        (extent - 1) * stride for extent, stride in zip(extents, work.w.strides, strict=True)
    )
    size = reach * work.dtype.itemsize
    whole = reach == prod(extents) and size % CHUNK_BYTES == 0
    return size if whole and size <= room else 0


def _map(work: ConvWork, y: Operand, form: Form, cut: Cut) -> TileMap:
    """Of grad_output: channels, W, H, D, images; a row's positions that a block meets."""
    item = work.dtype.itemsize
    n, _, _, d, h, w = y.strides
    sizes = (work.out_channels, *work.output[::-1], work.batch)
    # The stride of what there is one of may be anything; the hardware takes multiples of 16.
    strides = tuple(
        item * stride if size > 1 else ROW_BYTES
        for stride, size in zip((w, h, d, n), sizes[1:], strict=True)
    )
    return TileMap(
        work.dtype,
        sizes,
        strides,
        swizzle=128,
        rounds=form.wide and not form.split,
        box=(ROW_BYTES // item, form.positions(cut.warp_groups), 1, 1, 1),
    )


def _segments(work: ConvWork, warpgroups: int) -> int:
    return ceil_div(work.input[2], work.stride[2] * warpgroups * GROUPS)


def _blocks(work: ConvWork, cut: Cut) -> int:
    return work.batch * work.input[0] * cut.row_segments * _segments(work, cut.warp_groups)


def _cut(work: ConvWork, form: Form, device: CudaDevice) -> Cut:
    """The one that should take the least time."""
    stride, pad = work.stride[1], work.pad[1]
    rows = (work.input[1] - 1 + pad) // stride - pad // stride + 1
    best: tuple[float, Cut] | None = None
    for warpgroups in range(1, MOST_WARPGROUPS + 1):
        shared = form.shared_bytes(warpgroups) + STATIC_BYTES
        if shared > device.shared_bytes_per_block:
            continue
        together = min(form.blocks, device.shared_bytes_per_multiprocessor // shared)
        for parts in range(1, min(rows, 64) + 1):
            segment_rows = ceil_div(rows, parts)
            cut = Cut(warpgroups, segment_rows, ceil_div(rows, segment_rows))
            blocks = _blocks(work, cut)
            if blocks > MAX_BLOCKS:
                continue
            filled = min(together, ceil_div(blocks, device.multiprocessors))
            alone = warpgroups * form.product_clocks
            row = max(filled * (alone + ROW_CLOCKS), alone + WAIT_CLOCKS)
            # With rows that only lead to the first of a segment.
            walked = segment_rows + (work.kernel[1] - 1) // stride
            waves = ceil_div(blocks, device.multiprocessors * filled)
            clocks = waves * (walked * row + START_CLOCKS)
            if best is None or clocks < best[0]:
                best = clocks, cut
    if best is None:
        raise ValueError("no cut fits")
    return best[1]


def _instance(form: Form) -> Instance:
    defines = {
        "ELEMENT": CUDA_TYPES[form.dtype],
        "SPLIT": int(form.split),
        "ROWS": form.rows,
        "TAPS": form.taps,
        "STEPS": form.steps,
        "STAGES": form.stages,
        "BLOCKS": form.blocks,
    }
    return Instance.of("hopper_first_data.cu", defines, HOPPER)
