"""A small example request for each operation, as a JSON body, for OpenAPI and the tests."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from types import MappingProxyType
from typing import Any

__all__ = ["EXAMPLES"]


def _values(*shape: int, start: int = 1, step: int = 1) -> dict[str, Any]:
    """A float32 tensor of small integers, so that an answer can be checked by hand."""
    flat: list[Any] = [float((start + step * i) % 7 - 3) for i in range(prod(shape))]
    for extent in reversed(shape[1:]):
        flat = [flat[i : i + extent] for i in range(0, len(flat), extent)]
    return {"values": flat, "dtype": "float32"}


def _rows(*rows: tuple[float, ...]) -> dict[str, Any]:
    """A float32 tensor of shape (1, 1, len(rows), len(rows[0]))."""
    return {"values": [[[list(row) for row in rows]]], "dtype": "float32"}


EXAMPLES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "conv_bwd_data": {
            "grad_output": _rows((1.0, 2.0), (3.0, 4.0)),
            "weight": _rows((1.0, 0.0), (0.0, -1.0)),
            "stride": 1,
            "padding": 0,
            "response": "values",
        },
        "grouped_conv_bwd_weight": {
            "input": _values(1, 2, 4, 4),
            "grad_output": _values(1, 2, 2, 2, start=2),
            "groups": 2,
            "weight_size": [3, 3],
            "outputs": ["grad_weight", "grad_bias"],
            "response": "values",
        },
        "maxpool2d_bwd": {
            "grad_output": _rows((1.0, 2.0)),
            "input": _rows((1.0, 4.0, 2.0, 3.0), (0.0, 2.0, 5.0, 1.0)),
            "kernel_size": 2,
            "response": "values",
        },
        "maxpool3d_bwd": {
            "grad_output": _values(1, 1, 1, 2, 2),
            "input": _values(1, 1, 2, 4, 4, step=3),
            "kernel_size": 2,
            "response": "values",
        },
        "conv3d_backprop_input": {
            "grad_output": _values(1, 2, 1, 2, 2),
            "weight": _values(2, 1, 2, 2, 2, start=3),
            "input_size": [2, 3, 3],
            "region": {"d": [0, 1], "h": [0, 3]},
            "response": "values",
        },
        "grouped_conv_conv_fwd": {
            "input": _values(1, 2, 4, 4),
            "weight0": _values(2, 1, 3, 3, start=2),
            "weight1": _values(3, 2, 1, 1),
            "conv0": {"padding": 1, "groups": 2},
            "activation0": "relu",
            "response": "values",
        },
        "conv3d_transpose": {
            "input": _values(1, 2, 1, 2, 2),
            "weight": _values(2, 1, 2, 2, 2, start=3),
            "stride": 2,
            "response": "values",
        },
        "conv_fwd": {
            "input": _rows((1.0, 2.0, 3.0), (4.0, 5.0, 6.0), (7.0, 8.0, 9.0)),
            "weight": _rows((1.0, 0.0), (0.0, -1.0)),
            "bias": {"values": [0.5], "dtype": "float32"},
            "response": "values",
        },
        "maxpool2d_fwd": {
            "input": _rows((1.0, 4.0, 2.0, 3.0), (0.0, 2.0, 5.0, 1.0)),
            "kernel_size": 2,
            "return_indices": True,
            "response": "values",
        },
        "maxpool3d_fwd": {
            "input": _values(1, 1, 2, 4, 4, step=3),
            "kernel_size": 2,
            "return_indices": True,
            "response": "values",
        },
        "conv_backward": {
            "grad_output": _rows((1.0, 2.0), (3.0, 4.0)),
            "input": _rows((1.0, 2.0, 3.0), (4.0, 5.0, 6.0), (7.0, 8.0, 9.0)),
            "weight": _rows((1.0, 0.0), (0.0, -1.0)),
            "response": "values",
        },
        "conv_transpose_fwd": {
            "input": _rows((1.0, 2.0), (3.0, 4.0)),
            "weight": _rows((1.0, 0.0), (0.0, -1.0)),
            "bias": {"values": [0.5], "dtype": "float32"},
            "stride": 2,
            "response": "values",
        },
        "conv_transpose_backward": {
            "grad_output": _values(1, 1, 5, 5),
            "input": _rows((1.0, 2.0), (3.0, 4.0)),
            "weight": _rows((1.0, 0.0), (0.0, -1.0)),
            "stride": 2,
            "output_padding": 1,
            "response": "values",
        },
        "conv_double_backward": {
            "grad_output": _rows((1.0, 2.0), (3.0, 4.0)),
            "input": _rows((1.0, 2.0, 3.0), (4.0, 5.0, 6.0), (7.0, 8.0, 9.0)),
            "weight": _rows((1.0, 0.0), (0.0, -1.0)),
            "grad_grad_input": _values(1, 1, 3, 3),
            "grad_grad_weight": _rows((0.0, 1.0), (2.0, 0.0)),
            "response": "values",
        },
        "conv_transpose_double_backward": {
            "grad_output": _values(1, 1, 4, 4),
            "input": _rows((1.0, 2.0), (3.0, 4.0)),
            "weight": _rows((1.0, 0.0), (0.0, -1.0)),
            "grad_grad_input": _rows((0.0, 1.0), (-1.0, 2.0)),
            "grad_grad_weight": _rows((0.0, 1.0), (2.0, 0.0)),
            "stride": 2,
            "response": "values",
        },
        "maxpool1d_fwd": {
            "input": _values(1, 1, 6, step=3),
            "kernel_size": 2,
            "return_indices": True,
            "response": "values",
        },
        "maxpool1d_bwd": {
            "grad_output": _values(1, 1, 3),
            "input": _values(1, 1, 6, step=3),
            "kernel_size": 2,
            "response": "values",
        },
        "avg_pool_fwd": {
            "input": _rows((1.0, 4.0, 2.0, 3.0), (0.0, 2.0, 5.0, 1.0)),
            "kernel_size": 2,
            "response": "values",
        },
        "avg_pool_bwd": {
            "grad_output": _rows((1.0, 2.0)),
            "input_size": [2, 4],
            "kernel_size": 2,
            "response": "values",
        },
        "adaptive_avg_pool_fwd": {
            "input": _rows((1.0, 4.0, 2.0), (0.0, 2.0, 5.0)),
            "output_size": [None, 2],
            "response": "values",
        },
        "adaptive_avg_pool_bwd": {
            "grad_output": _rows((1.0, 2.0), (3.0, 4.0)),
            "input_size": [2, 3],
            "response": "values",
        },
        "adaptive_max_pool_fwd": {
            "input": _rows((1.0, 4.0, 2.0), (0.0, 2.0, 5.0)),
            "output_size": [1, 2],
            "return_indices": True,
            "response": "values",
        },
        "adaptive_max_pool_bwd": {
            "grad_output": _rows((1.0, 2.0)),
            "input": _rows((1.0, 4.0, 2.0), (0.0, 2.0, 5.0)),
            "response": "values",
        },
        "max_unpool_fwd": {
            "input": _rows((4.0, 5.0)),
            "indices": {"values": [[[[1, 6]]]], "dtype": "int64"},
            "kernel_size": 2,
            "response": "values",
        },
        "max_unpool_bwd": {
            "grad_output": _rows((1.0, 4.0, 2.0, 3.0), (0.0, 2.0, 5.0, 1.0)),
            "indices": {"values": [[[[1, 6]]]], "dtype": "int64"},
            "response": "values",
        },
    }
)
"""By operation; every tensor in the form that a person can read."""
