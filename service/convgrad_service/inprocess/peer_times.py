"""Layers on which PyTorch's own kernels were measured to be faster: a bridge may leave them to it.

``peer_times.json`` holds the times of layers' gradients by both, in microseconds, for each model of
GPU. ``python -m tests.perf.peer_times`` writes it from the measurements of whole networks.
"""

from __future__ import annotations

import json
from functools import lru_cache
from importlib.resources import files
from typing import Any

from convgrad_service.problems.base import Problem
from convgrad_service.problems.conv_backward import ConvBackward
from convgrad_service.problems.convolution import ConvProblem

__all__ = ["FASTER", "faster_peer", "layer_key"]

FASTER = 0.95
"""Below this share of our time, the peer is the faster one; times vary by a few percent."""


def faster_peer(problem: Problem, device: str) -> str | None:
    """Say what was measured to be faster than our kernels, and by how much.

    Parameters
    ----------
    problem : Problem
        Only gradients of convolutions have been measured.
    device : str
        The model of the GPU, e.g. ``NVIDIA H200``.

    Returns
    -------
    str or None
        None where nothing was measured to be faster.
    """
    table = _tables().get(device)
    if table is None or not isinstance(problem, ConvProblem):
        return None
    times = table["layers"].get(layer_key(problem))
    if times is None:
        return None
    parts = problem.parts if isinstance(problem, ConvBackward) else (problem,)
    measured = [times.get(part.operation) for part in parts]
    if None in measured:
        return None
    ours_us, peer_us = map(sum, zip(*measured, strict=True))
    if peer_us >= FASTER * ours_us:
        return None
    return f"{table['peer']} is faster: {peer_us:.1f} us, not {ours_us:.1f}"


def layer_key(problem: ConvProblem) -> str:
    """Name a convolution, its dtype and its layout, whichever gradient is asked for."""
    conv = problem.conv
    sizes = (
        (conv.batch, conv.in_channels, *conv.input_size),
        (conv.out_channels, *conv.kernel_size),
        conv.stride,
        (each for pair in conv.padding for each in pair),
        conv.dilation,
    )
    text = " ".join("x".join(map(str, each)) for each in sizes)
    precision = f" {problem.precision}" if problem.dtype.value == "float32" else ""
    return f"{text} g{conv.groups} {problem.dtype.value} {problem.layout.name}{precision}"


@lru_cache(maxsize=1)
def _tables() -> dict[str, Any]:
    text = files("convgrad_service.inprocess").joinpath("peer_times.json").read_text("utf-8")
    tables: dict[str, Any] = json.loads(text)
    return tables
