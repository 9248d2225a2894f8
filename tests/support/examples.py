"""The contract's examples as a caller of the SDK writes them."""

from __future__ import annotations

from typing import Any

from convgrad.contract import OPERATIONS
from convgrad.wire import json_tensors


def example(name: str) -> dict[str, Any]:
    """The contract's example request, its tensors as arrays."""
    return {
        field: json_tensors.decode_tensor(value, name=field)
        if field in OPERATIONS[name].tensors
        else value
        for field, value in OPERATIONS[name].example.items()
        if field != "response"
    }
