"""Lints and renders the chart with Helm, and compares the result with what our tests render.

    build/deploy-tools/bin/python tests/deploy/compare_helm.py build/manifests

Helm's engine comes from the package helm-python-sdk. The tests use another template engine, which
is smaller and starts faster.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "convgrad"
RELEASE = "gradients"
# Severity of helm-python-sdk's findings.
_WARNING = 2


def named(manifest: Mapping[str, Any]) -> str:
    """Return the name of a manifest: its kind, and its name without the release's."""
    name: str = manifest["metadata"]["name"]
    return manifest["kind"] + name.removeprefix(RELEASE)


def by_helm(values: Mapping[str, Any]) -> dict[str, Any]:
    """Render the manifests with Helm, by `named`."""
    from helm_python import Chart

    with Chart.load(CHART) as chart:
        texts = chart.render(values, name=RELEASE, namespace="default")
    stream = "\n---\n".join(text for name, text in texts.items() if name.endswith(".yaml"))
    return {named(one): one for one in yaml.safe_load_all(stream) if one}


def lint(values: Mapping[str, Any]) -> list[str]:
    """Return the problems that Helm's linter finds."""
    from helm_python import chart

    report = chart.lint(CHART, values, strict=True)
    found = [one for one in report["messages"] if one["severity"] >= _WARNING]
    return [*(f"{one['path']}: {one['error']}" for one in found), *report["errors"]]


def main(manifests: Path) -> int:
    """Print the differences; return the exit status."""
    variants = sorted((manifests / "values").glob("*.json"))
    wrong = [] if variants else ["there are no values to render the chart with"]
    for path in variants:
        variant, values = path.stem, json.loads(path.read_text())
        wrong += [f"{variant}: {finding}" for finding in lint(values)]
        theirs = by_helm(values)
        ours = {
            named(one): one
            for path in manifests.glob(f"{variant}-*.yaml")
            for one in [yaml.safe_load(path.read_text())]
        }
        wrong += [f"{variant}: {name}: {said}" for name, said in differences(ours, theirs)]
        print(f"{variant}: {len(theirs)} manifests rendered by Helm")
    # Values that the schema must reject.
    repeated = {"settings": {"CONVGRAD_DRAIN_S": "1"}}
    for values in ({"replica": 2}, {"gpu": {"counts": 1}}, {"ports": {"http": "many"}}, repeated):
        if not lint(values):
            wrong.append(f"Helm does not reject the values {values}")
    for one in wrong:
        print(one)
    return 1 if wrong else 0


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the manifests that differ, and how."""
    said = dict.fromkeys(ours.keys() - theirs.keys(), "only our tests render it")
    said |= dict.fromkeys(theirs.keys() - ours.keys(), "only Helm renders it")
    for kind in ours.keys() & theirs.keys():
        if ours[kind] != theirs[kind]:
            said[kind] = f"our tests read {ours[kind]}, Helm renders {theirs[kind]}"
    return sorted(said.items())


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
