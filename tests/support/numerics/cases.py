"""Named problems: the geometries of `geometries.py` as requests of every operation.

A `Case` is one request, with channels-first shapes. `oracle.py` computes the expected answer,
`arrays.py` draws the tensors and lays them out, `strategies.py` draws random cases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tests.support.numerics.geometries import CONVS, POOLS, Conv, Pool, Shape


@dataclass(frozen=True, eq=False)
class Case:
    """One request: its operation, the shapes of its tensors (channels first), its parameters."""

    name: str
    operation: str
    shapes: Mapping[str, Shape]
    params: Mapping[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return f"{self.operation}-{self.name}"

    @property
    def ndim(self) -> int:
        """Spatial dimensions."""
        first = self.shapes.get("grad_output") or self.shapes["input"]
        return len(first) - 2

    @property
    def groups(self) -> int:
        return int(self.params.get("groups", 1))

    def with_params(self, name: str, **params: Any) -> Case:
        return replace(self, name=f"{self.name}-{name}", params={**self.params, **params})

    def with_tensor(self, tensor: str, shape: Shape) -> Case:
        return replace(self, shapes={**self.shapes, tensor: shape})


def conv_fwd(name: str, conv: Conv) -> Case:
    shapes = {"input": conv.input_shape, "weight": conv.weight_shape, "bias": (conv.k,)}
    return Case(name, "conv_fwd", shapes, conv.params)


def conv_bwd_data(name: str, conv: Conv) -> Case:
    shapes = {"grad_output": conv.output_shape, "weight": conv.weight_shape}
    params = conv.params
    if any(conv.rows_left_over):
        params["input_size"] = conv.size
    return Case(name, "conv_bwd_data", shapes, params)


def grouped_conv_bwd_weight(name: str, conv: Conv) -> Case:
    shapes = {"input": conv.input_shape, "grad_output": conv.output_shape}
    params = {**conv.params, "weight_size": conv.kernel, "outputs": ("grad_weight", "grad_bias")}
    return Case(name, "grouped_conv_bwd_weight", shapes, params)


def conv_backward(name: str, conv: Conv) -> Case:
    shapes = {
        "grad_output": conv.output_shape,
        "input": conv.input_shape,
        "weight": conv.weight_shape,
    }
    return Case(name, "conv_backward", shapes, conv.params)


def _transposed_params(conv: Conv) -> dict[str, Any]:
    more = {"output_padding": conv.rows_left_over} if any(conv.rows_left_over) else {}
    return {**conv.params, **more}


def conv_transpose_fwd(name: str, conv: Conv) -> Case:
    shapes = {"input": conv.output_shape, "weight": conv.weight_shape, "bias": (conv.c,)}
    return Case(name, "conv_transpose_fwd", shapes, _transposed_params(conv))


def conv3d_transpose(name: str, conv: Conv) -> Case:
    return replace(conv_transpose_fwd(name, conv), operation="conv3d_transpose")


def conv_transpose_backward(name: str, conv: Conv) -> Case:
    shapes = {
        "grad_output": conv.input_shape,
        "input": conv.output_shape,
        "weight": conv.weight_shape,
    }
    return Case(name, "conv_transpose_backward", shapes, _transposed_params(conv))


def _double(case: Case, operation: str, bias: int) -> Case:
    """The double backward pass of a backward pass."""
    shapes = {
        **case.shapes,
        "grad_grad_input": case.shapes["input"],
        "grad_grad_weight": case.shapes["weight"],
        "grad_grad_bias": (bias,),
    }
    return replace(case, operation=operation, shapes=shapes)


def conv_double_backward(name: str, conv: Conv) -> Case:
    return _double(conv_backward(name, conv), "conv_double_backward", conv.k)


def conv_transpose_double_backward(name: str, conv: Conv) -> Case:
    case = conv_transpose_backward(name, conv)
    return _double(case, "conv_transpose_double_backward", conv.c)


def conv3d_backprop_input(name: str, conv: Conv) -> Case:
    shapes = {"grad_output": conv.output_shape, "weight": conv.weight_shape}
    return Case(name, "conv3d_backprop_input", shapes, {**conv.params, "input_size": conv.size})


FROM_CONV = {
    "conv_fwd": conv_fwd,
    "conv_bwd_data": conv_bwd_data,
    "grouped_conv_bwd_weight": grouped_conv_bwd_weight,
    "conv_backward": conv_backward,
}
# Compositions of the passes above, on the same kernels.
FROM_PASSES = {
    "conv_transpose_fwd": conv_transpose_fwd,
    "conv_transpose_backward": conv_transpose_backward,
    "conv_double_backward": conv_double_backward,
    "conv_transpose_double_backward": conv_transpose_double_backward,
}
FROM_CONV3D = {
    "conv3d_transpose": conv3d_transpose,
    "conv3d_backprop_input": conv3d_backprop_input,
}


def conv_cases(operation: str) -> list[Case]:
    """The named geometries as requests of one operation."""
    if operation in FROM_CONV3D:
        make = FROM_CONV3D[operation]
        return [make(name, conv) for name, conv in CONVS.items() if conv.ndim == 3]
    make = {**FROM_CONV, **FROM_PASSES}[operation]
    return [make(name, conv) for name, conv in CONVS.items()]


PASSES: list[Case] = [
    case
    for operation in FROM_PASSES
    for case in conv_cases(operation)
    if case.name
    in (
        "plain",
        "stride_shares_factor_with_dilation",
        "rows_past_the_last_window",
        "asymmetric_padding",
        "depthwise_strided",
        "groups_3_odd",
        "1d_causal",
        "1d_depthwise",
        "3d_plain",
        "3d_depthwise",
    )
]
"""A few geometries of each kind: what these operations are made of is tested whole."""


def _accumulating(case: Case, shape: Shape) -> list[Case]:
    """The epilogues; their factors are dyadic, so that the exact gate stays exact."""
    with_tensor = case.with_tensor("accumulate", shape)
    return [
        case.with_params("alpha", alpha=-0.5),
        case.with_params("alpha_zero", alpha=0.0),
        with_tensor.with_params("accumulate"),
        with_tensor.with_params("bilinear", alpha=2.0, beta=-0.25),
        with_tensor.with_params("beta_zero", alpha=1.0, beta=0.0),
    ]


EPILOGUES: list[Case] = [
    case
    for name in (
        "plain",
        "pointwise",
        "stride_beyond_kernel",
        "stride_shares_factor_with_dilation",
        "rows_past_the_last_window",
        "depthwise",
        "groups_4",
        "1d_causal",
        "3d_plain",
    )
    for case in (
        *_accumulating(conv_bwd_data(name, CONVS[name]), CONVS[name].input_shape),
        *_accumulating(
            grouped_conv_bwd_weight(name, CONVS[name]).with_params("", outputs=("grad_weight",)),
            CONVS[name].weight_shape,
        ),
    )
]


def maxpool_fwd(name: str, pool: Pool) -> Case:
    params = {**pool.params, "return_indices": True}
    return Case(name, f"maxpool{pool.ndim}d_fwd", {"input": pool.input_shape}, params)


def maxpool_bwd(name: str, pool: Pool) -> Case:
    """From the input; the tests make indices of it where they want those."""
    shapes = {"grad_output": pool.output_shape, "input": pool.input_shape}
    return Case(name, f"maxpool{pool.ndim}d_bwd", shapes, pool.params)


def pool_cases(operation: str) -> list[Case]:
    """The named poolings as requests of one operation."""
    make = maxpool_bwd if operation.endswith("bwd") else maxpool_fwd
    cases = [make(name, pool) for name, pool in POOLS.items()]
    return [case for case in cases if case.operation == operation]


def fused(
    name: str,
    first: Conv,
    second: Conv,
    activations: tuple[str, str] = ("none", "none"),
    biases: tuple[bool, bool] = (False, False),
) -> Case:
    """Two convolutions in one; `second`'s batch and input follow from `first`."""
    second = replace(second, n=first.n, c=first.k, size=first.output_size)
    shapes = {
        "input": first.input_shape,
        "weight0": first.weight_shape,
        "weight1": second.weight_shape,
    }
    for i, conv in enumerate((first, second)):
        if biases[i]:
            shapes[f"bias{i}"] = (conv.k,)
    params: dict[str, Any] = {"conv0": first.params, "conv1": second.params}
    for i in (0, 1):
        if activations[i] != "none":
            params[f"activation{i}"] = activations[i]
    return Case(name, "grouped_conv_conv_fwd", shapes, params)


