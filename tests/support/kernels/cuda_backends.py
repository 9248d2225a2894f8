"""The GPU as the tests see it: as it is, and with one family of kernels for everything.

Plans leave small channels to other kernels than large ones, and fast kernels take work from
general ones. So that every kernel meets every geometry that it can compute, a backend is made for
each of the general families too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from random import Random
from typing import Any

from convgrad_service.backends.base import Backend
from convgrad_service.backends.cuda.backend import CudaBackend
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.conv.dense_gather import DenseGather
from convgrad_service.backends.cuda.kernels.conv.dense_tiles import least_terms
from convgrad_service.backends.cuda.kernels.conv.dense_weight import DenseWeight
from convgrad_service.backends.cuda.kernels.conv.float_parts import PARTS
from convgrad_service.backends.cuda.kernels.conv.hopper_gather import HopperGather
from convgrad_service.backends.cuda.kernels.conv.hopper_gather_plan import Schedule
from convgrad_service.backends.cuda.kernels.conv.hopper_halo import HopperHalo
from convgrad_service.backends.cuda.kernels.conv.hopper_weight import HopperWeight
from convgrad_service.backends.cuda.kernels.conv.implicit_gemm import ImplicitGemm
from convgrad_service.backends.cuda.kernels.conv.implicit_gemm_tiles import Config
from convgrad_service.backends.cuda.kernels.conv.pointwise_gemm import PointwiseGemm
from convgrad_service.backends.cuda.kernels.conv.pointwise_gemm_tiles import (
    Config as PointwiseConfig,
)
from convgrad_service.backends.cuda.kernels.conv.simt_gemm import Config as SimtConfig
from convgrad_service.backends.cuda.kernels.conv.simt_gemm import SimtGemm
from convgrad_service.backends.cuda.kernels.conv.split_gather import SplitGather
from convgrad_service.backends.cuda.kernels.conv.split_weight import SplitWeight
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_pairs import DepthwisePairs
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_weight import DepthwiseWeight
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_weight_direct import (
    DepthwiseWeightDirect,
)
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_weight_mma import DepthwiseWeightMma
from convgrad_service.backends.cuda.kernels.fallback.gather_direct import GatherDirect
from convgrad_service.backends.cuda.kernels.fallback.gather_tile import GatherTile
from convgrad_service.backends.cuda.kernels.fallback.weight_direct import WeightDirect
from convgrad_service.backends.cuda.kernels.fallback.weight_tile import WeightTile
from convgrad_service.backends.cuda.kernels.pool.pool_stages import PoolThroughIndices
from convgrad_service.backends.cuda.kernels.pool.window_maxima import WindowMaxima
from convgrad_service.backends.cuda.kernels.pool.window_routes import WindowRoutes
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import Families, Family, FastestExpected, Selector
from convgrad_service.plans.cuda.program import Fragment, Instance
from convgrad_service.plans.cuda.works import ConvWork
from convgrad_service.problems import Problem

__all__ = ["MAKERS", "Everywhere", "adds_as_whole"]

# Those that compute everything of their role.
GENERAL = ("gather_direct", "weight_direct", "gather_tile", "weight_tile", "strided_copy")


class Everywhere:
    """A family that computes everything, though a plan would leave some of it to another."""

    def __init__(self, family: Family[Any]) -> None:
        self.name = family.name
        self._family = family

    def why_not(self, work: Any, device: CudaDevice) -> str | None:
        return None

    def launches(self, work: Any, device: CudaDevice) -> Fragment:
        return self._family.launches(work, device)

    def instances(self) -> Iterable[Instance]:
        return self._family.instances()


def general(gather: Family[Any], weight: Family[Any]) -> Families:
    """The general kernels alone, with one of each kind for every convolution."""
    return replace(
        FAMILIES,
        fwd=[Everywhere(gather)],
        bwd_data=[Everywhere(gather)],
        bwd_weight=[Everywhere(weight)],
        fused=(),
        pool_bwd=[PoolThroughIndices([WindowMaxima()], [WindowRoutes()])],
    )


def dense() -> Families:
    """The tensor cores' kernels for every convolution that they can compute, however few channels
    it has; the general ones for the others."""
    return replace(
        FAMILIES,
        fwd=[DenseGather(1, 1), GatherDirect()],
        bwd_data=[DenseGather(1, 1), GatherDirect()],
        bwd_weight=[DenseWeight(1, 1), WeightDirect()],
        fused=(),
    )


class _SplitSums(SplitGather):
    """Without single products, whose rounding no sum outweighs: plans leave these to others."""

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        return "single products" if least_terms(work) < 2 else super().why_not(work, device)


def hopper(schedule: Schedule | None = None) -> Families:
    """Hopper's kernels for every convolution that they can compute, however few channels it has;
    the general ones for the others. ``schedule`` in place of the plan's own."""
    gathers = [
        HopperGather(True, schedule),
        _SplitSums(HopperGather(True, parts=PARTS["highest"])),
        GatherDirect(),
    ]
    return replace(
        FAMILIES,
        fwd=gathers,
        bwd_data=gathers,
        bwd_weight=[
            SplitWeight(HopperWeight(1)),
            HopperWeight(1),
            WeightDirect(),
        ],
        fused=(),
    )


