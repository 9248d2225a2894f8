"""The operations as the protocol's models: metadata, configuration, index, statistics.

The protocol cannot express variable dtypes and ranks, so inputs and outputs have those of the
operation's example; a model's configuration lists all dtypes, layouts and ranks among its
parameters.
Every extent is -1, variable.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, get_args

from convgrad import _version
from convgrad.contract import OPERATIONS, Operation, validate
from convgrad.dtypes import DType
from convgrad.wire.json_tensors import decode_tensor
from convgrad_service.engine.telemetry.record import Duration, OperationStatistics
from convgrad_service.oip.fields import VERSION, output_fields
from convgrad_service.oip.request import protocol_name
from convgrad_service.problems import problem_from

PLATFORM = "convgrad"
_EXTENSIONS = (
    "binary_tensor_data",
    "model_configuration",
    "model_repository",
    "parameters",
    "statistics",
)
# Optional tensors that hold integers, or have one dimension.
_INDICES = ("indices",)
_PER_CHANNEL = ("bias", "bias0", "bias1", "grad_grad_bias")


def server_metadata(extensions: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the server's name, version and extensions; ``extensions`` are the optional ones."""
    return {
        "name": "convgrad",
        "version": _version.__version__,
        "extensions": sorted({*_EXTENSIONS, *extensions}),
    }


@cache
def model_metadata(operation: str) -> dict[str, Any]:
    """Return an operation's inputs, the optional ones last, and its outputs; not to be changed."""
    inputs, outputs = _example_tensors(OPERATIONS[operation])
    return {
        "name": operation,
        "versions": [VERSION],
        "platform": PLATFORM,
        "inputs": inputs,
        "outputs": outputs,
    }


def model_config(operation: str) -> dict[str, Any]:
    """Return the configuration in Triton's JSON form, with the fields that its clients read."""
    described, metadata = OPERATIONS[operation], model_metadata(operation)
    return {
        "name": operation,
        "platform": "",
        "backend": PLATFORM,
        "runtime": "",
        "version_policy": {"latest": {"num_versions": 1}},
        # 0: the server does not batch; shapes include the batch dimension.
        "max_batch_size": 0,
        "input": [
            {
                **_config_tensor(tensor),
                "format": "FORMAT_NONE",
                "is_shape_tensor": False,
                "allow_ragged_batch": False,
                # May be omitted, though an operation may require one of two.
                "optional": tensor["name"] not in described.required_tensors,
            }
            for tensor in metadata["inputs"]
        ],
        "output": [
            {**_config_tensor(tensor), "label_filename": "", "is_shape_tensor": False}
            for tensor in metadata["outputs"]
        ],
        "batch_input": [],
        "batch_output": [],
        "instance_group": [],
        "default_model_filename": "",
        "cc_model_filenames": {},
        "metric_tags": {},
        "parameters": {
            name: {"string_value": value} for name, value in _extra_parameters(described).items()
        },
        "model_warmup": [],
        "model_transaction_policy": {"decoupled": False},
    }


def repository_index(unready_reason: str | None, *, only_ready: bool) -> list[dict[str, str]]:
    """Return all models, or only those that are ready; every device computes every operation."""
    if only_ready and unready_reason is not None:
        return []
    state = {
        "version": VERSION,
        "state": "READY" if unready_reason is None else "UNAVAILABLE",
        "reason": unready_reason or "",
    }
    return [{"name": name, **state} for name in OPERATIONS]


def _config_tensor(tensor: dict[str, Any]) -> dict[str, Any]:
    data_type = f"TYPE_{tensor['datatype']}"
    return {"name": tensor["name"], "data_type": data_type, "dims": tensor["shape"]}


def _example_tensors(operation: Operation) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the inputs and outputs of the operation's example, with all outputs requested."""
    fields: dict[str, Any] = dict(operation.example)
    for name in operation.tensors:
        if name in fields:
            fields[name] = decode_tensor(fields[name], name=name)
    fields.update(output_fields(operation, list(operation.outputs)))
    problem = problem_from(operation.name, validate(operation.request, fields))
    required = {name: problem.inputs[name] for name in operation.required_tensors}
    usual = next(iter(required.values()))
    optional = [name for name in operation.tensors if name not in required]
    inputs = [
        *(_tensor(name, spec.dtype, len(spec.shape)) for name, spec in required.items()),
        *(
            _tensor(
                name,
                DType.INT64 if name in _INDICES else usual.dtype,
                1 if name in _PER_CHANNEL else len(usual.shape),
            )
            for name in optional
        ),
    ]
    outputs = [
        _tensor(name, problem.outputs[name].dtype, len(problem.outputs[name].shape))
        for name in operation.outputs
    ]
    return inputs, outputs


def _tensor(name: str, dtype: DType, rank: int) -> dict[str, Any]:
    return {"name": name, "datatype": protocol_name(dtype), "shape": [-1] * rank}


def _extra_parameters(operation: Operation) -> dict[str, str]:
    """Return all dtypes, layouts and ranks, which the lists of tensors cannot express."""
    lists: dict[str, Iterable[object]] = {
        "dtypes": map(protocol_name, operation.dtypes),
        "layouts": operation.layouts,
        "ranks": sorted({len(layout) for layout in operation.layouts}),
    }
    if set(_INDICES) & {*operation.tensors, *operation.outputs}:
        lists["index_dtypes"] = map(protocol_name, (DType.INT64, DType.INT32))
    for name, field in operation.request.model_fields.items():
        if name.endswith("_format"):
            lists[f"{name}s"] = get_args(field.annotation)
    joined = {name: ",".join(map(str, values)) for name, values in lists.items()}
    return {name: text for name, text in joined.items() if text}


def model_statistics(
    counts: Mapping[str, OperationStatistics], operations: Iterable[str]
) -> dict[str, Any]:
    """Return the counters of ``operations`` as JSON, whose names the gRPC message shares.

    Nothing is batched or cached: each request is one execution of batch size 1.
    """
    return {
        "model_stats": [
            _model(name, counts.get(name, OperationStatistics())) for name in operations
        ]
    }


def _model(name: str, counts: OperationStatistics) -> dict[str, Any]:
    computed = {
        "compute_input": _duration(counts.input),
        "compute_infer": _duration(counts.infer),
        "compute_output": _duration(counts.output),
    }
    return {
        "name": name,
        "version": VERSION,
        "last_inference": counts.last_inference_ms,
        "inference_count": counts.success.count,
        "execution_count": counts.success.count,
        "inference_stats": {
            "success": _duration(counts.success),
            "fail": _duration(counts.fail),
            "queue": _duration(counts.queue),
            **computed,
            "cache_hit": _duration(Duration()),
            "cache_miss": _duration(Duration()),
        },
        "batch_stats": [{"batch_size": 1, **computed}] if counts.success.count else [],
        "memory_usage": [],
        "response_stats": {},
    }


def _duration(duration: Duration) -> dict[str, int]:
    return {"count": duration.count, "ns": duration.ns}
