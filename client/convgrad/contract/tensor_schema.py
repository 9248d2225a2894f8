"""JSON Schema of a tensor in a JSON body: one of three forms, or the name of a stored tensor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from convgrad.dtypes import DType

__all__ = ["tensor_json_schema"]


def tensor_json_schema(dtypes: Iterable[DType]) -> dict[str, Any]:
    """The schema of a tensor whose elements are one of ``dtypes``, in any of the forms."""
    dtype = {
        "type": "string",
        "enum": [member.value for member in dtypes],
        "description": "Element type of the tensor.",
    }
    return {
        "oneOf": [
            _form(
                "npy",
                "The whole of a .npy file (numpy.save) in base64. NumPy has no bfloat16: such a "
                'file holds 2-byte items, and "dtype": "bfloat16" is given next to it.',
                {
                    "npy": {"type": "string", "contentEncoding": "base64"},
                    "dtype": dtype,
                },
                required=["npy"],
            ),
            _form(
                "data",
                "The elements in base64, little-endian and row-major (C order).",
                {
                    "data": {"type": "string", "contentEncoding": "base64"},
                    "dtype": dtype,
                    "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
                },
                required=["data", "dtype", "shape"],
            ),
            _form(
                "values",
                'Nested lists of numbers, for trying by hand; "NaN", "Infinity" and "-Infinity" '
                "are written as strings.",
                {
                    # Untyped, it could be null, and generated clients found it in all forms.
                    "values": {
                        "type": "array",
                        "items": {},
                        "description": "Nested lists of numbers, all of one shape.",
                    },
                    "dtype": dtype,
                },
                required=["values", "dtype"],
            ),
            _form(
                "stored",
                "The name of a stored tensor (PUT /tensors/{name}, or `store`).",
                {"stored": {"type": "string"}},
                required=["stored"],
            ),
        ]
    }


def _form(
    title: str, description: str, properties: dict[str, Any], required: list[str]
) -> dict[str, Any]:
    return {
        "title": title,
        "description": description,
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }
