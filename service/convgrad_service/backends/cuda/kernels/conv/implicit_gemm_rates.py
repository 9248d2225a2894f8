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
        4.85,
        2.38,
        1.03,
        0.755,
        0.246,
        0.222,
        0.327,
        0.0296,
        0.88,
        1.12,
        0.0624,
        0.00558,
        1.42,
        6.27,
        6.25,
        8.82,
    ),
    ("TF32", False, True): Rates(
        3.86,
        3.37,
        0.605,
        0.0286,
        0.261,
        0.361,
        0.129,
        0.042,
        0.413,
        1.72,
        0.228,
        0.0166,
        1.36,
        9.61,
        38.7,
        5.13,
    ),
    ("TF32", True, False): Rates(
        5.49,
        1.3,
        1.41,
        0.0722,
        0.436,
        0.149,
        0.332,
        0.0668,
        1.0,
        1.7,
        0.252,
        0.00594,
        1.44,
        1.1,
        34.3,
        6.91,
    ),
    ("TF32", True, True): Rates(
        4.67,
        2.13,
        0.375,
        0.0219,
        0.269,
        0.293,
        0.265,
        0.0874,
        0.34,
        2.29,
        0.569,
        0.0353,
        2.12,
        2.78,
        132.0,
        5.14,
    ),
    ("split", False, False): Rates(
        3.9,
        3.58,
        1.16,
        1.24,
        0.424,
        0.555,
        0.506,
        0.0848,
        1.06,
        0.865,
        0.0175,
        0.00558,
        1.14,
        7.83,
        13.8,
        5.46,
    ),
    ("split", False, True): Rates(
        2.76,
        5.45,
        0.0498,
        0.0365,
        0.371,
        0.711,
        0.451,
        0.0918,
        0.165,
        1.62,
        0.184,
        0.0171,
        1.24,
        9.28,
        23.9,
        3.99,
    ),
    ("split", True, False): Rates(
        3.84,
        3.42,
        1.56,
        0.0722,
        0.44,
        0.537,
        0.673,
        0.0122,
        1.15,
        1.89,
        0.0158,
        0.00558,
        1.21,
        3.79,
        34.3,
        4.16,
    ),
    ("split", True, True): Rates(
        2.95,
        4.97,
        0.139,
        0.00741,
        0.349,
        0.637,
        0.148,
        0.119,
        0.0945,
        2.34,
        0.0499,
        0.0126,
        1.47,
        8.41,
        130.0,
        3.48,
    ),
}


def rates_of(gemm: Gemm, dtype: DType) -> Rates:
    """Return the constants of a GEMM."""
    kind = "16 bits" if dtype.itemsize == 2 else "split" if gemm.copies.split else "TF32"
    return RATES[kind, gemm.copies.planes > 0, gemm.weight]
