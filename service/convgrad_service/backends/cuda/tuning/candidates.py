"""The configurations of every dense family for one layer, to be timed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from convgrad_service.backends.cuda.kernels.conv import hopper_gather_model as gather
from convgrad_service.backends.cuda.kernels.conv import hopper_weight_model as weight
from convgrad_service.backends.cuda.kernels.conv import hopper_weight_single as weight_single
from convgrad_service.backends.cuda.kernels.conv import implicit_gemm_model as implicit
from convgrad_service.backends.cuda.kernels.conv import pointwise_gemm_model as product
from convgrad_service.backends.cuda.kernels.conv.dense_weight import DenseWeight
from convgrad_service.backends.cuda.kernels.conv.hopper_gather import HopperGather
from convgrad_service.backends.cuda.kernels.conv.hopper_gather_plan import (
    candidates as gather_candidates,
)
from convgrad_service.backends.cuda.kernels.conv.hopper_halo import HopperHalo
from convgrad_service.backends.cuda.kernels.conv.hopper_weight import HopperWeight, reachable
from convgrad_service.backends.cuda.kernels.conv.hopper_weight_single import (
    HopperWeightSingle,
)
from convgrad_service.backends.cuda.kernels.conv.implicit_gemm import (
    ImplicitGemm,
    gemm_of,
)
from convgrad_service.backends.cuda.kernels.conv.pointwise_gemm import (
    COUNTERS,
    SWAPPED,
    PointwiseGemm,
)
from convgrad_service.backends.cuda.kernels.conv.pointwise_gemm_products import products_of
from convgrad_service.backends.cuda.kernels.conv.pointwise_gemm_tiles import (
    UNALIGNED,
    Config,
    Product,
)
from convgrad_service.backends.cuda.kernels.core.gather_axes import gather_axes
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import Family
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["Candidate", "candidates"]


@dataclass(frozen=True)
class Candidate:
    """A configuration of a family.

    Attributes
    ----------
    family
        The family, with its configuration fixed.
    config
        The configuration's name, as in a table of tuned layers.
    expected_s
        The cost model's seconds, without corrections; None without a model.
    """

    family: Family[ConvWork]
    config: str
    expected_s: float | None


def candidates(work: ConvWork, device: CudaDevice) -> Iterator[list[Candidate]]:
    """Yield a list for each family that takes such work, fastest first by its cost model."""
    for unaligned in (False, True):
        if PointwiseGemm(Config(64, 64), unaligned=unaligned).why_not(work, device) is None:
            yield _sorted(
                Candidate(
                    PointwiseGemm(config, swapped=one.swapped, unaligned=unaligned),
                    _name(config, one),
                    time_s,
                )
                for one in products_of(work, unaligned=unaligned)
                for time_s, config in product.timed(one, device, COUNTERS)
            )
    if ImplicitGemm().why_not(work, device) is None:
        gemm = gemm_of(work)
        yield _sorted(
            Candidate(
                ImplicitGemm(config),
                str(config),
                implicit.expected_s(gemm, work.dtype, config, device),
            )
            for config in implicit.candidate_configs(gemm, work.dtype, device, COUNTERS)
        )
    if work.direction == "bwd_weight":
        if HopperWeight().why_not(work, device) is None:
            yield _sorted(
                Candidate(
                    HopperWeight(cut=cut),
                    str(cut),
                    weight.launch_s(weight.expected_s(cut, device)),
                )
                for cut in reachable(work, device)
            )
        if HopperWeightSingle().why_not(work, device) is None:
            yield _sorted(
                Candidate(
                    HopperWeightSingle(config),
                    str(config),
                    weight_single.expected_s(work, device, config),
                )
                for config in weight_single.configs(work, device)
            )
        if DenseWeight().why_not(work, device) is None:
            yield [Candidate(DenseWeight(), "", None)]
        return
    if HopperGather(everything=True).why_not(work, device) is None:
        axes = gather_axes(work)
        yield _sorted(
            Candidate(
                HopperGather(everything=True, schedule=one),
                str(one),
                gather.expected_s(work, axes, device, one),
            )
            for one in gather_candidates(work, axes, device)
        )
    if HopperHalo().why_not(work, device) is None:
        yield [Candidate(HopperHalo(), "", None)]


def _name(config: Config, of: Product) -> str:
    return f"{config}{SWAPPED * of.swapped}{UNALIGNED * of.unaligned}"


def _sorted(found: Iterator[Candidate]) -> list[Candidate]:
    return sorted(found, key=lambda one: one.expected_s or 0.0)
