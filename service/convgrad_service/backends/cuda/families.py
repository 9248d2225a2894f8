"""The kernel families of the GPU, in order of preference.

The first one that applies is used. Some entries stand for several families, one of which is chosen:
by a table of tuned layers (`Tuned`) or by predicted time (`FastestExpected`). A faster kernel comes
before those that it replaces. The last family of each role applies to everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.conv.batch_last_weight import BatchLastWeight
from convgrad_service.backends.cuda.kernels.conv.channel_sums import ChannelSumsKernel
from convgrad_service.backends.cuda.kernels.conv.col2im import Col2im
from convgrad_service.backends.cuda.kernels.conv.dense_gather import DenseGather
from convgrad_service.backends.cuda.kernels.conv.dense_weight import DenseWeight
from convgrad_service.backends.cuda.kernels.conv.few_gather import FewGather
from convgrad_service.backends.cuda.kernels.conv.few_sources import FewSources
from convgrad_service.backends.cuda.kernels.conv.first_forward import FirstForward
from convgrad_service.backends.cuda.kernels.conv.first_weight import FirstWeight
from convgrad_service.backends.cuda.kernels.conv.hopper_first_data import HopperFirstData
from convgrad_service.backends.cuda.kernels.conv.hopper_first_taps import HopperFirstTaps
from convgrad_service.backends.cuda.kernels.conv.hopper_gather import HopperGather
from convgrad_service.backends.cuda.kernels.conv.hopper_halo import HopperHalo
from convgrad_service.backends.cuda.kernels.conv.hopper_weight import HopperWeight
from convgrad_service.backends.cuda.kernels.conv.hopper_weight_single import HopperWeightSingle
from convgrad_service.backends.cuda.kernels.conv.implicit_gemm import ImplicitGemm
from convgrad_service.backends.cuda.kernels.conv.padded_result import PaddedResult
from convgrad_service.backends.cuda.kernels.conv.patch_products import PatchProducts
from convgrad_service.backends.cuda.kernels.conv.pointwise_gemm import PointwiseGemm
from convgrad_service.backends.cuda.kernels.conv.simt_gemm import SimtGemm
from convgrad_service.backends.cuda.kernels.conv.split_gather import SplitGather
from convgrad_service.backends.cuda.kernels.conv.split_weight import SplitWeight
from convgrad_service.backends.cuda.kernels.conv.zero_insertion import ZeroInsertion
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_direct import DepthwiseDirect
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_pairs import DepthwisePairs
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_scale import DepthwiseScale
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_weight import DepthwiseWeight
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_weight_direct import (
    DepthwiseWeightDirect,
)
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_weight_mma import DepthwiseWeightMma
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_weight_rows import (
    DepthwiseWeightRows,
)
from convgrad_service.backends.cuda.kernels.fallback.gather_direct import GatherDirect
from convgrad_service.backends.cuda.kernels.fallback.gather_tile import GatherTile
from convgrad_service.backends.cuda.kernels.fallback.weight_direct import WeightDirect
from convgrad_service.backends.cuda.kernels.fallback.weight_tile import WeightTile
from convgrad_service.backends.cuda.kernels.fused.hopper_separable import HopperSeparable
from convgrad_service.backends.cuda.kernels.grouped.grouped_gather import GroupedGather
from convgrad_service.backends.cuda.kernels.grouped.grouped_weight import GroupedWeight
from convgrad_service.backends.cuda.kernels.grouped.hopper_grouped import HopperGrouped
from convgrad_service.backends.cuda.kernels.grouped.hopper_grouped_weight import HopperGroupedWeight
from convgrad_service.backends.cuda.kernels.layout.channels_first import (
    ConvThroughChannelsLast,
    FusedThroughChannelsLast,
    PoolThroughChannelsLast,
)
from convgrad_service.backends.cuda.kernels.layout.dense_channels_first import (
    ResultThroughChannelsLast,
)
from convgrad_service.backends.cuda.kernels.layout.strided_copy import StridedCopy
from convgrad_service.backends.cuda.kernels.layout.transpose import (
    RowCopy,
    RowPack,
    Transpose,
)
from convgrad_service.backends.cuda.kernels.pool.max_unpool import MaxUnpool
from convgrad_service.backends.cuda.kernels.pool.pool_cells import PoolCells
from convgrad_service.backends.cuda.kernels.pool.pool_stages import MaximaByAxes, PoolThroughIndices
from convgrad_service.backends.cuda.kernels.pool.pool_strips import PoolStrips
from convgrad_service.backends.cuda.kernels.pool.pool_tiles import PoolTiles
from convgrad_service.backends.cuda.kernels.pool.window_chunks import RouteChunks, WindowChunks
from convgrad_service.backends.cuda.kernels.pool.window_maxima import WindowMaxima
from convgrad_service.backends.cuda.kernels.pool.window_planes import WindowPlanes
from convgrad_service.backends.cuda.kernels.pool.window_reduce import WindowReduce
from convgrad_service.backends.cuda.kernels.pool.window_routes import WindowRoutes
from convgrad_service.backends.cuda.kernels.pool.window_scatter import WindowScatter
from convgrad_service.backends.cuda.kernels.pool.window_sums import WindowSums
from convgrad_service.backends.cuda.kernels.pool.window_tiles import WindowTiles
from convgrad_service.backends.cuda.overheads import COPY_S, OVERHEADS
from convgrad_service.backends.cuda.tuning.tuned import Tuned
from convgrad_service.plans.cuda.families import Families, Family, FastestExpected, Overhead
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["FAMILIES"]

# Copies between layouts.
COPIES = (Transpose(), RowCopy(), RowPack(), StridedCopy())


def _fastest(
    *alternatives: Sequence[Family[ConvWork]], copy_s: float = 0.0
) -> FastestExpected[ConvWork]:
    """Return a choice by predicted times and those of copies; none of the alternatives needs to
    apply."""
    overheads = {
        family.name: Overhead(0.0, copy_s=copy_s)
        for families in alternatives
        for family in families
    }
    return FastestExpected(*alternatives, overheads=overheads, optional=True)


def _through_channels_last(families: Sequence[Family[ConvWork]]) -> list[Family[ConvWork]]:
    return [ConvThroughChannelsLast(family, COPIES) for family in families]


def _in_any_layout(family: Family[ConvWork]) -> tuple[Family[ConvWork], ...]:
    return family, ConvThroughChannelsLast(family, COPIES)


def _result_in_any_layout(
    family: Family[ConvWork], timed: bool = False
) -> tuple[Family[ConvWork], ...]:
    return ResultThroughChannelsLast(family, COPIES, timed=timed), family


# Channels that a result may sum over: any number.
MANY = 2**31
# Depthwise convolutions: forward and input gradient, then weight gradient. Small ones first.
# Channels first, a kernel that reads planes is compared with those between copies.
_Alternatives = tuple[Sequence[Family[ConvWork]], ...]
_DEPTHWISE: _Alternatives = (
    [DepthwiseDirect()],
    [DepthwisePairs()],
)
_DEPTHWISE_WEIGHT: _Alternatives = (
    [DepthwiseWeightRows()],
    [DepthwiseWeightDirect()],
    [DepthwiseWeight(), DepthwiseWeightMma()],
)
DEPTHWISE = (
    DepthwiseScale(),
    _fastest(*_DEPTHWISE),
    _fastest(
        [DepthwiseDirect(in_planes=True, most_summed=MANY)],
        *map(_through_channels_last, _DEPTHWISE),
        copy_s=COPY_S,
    ),
)
DEPTHWISE_WEIGHT = (
    _fastest(*_DEPTHWISE_WEIGHT),
    _fastest(
        [DepthwiseWeightRows(in_planes=True)],
        *map(_through_channels_last, _DEPTHWISE_WEIGHT),
        copy_s=COPY_S,
    ),
)
SPLIT_GATHER = _result_in_any_layout(SplitGather(), timed=True)
SPLIT_WEIGHT = _result_in_any_layout(SplitWeight())
# Of families and, where none is fitted to them, of those between copies.
COPIED = {
    f"{name}_through_channels_last": replace(one, copy_s=COPY_S) for name, one in OVERHEADS.items()
} | OVERHEADS
# Few channels per group. Kernels that compute several groups at once, between copies if need be,
# are compared with dense ones, whose tiles are of one group.
GROUPED = (
    FastestExpected(
        _in_any_layout(GroupedGather()),
        _in_any_layout(HopperGrouped()),
        _result_in_any_layout(HopperGather(), timed=True),
        SPLIT_GATHER,
        (ImplicitGemm(),),
        (DenseGather(),),
        overheads=COPIED,
    ),
)
GROUPED_WEIGHT = (
    FastestExpected(
        _in_any_layout(GroupedWeight()),
        _in_any_layout(HopperGroupedWeight()),
        _result_in_any_layout(HopperWeight(), timed=True),
        SPLIT_WEIGHT,
        (ImplicitGemm(),),
        _result_in_any_layout(DenseWeight()),
        overheads=COPIED,
    ),
)
# Depthwise gradients of the input that sum over several channels, channels last. On an H200,
# grouped_gather takes 1.6 to 2.5 times as long in float32 (36 layers), and in 16-bit types 0.88
# (77).
DEPTHWISE_SUMS = (
    DepthwiseDirect(most_summed=8, dtypes=(DType.FLOAT32,)),
    *GROUPED,
    DepthwiseDirect(most_summed=MANY),
)
# Many channels per group, any kernel: forward and input gradient, then weight gradient.
DENSE_CONV = *_result_in_any_layout(HopperGather(), timed=True), DenseGather()
DENSE_CONV_16 = (
    DENSE_CONV,
    _result_in_any_layout(HopperHalo(), timed=True),
    (HopperGather(direct=True),),
)
DENSE_CONV_WEIGHT = (
    *_result_in_any_layout(HopperWeight(), timed=True),
    *_result_in_any_layout(DenseWeight()),
)
BATCH_LAST_WEIGHT = _result_in_any_layout(BatchLastWeight())
# Small layers, and those that no family above takes. 14 layers that only fallback kernels take
# otherwise take 0.28 to 1.02 of their time on an H200; 7 in TF32 with fewer than 4 channels 0.31 to
# 1.55.
IMPLICIT_GEMM = ImplicitGemm(dtypes=(DType.FLOAT16, DType.BFLOAT16))
FLOAT32_GEMM = ImplicitGemm(dtypes=(DType.FLOAT32,), least_channels=4)
IMPLICIT_GEMMS = (IMPLICIT_GEMM, FLOAT32_GEMM)
# 1x1 convolutions as GEMMs. For channels first in aligned planes, and for those expected to be
# short, hardly any other family was ever faster, so they are not compared.
_IN_16_BITS = DType.FLOAT16, DType.BFLOAT16
PLANES_GEMM = PointwiseGemm(planes=True, dtypes=_IN_16_BITS)
SHORT_GEMM = PointwiseGemm(most_s=25e-6, dtypes=_IN_16_BITS)
GEMMS = (PointwiseGemm(),), (IMPLICIT_GEMM,)
UNALIGNED_GEMM = PointwiseGemm(unaligned=True)


def _in_float32(
    *alternatives: Sequence[Family[ConvWork]], few_terms: Sequence[Family[ConvWork]] = ()
) -> FastestExpected[ConvWork]:
    """Return a choice for float32, where channels first `FLOAT32_GEMM` needs no copies, and those
    of other families count; sums that are too short for it are left to ``few_terms``."""
    return FastestExpected((FLOAT32_GEMM, *few_terms), *alternatives, overheads=COPIED)


# Channels that are whole chunks of 16 bytes, or not.
TUNABLE = (PointwiseGemm(), IMPLICIT_GEMM, HopperGather(), HopperHalo())
WHOLE_CHUNKS = (
    Tuned(TUNABLE),
    PLANES_GEMM,
    SHORT_GEMM,
    _in_float32(
        DENSE_CONV,
        (HopperGather(direct=True),),
        (PointwiseGemm(),),
        SPLIT_GATHER,
        few_terms=SPLIT_GATHER,
    ),
    FastestExpected(*DENSE_CONV_16, *GEMMS, overheads=OVERHEADS),
)
TUNABLE_WEIGHT = (
    PointwiseGemm(),
    IMPLICIT_GEMM,
    HopperWeight(),
    HopperWeightSingle(),
    DenseWeight(),
)
WHOLE_CHUNKS_WEIGHT = (
    Tuned(TUNABLE_WEIGHT),
    PLANES_GEMM,
    SHORT_GEMM,
    _in_float32(DENSE_CONV_WEIGHT, BATCH_LAST_WEIGHT, (PointwiseGemm(),), SPLIT_WEIGHT),
    FastestExpected(DENSE_CONV_WEIGHT, (HopperWeightSingle(),), *GEMMS, overheads=OVERHEADS),
)
# 1x1 layers of so few pixels and products that other families are hardly ever faster: on an H200,
# 9 of 122 rows by more than 3 %, and 19 of 23 of more products.
SIMT_GEMM = SimtGemm(most_s=8.5e-6, most_pixels=200, most_products=2**21)
# Narrow ones in float32, of any number of pixels; measured with up to 4 channels on one side.
NARROW_GEMM = SimtGemm(most_s=14e-6, most_channels=4, dtypes=(DType.FLOAT32,))
SHORTEST = Tuned(TUNABLE, own=True), SIMT_GEMM
SHORTEST_WEIGHT = Tuned(TUNABLE_WEIGHT, own=True), SIMT_GEMM


def _beside_unaligned(*families: Family[ConvWork]) -> tuple[Family[ConvWork], ...]:
    """Return a choice between them and a GEMM of rows that are no whole chunks, then them."""
    others = (*families, IMPLICIT_GEMM)
    return FastestExpected((UNALIGNED_GEMM,), others, overheads=OVERHEADS), *families


DENSE: Sequence[Family[ConvWork]] = (
    *SHORTEST,
    *_beside_unaligned(PaddedResult(WHOLE_CHUNKS, COPIES), *WHOLE_CHUNKS),
)
DENSE_WEIGHT: Sequence[Family[ConvWork]] = (
    *SHORTEST_WEIGHT,
    *_beside_unaligned(PaddedResult(WHOLE_CHUNKS_WEIGHT, COPIES), *WHOLE_CHUNKS_WEIGHT),
)
LAST_GATHERS = (*DENSE, *IMPLICIT_GEMMS, GatherTile(), GatherDirect())
LAST_WEIGHTS = (*DENSE_WEIGHT, *IMPLICIT_GEMMS, WeightTile(), WeightDirect())
# Few channels of the input or of the result: families that read them in place, or lower the layer
# to a product, beside the dense ones.
COL2IM = Col2im((PointwiseGemm(), IMPLICIT_GEMM), (*DENSE, *IMPLICIT_GEMMS))


def _few_channels(
    *families: Family[ConvWork], others: Sequence[Family[ConvWork]]
) -> FastestExpected[ConvWork]:
    """Return a choice between families for few channels, and the first of the others."""
    copied = {family.name: Overhead(0.0, copy_s=COPY_S) for family in families}
    # Its tiles are mostly empty: without this, it takes 1.14 times as long as expected (116 rows).
    tiles = {"dense_gather": replace(OVERHEADS["dense_gather"], scale=1.24)}
    overheads = copied | COPIED | tiles
    alternatives = *((family,) for family in families), others
    return FastestExpected(*alternatives, overheads=overheads, optional=True)


FEW_FORWARD = _few_channels(
    PatchProducts(DENSE),
    FewSources(),
    NARROW_GEMM,
    FirstForward(),
    FewGather(),
    COL2IM,
    others=LAST_GATHERS,
)
FEW_DATA = _few_channels(
    PatchProducts(DENSE),
    FewSources(),
    NARROW_GEMM,
    FewGather(),
    HopperFirstData(),
    COL2IM,
    FirstForward(),
    ZeroInsertion((*DENSE, *IMPLICIT_GEMMS), (DType.FLOAT32,)),
    others=LAST_GATHERS,
)
FEW_WEIGHT = _few_channels(
    PatchProducts(DENSE_WEIGHT),
    NARROW_GEMM,
    HopperFirstTaps(),
    FirstWeight(),
    others=LAST_WEIGHTS,
)

# Two convolutions with the intermediate on chip.
FUSED = (
    HopperSeparable(),
    FusedThroughChannelsLast(HopperSeparable(), COPIES),
)

# Maxima over windows, and their gradients from indices.
MAXIMA_ONE_PASS = (WindowReduce(), WindowPlanes(), WindowMaxima())
MAXIMA = (MaximaByAxes(MAXIMA_ONE_PASS), *MAXIMA_ONE_PASS)
FROM_INDICES = (RouteChunks(), WindowScatter(), WindowRoutes())

FAMILIES = Families(
    fwd=(*DEPTHWISE, *GROUPED, FEW_FORWARD),
    bwd_data=(*DEPTHWISE, *DEPTHWISE_SUMS, FEW_DATA),
    bwd_weight=(
        *DEPTHWISE_WEIGHT,
        *GROUPED_WEIGHT,
        *SHORTEST_WEIGHT,
        PLANES_GEMM,
        FEW_WEIGHT,
    ),
    fused=FUSED,
    channel_sums=(ChannelSumsKernel(),),
    pool_bwd=(
        PoolCells(),
        PoolTiles(),
        PoolStrips(),
        PoolThroughChannelsLast(PoolTiles(), COPIES),
        PoolThroughChannelsLast(PoolStrips(), COPIES),
        PoolThroughIndices(MAXIMA, FROM_INDICES),
    ),
    windows=(
        MaximaByAxes(MAXIMA_ONE_PASS),
        WindowReduce(),
        WindowTiles(),
        WindowChunks(),
        WindowPlanes(),
        WindowSums(),
        WindowMaxima(),
        *FROM_INDICES,
    ),
    unpool=(MaxUnpool(),),
    copy=COPIES,
)
