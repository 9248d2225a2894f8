"""Makes schemas/*.json from the CustomResourceDefinitions and schemas that other projects publish.

    python -m tests.deploy.prune_schemas FOLDER

The folder contains CustomResourceDefinitions in YAML, and optionally compose-spec.json. The pruned
schemas keep all siblings of the properties that our manifests use, so that misspelt names are
detected, but nothing below unused properties. Run it again when a manifest uses a new property.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.chart import VARIANTS, rendered

HERE = Path(__file__).parent
DEPLOY = HERE.parents[1] / "deploy"
_KEPT = ("type", "enum", "pattern", "minimum", "maximum", "minLength", "maxLength", "required")


def pruned(schema: Any, used: Sequence[Any]) -> Any:
    """Prune a structural schema to the properties that these values use."""
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    kept = {name: schema[name] for name in _KEPT if name in schema}
    if "items" in schema:
        kept["items"] = pruned(schema["items"], [item for value in used for item in value])
    if "properties" in schema:
        objects = [value for value in used if isinstance(value, dict)]
        kept["properties"] = {
            name: pruned(inner, below)
            if (below := [value[name] for value in objects if name in value])
            else {}
            for name, inner in schema["properties"].items()
        }
        kept["additionalProperties"] = bool(schema.get("x-kubernetes-preserve-unknown-fields"))
    return kept


def resource(definition: Any, manifests: Sequence[Any]) -> Any:
    """Return the pruned schema of a custom resource, in the version that the manifests use."""
    (version,) = {manifest["apiVersion"].rpartition("/")[2] for manifest in manifests}
    (found,) = (one for one in definition["spec"]["versions"] if one["name"] == version)
    schema = found["schema"]["openAPIV3Schema"]
    schema["properties"]["metadata"] = {"type": "object"}
    return pruned(schema, manifests)


def without_prose(schema: Any) -> Any:
    """Return the schema without titles and descriptions."""
    if isinstance(schema, dict):
        return {
            name: without_prose(inner)
            for name, inner in schema.items()
            if not (name in ("description", "title") and isinstance(inner, str))
        }
    return [without_prose(one) for one in schema] if isinstance(schema, list) else schema


def ours() -> dict[str, list[Any]]:
    """Return all our manifests, by kind."""
    found: dict[str, list[Any]] = {}
    for folder in ("kserve", "ray"):
        for path in (DEPLOY / folder).glob("*.yaml"):
            for manifest in yaml.safe_load_all(path.read_text()):
                found.setdefault(manifest.get("kind", ""), []).append(manifest)
    for values in VARIANTS.values():
        for manifest in rendered(values).values():
            found.setdefault(manifest["kind"], []).append(manifest)
    return found


def main(folder: Path) -> None:
    """Write the schema of every kind defined in the folder."""
    manifests, made = ours(), {}
    for path in folder.rglob("*.yaml"):
        definition = yaml.safe_load(path.read_text())
        kind = definition["spec"]["names"]["kind"]
        made[kind] = resource(definition, manifests[kind])
    for path in folder.rglob("compose-spec.json"):
        made["compose"] = without_prose(json.loads(path.read_text()))
    for name, schema in made.items():
        (HERE / "schemas" / f"{name}.json").write_text(json.dumps(schema, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