def _pointwise(ndim: int, k: int) -> Conv:
    return Conv(0, 0, k, (), (1,) * ndim)


FUSED: list[Case] = [
    fused("depthwise_pointwise", CONVS["depthwise"], _pointwise(2, 23)),
    fused("relu", CONVS["depthwise"], _pointwise(2, 8), ("relu", "relu"), (True, True)),
    fused("relu6", CONVS["depthwise_strided"], _pointwise(2, 9), ("relu6", "none"), (True, False)),
    fused("silu", CONVS["depthwise_7x7"], _pointwise(2, 11), ("silu", "silu"), (False, True)),
    fused("silu_bias", CONVS["depthwise_multiplier_2"], _pointwise(2, 7), ("silu", "relu6")),
    fused("grouped_pointwise", CONVS["groups_4"], _pointwise(2, 67), ("relu", "none")),
    fused("dense_dense", CONVS["plain"], Conv(0, 0, 5, (), (3, 3), 2, 1), ("relu", "silu")),
    fused(
        "grouped_grouped",
        CONVS["groups_2"],
        Conv(0, 0, 9, (), (2, 3), 1, ((1, 0), (0, 2)), (2, 1), 3),
        ("relu6", "relu"),
        (True, True),
    ),
    fused("pointwise_pointwise", CONVS["pointwise"], _pointwise(2, 6)),
    fused("channels_67", CONVS["channels_67"], _pointwise(2, 131)),
    fused("1d_depthwise", CONVS["1d_depthwise"], _pointwise(1, 6), ("silu", "none")),
    fused("1d_strided", CONVS["1d_groups_4"], Conv(0, 0, 6, (), (3,), 2, 1, 1, 2)),
    fused("3d_depthwise", CONVS["3d_depthwise"], _pointwise(3, 7), ("relu", "none"), (True, True)),
    fused("3d_dense", CONVS["3d_plain"], Conv(0, 0, 4, (), (1, 3, 2), 1, 1)),
]

# Ascend's formats: which of them each of grad_output, weight and output takes.
BACKPROP_FORMATS: list[tuple[str, str, str]] = [
    ("NDC1HWC0", "FRACTAL_Z_3D", "NDC1HWC0"),
    ("NDC1HWC0", "FRACTAL_Z_3D", "NCDHW"),
    ("NCDHW", "FRACTAL_Z_3D", "NDHWC"),
    ("NDHWC", "NDHWC", "NDHWC"),
    ("NDC1HWC0", "NCDHW", "NDC1HWC0"),
    ("NCDHW", "NDHWC", "NDC1HWC0"),
]
