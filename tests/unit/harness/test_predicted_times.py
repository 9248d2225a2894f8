"""`tests.perf.predicted_times`: layers by their names, and what is recorded of a choice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.perf.layer_names import layer_named
from tests.perf.layer_problems import problem_of
from tests.perf.predicted_times import bias_and_spread, prediction_of
from tests.perf.random_grouped import random_grouped_layers
from tests.perf.random_layers import (
    random_any_depthwise_layers,
    random_depthwise_layers,
    random_few_channel_layers,
    random_layers,
)

WEIGHT = "grouped_conv_bwd_weight"
NOT_NAMED = ("class", "kind", "networks")


def drawn() -> Iterator[dict[str, Any]]:
    for draw in (
        random_layers,
        random_grouped_layers,
        random_depthwise_layers,
        random_any_depthwise_layers,
        random_few_channel_layers,
    ):
        yield from draw(3, 25)


def test_a_random_layer_follows_from_its_name() -> None:
    for layer in drawn():
        known = {name: value for name, value in layer.items() if name not in NOT_NAMED}
        assert layer_named(layer["name"], None) == known


def test_names_of_suites_squares_and_others() -> None:
    listed = layer_named("64>64g1_56x56_k3x3_s1_d1", 8)
    assert listed is not None
    assert (listed["N"], listed["networks"]["resnet50"]) == (8, 3)
    square = layer_named("128>256g2_56_k3_s2", 16, square=True)
    assert square is not None
    assert square["output_size"] == [28, 28]
    assert layer_named("pack 100352x230 of 232", 1) is None


def test_bias_and_spread() -> None:
    bias, spread = bias_and_spread([(2.0, 1.0), (8.0, 1.0)])
    assert bias == pytest.approx(4.0)
    assert spread == pytest.approx(2.0)


# Kernels that took less time than the one that was chosen before, on an H200
# (family_sweeps.jsonl, families.jsonl): 22 instead of 50 us, 23 instead of 37, 11 instead of 24, 19
# instead of 22, 11 instead of 13, 217 instead of 289.
@pytest.mark.parametrize(
    ("name", "batch", "op", "dtype", "layout", "precision", "kernel"),
    [
        ("128>128g2_56x56_k3_s2", 16, "conv_bwd_data", "bfloat16", "NCHW", "", "hopper_gather"),
        ("1024>1024g8_7x7_k3", 16, WEIGHT, "bfloat16", "NCHW", "", "hopper_weight"),
        ("64>1_28x28_k1", 16, WEIGHT, "float32", "NCHW", "highest", "simt_gemm"),
        ("528>528g11_50_k5", 16, WEIGHT, "float32", "NCHW", "high", "implicit_gemm"),
        (
            "256>256g32_56x56_k3_s2_d1",
            1,
            "conv_fwd",
            "float32",
            "NHWC",
            "highest",
            "grouped_gather",
        ),
        ("240>240g6_28x28_k3_s1_d1", 32, "conv_fwd", "float32", "NCHW", "highest", "dense_gather"),
    ],
)
def test_faster_kernels_are_chosen(
    name: str, batch: int, op: str, dtype: str, layout: str, precision: str, kernel: str
) -> None:
    layer = layer_named(name, batch)
    assert layer is not None
    problem = problem_of(layer, dtype, layout, op)
    prediction = prediction_of(replace(problem, precision=precision or "high"))
    assert prediction.kernel.startswith(kernel)
    assert prediction.kernel in prediction.candidates


def test_weight_gradients_are_not_expected_to_take_less_than_their_bytes() -> None:
    layer = layer_named("64>256_128x128_k1", 32)
    assert layer is not None
    prediction = prediction_of(problem_of(layer, "float32", "NHWC", WEIGHT))
    compared = {family for family, _ in prediction.candidates.values()}
    assert {"hopper_weight", "pointwise_gemm"} <= compared
    read_us = 32 * 128 * 128 * (64 + 256) * 4 / 4.3e6
    assert min(us for _, us in prediction.candidates.values()) > read_us
