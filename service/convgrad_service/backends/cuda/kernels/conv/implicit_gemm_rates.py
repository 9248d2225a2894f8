"""Constants of implicit_gemm's cost model."""

from __future__ import annotations

from dataclasses import dataclass

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.conv.implicit_gemm_tiles import Gemm

__all__ = ["Rates", "rates_of"]


@dataclass(frozen=True, slots=True)
class Rates:
    """Times in microseconds.

    Sizes are in units of a 64 x 64 tile, or of 4 warps.

    Attributes
    ----------
    start
        A launch.
    block, block_size, block_irregular
        A block outside its mainloop: fixed, per size, and to locate irregular positions.
    step, step_size
        Latency of a k-tile.
    size, warps, block_issue
        Inverse throughput of k-tiles (by size and by warps), and of blocks, on an SM with several.
    irregular
        Factor on address computation if positions are irregular.
    cluster_reduce, cluster_reduce_size
        Reduction within a cluster.
    workspace_reduce, workspace_write
        Reduction through a workspace: fixed, and per megabyte that an SM writes.
    memory, l2
        Bandwidths in megabytes per microsecond.
    """

    start: float
    block: float
    block_size: float
    block_irregular: float
    step: float
    step_size: float
    size: float
    warps: float
    block_issue: float
    irregular: float
    cluster_reduce: float
    cluster_reduce_size: float
    workspace_reduce: float
    workspace_write: float
    memory: float
    l2: float


# By type of product, whether channels are first, and whether it is wgrad.
# Each row is in the order of `Rates`.
RATES = {
    ("16 bits", False, False): Rates(
        4.45,
        0.92,
        0.98,
        1.45,
        0.077,
        0.374,
        0.191,
        0.025,
        0.81,
        2.66,
        0.175,
        0.112,
        0.84,
        2.35,
        1.71,
        11.5,
    ),
    ("16 bits", False, True): Rates(
        2.94,
        2.34,
        0.447,
        0.143,
        0.076,
        0.475,
        0.129,
        0.042,
        0.71,
        3.63,
        0.204,
        0.231,
        1.78,
        4.43,
        6.56,
        12.6,
    ),
    ("TF32", False, False): Rates(
        5.4,
        2.52,
        0.678,
        0.225,
        0.211,
        0.186,
        0.213,
        0.0298,
        0.942,
        1.65,
        0.149,
        0.0392,
        1.09,
        3.79,
        2.45,
        11.0,
    ),
    ("TF32", False, True): Rates(
        2.93,
        3.74,
        0.465,
        0.113,
        0.22,
        0.514,
        0.129,
        0.042,
        0.863,
        1.73,
        0.0857,
        0.0505,
        2.08,
        10.9,
        15.7,
        5.95,
    ),
    ("TF32", True, False): Rates(
        4.25,
        2.84,
        0.992,
        0.0736,
        0.428,
        0.211,
        0.267,
        0.0598,
        1.02,
        1.97,
        1.1,
        0.0291,
        0.442,
        17.4,
        16.5,
        7.81,
    ),
    ("TF32", True, True): Rates(
        3.67,
        3.18,
        0.381,
        0.307,
        0.265,
        0.348,
        0.152,
        0.106,
        0.708,
        2.04,
        0.128,
        0.0641,
        4.13,
        10.2,
        54.1,
        12.6,
    ),
    ("split", False, False): Rates(
        3.71,
        3.66,
        0.919,
        1.05,
        0.46,
        0.76,
        0.191,
        0.025,
        0.972,
        0.716,
        0.242,
        0.0505,
        1.48,
        5.44,
        12.1,
        6.04,
    ),
    ("split", False, True): Rates(
        2.45,
        5.76,
        0.0701,
        0.0411,
        0.378,
        0.769,
        0.129,
        0.042,
        0.147,
        1.45,
        0.108,
        0.0228,
        1.15,
        11.3,
        38.3,
        4.04,
    ),
    ("split", True, False): Rates(
        2.99,
        3.84,
        1.6,
        0.589,
        0.493,
        0.526,
        0.613,
        0.00656,
        1.09,
        1.57,
        0.27,
        0.0152,
        1.07,
        0.762,
        34.3,
        4.26,
    ),
    ("split", True, True): Rates(
        2.7,
        5.09,
        0.0422,
        0.0229,
        0.357,
        0.69,
        0.208,
        0.13,
        0.168,
        2.17,
        0.193,
        0.0146,
        1.52,
        9.56,
        30.8,
        3.72,
    ),
}


def rates_of(gemm: Gemm, dtype: DType) -> Rates:
    """Return the constants of a GEMM."""
    kind = "16 bits" if dtype.itemsize == 2 else "split" if gemm.copies.split else "TF32"
    return RATES[kind, gemm.copies.planes > 0, gemm.weight]
