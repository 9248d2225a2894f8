"""Requests about an operation that do not return its tensors: verify, time and plan.

Their models are derived from those of the operations. No field is required, because ``layer`` can
replace them. Completeness is checked when the request is converted to a problem.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, create_model

from convgrad.contract.base import Request, is_tensor
from convgrad.contract.fields import Flag, Int, Parsed, Tensor
from convgrad.contract.judged_results import judged_results
from convgrad.contract.operations import OPERATIONS, Operation
from convgrad.contract.shared_tensors import SharedTensors

__all__ = [
    "DISTRIBUTIONS",
    "PLANS",
    "TIMINGS",
    "VERIFICATIONS",
    "Distribution",
    "PlanRequest",
    "TimeRequest",
    "VerifyRequest",
    "operation_examined",
]

Distribution = Literal["normal", "uniform", "integers"]
DISTRIBUTIONS: tuple[Distribution, ...] = ("normal", "uniform", "integers")

_MAX_TENSORS, _MAX_RANK = 8, 8


def _shapes(value: Any) -> dict[str, tuple[int, ...]]:
    if not isinstance(value, Mapping) or len(value) > _MAX_TENSORS:
        raise TypeError
    found: dict[str, tuple[int, ...]] = {}
    for name, sizes in value.items():
        if not isinstance(name, str) or not isinstance(sizes, list | tuple):
            raise TypeError
        if len(sizes) > _MAX_RANK or not all(type(size) is int and size >= 0 for size in sizes):
            raise ValueError
        found[name] = tuple(sizes)
    return found


def _seed(value: Any) -> int:
    if type(value) is not int and not isinstance(value, np.integer):
        raise TypeError
    if not 0 <= value < 2**64:
        raise ValueError
    return int(value)


Shapes = Annotated[
    Mapping[str, tuple[int, ...]],
    Parsed(
        _shapes,
        'an object of shapes such as {"weight": [64, 64, 3, 3]}',
        {
            "type": "object",
            "additionalProperties": {"type": "array", "items": {"type": "integer"}},
        },
    ),
]
Seed = Annotated[
    int,
    Parsed(
        _seed,
        "an integer from 0 to 2^64 - 1",
        {"type": "integer", "minimum": 0, "maximum": 2**64 - 1},
    ),
]


class _Examination(Request):
    """Fields that state a problem without its tensors."""

    layer: str | None = Field(
        default=None,
        max_length=4096,
        description="The layer: a name from the suites (ck_headline), a benchdnn problem "
        "(mb32ic64ih56oc64oh56kh3ph1), a MIOpenDriver command (conv -n 32 -c 64 …), a PyTorch "
        "module (Conv2d(…) on 32x64x56x56) or an ONNX node. Other fields override it.",
    )
    batch: Int | None = Field(default=None, description="Number of samples; overrides the layer's.")
    dtype: Literal["float16", "bfloat16", "float32", "float64"] | None = Field(
        default=None,
        description="Element type of drawn tensors; by default the layer's, or float32.",
    )
    shapes: Shapes = Field(
        default_factory=dict,
        json_schema_extra={"default": {}},
        description="Shapes of drawn tensors that the layer does not define.",
    )
    seed: Seed = Field(
        default=0,
        description="Seed of the drawn tensors, which Philox 4x32-10 generates.",
    )
    distribution: Distribution = Field(
        default="normal",
        description="Distribution of the drawn tensors: normal (mean 0, variance 1), uniform in "
        "[-1, 1), or integers from -2 to 2, whose sums are exact.",
    )


class VerifyRequest(_Examination):
    """A result of the caller's kernel, to be verified against a float64 reference."""

    factors: Literal["exact", "tf32", "tf32_truncated", "bfloat16"] | None = Field(
        default=None,
        description="How the caller's kernel rounds factors before multiplying them, which the "
        "bound allows for. By default tf32 if precision is high, otherwise exact.",
    )
    sums: Literal["float32", "tensor_core"] = Field(
        default="float32",
        description="How the kernel adds: float32 rounds to nearest (2^-24 per term), tensor_core "
        "truncates (2^-23 per term). float64 tensors are added in float64.",
    )
    shared_memory: SharedTensors = Field(
        default_factory=dict,
        json_schema_extra={"default": {}},
        description="Tensors in shared memory, by field name: a registered region, the dtype, the "
        "shape and the offset in bytes.",
    )


