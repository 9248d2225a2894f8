"""Tile shapes of the dense mma.sync kernels and their cost model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.core.gather_axes import gather_axis, least_taps
from convgrad_service.backends.cuda.kernels.core.limits import DTYPES
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import ceil_div
from convgrad_service.plans.cuda.works import ConvWork, Operand

__all__ = ["DTYPES", "LAUNCH_S", "MAX_INDEX", "DenseFamily", "DenseTile", "last_offset"]
__all__ += ["least_terms", "uses_3xtf32", "why_not_few_parts", "why_not_few_terms"]

MAX_INDEX = 2**31 - 1
LAUNCH_S = 3e-6
# Splitting into two TF32 parts has a relative error of 2^-21 per product, and into three bfloat16
# ones of 2^-23, and their sum in a tensor core a few more; float32 accumulation has 2^-24 per term.
_LEAST_TERMS, _LEAST_TERMS_OF_PARTS = 16, 8
# The fewest result channels with short sums of parts. With fewer, float32 FMAs take 0.60 to 1.53 of
# the time on an H200 (34 passes of layers of 12 to 15 channels, geometric mean 0.90).
_LEAST_SHORT_SUMS = 16
# Relative throughput of an SM with 1, 2, ... resident blocks, by the most that fit.
_OCCUPANCY_RATES = {1: (1.0,), 2: (0.65, 1.0), 3: (0.55, 0.8, 1.0)}
# SMs of the GPU on which the rates below were measured.
_MEASURED_ON = 132


@dataclass(frozen=True, slots=True)
class DenseTile:
    """A tile shape and its measured rates.

    Attributes
    ----------
    m, n, warp_m, warp_n
        Block tile and warp tile.
    step_bytes
        Bytes along K of a k-tile.
    stages, blocks
        Pipeline stages, and resident blocks per SM.
    copy_groups
        Groups in which the copies of a k-tile are issued.
    flops, start_s
        FLOP/s of a whole H200 in 16-bit types (half of that in TF32), and seconds of a block
        outside its mainloop. They were fitted to tests/perf's dense layers, and rank tiles on
        every device.
    tf32x3
        Whether float32 operands are split into three TF32 products.
    """

    m: int
    n: int
    warp_m: int
    warp_n: int
    step_bytes: int
    stages: int
    blocks: int
    copy_groups: int = 1
    flops: float = 300e12
    start_s: float = 5e-6
    tf32x3: bool = False

    @property
    def threads(self) -> int:
        return self.m // self.warp_m * (self.n // self.warp_n) * 32

    @property
    def pipeline_bytes(self) -> int:
        return self.stages * (self.m + self.n) * self.step_bytes

    @property
    def scaling_flag_bytes(self) -> int:
        """Bytes of ``ScalingFlags`` (core/operand_scaling.cuh) if operands are split."""
        return 24 if self.tf32x3 else 0

    def depth(self, dtype: DType) -> int:
        """Return the elements along K of a k-tile."""
        return self.step_bytes // dtype.itemsize

    def defines(self, dtype: DType, int64: bool) -> dict[str, object]:
        """Return the preprocessor macros of an instance, with 64-bit offsets if ``int64``."""
        return {
            "ELEMENT": dtype,
            "WIDE": int64,
            "BM": self.m,
            "BN": self.n,
            "BK": self.depth(dtype),
            "WM": self.warp_m,
            "WN": self.warp_n,
            "STAGES": self.stages,
            "BLOCKS": self.blocks,
            "GROUPS": self.copy_groups,
            "SPLIT": self.tf32x3,
        }

    def fits(self, device: CudaDevice, shared_bytes: int) -> bool:
        return shared_bytes <= device.shared_bytes_per_block

    def expected_s(
        self, device: CudaDevice, blocks: int, steps: float, shared_bytes: int, extra_s: float = 0.0
    ) -> float:
        """Return the expected seconds of all full waves of blocks, and of the last partial one.

        Parameters
        ----------
        steps
            Average number of k-tiles per block.
        extra_s
            Seconds of a k-tile besides its products and copies.
        """
        resident = max(1, min(self.blocks, device.fitting_blocks(shared_bytes)))
        shares = _OCCUPANCY_RATES[self.blocks]
        # Independent of the dtype: in TF32, a k-tile has half the elements at half the rate.
        step_flops = 2 * self.m * self.n * self.step_bytes // 2
        step_s = step_flops * self.blocks * _MEASURED_ON / self.flops + extra_s
        block_s = self.start_s + steps * step_s
        wave = shares[resident - 1]
        full, rest = divmod(blocks, device.multiprocessors * resident)
        last = shares[ceil_div(rest, device.multiprocessors) - 1] if rest else 0.0
        return (full * wave + last) * block_s


class DenseFamily:
    """The thresholds of tile utilisation of a dense mma.sync family."""

    def __init__(self, least_grouped: int = 16, least_product: int = 64) -> None:
        """Create the family.

        Parameters
        ----------
        least_grouped
            With groups, the fewest channels per group on either side.
        least_product
            The least product of the GEMM's two extents that are channels (in wgrad, output
            channels, and taps x input channels).
        """
        self._least_grouped, self._least_product = least_grouped, least_product

    def _fills_tile(self, work: ConvWork, product: int) -> bool:
        least = min(work.in_channels, work.out_channels)
        return product >= self._least_product and (work.groups == 1 or least >= self._least_grouped)


def last_offset(operand: Operand, shape: tuple[int, ...]) -> int:
    """Return the offset of the last element plus a whole chunk."""
    strides = zip(shape, operand.strides, strict=True)
    return sum((extent - 1) * stride for extent, stride in strides) + 16


def uses_3xtf32(work: ConvWork) -> bool:
    """Return whether float32 is computed as three TF32 products of split operands."""
    return work.dtype is DType.FLOAT32 and work.precision != "high"


def least_terms(work: ConvWork) -> int:
    """Return the fewest products of any non-empty sum."""
    if work.direction == "bwd_weight":
        met = (min(filter(None, _outputs_of_taps(work, dim)), default=0) for dim in range(3))
        return work.batch * prod(met)
    return work.channels[0] * prod(least_taps(gather_axis(work, dim)) for dim in range(3))


def _outputs_of_taps(work: ConvWork, dim: int) -> Iterator[int]:
    """Yield the number of outputs that each tap contributes to along one dimension."""
    for tap in range(work.kernel[dim]):
        first = tap * work.dilation[dim] - work.pad[dim]
        low = max(0, ceil_div(-first, work.stride[dim]))
        high = min(work.output[dim], (work.input[dim] - 1 - first) // work.stride[dim] + 1)
        yield max(0, high - low)


def why_not_few_terms(work: ConvWork) -> str | None:
    """Return why its sums are not computed from split operands, or None."""
    gathers = work.direction != "bwd_weight"
    if not uses_3xtf32(work) or (gathers and work.channels[0] >= _LEAST_TERMS):
        return None
    if (terms := least_terms(work)) >= _LEAST_TERMS:
        return None
    return f"sums of {terms} products: float32 FMAs may be more accurate than split TF32 operands"


def why_not_few_parts(work: ConvWork) -> str | None:
    """Return why its sums are not computed from three bfloat16 parts of operands, or None."""
    gathers = work.direction != "bwd_weight"
    if gathers and work.channels[0] >= _LEAST_TERMS:
        return None
    terms = least_terms(work)
    if terms < _LEAST_TERMS_OF_PARTS:
        return f"sums of {terms} products: float32 FMAs may be more accurate than parts of operands"
    if gathers and terms < _LEAST_TERMS and work.channels[1] < _LEAST_SHORT_SUMS:
        return f"float32 FMAs take less time for {work.channels[1]} sums of {terms} products"
    return None
