"""Time that a launch spends on memory, for cost models that count what an SM does."""

from __future__ import annotations

from math import prod

from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["with_memory_s"]

BYTES_S, POWER = 4.3e12, 4
"""Bytes per second of a copy on an H200, and how sharply the longer of both times counts."""


def with_memory_s(work: ConvWork, expected_s: float, start_s: float) -> float:
    """Return the expected seconds of a launch, ``start_s`` of them before its first copies, with
    those of the activations' bytes: they overlap, but two of about the same length not fully. What
    the launch before it wrote is in L2.

    Fitted to half of 105 weight gradients in TF32, by `hopper_weight` and `pointwise_gemm`; on the
    other half, the models then err by 6 and 4 % instead of 8 and 7 %.
    """
    if work.follows:
        return expected_s
    busy_s = expected_s - start_s
    taps = zip(work.input, work.output, work.kernel, work.stride, strict=True)
    read = prod(min(size, out * min(kernel, step)) for size, out, kernel, step in taps)
    elements = work.batch * read * work.in_channels + work.pixels * work.out_channels
    memory_s = work.groups * elements * work.dtype.itemsize / BYTES_S
    longer_s, shorter_s = max(busy_s, memory_s), min(busy_s, memory_s)
    return start_s + float(longer_s * (1 + (shorter_s / longer_s) ** POWER) ** (1 / POWER))
