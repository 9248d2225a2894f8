"""What the distributions ``convgrad`` and ``convgrad-service`` have from the pyproject.toml above.

Both run this when they are built in a checkout; a source distribution holds the outcome, in its
PKG-INFO, for every field that is dynamic.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

SERVICE = "convgrad-service"
# Extras that bring packages to the server, under the same name in both distributions.
_OF_THE_SERVICE = ("cuda12", "cuda13", "ray", "otel")


class SharedMetadata(MetadataHookInterface):
    """Splits the dependencies of the whole between the client and the server."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Fill in what this distribution's own pyproject.toml calls dynamic."""
        if (Path(self.root) / "PKG-INFO").exists():
            # In a source distribution, which lacks a field only if it was empty.
            metadata.setdefault("urls", {})
            return
        above = Path(self.root).parent / "pyproject.toml"
        whole = tomllib.loads(above.read_text(encoding="utf-8"))["project"]
        for field in ("keywords", "classifiers"):
            metadata[field] = whole[field]
        metadata["urls"] = _project_urls(os.environ.get("PROJECT_URL", "").rstrip("/"))
        extras, version = whole["optional-dependencies"], metadata["version"]
        if metadata["name"] == SERVICE:
            metadata["dependencies"] = [f"convgrad=={version}", *extras["service"]]
            metadata["optional-dependencies"] = {
                name: _without_the_whole(extras[name]) for name in _OF_THE_SERVICE
            }
            return
        server = f"{SERVICE}=={version}"
        metadata["dependencies"] = whole["dependencies"]
        metadata["optional-dependencies"] = {
            "service": [server],
            **{name: [f"{SERVICE}[{name}]=={version}"] for name in _OF_THE_SERVICE},
            **{
                name: [server, *_without_the_whole(packages)]
                if _needs_the_server(packages)
                else packages
                for name, packages in extras.items()
                if name not in ("service", *_OF_THE_SERVICE)
            },
        }


def _project_urls(repository: str) -> dict[str, str]:
    """Return the project URLs in a forge's repository, whose address the publisher gives."""
    if not repository:
        return {}
    files = f"{repository}/blob/main"
    return {
        "Homepage": repository,
        "Documentation": f"{files}/docs/index.md",
        "Changelog": f"{files}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }


def _needs_the_server(packages: list[str]) -> bool:
    return "convgrad[service]" in packages


def _without_the_whole(packages: list[str]) -> list[str]:
    return [package for package in packages if package != "convgrad[service]"]
