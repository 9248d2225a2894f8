"""Dense wgrad on Hopper of a single wave of tiles (hopper_weight_single.cu)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import fill
from convgrad_service.backends.cuda.kernels.conv.hopper_gather_tiles import (
    BOX_ROWS,
    SPLITS,
    WARP_FRAGMENT_BYTES,
    HopperTile,
)
from convgrad_service.backends.cuda.kernels.conv.hopper_weight import im2col_maps, why_not_im2col
from convgrad_service.backends.cuda.kernels.conv.hopper_weight_args import beside, dims_of
from convgrad_service.backends.cuda.kernels.conv.single_model import Rates, SingleWave, single_s
from convgrad_service.backends.cuda.kernels.core.gather_axes import divider
from convgrad_service.backends.cuda.kernels.core.limits import IN_16_BITS, Requirements
from convgrad_service.backends.cuda.kernels.core.tensor_maps import pack_maps
from convgrad_service.backends.cuda.kernels.layout.channels_last import Prepared, prepare_side
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.backends.cuda.tuning.correction import fastest
from convgrad_service.backends.cuda.tuning.features import features
from convgrad_service.plans.cuda.device import HOPPER, CudaDevice
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["HopperWeightSingle", "SingleTile", "configs", "expected_s", "lines"]

HopperWeightSingleArgs = structure("conv/hopper_weight_single.cuh", "HopperWeightSingleArgs")
PIXELS, LEAST_STAGES = 64, 3
LEAST_CHANNELS, MAX_GRID_YZ = 16, 65535
RATES = Rates(
    start=5.094,
    copied=138.1,
    l2=10140.0,
    products=1.15,
    step=0.1417,
    apart_a=1.371,
    apart_b=1.208,
    tile=0.792,
    tile_size=0.05833,
    join=0.1,
    joined=0.03976,
    memory=3039.0,
    beside=0.4331,
)


class SingleTile(HopperTile):
    """A tile of ``m`` channels of grad_output and ``n`` columns."""

    __slots__ = ()

    @property
    def epilogue_bytes(self) -> int:
        """Shared memory of the partial sums, also of a block that has the only ones."""
        return self.split * self.owned * self.warpgroups * 4 * WARP_FRAGMENT_BYTES

    def tiles(self, work: ConvWork) -> tuple[int, int]:
        """Return the number of tiles along rows and columns."""
        boxes = ceil_div(work.in_channels, BOX_ROWS) * work.taps
        return ceil_div(work.out_channels, self.m), ceil_div(boxes * BOX_ROWS, self.n)

    def instance(self, dtype: DType) -> Instance:
        return Instance.of(
            "conv/hopper_weight_single.cu",
            HOPPER,
            ELEMENT=dtype,
            BM=self.m,
            BN=self.n,
            CONSUMERS=self.warpgroups,
        )


TILES = tuple(
    SingleTile(m, n, m // 64, single=True, blocks=blocks)
    for m, n, blocks in ((64, 64, 1), (64, 64, 2), (64, 128, 1), (128, 64, 1), (128, 128, 1))
)


def configs(work: ConvWork, device: CudaDevice) -> Iterator[SingleTile]:
    """Yield the configurations whose clusters run at once, with a k-tile for each block."""
    steps = ceil_div(work.pixels, PIXELS)
    for tile in TILES:
        for split in SPLITS:
            one = replace(tile, split=split)
            if one.stages(device) < LEAST_STAGES or split > steps:
                continue
            tiles = one.tiles(work)
            if prod(tiles) <= one.clusters(device) and max(tiles) <= MAX_GRID_YZ:
                yield one


NEEDS = Requirements(IN_16_BITS, hopper=True)


class HopperWeightSingle:
    """bwd_weight on sm_90a, of 16-bit tensors."""

    name = "hopper_weight_single"

    def __init__(self, config: SingleTile | None = None) -> None:
        """Create the family; ``config`` overrides the chosen configuration."""
        self._config = config

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        if (reason := NEEDS.why_not(work, device)) is not None:
            return reason
        if work.taps == 1 and max(work.stride) == 1:
            return "1x1 with stride 1, which pointwise_gemm computes"
        if work.split_k not in (None, 1):
            return f"split_k is {work.split_k}, set by the caller"
        if min(work.in_channels, work.out_channels) < LEAST_CHANNELS:
            return f"{work.in_channels} channels to {work.out_channels} would leave most of a tile"
        reason = why_not_im2col(work)
        if reason is not None:
            return reason
        if work.w.strides[2] != 1 or any(side.steps for side in _sides(work, device)):
            return "operands are not channels last, in whole chunks"
        if next(configs(work, device), None) is None:
            return "more tiles than fit on the device at once"
        for one in im2col_maps(work, BOX_ROWS, 0):
            reason = one.why_not()
            if reason is not None:
                return reason
        return None

    def launches(self, work: ConvWork, device: CudaDevice) -> Fragment:
        config = self._config
        if config is None:
            time_s, config = _chosen(work, device)
        else:
            time_s = expected_s(work, device, config)
        x_map, y_map = im2col_maps(work, BOX_ROWS, 0, work.x, work.y)
        rows, columns = config.tiles(work)
        stages = config.stages(device)
        launch = Launch(
            config.instance(work.dtype),
            (config.split, columns, rows),
            (config.threads, 1, 1),
            pack_maps(
                _arguments(work, config, stages),
                {"x_map": (work.x, x_map), "y_map": (work.y, y_map)},
                result=work.w,
                accumulate=work.accumulate,
            ),
            config.shared_bytes(stages),
            cluster=config.split,
        )
        return Fragment(
            f"{self.name}_{config}",
            (launch,),
            expected_s=time_s,
            order=f"split {config.split}" if config.split > 1 else "",
        )

    def tuned(self, config: str, work: ConvWork, device: CudaDevice) -> HopperWeightSingle | None:
        found = next((one for one in configs(work, device) if str(one) == config), None)
        return None if found is None else HopperWeightSingle(found)

    def instances(self) -> Iterable[Instance]:
        return [tile.instance(dtype) for dtype in IN_16_BITS for tile in TILES]


def expected_s(work: ConvWork, device: CudaDevice, config: SingleTile) -> float:
    """Return the expected seconds of a launch in a graph."""
    steps = ceil_div(work.pixels, PIXELS)
    return single_s(
        SingleWave(
            m=config.m,
            n=config.n,
            tiles=prod(config.tiles(work)),
            steps=steps,
            mean_steps=steps,
            empty=0,
            split=config.split,
            blocks=config.blocks,
            slots=config.clusters(device) * config.split,
            a_rows=config.m,
            taps=1,
            apart=(work.out_channels % BOX_ROWS != 0, work.in_channels % BOX_ROWS != 0),
            moved_bytes=work.elements * work.dtype.itemsize,
        ),
        RATES,
    )


def _sides(work: ConvWork, device: CudaDevice) -> Iterator[Prepared]:
    return (prepare_side(work, name, device) for name in ("input", "grad_output"))


def _chosen(work: ConvWork, device: CudaDevice) -> tuple[float, SingleTile]:
    """Return the configuration with the least expected time, and that in seconds."""
    return fastest(
        "hopper_weight_single",
        ((expected_s(work, device, one), one) for one in configs(work, device)),
        lambda found: lines(work, device, found),
        device,
    )


def lines(
    work: ConvWork, device: CudaDevice, found: Sequence[tuple[float, SingleTile]]
) -> NDArray[np.float64]:
    """Return the `features` of configurations with their expected seconds."""
    every = [config for _, config in found]
    return features(
        expected_s=[time_s for time_s, _ in found],
        rows=work.out_channels,
        columns=work.taps * work.in_channels,
        depth=work.pixels,
        m=[config.m for config in every],
        n=[config.n for config in every],
        k=PIXELS,
        inner=[config.split for config in every],
        outer=1,
        workers=[config.clusters(device) * config.split for config in every],
        moved=work.elements * work.dtype.itemsize,
        kind=[config.blocks for config in every],
        order=0,
    )


def _arguments(work: ConvWork, config: SingleTile, stages: int) -> Any:
    """Return the kernel parameters without addresses and tensor maps."""
    args = HopperWeightSingleArgs()
    args.dims, args.steps = dims_of(work), ceil_div(work.pixels, PIXELS)
    args.cluster, args.owned = config.split, config.owned
    args.stages, args.reduce_bytes = stages, config.epilogue_bytes
    args.y_size[:] = work.output
    fill(args, work, "stride", "pad", "dilation", "kernel")
    for dim, size in enumerate(work.output):
        args.by_size[dim] = divider(size)
    _, r, s = work.kernel
    args.by_taps, args.by_plane, args.by_row = divider(work.taps), divider(r * s), divider(s)
    args.in_channels, args.out_channels = work.in_channels, work.out_channels
    args.alpha, args.beta = work.alpha, work.beta
    args.plain, args.wide_result = work.epilogue_free, work.result_dtype is DType.FLOAT32
    args.result_in_vectors = beside(work, 8)
    args.w_stride[:] = work.w.strides
    return args
