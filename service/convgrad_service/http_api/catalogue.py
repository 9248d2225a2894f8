"""``GET /operations``: the operations' inputs and outputs, and the limits of this server."""

from __future__ import annotations

from typing import Any

from convgrad import _version
from convgrad.contract import OPERATIONS, Operation
from convgrad_service.engine.pipeline import Pipeline
from convgrad_service.http_api.codecs import ANSWER_FORMS, BODY_FORMS
from convgrad_service.server.settings import Settings

__all__ = ["catalogue"]


def catalogue(pipeline: Pipeline, settings: Settings) -> dict[str, Any]:
    """Return the operations, formats and limits as JSON-compatible values."""
    return {
        "server": "convgrad",
        "version": _version.__version__,
        "backend": pipeline.engine.status.backend,
        "media_types": list(BODY_FORMS),
        "answer_media_types": list(ANSWER_FORMS),
        "limits": {
            "body_bytes": {
                media_type: int(getattr(settings, form.limit))
                for media_type, form in BODY_FORMS.items()
            },
            "problem_bytes": pipeline.limits.problem_bytes,
            "problem_flops": pipeline.limits.problem_flops,
            "output_ratio": pipeline.limits.output_ratio,
            "inflight_bytes": pipeline.engine.limit_bytes,
            "queue": settings.max_queue,
            "timeout_s": settings.max_timeout_s,
        },
        "operations": [_described(operation) for operation in OPERATIONS.values()],
    }


def _described(operation: Operation) -> dict[str, Any]:
    schema = operation.request.model_json_schema()
    parameters = {
        name: field for name, field in schema["properties"].items() if name not in operation.tensors
    }
    described: dict[str, Any] = {
        "name": operation.name,
        "path": f"/{operation.name}",
        "summary": operation.summary,
        "tensors": {
            name: {
                "required": name in operation.required_tensors,
                "description": schema["properties"][name].get("description", ""),
            }
            for name in operation.tensors
        },
        "outputs": list(operation.outputs),
        "dtypes": [dtype.value for dtype in operation.dtypes],
        "layouts": list(operation.layouts),
        "parameters": {
            "type": "object",
            "properties": parameters,
            "required": [name for name in schema.get("required", []) if name in parameters],
            "additionalProperties": False,
        },
        "example": operation.example,
    }
    if "$defs" in schema:
        described["parameters"]["$defs"] = schema["$defs"]
    return described
