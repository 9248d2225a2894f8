"""fprop or dgrad with few channels of the result by FMA, in any layout (few_results.cu)."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import fill, pack
from convgrad_service.backends.cuda.kernels.conv.few_results_cuts import (
    STRIP,
    TILES,
    Cut,
    Gather,
    Tile,
    cuts_of,
    expected_s,
)
from convgrad_service.backends.cuda.kernels.core.elements import ACTIVATIONS, MAX_BLOCKS
from convgrad_service.backends.cuda.kernels.core.gather_axes import divider
from convgrad_service.backends.cuda.kernels.core.limits import (
    DTYPES,
    MAX_PIXELS,
    Requirements,
    why_not_32bit_positions,
)
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import Solver
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["FewResults"]

MOST_CHANNELS = 8
"""The most channels of the result."""
MOST_PHASES = 8
"""Of ``FewResultsArgs``."""

FewResultsArgs = structure("conv/few_results.cuh", "FewResultsArgs")


class FewResults(Solver[ConvWork, Cut]):
    """fwd with stride 1 along W, and bwd_data, with at most ``MOST_CHANNELS`` of the result."""

    name = "few_results"

    def solve(self, work: ConvWork, device: CudaDevice) -> Cut | str:
        """See `Family.why_not`."""
        if work.direction == "bwd_weight":
            return "a gradient of the weight"
        if (reason := Requirements().why_not(work, device)) is not None:
            return reason
        if work.channels[1] > MOST_CHANNELS:
            return f"{work.channels[1]} channels of the result are more than {MOST_CHANNELS}"
        if work.result_dtype is not work.dtype:
            return f"a result in {work.result_dtype}"
        if work.dilation[2] > 1 < work.kernel[2]:
            return "dilated along W"
        if work.direction == "fwd" and work.stride[2] > 1:
            return "a forward pass with a stride along W"
        if (reason := why_not_32bit_positions(work)) is not None:
            return reason
        of = Gather(work)
        if max(len(axis.phases) for axis in of.axes) > MOST_PHASES:
            return f"more than {MOST_PHASES} phases along a dimension"
        reach = sum(
            (extent - 1) * abs(stride)
            for extent, stride in zip(
                (work.out_channels, work.in_channels, *work.kernel), work.w.strides[1:], strict=True
            )
        )
        strides = zip(work.sizes[0], work.sides[0].strides[3:], strict=True)
        image = sum((extent - 1) * abs(stride) for extent, stride in strides)
        if max(reach, image, work.batch * prod(work.sizes[1])) > MAX_PIXELS:
            return f"more than {MAX_PIXELS} positions or weights"
        cuts = [cut for cut in cuts_of(of, device) if cut.blocks(of) <= MAX_BLOCKS]
        if not cuts:
            return "no tile of the source and the weights fits into shared memory"
        return min(cuts, key=lambda cut: expected_s(of, device, cut))

    def fragment(self, work: ConvWork, device: CudaDevice, cut: Cut) -> Fragment:
        of, (source, result) = Gather(work), work.sides
        args = FewResultsArgs()
        args.source_stride[:] = (source.strides[0], *source.strides[2:])
        args.result_stride[:] = (result.strides[0], *result.strides[2:])
        _, k, c, *taps = work.w.strides
        args.weight_stride[:] = (k, c, *taps) if of.backward else (c, k, *taps)
        for dim, axis in enumerate(of.axes):
            to = args.axis[dim]
            to.size, to.x_step, to.x_tap = axis.x_size, axis.x_step, axis.x_tap
            to.y_step, to.r_step, to.phases = axis.y_step, axis.r_step, len(axis.phases)
            for place, phase in enumerate(axis.phases):
                one = args.phase[place][dim]
                one.taps, one.r0, one.x0 = phase.taps, phase.r0, phase.x0
                one.y0, one.count = phase.y0, phase.count
        args.source_channels, args.result_channels = work.channels
        args.activation, args.alpha, args.beta = ACTIVATIONS[work.activation], work.alpha, work.beta
        args.source_w, args.result_w = (size[2] for size in work.sizes)
        args.kernel_w, args.backward = work.kernel[2], of.backward
        fill(args, of, "group", "first", "steps", "shift", "first_columns")
        fill(args, cut, "roles", "shares", "planes", "rows", "strips")
        args.column_blocks, args.all_roles = cut.column_blocks(of), cut.all_roles(of)
        args.role_blocks = ceil_div(args.all_roles, cut.roles)
        args.tiles_d, args.tiles_h, args.tiles_w = cut.tiles(of)
        args.first_h, args.depth_taps, args.height_taps = of.rows[0], *of.taps
        args.source_rows = cut.source_rows(of)
        args.row_pitch, args.channel_pitch = cut.row_pitch(of), cut.channel_pitch(of)
        args.tap_pitch, args.weights, args.stage = cut.tap_pitch(of), cut.weights(of), cut.stage(of)
        args.channels_last = source.channels_last and work.channels[0] > 1
        args.result_last = result.channels_last and work.channels[1] > 1
        for name, by in (
            ("row_pitch", args.row_pitch),
            ("rows", args.source_rows),
            ("weights", args.weights),
            ("channels", work.channels[1]),
            ("width", cut.strips * STRIP * of.group),
            ("group", of.group),
            ("result_rows", cut.rows * cut.tile.rows),
            ("planes", cut.planes),
        ):
            to = getattr(args, f"by_{name}")
            to.factor, to.shift = divider(max(by, 1))
        pointers = {"source": source.buffer, "weight": work.w.buffer, "result": result.buffer}
        if work.accumulate is not None:
            pointers["accumulate"] = work.accumulate.buffer
        if work.bias is not None:
            pointers["bias"] = work.bias
        launch = Launch(
            _instance(work.dtype, cut.tile),
            (cut.blocks(of), 1, 1),
            (cut.threads, 1, 1),
            pack(args, **pointers),
            cut.shared_bytes(of),
        )
        return Fragment(
            f"{self.name}_{work.direction}",
            (launch,),
            expected_s=expected_s(of, device, cut),
            order=str(cut.shares),
        )

    def instances(self) -> Iterable[Instance]:
        return [_instance(dtype, tile) for dtype in DTYPES for tile in TILES]


def _instance(dtype: DType, tile: Tile) -> Instance:
    return Instance.of("conv/few_results.cu", ELEMENT=dtype, COLUMNS=tile.columns, ROWS=tile.rows)
