"""Validates what is no kind of Kubernetes itself: KServe's and Prometheus' resources, compose.

    build/deploy-tools/bin/python tests/deploy/validate.py build/manifests

Against the schemas in schemas/, which prune_schemas.py made from what their projects publish.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jsonschema
import yaml

HERE = Path(__file__).resolve().parent
DEPLOY = HERE.parents[1] / "deploy"


def main(manifests: Path) -> int:
    """Print what is wrong; the exit status."""
    files = {
        "ServingRuntime": [DEPLOY / "kserve" / "servingruntime.yaml"],
        "InferenceService": [DEPLOY / "kserve" / "inferenceservice.yaml"],
        "ServiceMonitor": sorted(manifests.glob("*-ServiceMonitor.yaml")),
        "PrometheusRule": sorted(manifests.glob("*-PrometheusRule.yaml")),
        "compose": [DEPLOY / "compose" / "compose.yaml"],
    }
    wrong = 0
    for kind, paths in files.items():
        schema = json.loads((HERE / "schemas" / f"{kind}.json").read_text())
        validator = jsonschema.Draft7Validator(schema)
        if not paths:
            print(f"{kind}: there is none to validate")
            wrong += 1
        for path in paths:
            found = yaml.safe_load(path.read_text())
            for error in validator.iter_errors(found):
                where = "/".join(map(str, error.absolute_path)) or "at the top"
                print(f"{path.name}: {where}: {error.message[:300]}")
                wrong += 1
            print(f"{path.name}: validated as {kind}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
