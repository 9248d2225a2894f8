"""Named schemas of tensors, from which client generators make types, and ``/tensors`` paths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from convgrad.contract import tensor_json_schema
from convgrad.dtypes import FLOATING, INDEX

__all__ = ["REF", "named_tensors", "stored_tensor_paths", "with_named_tensors"]

REF = "#/components/schemas/{}"
# Answers hold tensors of any type; the others are for requests.
_KINDS = {"Tensor": (*FLOATING, *INDEX), "FloatTensor": FLOATING, "IndexTensor": INDEX}


def named_tensors() -> dict[str, Any]:
    """Return a schema for each kind of tensor, and for each of its forms, by name."""
    schemas: dict[str, Any] = {}
    for kind, dtypes in _KINDS.items():
        forms = {
            _form_name(kind, form["title"]): form for form in tensor_json_schema(dtypes)["oneOf"]
        }
        for name, form in forms.items():
            schemas[name] = {**form, "title": name}
        schemas[kind] = {"title": kind, "oneOf": [{"$ref": REF.format(name)} for name in forms]}
    schemas["StoredOutput"] = {
        "title": "StoredOutput",
        "description": "An output that is stored instead of sent.",
        "type": "object",
        "properties": {
            "stored": {"type": "string"},
            "dtype": {"type": "string", "enum": [dtype.value for dtype in _KINDS["Tensor"]]},
            "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
        },
        "required": ["stored", "dtype", "shape"],
        "additionalProperties": False,
    }
    sent = [
        form for form in schemas["Tensor"]["oneOf"] if not form["$ref"].endswith("/StoredTensor")
    ]
    schemas["OutputTensor"] = {
        "title": "OutputTensor",
        "oneOf": [*sent, {"$ref": REF.format("StoredOutput")}],
    }
    schemas["StoredTensorDescription"] = {
        "title": "StoredTensorDescription",
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "dtype": {"type": "string", "enum": [dtype.value for dtype in _KINDS["Tensor"]]},
            "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
            "bytes": {"type": "integer"},
            "expires_in_s": {"type": "number"},
        },
        "required": ["name", "dtype", "shape"],
    }
    return schemas


def with_named_tensors(schema: Any) -> Any:
    """Replace each kind of tensor in ``schema`` by a reference."""
    if isinstance(schema, list):
        return [with_named_tensors(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    for kind, forms in _FORMS.items():
        if schema.get("oneOf") == forms:
            beside = {
                key: value for key, value in schema.items() if key in ("title", "description")
            }
            return {"$ref": REF.format(kind), **beside}
    return {key: with_named_tensors(value) for key, value in schema.items()}


def stored_tensor_paths(error: Callable[[int], Any]) -> dict[str, Any]:
    """Return the path items of stored tensors; ``error`` describes the answer of a status."""
    name = {
        "name": "name",
        "in": "path",
        "required": True,
        "description": "The tensor's name on the server.",
        "schema": {"type": "string", "pattern": "^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$"},
    }
    lives = {
        "name": "X-Time-To-Live",
        "in": "header",
        "description": "Seconds since its last use after which it is deleted; at most the "
        "server's own limit.",
        "schema": {"type": "number", "exclusiveMinimum": 0},
    }
    described = {"$ref": REF.format("StoredTensorDescription")}
    a_tensor = {
        "application/json": {"schema": {"$ref": REF.format("Tensor")}},
        "application/vnd.safetensors": {"schema": {"type": "string", "format": "binary"}},
        "application/x-npy": {"schema": {"type": "string", "format": "binary"}},
    }

    def operation(identifier: str, summary: str, answer: Any, *statuses: int) -> dict[str, Any]:
        return {
            "tags": ["stored tensors"],
            "operationId": identifier,
            "summary": summary,
            "responses": {
                "200": {"description": "Done.", "content": answer},
                **{str(status): error(status) for status in statuses},
            },
        }

    def as_json(schema: Any) -> dict[str, Any]:
        return {"application/json": {"schema": schema}}

    listed = {"type": "array", "items": described}
    list_schema = {"type": "object", "properties": {"tensors": listed}, "required": ["tensors"]}
    return {
        "/tensors": {
            "get": operation("list_tensors", "List the stored tensors.", as_json(list_schema))
        },
        "/tensors/{name}": {
            "parameters": [name],
            "put": {
                **operation(
                    "put_tensor", "Store a tensor.", as_json(described), 400, 413, 415, 429
                ),
                "parameters": [lives],
                "requestBody": {"required": True, "content": a_tensor},
            },
            "get": operation("get_tensor", "Fetch a tensor.", a_tensor, 404, 406),
            "delete": operation(
                "drop_tensor", "Delete a tensor.", as_json({"type": "object"}), 404
            ),
        },
    }


def _form_name(kind: str, form: str) -> str:
    # A stored tensor's name does not depend on its dtype, so it has one form.
    return "StoredTensor" if form == "stored" else f"{form.capitalize()}{kind}"


_FORMS = {kind: tensor_json_schema(dtypes)["oneOf"] for kind, dtypes in _KINDS.items()}
