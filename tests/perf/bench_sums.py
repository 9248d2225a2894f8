"""How fast the shares of a split sum are added up: a weight's gradient, bfloat16, on one core.

Run by `make bench-sums`; writes `tests/perf/results/sums.jsonl`. `engine/parts.py` weighs by it
whether several devices gain by a sum's being split. Shares come from memory, not from a cache:
each sample has its own, and all of them together are many times a cache's size.
"""

from __future__ import annotations

import json
import statistics
import time
from importlib.metadata import version
from pathlib import Path

import ml_dtypes
import numpy as np

from convgrad.contract import OPERATIONS, validate
from convgrad_service.problems import problem_from
from convgrad_service.problems.pieces import sum_of_shares
from tests.perf.provenance import cpu_model, origin

RESULTS = Path(__file__).parent / "results" / "sums.jsonl"
OPERATION = "grouped_conv_bwd_weight"
CHANNELS, SAMPLES, WARM_UP = 2048, 9, 2


def measured(shares: int) -> dict[str, object]:
    """Of one number of shares, 64 MiB each."""
    image = np.ones((shares, CHANNELS, 2, 2), ml_dtypes.bfloat16)
    fields = {"input": image, "grad_output": image[:, :, :1, :1], "weight_size": [2, 2]}
    problem = problem_from(OPERATION, validate(OPERATIONS[OPERATION].request, fields))
    shape = problem.outputs["grad_weight"].shape
    taken_s = []
    for _ in range(WARM_UP + SAMPLES):
        each = [np.full(shape, number, np.float32) for number in range(shares)]
        began = time.perf_counter()
        total = sum_of_shares(problem, "grad_weight", each, {})
        taken_s.append(time.perf_counter() - began)
        assert total.dtype == ml_dtypes.bfloat16
        assert total.flat[-1] == sum(range(shares))
    share_bytes = shares * each[0].nbytes
    median_s = statistics.median(taken_s[WARM_UP:])
    return {
        "bench": "sums",
        "op": OPERATION,
        "dtype": "bfloat16",
        "shares": shares,
        "share_bytes": share_bytes,
        "ours_ms": round(median_s * 1e3, 3),
        "gb_per_s": round(share_bytes / median_s / 1e9, 2),
        "samples_ms": [round(one * 1e3, 3) for one in taken_s[WARM_UP:]],
    }


if __name__ == "__main__":
    where = origin(cpu_model(), {"numpy": version("numpy"), "ml_dtypes": version("ml_dtypes")})
    rows = [{**measured(shares), **where} for shares in (2, 4, 8)]
    for row in rows:
        print(f"{row['shares']} shares: {row['ours_ms']} ms, {row['gb_per_s']} GB/s of shares")
    RESULTS.write_text("".join(json.dumps(row) + "\n" for row in rows))
