"""The kernel families of the GPU, in order of preference: the first that applies is used.

A faster kernel goes before the ones that it replaces. The last of each role takes everything.
"""

from __future__ import annotations

from convgrad_service.backends.cuda.kernels.channel_sums import ChannelSumsKernel
from convgrad_service.backends.cuda.kernels.depthwise import Depthwise
from convgrad_service.backends.cuda.kernels.depthwise_weight import DepthwiseWeight
from convgrad_service.backends.cuda.kernels.gather_direct import GatherDirect
from convgrad_service.backends.cuda.kernels.gather_tile import GatherTile
from convgrad_service.backends.cuda.kernels.max_pool import MaxPoolBackward, MaxPoolForward
from convgrad_service.backends.cuda.kernels.pool_cells import PoolCells
from convgrad_service.backends.cuda.kernels.pool_lines import PoolLines
from convgrad_service.backends.cuda.kernels.strided_copy import StridedCopy
from convgrad_service.backends.cuda.kernels.weight_direct import WeightDirect
from convgrad_service.backends.cuda.kernels.weight_tile import WeightTile
from convgrad_service.plans.cuda_families import Families

__all__ = ["FAMILIES"]

FAMILIES = Families(
    fwd=(Depthwise(), GatherTile(), GatherDirect()),
    bwd_data=(Depthwise(), GatherTile(), GatherDirect()),
    bwd_weight=(DepthwiseWeight(), WeightTile(), WeightDirect()),
    fused=(),
    channel_sums=(ChannelSumsKernel(),),
    pool_fwd=(MaxPoolForward(),),
    pool_bwd=(
        PoolCells(),
        PoolLines(),
        MaxPoolBackward(),
    ),
    copy=(StridedCopy(),),
)
