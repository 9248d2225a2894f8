"""Makes schemas/*.json from what the projects publish: custom resources' definitions, cut to size.

    python -m tests.deploy.prune_schemas KSERVE PROMETHEUS_OPERATOR COMPOSE_SPEC

The arguments are checkouts. Every name that may stand beside one that our manifests use is kept, so
that a misspelt one is found; what lies below names that they do not use is left out. Run it again
after a manifest uses something new.
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
    """A structural schema as far as these values reach into it."""
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


def resource(definition: Path, version: str, manifests: Sequence[Any]) -> Any:
    """The schema of a custom resource's version."""
    versions = yaml.safe_load(definition.read_text())["spec"]["versions"]
    (found,) = (one for one in versions if one["name"] == version)
    schema = found["schema"]["openAPIV3Schema"]
    schema["properties"]["metadata"] = {"type": "object"}
    return pruned(schema, manifests)


def without_prose(schema: Any) -> Any:
    """The same without what is said for people."""
    if isinstance(schema, dict):
        return {
            name: without_prose(inner)
            for name, inner in schema.items()
            if not (name in ("description", "title") and isinstance(inner, str))
        }
    return [without_prose(one) for one in schema] if isinstance(schema, list) else schema


def main(kserve: Path, operator: Path, compose: Path) -> None:
    crds = kserve / "config" / "crd" / "full"
    operator_crds = operator / "example" / "prometheus-operator-crd"
    monitor = operator_crds / "monitoring.coreos.com_servicemonitors.yaml"
    monitors = [made["ServiceMonitor"] for values in VARIANTS.values()
                if "ServiceMonitor" in (made := rendered(values))]  # fmt: skip
    ours = {path.stem: [yaml.safe_load(path.read_text())]
            for path in (DEPLOY / "kserve").glob("*.yaml")}  # fmt: skip
    rule = operator_crds / "monitoring.coreos.com_prometheusrules.yaml"
    rules = [rendered(VARIANTS["everything"])["PrometheusRule"]]
    made = {
        "PrometheusRule": resource(rule, "v1", rules),
        "ServingRuntime": resource(
            crds / "serving.kserve.io_servingruntimes.yaml", "v1alpha1", ours["servingruntime"]
        ),
        "InferenceService": resource(
            crds / "serving.kserve.io_inferenceservices.yaml", "v1beta1", ours["inferenceservice"]
        ),
        "ServiceMonitor": resource(monitor, "v1", monitors),
        "compose": without_prose(json.loads((compose / "schema/compose-spec.json").read_text())),
    }
    for name, schema in made.items():
        (HERE / "schemas" / f"{name}.json").write_text(json.dumps(schema, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
