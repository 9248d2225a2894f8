"""The fused forward on the CPU: pieces give what the whole gives, and memory stays bounded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from convgrad.contract import GroupedConvConvFwdRequest
from convgrad_service.backends.cpu import CpuBackend, fused_forward
from convgrad_service.problems import problem_from
from tests.support.numerics.arrays import DTYPES, rng_for
from tests.support.numerics.bounds import assert_same_bits

OPERATION = "grouped_conv_conv_fwd"


def _request(
    seed: int, dtype: str, activation: str, kernel1: int, last: bool
) -> GroupedConvConvFwdRequest:
    """Depthwise 3x3 with a stride, then 1x1 or 3x3."""
    rng = rng_for(seed, dtype, activation, kernel1)
    shapes = {
        "input": (2, 24, 23, 17), "weight0": (24, 1, 3, 3), "bias0": (24,),
        "weight1": (10, 24, kernel1, kernel1), "bias1": (10,),
    }  # fmt: skip
    tensors = {
        name: rng.standard_normal(shape).astype(DTYPES[dtype]) for name, shape in shapes.items()
    }
    if last:
        for name in ("input", "weight0", "weight1"):
            tensors[name] = np.ascontiguousarray(np.moveaxis(tensors[name], 1, -1))
    parameters: dict[str, Any] = {
        "conv0": {"stride": 2, "padding": 1, "groups": 24},
        "conv1": {"padding": kernel1 // 2},
        "activation0": activation,
        "activation1": activation,
        "layout": "NHWC" if last else None,
    }
    return GroupedConvConvFwdRequest.model_validate({**tensors, **parameters})


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("kernel1", [1, 3])
@pytest.mark.parametrize("activation", ["none", "relu", "relu6", "silu"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_pieces_change_no_bit(
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    activation: str,
    kernel1: int,
    last: bool,
) -> None:
    request = _request(seed, dtype, activation, kernel1, last)
    problem = problem_from(OPERATION, request)
    backend = CpuBackend(threads=2)
    whole = backend.run(problem, request.tensors())
    monkeypatch.setattr(fused_forward, "INTERMEDIATE_BYTES", 2_000)
    pieces = backend.run(problem, request.tensors())
    backend.close()
    assert whole.pieces == 1
    assert pieces.pieces > 4
    assert_same_bits(whole.outputs["output"], pieces.outputs["output"], f"seed {seed}")


def test_a_wide_input_is_widened_in_pieces() -> None:
    """silu sums a 16-bit convolution in float32: the copies of its input stay small."""
    tensors = {
        "input": np.zeros((8, 2048, 56, 56), np.float16),
        "weight0": np.zeros((16, 2048, 1, 1), np.float16),
        "weight1": np.zeros((16, 16, 1, 1), np.float16),
    }
    request = GroupedConvConvFwdRequest.model_validate({**tensors, "activation0": "silu"})
    plan = CpuBackend(threads=2).explain(problem_from(OPERATION, request))
    assert plan.pieces > 1
    assert plan.workspace_bytes < 128 * 2**20


def test_nan_passes_through_activations() -> None:
    request = _request(0, "float32", "relu", 1, last=False)
    source = request.tensors()["input"].copy()
    source[0, 5, 10, 8] = np.nan
    request = request.model_copy(update={"input": source})
    backend = CpuBackend(threads=1)
    output = backend.run(problem_from(OPERATION, request), request.tensors()).outputs["output"]
    backend.close()
    assert np.isnan(output[0, :, 5, 4]).all()
    assert not np.isnan(output[1]).any()
