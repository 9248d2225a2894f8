"""How to repeat a request, as a JSON body and on the command line."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from convgrad.contract.verification import Again

__all__ = ["OPTIONS", "again"]

OPTIONS = (
    "layer",
    "batch",
    "dtype",
    "layout",
    "seed",
    "distribution",
    "factors",
    "sums",
    "standard_error",
    "budget_s",
    "peers",
)
"""Fields with a command line option of their own; others are ``--param NAME=VALUE``."""


def again(name: str, fields: Mapping[str, Any]) -> Again:
    """Return how to repeat a request for ``verify/conv_fwd`` and the like with these fields."""
    kind, _, operation = name.partition("/")
    words = ["convgrad", kind, operation]
    for option in OPTIONS:
        if option in fields:
            words += [f"--{option.replace('_', '-')}", str(fields[option])]
    if fields.get("candidates"):
        words.append("--candidates")
    for tensor, shape in (fields.get("shapes") or {}).items():
        words += ["--shape", f"{tensor}={'x'.join(map(str, shape))}"]
    for other, value in fields.items():
        if other not in (*OPTIONS, "candidates", "shapes"):
            text = value if isinstance(value, str) else json.dumps(value)
            words += ["--param", f"{other}={text}"]
    if kind == "verify":
        words += ["--mine", "OUTPUT.npy"]
    method = "GET" if kind == "plan" else "POST"
    return Again(method=method, path=f"/{name}", fields=dict(fields), command=shlex.join(words))
