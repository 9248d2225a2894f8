"""dgrad of a first layer on Hopper by wgmma: groups of positions are the rows of a GEMM; kernel
rows, and a group's positions and channels, are its columns (hopper_first_data.cu)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import fill
from convgrad_service.backends.cuda.kernels.conv.dense_tiles import uses_3xtf32
from convgrad_service.backends.cuda.kernels.conv.hopper_first_data_forms import (
    GROUPS,
    ROW_BYTES,
    STATIC_BYTES,
    STEP,
    Form,
    shapes_of,
)
from convgrad_service.backends.cuda.kernels.core.elements import ACTIVATIONS, MAX_BLOCKS
from convgrad_service.backends.cuda.kernels.core.gather_axes import divider
from convgrad_service.backends.cuda.kernels.core.limits import (
    DTYPES,
    MAX_GRID_YZ,
    Requirements,
    why_not_32bit_positions,
)
from convgrad_service.backends.cuda.kernels.core.tensor_maps import TiledMap, pack_maps
from convgrad_service.backends.cuda.kernels.layout.channels_last import CHUNK_BYTES, prepare_side
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import HOPPER, CudaDevice
from convgrad_service.plans.cuda.families import Solver
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div, macros_of
from convgrad_service.plans.cuda.works import ConvWork, Operand

__all__ = ["HopperFirstData"]

MOST_CHANNELS, LEAST_CHANNELS = 8, 16
"""The most channels of the input, and the fewest of grad_output."""
MAX_OFFSET = 2**31 - 1
IN_TWOS = 3
"""An epilogue code of the kernel: pairs of columns are contiguous and at even offsets."""
# Cost model, fitted to an H200, in clocks: an SM's overhead per row of y; the latency per row of a
# block that runs alone; and a block's start, per tap along D.
ROW_CLOCKS, WAIT_CLOCKS, START_CLOCKS = 300, 500, 6000
START_S, CLOCKS_PER_S, BYTES_S = 8.5e-6, 1.8e9, 4.6e12


HopperFirstDataArgs = structure("conv/hopper_first_data.cuh", "HopperFirstDataArgs")


@dataclass(frozen=True, slots=True)
class Cut:
    """A partition: warpgroups of a block along W, rows of y per segment, and segments along H."""

    warpgroups: int
    segment_rows: int
    row_segments: int


NEEDS = Requirements(hopper=True, dilated=False)


class HopperFirstData(Solver[ConvWork, tuple[Form, Cut]]):
    """bwd_data where one of ``SHAPES`` fits: few channels of the input, up to 128 of grad_output.

    Takes 16-bit types, float32 as TF32 (``precision: high``), and float32 as six bfloat16
    products.
    """

    name = "hopper_first_data"

    def solve(self, work: ConvWork, device: CudaDevice) -> tuple[Form, Cut] | str:
        """See `Family.why_not`. Splitting along N, D or H does not change the answer."""
        if (reason := NEEDS.why_not(work, device)) is not None:
            return reason
        if work.in_channels > MOST_CHANNELS or work.taps == 1:
            return f"{work.taps} taps of {work.in_channels} channels of the input"
        if work.out_channels < LEAST_CHANNELS:
            return "a product's depth would be mostly empty"
        row = work.input[2] * work.x.strides[5] + work.in_channels * work.x.strides[2]
        if max(row, work.output[2] * work.y.strides[5]) > MAX_OFFSET:
            return f"a row of the input reaches over {row} elements"
        reason = why_not_32bit_positions(work)
        if reason is not None:
            return reason
        form = _form(work)
        if form is None:
            return (
                f"{work.kernel[1]} rows and {_taps(work)[1]} steps along W of a kernel, "
                f"{work.stride[2]} x {work.in_channels} columns, {work.out_channels} channels: "
                "no instance has the room"
            )
        cut = _cut(work, form, device)
        return "its blocks are more than one grid holds" if cut is None else (form, cut)

    def fragment(self, work: ConvWork, device: CudaDevice, config: tuple[Form, Cut]) -> Fragment:
        (form, cut), y = config, prepare_side(work, "source", device)
        args = HopperFirstDataArgs()
        args.x_stride[:], args.w_stride[:] = work.x.strides, work.w.strides
        args.activation, args.plain = ACTIVATIONS[work.activation], _plain(work)
        args.channels, args.y_channels = work.in_channels, work.out_channels
        args.x_size[:], args.y_size[:] = work.input, work.output
        fill(args, work, "alpha", "beta", "kernel", "stride", "pad")
        args.row_segments, args.segment_rows = cut.row_segments, cut.segment_rows
        args.first_tap, args.warpgroups = _taps(work)[0], cut.warpgroups
        args.positions = form.positions(cut.warpgroups)
        args.segments = _segments(work, cut.warpgroups)
        args.sub_bytes = form.sub_bytes(cut.warpgroups)
        args.row_step = form.row_step
        args.taps = form.taps
        args.by_taps.factor, args.by_taps.shift = divider(form.taps)
        args.w_bytes = _whole_bytes(work, 2 * form.stage_bytes(cut.warpgroups))
        launch = Launch(
            _instance(form),
            (_blocks(work, cut), form.row_step, 1),
            (128 * cut.warpgroups + form.loaders, 1, 1),
            pack_maps(
                args,
                {"y_map": (y.operand, _map(work, y.operand, form, cut))},
                w=work.w,
                x=work.x,
                accumulate=work.accumulate,
                bias=work.bias,
            ),
            form.shared_bytes(cut.warpgroups),
        )
        expected_s = _expected_s(work, form, cut, device)
        return Fragment(self.name, (*y.steps, launch), y.workspace, expected_s=expected_s)

    def instances(self) -> Iterable[Instance]:
        kinds = [(dtype, False) for dtype in DTYPES] + [(DType.FLOAT32, True)]
        forms = (
            Form(dtype, split, shape) for dtype, split in kinds for shape in shapes_of(dtype, split)
        )
        return [_instance(form) for form in forms if form.fits]


def _form(work: ConvWork) -> Form | None:
    """Return the cheapest instance with sufficient capacity, or None."""
    split, stride, taps = uses_3xtf32(work), work.stride[1], _taps(work)[1]
    forms = (
        Form(work.dtype, split, shape, row_step, work.kernel[0], taps)
        for shape in shapes_of(work.dtype, split)
        for row_step in (1, stride)
        if row_step <= MAX_GRID_YZ
    )
    fitting = [
        form
        for form in forms
        if form.fits
        and ceil_div(work.kernel[1], form.row_step) <= form.shape.rows
        and stride // form.row_step <= form.shape.most_finished
        and work.stride[2] * work.in_channels <= form.shape.eights * 8
        and taps <= form.taps
        and work.out_channels <= form.shape.steps * STEP
    ]
    return min(
        fitting,
        key=lambda form: (form.wide_rows, form.product_clocks * form.row_step),
        default=None,
    )


def _plain(work: ConvWork) -> int:
    """Return the epilogue code: 0 applies the epilogue; the others store the sums, one by one or,
    with ``IN_TWOS``, in pairs."""
    if not work.epilogue_free:
        return 0
    n, _, c, d, h, w = work.x.strides
    channels, row = work.in_channels, work.input[2] * work.in_channels
    adjacent = (channels == 1 or c == 1) and (work.input[2] == 1 or w == channels)
    outer = zip((n, d, h), (work.batch, *work.input[:2]), strict=True)
    even = all(stride % 2 == 0 for stride, extent in outer if extent > 1)
    return IN_TWOS if adjacent and even and not (work.stride[2] * channels | row) % 2 else 1


def _taps(work: ConvWork) -> tuple[int, int]:
    """Return the first position of y that a group reads, relative to the group, and their count."""
    stride, pad = work.stride[2], work.pad[2]
    first = ceil_div(pad - work.kernel[2] + 1, stride)
    return first, (stride - 1 + pad) // stride - first + 1


def _whole_bytes(work: ConvWork, room: int) -> int:
    """Return the bytes of the weights if one bulk copy can load them, else 0.

    They must be contiguous in some order, a multiple of 16 bytes, and at most ``room`` bytes.
    """
    extents = (1, work.out_channels, work.in_channels, *work.kernel)
    reach = 1 + sum(
        (extent - 1) * stride for extent, stride in zip(extents, work.w.strides, strict=True)
    )
    size = reach * work.dtype.itemsize
    whole = reach == prod(extents) and size % CHUNK_BYTES == 0
    return size if whole and size <= room else 0


def _map(work: ConvWork, y: Operand, form: Form, cut: Cut) -> TiledMap:
    """Return the tensor map of grad_output (C, W, H, D, N), whose box is what a block reads of a
    row."""
    item = work.dtype.itemsize
    n, _, _, d, h, w = y.strides
    sizes = (work.out_channels, *work.output[::-1], work.batch)
    # A dimension of extent 1 may have any stride, but TMA requires a multiple of 16 bytes.
    strides = tuple(
        item * stride if size > 1 else ROW_BYTES
        for stride, size in zip((w, h, d, n), sizes[1:], strict=True)
    )
    return TiledMap(
        work.dtype,
        sizes,
        strides,
        swizzle=128,
        round_to_tf32=form.wide and not form.split,
        box=(ROW_BYTES // item, form.positions(cut.warpgroups), 1, 1, 1),
    )


def _segments(work: ConvWork, warpgroups: int) -> int:
    return ceil_div(work.input[2], work.stride[2] * warpgroups * GROUPS)


def _blocks(work: ConvWork, cut: Cut) -> int:
    return work.batch * work.input[0] * cut.row_segments * _segments(work, cut.warpgroups)


def _cut(work: ConvWork, form: Form, device: CudaDevice) -> Cut | None:
    """Return the partition with the least expected time, or None."""
    stride, pad = work.stride[1], work.pad[1]
    rows = (work.input[1] - 1 + pad) // stride - pad // stride + 1
    best: tuple[float, Cut] | None = None
    for warpgroups in range(1, form.shape.most_warpgroups + 1):
        if form.shared_bytes(warpgroups) + STATIC_BYTES > device.shared_bytes_per_block:
            continue
        for parts in range(1, min(rows, 64) + 1):
            segment_rows = ceil_div(rows, parts)
            cut = Cut(warpgroups, segment_rows, ceil_div(rows, segment_rows))
            if _blocks(work, cut) > MAX_BLOCKS:
                continue
            clocks = _clocks(work, form, cut, device)
            if best is None or clocks < best[0]:
                best = clocks, cut
    return best[1] if best is not None else None


def _clocks(work: ConvWork, form: Form, cut: Cut, device: CudaDevice) -> float:
    """Return the clocks that a partition should take."""
    shared = form.shared_bytes(cut.warpgroups) + STATIC_BYTES
    fitting = device.shared_bytes_per_multiprocessor // shared
    together = max(1, min(form.together(cut.warpgroups), fitting))
    # With split operands, one warpgroup takes as long as two.
    alone = (2 if form.split else cut.warpgroups) * form.product_clocks
    # Each segment also reads the rows before its first, of all planes that its taps meet.
    walked = cut.segment_rows + (work.kernel[1] - 1) // work.stride[1]
    walked *= ceil_div(form.planes, work.stride[0])
    each = ceil_div(_blocks(work, cut) * form.row_step, device.multiprocessors)
    turns = ceil_div(each, together)
    busy = max(each * (alone + ROW_CLOCKS), turns * (alone + WAIT_CLOCKS))
    return walked * busy + turns * START_CLOCKS * form.planes


def _expected_s(work: ConvWork, form: Form, cut: Cut, device: CudaDevice) -> float:
    """Return the seconds that the launch should take."""
    moved = work.elements * work.dtype.itemsize / BYTES_S
    return START_S + max(_clocks(work, form, cut, device) / CLOCKS_PER_S, moved)


def _instance(form: Form) -> Instance:
    return Instance.of(
        "conv/hopper_first_data.cu",
        HOPPER,
        ELEMENT=form.dtype,
        SPLIT=form.split,
        **macros_of(form.shape, "rows", "eights", "taps", "steps"),
        **macros_of(form, "stages", "blocks"),
    )
