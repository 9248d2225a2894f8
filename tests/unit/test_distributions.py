"""The distributions of client and server say what the whole says, from which they are built."""

from __future__ import annotations

import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
VERSION = "1.2.3"


def project(folder: str) -> Any:
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]


def completed(folder: str) -> Any:
    """A project's metadata as hatchling has it after the hook."""
    hook = runpy.run_path(str(ROOT / "client" / "hatch_metadata.py"))["SharedMetadata"]
    metadata = {**project(folder), "version": VERSION}
    hook(str(ROOT / folder), {}).update(metadata)
    return metadata


def test_the_client_needs_nothing_of_the_server() -> None:
    whole, client = project("."), completed("client")
    assert client["dependencies"] == whole["dependencies"]
    assert client["scripts"] == whole["scripts"]
    extras = client["optional-dependencies"]
    assert extras.keys() == whole["optional-dependencies"].keys()
    assert extras["service"] == [f"convgrad-service=={VERSION}"]
    assert extras["cuda13"] == [f"convgrad-service[cuda13]=={VERSION}"]
    assert extras["demo"][0] == f"convgrad-service=={VERSION}"
    for packages in extras.values():
        assert not [package for package in packages if package.startswith("convgrad[")]


def test_addresses_are_those_of_whoever_publishes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROJECT_URL", raising=False)
    assert completed("client")["urls"] == {}
    monkeypatch.setenv("PROJECT_URL", "https://forge.example/convgrad/")
    for folder in ("client", "service"):
        urls = completed(folder)["urls"]
        assert urls["Homepage"] == "https://forge.example/convgrad"
        assert urls["Changelog"] == "https://forge.example/convgrad/blob/main/CHANGELOG.md"
        paths = [url.partition("/blob/main/")[2] for url in urls.values() if "/blob/" in url]
        assert all((ROOT / path).exists() for path in paths)


def test_the_server_brings_the_client_of_its_version() -> None:
    whole, service = project("."), completed("service")
    packages = whole["optional-dependencies"]
    assert service["dependencies"] == [f"convgrad=={VERSION}", *packages["service"]]
    assert service["entry-points"] == whole["entry-points"]
    for extra, listed in service["optional-dependencies"].items():
        assert {*listed, "convgrad[service]"} >= set(packages[extra])
        assert "convgrad[service]" not in listed
