"""Overhead of the path to a replica, and of splitting a problem: medians, in seconds.

The same problems are computed by the CPU backend in this process and through the service; the
difference is HTTP, the front end, and Ray's object store in both directions.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import convgrad
from convgrad.contract import OPERATIONS
from convgrad.contract.base import validate
from convgrad_service.backends.cpu import CpuBackend
from convgrad_service.problems import problem_from
from convgrad_service.problems.pieces import assemble, piece_tensors

__all__ = ["costs"]

SAMPLES = 15
SMALL, LARGE = (1, 4, 8, 8), (16, 64, 128, 128)  # 1 KiB and 64 MiB of input


def costs(ray_url: str, plain_url: str) -> list[dict[str, Any]]:
    """Return rows with the cost of a request to a plain server and a replica, and of a split."""
    backend = CpuBackend(threads=1)
    rows = []
    with convgrad.Client(ray_url, timeout=120) as ray, convgrad.Client(plain_url) as plain:
        for name, shape in (("1 KiB", SMALL), ("64 MiB", LARGE)):
            x = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
            request = validate(OPERATIONS["maxpool2d_fwd"].request, {"input": x, "kernel_size": 2})
            problem = problem_from("maxpool2d_fwd", request)
            computed_s = median_s(lambda: backend.run(problem, {"input": x}))  # noqa: B023
            for what, client in (("plain", plain), ("ray", ray)):
                taken_s = median_s(lambda: client.maxpool2d_fwd(x, 2))  # noqa: B023
                rows.append(
                    {"cost": "way", "through": what, "size": name, "bytes": problem.memory_bytes,
                     "taken_s": taken_s, "computed_s": computed_s}
                )  # fmt: skip
    return [*rows, *_split_costs(backend)]


def _split_costs(backend: CpuBackend) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((16, 64, 56, 56), dtype=np.float32)
    w = rng.standard_normal((64, 64, 3, 3), dtype=np.float32)
    rows = []
    for operation, given in (
        ("conv_bwd_data", {"grad_output": x, "weight": w}),
        ("grouped_conv_bwd_weight", {"input": x, "grad_output": x, "weight_size": (3, 3)}),
    ):
        fields = {**given, "padding": 1}
        problem = problem_from(operation, validate(OPERATIONS[operation].request, fields))
        tensors = {name: given[name] for name in problem.inputs}
        pieces = problem.split(4)

        def cut(
            pieces: Any = pieces, tensors: Any = tensors
        ) -> list[dict[str, np.ndarray[Any, Any]]]:
            return [
                {name: np.ascontiguousarray(a) for name, a in piece_tensors(one, tensors).items()}
                for one in pieces
            ]

        parts = [
            backend.run(one.problem, own).outputs for one, own in zip(pieces, cut(), strict=True)
        ]
        rows.append(
            {
                "cost": "split",
                "op": operation,
                "pieces": len(pieces),
                "bytes": problem.memory_bytes,
                "cut_s": median_s(cut),
                "combine_s": median_s(
                    lambda: assemble(problem, tensors, pieces, iter(parts))  # noqa: B023
                ),
                "computed_s": median_s(lambda: backend.run(problem, tensors)),  # noqa: B023
            }
        )
    return rows


def median_s(call: Callable[[], object]) -> float:
    """Return the median duration of some calls, without the first one."""
    taken = []
    for _ in range(SAMPLES + 1):
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:])
