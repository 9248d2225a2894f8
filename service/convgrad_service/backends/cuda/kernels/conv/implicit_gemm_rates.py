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
        4.88,
        2.47,
        0.797,
        0.84,
        0.23,
        0.217,
        0.285,
        0.0605,
        0.751,
        0.988,
        0.121,
        0.00404,
        1.42,
        10.4,
        4.3,
        8.44,
    ),
    ("TF32", False, True): Rates(
        3.91,
        3.35,
        0.211,
        0.0332,
        0.152,
        0.6,
        0.129,
        0.042,
        0.39,
        2.06,
        0.157,
        0.00761,
        1.47,
        12.2,
        4.3,
        5.86,
    ),
    ("TF32", True, False): Rates(
        5.59,
        1.11,
        1.49,
        0.00826,
        0.436,
        0.107,
        0.312,
        0.0634,
        0.942,
        1.91,
        0.0527,
        0.00259,
        1.19,
        0.513,
        4.3,
        7.7,
    ),
    ("TF32", True, True): Rates(
        5.19,
        1.46,
        0.527,
        0.00896,
        0.229,
        0.3,
        0.216,
        0.0818,
        0.298,
        2.79,
        0.546,
        0.163,
        1.44,
        3.55,
        4.3,
        5.29,
    ),
    ("split", False, False): Rates(
        4.21,
        3.52,
        0.98,
        1.14,
        0.312,
        0.632,
        0.461,
        0.102,
        1.03,
        0.958,
        0.0223,
        0.00288,
        0.853,
        19.4,
        4.3,
        5.34,
    ),
    ("split", False, True): Rates(
        0.713,
        7.42,
        0.0204,
        0.0238,
        0.335,
        0.765,
        0.406,
        0.103,
        0.193,
        1.6,
        0.133,
        0.00625,
        1.39,
        10.8,
        4.3,
        4.68,
    ),
    ("split", True, False): Rates(
        4.05,
        2.87,
        1.77,
        0.00868,
        0.55,
        0.435,
        0.593,
        0.0585,
        1.17,
        1.82,
        0.00502,
        0.00116,
        1.03,
        3.01,
        4.3,
        4.75,
    ),
    ("split", True, True): Rates(
        2.76,
        5.18,
        0.0519,
        0.00316,
        0.177,
        0.825,
        0.144,
        0.101,
        0.14,
        3.85,
        0.0463,
        0.0122,
        1.61,
        2.8,
        4.3,
        3.53,
    ),
}


def rates_of(gemm: Gemm, dtype: DType) -> Rates:
    """Return the constants of a GEMM."""
    kind = "16 bits" if dtype.itemsize == 2 else "split" if gemm.copies.split else "TF32"
    return RATES[kind, gemm.copies.planes > 0, gemm.weight]
