"""Validates custom resources of other projects, and the compose file.

    build/deploy-tools/bin/python tests/deploy/validate.py build/manifests

The schemas in schemas/ were made by prune_schemas.py from those that the projects publish.
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
    """Print the errors; return the exit status."""
    wrong = 0
    for path in sorted((HERE / "schemas").glob("*.json")):
        kind, validator = path.stem, jsonschema.Draft7Validator(json.loads(path.read_text()))
        found = files(kind, manifests)
        if not found:
            print(f"{kind}: no manifest found")
            wrong += 1
        for file in found:
            for error in validator.iter_errors(yaml.safe_load(file.read_text())):
                where = "/".join(map(str, error.absolute_path)) or "at the top"
                print(f"{file.name}: {where}: {error.message[:300]}")
                wrong += 1
            print(f"{file.name}: validated as {kind}")
    return 1 if wrong else 0


def files(kind: str, manifests: Path) -> list[Path]:
    """Return the files that contain a resource of this kind."""
    if kind == "compose":
        return [DEPLOY / "compose" / "compose.yaml"]
    named = sorted(manifests.glob(f"*-{kind}.yaml"))
    written = [*(DEPLOY / "kserve").glob("*.yaml"), *(DEPLOY / "ray").glob("*.yaml")]
    return named + [one for one in written if f"\nkind: {kind}\n" in one.read_text()]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