class TimeRequest(_Examination):
    """An operation to be timed on drawn tensors."""

    standard_error: Annotated[float, Field(gt=0, le=0.5)] = Field(
        default=0.005,
        description="Sampling stops when the standard error of the mean, relative to the mean, is "
        "at most this, or when the budget is spent.",
    )
    budget_s: Annotated[float, Field(gt=0, le=3600)] | None = Field(
        default=None,
        description="Total seconds of sampling; the default and the maximum are the server's "
        "limit.",
    )
    peers: Literal["auto", "none"] = Field(
        default="auto",
        description="`auto` also times PyTorch on the same tensors if it is installed on the "
        "server.",
    )
    candidates: Flag = Field(
        default=False,
        description="Also time the kernels that the plan passed over and that can run.",
    )


class PlanRequest(_Examination):
    """An operation whose plan is explained."""


def _optional(operation: Operation) -> dict[str, Any]:
    """Return the operation's fields, none of them required."""
    fields: dict[str, Any] = {}
    for name, field in operation.request.model_fields.items():
        if name in Request.model_fields and name != "deterministic":
            continue
        if is_tensor(field):
            fields[name] = (Tensor | None, Field(default=None, description=field.description))
        elif field.is_required():
            kind: Any = field.rebuild_annotation()
            fields[name] = (kind | None, Field(default=None, description=field.description))
        else:
            fields[name] = (field.rebuild_annotation(), field)
    return fields


def _results(operation: Operation) -> dict[str, Any]:
    return {
        each.name: (Tensor | None, Field(default=None, description=each.description))
        for each in judged_results(operation.name)
    }


def _made(
    prefix: str, base: type[_Examination], operation: Operation, *, results: bool = False
) -> Operation:
    fields = _optional(operation)
    if not results:
        # No tensors are sent: all are generated from the seed.
        fields = {name: field for name, field in fields.items() if name not in operation.tensors}
    else:
        fields |= _results(operation)
    name = f"{prefix}/{operation.name}"
    model = create_model(
        f"{prefix.capitalize()}{operation.request.__name__}",
        __base__=base,
        __doc__=f"{base.__doc__} The operation is ``{operation.name}``.",
        __module__=__name__,
        **fields,
    )
    model.operation = name
    return Operation(
        model, (), operation.layouts, operation.dtypes, example=_example(prefix, operation)
    )


def _example(prefix: str, operation: Operation) -> dict[str, Any]:
    kinds = {
        "maxpool1d": "--pool mb2ic4iw8ow4kw2sw2",
        "maxpool2d": "--pool mb2ic4ih8oh4kh2sh2",
        "maxpool3d": "--pool mb2ic4id8od4kd2sd2",
        "max_unpool": "--pool mb2ic4ih8oh4kh2sh2",
        "avg_pool": "--pool --alg=avg_np mb2ic4ih8oh4kh3sh2ph1",
        "adaptive": "AdaptiveAvgPool2d((3, 3)) on 2x4x8x8",
        "conv3d_backprop_input": "mb1ic2id4oc2kd3pd1",
        "conv3d_transpose": "--deconv mb1ic2id4oc2kd3sd2pd1",
        "conv_transpose": "--deconv mb2ic4ih8oc8kh3sh2ph1",
        "grouped_conv_conv_fwd": "--separable mb1ic4ih8oc8kh3ph1",
    }
    words = (words for kind, words in kinds.items() if operation.name.startswith(kind))
    return {"layer": next(words, "mb2ic4ih8oc8kh3ph1"), "dtype": "float32", "seed": 1}


VERIFICATIONS: Mapping[str, Operation] = MappingProxyType(
    {name: _made("verify", VerifyRequest, each, results=True) for name, each in OPERATIONS.items()}
)
"""``POST /verify/<operation>``, by the operation's name."""

TIMINGS: Mapping[str, Operation] = MappingProxyType(
    {name: _made("time", TimeRequest, each) for name, each in OPERATIONS.items()}
)
"""``POST /time/<operation>``, by the operation's name."""

PLANS: Mapping[str, Operation] = MappingProxyType(
    {name: _made("plan", PlanRequest, each) for name, each in OPERATIONS.items()}
)
"""``GET /plan/<operation>``, by the operation's name."""


def operation_examined(name: str) -> Operation:
    """Return the operation of a name such as ``verify/conv_fwd``."""
    return OPERATIONS[name.partition("/")[2]]
