"""Constants of pointwise_gemm's cost model.

Fitted on an H200 to 170 GEMMs, of whole networks and of random layers
(`tests/perf/random_layers.py`, seed 77), in bfloat16, with up to 30 configurations each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["GATHER", "GATHER_TF32", "GATHER_UNALIGNED", "PLANES_UNALIGNED", "WGRAD"]
__all__ += ["WGRAD_TF32", "WGRAD_UNALIGNED", "Rates"]


@dataclass(frozen=True, slots=True)
class Rates:
    """Constants of the model, in microseconds, kilobytes and thousands of rows.

    A k-tile takes the longest of its copies, its products, the L2 traffic of all SMs, and ``step``.

    Attributes
    ----------
    start, start_split
        A launch with its first copies, without and with split-K.
    bandwidth, line
        Copies to an SM: megabytes per microsecond, and time per thousand rows of shared memory.
    products, issue
        Factor on the tensor-core time of a k-tile, and overhead.
    l2
        L2 bandwidth in megabytes per microsecond.
    near, near_split_a, near_split_b
        Fraction of B's bytes that cost L2 bandwidth, as adjacent blocks read the same B at the same
        time; with split-K, of A's and of B's.
    step, few_stages
        Least time of a k-tile, and what is added with a short pipeline.
    tile, tile_size
        Storing the results of a tile, fixed and per kilobyte.
    memory, beside
        Bandwidth in megabytes per microsecond, and the fraction of the shorter of memory and SM
        time that is not overlapped.
    resident, resident_size
        Loading a resident B, fixed and per kilobyte.
    join, sent, finish
        Reduction within a cluster: fixed, per kilobyte sent, and per 16 results of a thread.
    meet, left
        Reduction through a workspace: fixed, and per kilobyte of a block and part.
    grid, grid_size, grid_beside
        Reduction by the blocks of the grid: fixed, and per kilobyte of a tile's sums; ``beside``
        with it.
    straddle
        Factor on products whose words straddle those of shared memory.
    """

    start: float
    start_split: float
    bandwidth: float
    line: float
    products: float
    issue: float
    l2: float
    near: float
    near_split_a: float
    near_split_b: float
    step: float
    few_stages: float
    tile: float
    tile_size: float
    memory: float
    beside: float
    resident: float
    resident_size: float
    join: float
    sent: float
    finish: float
    meet: float
    left: float
    grid: float
    grid_size: float
    grid_beside: float
    straddle: float = 1.0


GATHER = Rates(
    start=4.8611,
    start_split=4.8821,
    bandwidth=0.1099,
    line=0.4759,
    products=0.95,
    issue=0.0228,
    l2=7.2549,
    near=0.5702,
    near_split_a=1.0257,
    near_split_b=0.543,
    step=0.1197,
    few_stages=0.0661,
    tile=0.2708,
    tile_size=0.0099,
    memory=9.8592,
    beside=0.9236,
    resident=0.0539,
    resident_size=0.0048,
    join=0.3719,
    sent=0.0523,
    finish=0.1534,
    meet=3.1574,
    left=0.0357,
    grid=3.2,
    grid_size=0.05,
    grid_beside=0.7,
)
WGRAD = Rates(
    start=5.1502,
    start_split=5.2941,
    bandwidth=0.1387,
    line=0.579,
    products=1.0,
    issue=0.0006,
    l2=7.8286,
    near=0.3133,
    near_split_a=0.931,
    near_split_b=0.8204,
    step=0.0956,
    few_stages=0.0167,
    tile=0.1544,
    tile_size=0.0045,
    memory=8.0715,
    beside=0.8937,
    resident=0.5314,
    resident_size=0.0011,
    join=0.3891,
    sent=0.0619,
    finish=0.1336,
    meet=2.9103,
    left=0.0096,
    grid=3.2,
    grid_size=0.05,
    grid_beside=0.7,
)
# Of TF32: fitted to 229 weight gradients of networks' and random 1x1 layers at batches 1 to 64. The
# expected time errs by 5 %, and the choice costs 0.9 %; fitted to half of the layers, by 6 % and
# 1.5 % on the other half.
WGRAD_TF32 = Rates(
    start=4.8542,
    start_split=6.7917,
    bandwidth=0.1857,
    line=1.5739,
    products=0.9279,
    issue=0.0073,
    l2=19.9735,
    near=0.3133,
    near_split_a=1.0691,
    near_split_b=0.8204,
    step=0.2599,
    few_stages=0.0167,
    tile=0.0832,
    tile_size=0.0122,
    memory=13.9187,
    beside=0.9557,
    resident=0.0,
    resident_size=0.0,
    join=0.055,
    sent=0.0333,
    finish=0.5321,
    meet=1.9802,
    left=0.0279,
    grid=3.6565,
    grid_size=0.0713,
    grid_beside=0.6505,
)
# Of TF32 by wgmma, forward and gradients of the input. Fitted on an H200 to 1,081 configurations of
# 136 products of networks' and random layers. Fitted to half of them, it errs by 8.7 % on the
# others, and the configurations chosen there take 1.013 of the time of the fastest ones measured.
GATHER_TF32 = replace(
    GATHER,
    start=5.4,
    start_split=6.4,
    bandwidth=0.1393,
    products=1.0,
    issue=0.0059,
    l2=9.3104,
    near=0.6341,
    near_split_a=1.3163,
    near_split_b=0.756,
    step=0.1169,
    few_stages=0.0354,
    tile=0.5454,
    tile_size=0.0131,
    memory=7.5225,
    beside=0.9236,
    join=0.1923,
    sent=0.0243,
    finish=0.1688,
)
# Of rows that are no whole chunks. Fitted on an H200 to 3,065 configurations of 407 products of
# networks' layers. Disturbed measurements are too long, so times are 5 % less than those fitted.
GATHER_UNALIGNED = replace(
    GATHER,
    start=4.7205,
    bandwidth=0.0335,
    products=1.3971,
    issue=0.193,
    l2=10.0097,
    near=0.7946,
    step=0.0665,
    few_stages=2.1444,
    tile=0.0943,
    tile_size=0.0221,
    memory=1.9636,
    beside=0.632,
    straddle=1.3615,
    line=2.9487,
    start_split=5.4555,
    join=0.0,
    sent=0.0502,
    finish=0.2044,
    near_split_a=0.0234,
    near_split_b=2.4893,
)
PLANES_UNALIGNED = replace(
    GATHER,
    start=4.5977,
    bandwidth=0.0325,
    products=1.8231,
    issue=0.0589,
    l2=48.9823,
    near=17.6283,
    step=0.3744,
    few_stages=0.0104,
    tile=0.4347,
    tile_size=0.0016,
    memory=3.5773,
    beside=0.7918,
    straddle=1.9424,
    line=0.674,
)
WGRAD_UNALIGNED = replace(
    WGRAD,
    start=5.4072,
    bandwidth=25.7287,
    products=2.5883,
    issue=0.0369,
    l2=5.3287,
    near=0.2408,
    step=0.4836,
    few_stages=0.0465,
    tile=0.0,
    tile_size=0.0002,
    memory=3.5044,
    beside=0.4937,
    straddle=1.3023,
    line=0.2242,
    grid=1.5888,
    grid_size=0.0541,
    grid_beside=0.2595,
    start_split=4.414,
    join=0.7689,
    sent=0.0343,
    finish=1.4255,
    near_split_a=2.8245,
    near_split_b=0.2577,
)
