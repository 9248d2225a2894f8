"""Has Helm lint the chart and render it, where there is a Helm, and compares what our tests render.

    build/deploy-tools/bin/python tests/deploy/compare_helm.py build/manifests

Helm is the program of that name, or its engine in the package helm-python-sdk. Without either it
says so: the tests read manifests that another engine of the same templates made.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import yaml

CHART = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "convgrad"
RELEASE = "gradients"
# Of helm-python-sdk's findings: worse than a hint.
_WARNING = 2


class Helm(Protocol):
    """What is asked of Helm."""

    def rendered(self, values: Path) -> str:
        """All manifests, as one YAML stream."""
        ...

    def lint(self, values: Path) -> list[str]:
        """What it finds wrong with the chart."""
        ...


class Program:
    """The program."""

    def __init__(self, path: str) -> None:
        self._path = path

    def rendered(self, values: Path) -> str:
        """See `Helm`."""
        return self._run("template", RELEASE, str(CHART), "-f", str(values)).stdout

    def lint(self, values: Path) -> list[str]:
        """See `Helm`."""
        done = self._run("lint", "--strict", str(CHART), "-f", str(values), check=False)
        return [done.stdout] if done.returncode else []

    def _run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return subprocess.run([self._path, *command], capture_output=True, text=True, check=check)


class Engine:
    """The engine, in Python's process."""

    def rendered(self, values: Path) -> str:
        """See `Helm`."""
        from helm_python import Chart

        with Chart.load(CHART) as chart:
            texts = chart.render(json.loads(values.read_text()), name=RELEASE, namespace="default")
        return "\n---\n".join(text for name, text in texts.items() if name.endswith(".yaml"))

    def lint(self, values: Path) -> list[str]:
        """See `Helm`."""
        from helm_python import chart

        report = chart.lint(CHART, json.loads(values.read_text()), strict=True)
        found = [one for one in report["messages"] if one["severity"] >= _WARNING]
        return [*(f"{one['path']}: {one['error']}" for one in found), *report["errors"]]


def main(manifests: Path) -> int:
    """Print what differs; the exit status."""
    helm: Helm
    if path := shutil.which("helm"):
        helm = Program(path)
    elif find_spec("helm_python"):
        helm = Engine()
    else:
        print("LEFT OUT: the chart was not rendered by Helm, which is not here")
        return 0
    variants = sorted((manifests / "values").glob("*.json"))
    wrong = [] if variants else ["there are no values to render the chart with"]
    for values in variants:
        variant = values.stem
        wrong += [f"{variant}: {finding}" for finding in helm.lint(values)]
        theirs = {one["kind"]: one for one in yaml.safe_load_all(helm.rendered(values)) if one}
        ours = {
            one["kind"]: one
            for path in manifests.glob(f"{variant}-*.yaml")
            for one in [yaml.safe_load(path.read_text())]
        }
        wrong += [f"{variant}: {kind}: {said}" for kind, said in differences(ours, theirs)]
        print(f"{variant}: {len(theirs)} manifests rendered by Helm")
    for one in wrong:
        print(one)
    return 1 if wrong else 0


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The kinds that differ, and how."""
    said = dict.fromkeys(ours.keys() - theirs.keys(), "only our tests render it")
    said |= dict.fromkeys(theirs.keys() - ours.keys(), "only Helm renders it")
    for kind in ours.keys() & theirs.keys():
        if ours[kind] != theirs[kind]:
            said[kind] = f"our tests read {ours[kind]}, Helm renders {theirs[kind]}"
    return sorted(said.items())


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
