"""Dense wgrad on Hopper of a single wave of tiles (hopper_weight_single.cu)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.conv.hopper_weight import (
    im2col_maps,
    why_not_im2col,
)
from convgrad_service.backends.cuda.kernels.conv.hopper_weight_args import beside, dims_of
from convgrad_service.backends.cuda.kernels.conv.single_model import Rates, SingleWave, single_s
from convgrad_service.backends.cuda.kernels.core.elements import CUDA_TYPES
from convgrad_service.backends.cuda.kernels.core.gather_axes import divider
from convgrad_service.backends.cuda.kernels.core.tensor_maps import pack_maps
from convgrad_service.backends.cuda.kernels.layout.channels_last import Prepared, prepare_side
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.backends.cuda.tuning.correction import MOST_CORRECTED, correction_of
from convgrad_service.backends.cuda.tuning.features import features
from convgrad_service.plans.cuda.device import HOPPER, RESERVED_BYTES, CudaDevice
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["HopperWeightSingle", "SingleConfig", "configs", "expected_s", "lines"]

HopperWeightSingleArgs = structure("conv/hopper_weight_single.cuh", "HopperWeightSingleArgs")
DTYPES = (DType.FLOAT16, DType.BFLOAT16)
BOX, PIXELS, ROW_BYTES = 64, 64, 128
ALIGNMENT, BARRIER_BYTES, FRAGMENT_BYTES = 1024, 8, 512
MOST_STAGES, LEAST_STAGES, PRODUCERS = 16, 3, 64
CLUSTERS = {1: 132, 2: 66, 3: 39, 4: 30, 6: 17, 8: 15}
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


@dataclass(frozen=True, slots=True)
class SingleConfig:
    """A tile of ``m`` channels of grad_output and ``n`` columns, computed by so many warpgroups,
    blocks per SM, and blocks of a cluster that split K."""

    m: int
    n: int
    warpgroups: int
    blocks: int = 1
    cluster: int = 1

    def __str__(self) -> str:
        split = f"_k{self.cluster}" if self.cluster > 1 else ""
        return f"{self.m}x{self.n}{split}" + (f"_b{self.blocks}" if self.blocks > 1 else "")

    @property
    def threads(self) -> int:
        return self.warpgroups * 128 + PRODUCERS

    @property
    def stage_bytes(self) -> int:
        return (self.m + self.n) * ROW_BYTES

    @property
    def owned(self) -> int:
        """Fragments of a warp that each block of the cluster reduces."""
        return ceil_div(self.m // self.warpgroups // 64 * self.n // 8, self.cluster)

    @property
    def reduce_bytes(self) -> int:
        return self.cluster * self.owned * self.warpgroups * 4 * FRAGMENT_BYTES

    def shared_bytes(self, stages: int) -> int:
        ring = stages * (self.stage_bytes + 2 * BARRIER_BYTES)
        return ALIGNMENT + ring + self.reduce_bytes + BARRIER_BYTES

    def stages(self, device: CudaDevice) -> int:
        """Return the number of pipeline stages that fit."""
        room = device.shared_bytes_per_multiprocessor // self.blocks - RESERVED_BYTES
        room = min(room, device.shared_bytes_per_block) - self.shared_bytes(0)
        return min(MOST_STAGES, room // (self.stage_bytes + 2 * BARRIER_BYTES))

    def clusters(self, device: CudaDevice) -> int:
        """Return the number of concurrent clusters."""
        return self.blocks * (device.multiprocessors * CLUSTERS[self.cluster] // CLUSTERS[1])

    def tiles(self, work: ConvWork) -> tuple[int, int]:
        """Return the number of tiles along rows and columns."""
        boxes = ceil_div(work.in_channels, BOX) * work.taps
        return ceil_div(work.out_channels, self.m), ceil_div(boxes * BOX, self.n)

    def instance(self, dtype: DType) -> Instance:
        defines = {
            "ELEMENT": CUDA_TYPES[dtype],
            "BM": self.m,
            "BN": self.n,
            "CONSUMERS": self.warpgroups,
        }
        return Instance.of("conv/hopper_weight_single.cu", defines, HOPPER)


TILES = tuple(
    SingleConfig(m, n, m // 64, blocks)
    for m, n, most in ((64, 64, 2), (64, 128, 1), (128, 128, 1))
    for blocks in range(1, most + 1)
)


def configs(work: ConvWork, device: CudaDevice) -> Iterator[SingleConfig]:
    """Yield the configurations whose clusters run at once, with a k-tile for each block."""
    steps = ceil_div(work.pixels, PIXELS)
    for tile in TILES:
        for cluster in CLUSTERS:
            one = SingleConfig(tile.m, tile.n, tile.warpgroups, tile.blocks, cluster)
            if one.stages(device) < LEAST_STAGES or cluster > steps:
                continue
            tiles = one.tiles(work)
            if prod(tiles) <= one.clusters(device) and max(tiles) <= MAX_GRID_YZ:
                yield one


class HopperWeightSingle:
    """bwd_weight on sm_90a, of 16-bit tensors."""

    name = "hopper_weight_single"

    def __init__(self, config: SingleConfig | None = None) -> None:
        """Create the family; ``config`` overrides the chosen configuration."""
        self._config = config

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`."""
        if device.architecture not in HOPPER:
            return f"{device.name} is not sm_90a"
        if work.dtype not in DTYPES:
            return f"{work.dtype} is not for products of 16 bits"
        if work.groups > 1:
            return f"{work.groups} groups of channels"
        if work.taps == 1 and max(work.stride) == 1:
            return "a product, which pointwise_gemm computes"
        if work.split_k not in (None, 1):
            return f"{work.split_k} shares were asked for"
        if min(work.in_channels, work.out_channels) < LEAST_CHANNELS:
            return f"{work.in_channels} channels to {work.out_channels} would leave most of a tile"
        reason = why_not_im2col(work)
        if reason is not None:
            return reason
        if work.w.strides[2] != 1 or any(side.steps for side in _sides(work, device)):
            return "operands are not channels last, in whole chunks"
        if next(configs(work, device), None) is None:
            return "more tiles than fit on the device at once"
        for one in im2col_maps(work, BOX, 0):
            reason = one.why_not()
            if reason is not None:
                return reason
        return None

    def launches(self, work: ConvWork, device: CudaDevice) -> Fragment:
        """See `Family.launches`."""
        config = self._config
        if config is None:
            time_s, config = _chosen(work, device)
        else:
            time_s = expected_s(work, device, config)
        x_map, y_map = im2col_maps(work, BOX, 0, work.x, work.y)
        rows, columns = config.tiles(work)
        stages = config.stages(device)
        launch = Launch(
            config.instance(work.dtype),
            (config.cluster, columns, rows),
            (config.threads, 1, 1),
            pack_maps(
                _arguments(work, config, stages),
                {"x_map": (work.x, x_map), "y_map": (work.y, y_map)},
                result=work.w,
                accumulate=work.accumulate,
            ),
            config.shared_bytes(stages),
            cluster=config.cluster,
        )
        return Fragment(
            f"{self.name}_{config}",
            (launch,),
            expected_s=time_s,
            order=f"split {config.cluster}" if config.cluster > 1 else "",
        )

    def tuned(self, config: str, work: ConvWork, device: CudaDevice) -> HopperWeightSingle | None:
        """See `Tunable.tuned`."""
        found = next((one for one in configs(work, device) if str(one) == config), None)
        return None if found is None else HopperWeightSingle(found)

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`."""
        return [tile.instance(dtype) for dtype in DTYPES for tile in TILES]


def expected_s(work: ConvWork, device: CudaDevice, config: SingleConfig) -> float:
    """Return the expected seconds of a launch in a graph."""
    steps = ceil_div(work.pixels, PIXELS)
    return single_s(
        SingleWave(
            m=config.m,
            n=config.n,
            tiles=prod(config.tiles(work)),
            steps=steps,
            mean_steps=steps,
            split=config.cluster,
            blocks=config.blocks,
            slots=config.clusters(device) * config.cluster,
            a_rows=config.m,
            taps=1,
            apart=(work.out_channels % BOX != 0, work.in_channels % BOX != 0),
            moved_bytes=_moved_bytes(work),
        ),
        RATES,
    )


def _sides(work: ConvWork, device: CudaDevice) -> Iterator[Prepared]:
    return (prepare_side(work, name, device) for name in ("input", "grad_output"))


def _chosen(work: ConvWork, device: CudaDevice) -> tuple[float, SingleConfig]:
    """Return the configuration with the least expected time, and that in seconds."""
    every = [(expected_s(work, device, one), one) for one in configs(work, device)]
    found = sorted(every, key=lambda one: one[0])[:MOST_CORRECTED]
    correction = correction_of("hopper_weight_single", device)
    if correction is None:
        return found[0]
    factors = correction.factors(lines(work, device, found))
    times = [time_s * float(factor) for (time_s, _), factor in zip(found, factors, strict=True)]
    best = int(np.argmin(times))
    return times[best], found[best][1]


def lines(
    work: ConvWork, device: CudaDevice, found: Sequence[tuple[float, SingleConfig]]
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
        inner=[config.cluster for config in every],
        outer=1,
        workers=[config.clusters(device) * config.cluster for config in every],
        moved=_moved_bytes(work),
        kind=[config.blocks for config in every],
        order=0,
    )


def _moved_bytes(work: ConvWork) -> int:
    """Return the bytes that must be read and written."""
    elements = work.batch * (
        work.in_channels * prod(work.input) + work.out_channels * prod(work.output)
    )
    elements += work.taps * work.in_channels * work.out_channels
    return elements * work.dtype.itemsize


def _arguments(work: ConvWork, config: SingleConfig, stages: int) -> Any:
    """Return the kernel parameters without addresses and tensor maps."""
    args = HopperWeightSingleArgs()
    args.dims, args.steps = dims_of(work), ceil_div(work.pixels, PIXELS)
    args.cluster, args.owned = config.cluster, config.owned
    args.stages, args.reduce_bytes = stages, config.reduce_bytes
    args.y_size[:] = work.output
    for name in ("stride", "pad", "dilation", "kernel"):
        getattr(args, name)[:] = getattr(work, name)
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
