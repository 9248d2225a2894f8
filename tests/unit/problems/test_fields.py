"""What a problem says of itself: defaults, shapes, cost, and how it divides."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from convgrad.contract import OPERATIONS, validate
from convgrad.dtypes import DType
from convgrad.errors import MalformedRequest
from convgrad.wire import json_tensors
from convgrad_service.problems import (
    PROBLEMS,
    Conv3dBackpropInput,
    ConvBackward,
    ConvBwdData,
    GroupedConvBwdWeight,
    GroupedConvConvFwd,
    Problem,
    problem_from,
    run_in_pieces,
)
from tests.support.numerics import problem_loops


def ones(*shape: int, dtype: Any = "float32") -> np.ndarray[Any, Any]:
    return np.broadcast_to(np.ones((), dtype), shape)


def problem(operation: str, **fields: Any) -> Any:
    return problem_from(operation, validate(OPERATIONS[operation].request, fields))


def shapes(specs: Any) -> dict[str, tuple[int, ...]]:
    return {name: spec.shape for name, spec in specs.items()}


def test_every_operation_has_a_problem() -> None:
    assert list(PROBLEMS) == list(OPERATIONS)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_examples_are_problems(operation: str) -> None:
    """The problem knows its operation, and names tensors that the contract names."""
    described = OPERATIONS[operation]
    fields = {
        name: json_tensors.decode_tensor(value, name=name) if name in described.tensors else value
        for name, value in described.example.items()
    }
    made = problem(operation, **fields)
    assert isinstance(made, Problem)
    assert made.operation == operation
    assert set(made.inputs) <= set(described.tensors)
    assert set(made.outputs) <= set(described.outputs)
    assert hash(made) == hash(problem(operation, **fields))
    assert made == problem(operation, **fields)
    assert 0 < made.valid_flops <= made.flops
    assert 0 < made.compulsory_bytes <= made.memory_bytes


def test_smallest_input_is_meant() -> None:
    small = problem(
        "conv_bwd_data", grad_output=ones(1, 4, 3, 3), weight=ones(4, 2, 3, 3), stride=2, padding=1
    )
    assert small.outputs["grad_input"].shape == (1, 2, 5, 5)


@pytest.mark.parametrize("size", [(6, 6), (1, 6, 6, 2)])
def test_input_size_spatial_or_full_in_the_layouts_order(size: tuple[int, ...]) -> None:
    larger = problem(
        "conv_bwd_data",
        grad_output=ones(1, 3, 3, 4),
        weight=ones(4, 3, 3, 2),
        stride=2,
        padding=1,
        input_size=size,
        layout="NHWC",
    )
    assert larger.conv.input_size == (6, 6)
    assert larger.outputs["grad_input"].shape == (1, 6, 6, 2)


def test_one_dimension_has_no_ambiguity() -> None:
    """Three numbers are a full shape in 1D, a spatial size in 3D."""
    one = problem(
        "conv_bwd_data", grad_output=ones(1, 4, 9), weight=ones(4, 2, 3), input_size=(1, 2, 11)
    )
    assert one.conv.input_size == (11,)
    three = problem(
        "conv_bwd_data",
        grad_output=ones(1, 4, 1, 2, 9),
        weight=ones(4, 2, 1, 1, 3),
        input_size=(1, 2, 11),
    )
    assert three.conv.input_size == (1, 2, 11)


def test_groups_of_a_grouped_layout_are_its_own() -> None:
    fields = {"grad_output": ones(5, 2, 8, 8, 4), "weight": ones(5, 4, 3, 3, 3)}
    for groups in ({}, {"groups": 5}):
        grouped = problem("conv_bwd_data", **fields, layout="GNHWC", **groups)
        assert (grouped.conv.groups, grouped.conv.in_channels) == (5, 15)
        assert grouped.outputs["grad_input"].shape == (5, 2, 10, 10, 3)


def test_padding_in_pairs_and_in_order() -> None:
    """D, H, W, whatever the layout."""
    conv = problem(
        "conv_fwd",
        input=ones(1, 5, 6, 7, 2),
        weight=ones(3, 1, 1, 1, 2),
        padding=(1, (0, 2), (3, 0)),
        stride=(1, 2, 3),
        layout="NDHWC",
    ).conv
    assert conv.padding == ((1, 1), (0, 2), (3, 0))
    assert conv.output_size == (7, 4, 4)


def test_cost() -> None:
    """Two operations a multiply-add; corner and edge windows have taps in padding."""
    fields = {"input": ones(2, 4, 3, 3, dtype="float16"), "padding": 1, "groups": 2}
    one = problem("conv_fwd", weight=ones(6, 2, 3, 3, dtype="float16"), **fields)
    assert one.flops == 2 * 2 * 6 * 2 * 9 * 9
    assert one.valid_flops == 2 * 2 * 6 * 2 * 7 * 7
    assert one.memory_bytes == 2 * (72 + 108 + 108)
    assert one.compulsory_bytes == one.memory_bytes


def test_accumulate_is_read_unless_beta_is_zero() -> None:
    fields = {"grad_output": ones(1, 4, 3, 3), "weight": ones(4, 2, 1, 1)}
    accumulate = ones(1, 2, 3, 3)
    read = problem("conv_bwd_data", **fields, accumulate=accumulate, alpha=2)
    assert (read.epilogue.alpha, read.epilogue.beta, read.epilogue.accumulate) == (2.0, 1.0, True)
    assert list(read.inputs) == ["grad_output", "weight", "accumulate"]
    unread = problem("conv_bwd_data", **fields, accumulate=accumulate, beta=0)
    assert not unread.epilogue.accumulate
    assert list(unread.inputs) == ["grad_output", "weight"]


def test_a_kernel_that_the_other_sizes_imply_need_not_be_stated() -> None:
    tensors = {"input": ones(2, 4, 9), "grad_output": ones(2, 6, 7)}
    made = problem("grouped_conv_bwd_weight", **tensors, padding=1, dilation=2, groups=2)
    assert shapes(made.outputs) == {"grad_weight": (6, 2, 3)}


def test_weight_gradients_in_float32() -> None:
    half: dict[str, Any] = {
        "input": ones(1, 2, 5, 5, dtype="float16"),
        "grad_output": ones(1, 3, 3, 3, dtype="float16"),
        "weight_size": (3, 2, 3, 3),
        "outputs": ("grad_bias", "grad_weight"),
    }
    made: GroupedConvBwdWeight = problem("grouped_conv_bwd_weight", **half)
    assert [spec.dtype for spec in made.outputs.values()] == [DType.FLOAT16] * 2
    assert list(made.outputs) == ["grad_weight", "grad_bias"]
    made = problem(
        "grouped_conv_bwd_weight", **half, weight_dtype="float32", accumulate=ones(3, 2, 3, 3)
    )
    assert [spec.dtype for spec in made.outputs.values()] == [DType.FLOAT32] * 2
    assert made.inputs["accumulate"].dtype is DType.FLOAT32
    assert made.split_k is None


def test_conv_backward_reads_what_the_wanted_gradients_need() -> None:
    fields = {
        "grad_output": ones(2, 4, 3, 3),
        "input": ones(2, 2, 5, 5),
        "weight": ones(4, 2, 3, 3),
    }
    every: ConvBackward = problem("conv_backward", **fields)
    assert shapes(every.outputs) == {
        "grad_input": (2, 2, 5, 5),
        "grad_weight": (4, 2, 3, 3),
        "grad_bias": (4,),
    }
    assert every.flops == 2 * every.conv.flops + 72
    for output, needed in (
        ("grad_input", {"grad_output", "weight"}),
        ("grad_weight", {"grad_output", "input"}),
        ("grad_bias", {"grad_output"}),
    ):
        one = problem("conv_backward", **fields, outputs=(output,))
        assert set(one.inputs) == needed
        assert list(one.outputs) == [output]


def test_transpose_is_the_gradient_of_a_convolution() -> None:
    made = problem(
        "conv3d_transpose",
        input=ones(1, 6, 2, 3, 4),
        weight=ones(6, 2, 3, 3, 3),
        groups=3,
        stride=2,
        padding=1,
        output_padding=(0, 1, 1),
        bias=ones(6),
    )
    assert made.outputs["output"].shape == (1, 6, 3, 6, 8)
    assert (made.conv.out_channels, made.conv.in_channels) == (6, 6)


def test_output_padding_may_reach_the_stride_under_a_larger_dilation() -> None:
    """PyTorch allows it, though the convolution of so large an input would give more rows."""
    made = problem(
        "conv3d_transpose",
        input=ones(1, 1, 1, 1, 2),
        weight=ones(1, 1, 1, 1, 2),
        dilation=3,
        output_padding=(0, 0, 2),
    )
    assert made.outputs["output"].shape == (1, 1, 1, 1, 7)


def test_a_region_costs_its_share() -> None:
    fields = {"grad_output": ones(1, 4, 8, 8, 8), "weight": ones(4, 2, 1, 1, 1)}
    whole: Conv3dBackpropInput = problem("conv3d_backprop_input", **fields)
    part = problem("conv3d_backprop_input", **fields, region={"d": (2, 4), "h": (0, 4)})
    assert part.outputs["grad_input"].shape == (1, 2, 2, 4, 8)
    assert whole.flops == 8 * part.flops
    assert part.valid_flops == part.flops
    outside = 7 * 4 * 64 * 4 + 7 * 2 * 64 * 4
    assert whole.compulsory_bytes - part.compulsory_bytes == outside


def test_fused_has_groups_of_its_own_for_each() -> None:
    """In a grouped layout the input shows conv0's, the output conv1's."""
    rng = np.random.default_rng(5)
    x, w0, w1 = (
        rng.integers(-2, 3, shape).astype(np.float64)
        for shape in ((2, 6, 9, 9), (12, 2, 3, 3), (8, 6, 2, 2))
    )
    plain: GroupedConvConvFwd = problem(
        "grouped_conv_conv_fwd",
        input=x,
        weight0=w0,
        weight1=w1,
        conv0={"groups": 3},
        conv1={"groups": 2},
    )
    assert plain.intermediate.shape == (2, 12, 7, 7)
    assert plain.compulsory_bytes == 8 * (x.size + w0.size + w1.size + 2 * 8 * 36)
    arrays = {
        "input": x.reshape(2, 3, 2, 9, 9),
        "weight0": w0.reshape(3, 4, 2, 3, 3),
        "weight1": w1.reshape(2, 4, 6, 2, 2),
    }
    grouped = problem("grouped_conv_conv_fwd", **arrays, layout="NGCHW")
    assert grouped.outputs["output"].shape == (2, 2, 4, 6, 6)
    wanted = problem_loops.run(plain, {"input": x, "weight0": w0, "weight1": w1})["output"]
    for parts in (1, 5):
        found = run_in_pieces(grouped, arrays, parts, problem_loops.run)["output"]
        np.testing.assert_array_equal(found.reshape(wanted.shape), wanted)


def test_parts_of_16_bit_sums_are_kept_in_float32() -> None:
    """Each part rounds away in bfloat16; their sum, rounded once, does not."""
    bf16 = ml_dtypes.bfloat16
    tensors = {
        "input": np.ones((2, 1, 3), bf16),
        "grad_output": np.array([[[85, 85, 86]], [[1, 1, 1]]], bf16),
    }
    both = ("grad_weight", "grad_bias")
    made = problem("grouped_conv_bwd_weight", **tensors, weight_size=(1,), outputs=both)
    pieces = made.split(6)
    assert len(pieces) == 6
    assert {spec.dtype for p in pieces for spec in p.problem.outputs.values()} == {DType.FLOAT32}
    found = run_in_pieces(made, tensors, 6, problem_loops.run)
    # 256 + 3 = 259 rounds to 260; one by one in bfloat16, 256 + 1 stays 256.
    assert float(found["grad_weight"][0, 0, 0]) == 260
    assert float(found["grad_bias"][0]) == 260
    assert found["grad_weight"].dtype == bf16


def test_pieces_are_even_and_follow_from_the_parts_alone() -> None:
    made: ConvBwdData = problem(
        "conv_bwd_data", grad_output=ones(5, 4, 9, 9), weight=ones(4, 2, 3, 3)
    )
    for parts, batches, rows in (
        (1, {5}, {11}),
        (3, {1, 2}, {11}),
        (5, {1}, {11}),
        (11, {1}, {3, 4}),
    ):
        pieces = made.split(parts)
        assert len(pieces) >= parts
        assert {piece.problem.conv.batch for piece in pieces} == batches
        assert {piece.problem.conv.input_size[0] for piece in pieces} == rows
        assert pieces == made.split(parts)
    assert made.split(1)[0].problem is made
    assert len(made.split(10**9)) == 5 * 11


def test_unknown_fields_are_the_contracts() -> None:
    with pytest.raises(MalformedRequest):
        problem("conv_fwd", input=ones(1, 1, 1), weight=ones(1, 1, 1), strides=1)
