"""The bias's gradient below the backend: many images share one sum, and memory stays bounded."""

from __future__ import annotations

import numpy as np
import pytest

from convgrad.contract import OPERATIONS, validate
from convgrad_service.backends.cpu import CpuBackend, channel_sum
from convgrad_service.problems import problem_from

# Sums of small whole numbers are exact in any order.
OPERATION = "grouped_conv_bwd_weight"


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("sums_bytes", [1, 400, 1000, 2**20])
def test_images_share_sums(monkeypatch: pytest.MonkeyPatch, layout: str, sums_bytes: int) -> None:
    """From one image a share to all of them in one, the last share smaller than the others."""
    monkeypatch.setattr(channel_sum, "SUMS_BYTES", sums_bytes)
    rng = np.random.default_rng(5)
    shape = (7, 37, 3, 5) if layout == "NCHW" else (7, 3, 5, 37)
    grad_output = rng.integers(-9, 9, shape).astype(np.float32)
    fields = {
        "input": grad_output,
        "grad_output": grad_output,
        "weight_size": (1, 1),
        "layout": layout,
        "outputs": ("grad_bias",),
    }
    problem = problem_from(OPERATION, validate(OPERATIONS[OPERATION].request, fields))
    ran = CpuBackend(threads=2).run(problem, {"grad_output": grad_output})
    axes = (0, 2, 3) if layout == "NCHW" else (0, 1, 2)
    np.testing.assert_array_equal(ran.outputs["grad_bias"], grad_output.sum(axes))
    one = 37 * 8
    assert ran.workspace_bytes <= max(one, sums_bytes)
