"""Writes the part of the OpenAPI document from which the TypeScript types are generated.

python -m tests.deploy.openapi_document client/typescript/openapi.json

Requests and answers in JSON alone: the other forms are bytes, of which types say nothing.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from convgrad.contract import OPERATIONS
from convgrad_service.server.composition import create_app
from tests.support.fake_backends import Zeros

JSON = "application/json"


def document() -> dict[str, Any]:
    """Write the document."""
    whole = create_app(backend=Zeros()).openapi()
    posts = {f"/{name}": _operation(whole["paths"][f"/{name}"]["post"]) for name in OPERATIONS}
    paths = {path: {"post": post} for path, post in posts.items()}
    schemas = whole["components"]["schemas"]
    used = _referred_to(paths, schemas) | {"Problem"}
    return {
        "openapi": whole["openapi"],
        "info": whole["info"] | {"description": ""},
        "paths": paths,
        "components": {"schemas": {name: each for name, each in schemas.items() if name in used}},
    }


def _referred_to(part: Any, schemas: dict[str, Any]) -> set[str]:
    """Return the names of all schemas that a part of the document refers to, transitively."""
    found: set[str] = set()
    parts = [part]
    while parts:
        names = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(parts.pop()))) - found
        found |= names
        parts += [schemas[name] for name in names]
    return found


def _operation(post: dict[str, Any]) -> dict[str, Any]:
    answer = post["responses"]["200"]
    content = {JSON: {"schema": post["requestBody"]["content"][JSON]["schema"]}}
    return {
        "operationId": post["operationId"],
        "summary": post["summary"],
        "requestBody": {"required": True, "content": content},
        "responses": {
            "200": {
                "description": answer["description"],
                "content": {JSON: answer["content"][JSON]},
            }
        },
    }


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(document()))