def implicit_gemm(config: Config | None = None) -> Families:
    """implicit_gemm for every convolution that it can compute, however many channels it has; the
    general kernels for the others. ``config`` in place of the plan's own."""
    gemm = ImplicitGemm(config)
    return replace(
        FAMILIES,
        fwd=[gemm, GatherDirect()],
        bwd_data=[gemm, GatherDirect()],
        bwd_weight=[gemm, WeightDirect()],
        fused=(),
    )


def simt_gemm(config: SimtConfig | None = None) -> Families:
    """simt_gemm for every convolution that it can compute, of any size; the general kernels for the
    others. ``config`` in place of the plan's own."""
    gemm = SimtGemm(config=config)
    return replace(
        FAMILIES,
        fwd=[gemm, GatherDirect()],
        bwd_data=[gemm, GatherDirect()],
        bwd_weight=[gemm, WeightDirect()],
        fused=(),
    )


def pointwise_gemm(
    config: PointwiseConfig | None = None, *, swapped: bool = False, unaligned: bool = False
) -> Families:
    """pointwise_gemm for every convolution that it can compute; the general kernels for the others.
    ``config`` in place of the plan's own, with wgrad's rows ``swapped``; of rows that are no whole
    chunks if ``unaligned``."""
    gemm = PointwiseGemm(config, swapped=swapped, unaligned=unaligned)
    return replace(
        FAMILIES,
        fwd=[gemm, GatherDirect()],
        bwd_data=[gemm, GatherDirect()],
        bwd_weight=[gemm, WeightDirect()],
        fused=(),
    )


def shuffled(rng: Random) -> Families:
    """The library's families in another order, the general ones last: each computes layers that
    plans leave to others."""

    def each(families: Iterable[Family[Any]]) -> Iterator[Family[Any]]:
        for family in families:
            if isinstance(family, FastestExpected):
                yield from each(chain(*family.alternatives))
            elif not isinstance(family, Selector):
                yield family

    def order(families: Iterable[Family[Any]]) -> list[Family[Any]]:
        found = list(each(families))
        rng.shuffle(found)
        return sorted(found, key=lambda family: family.name in GENERAL)

    return Families(**{role: order(getattr(FAMILIES, role)) for role in FAMILIES.__slots__})


def few() -> Families:
    """Kernels that plans keep for few layers, for every convolution that they can compute: of
    haloed tiles, and depthwise ones for large tensors."""
    families: list[Family[Any]] = [
        HopperHalo(anything=True),
        DepthwisePairs(anything=True),
        GatherDirect(),
    ]
    weight: list[Family[Any]] = [
        DepthwiseWeightDirect(always=True),
        DepthwiseWeight(always=True),
        DepthwiseWeightMma(),
        WeightDirect(),
    ]
    return replace(FAMILIES, fwd=families, bwd_data=families, bwd_weight=weight, fused=())


def _made(families: Families) -> Callable[[], Backend]:
    return lambda: CudaBackend(families=families, poison=True, debug=True)


MAKERS: dict[str, Callable[[], Backend]] = {
    "cuda": _made(FAMILIES),
    "cuda_dense": _made(dense()),
    "cuda_hopper": _made(hopper()),
    "cuda_implicit_gemm": _made(implicit_gemm()),
    "cuda_few": _made(few()),
    "cuda_tiles": _made(general(GatherTile(), WeightTile())),
    "cuda_direct": _made(general(GatherDirect(), WeightDirect())),
}
"""By the names that the fixture gives them."""


def adds_as_whole(backend: Backend, problem: Problem, parts: int) -> bool:
    """Whether pieces add in the order of the whole: on a CPU always, on a GPU if plans say so."""
    if not isinstance(backend, CudaBackend):
        return True
    orders = set(backend.plan(problem).orders)
    pieces = (piece.problem for piece in problem.split(parts))
    return all(orders.issuperset(backend.plan(piece).orders) for piece in pieces)
