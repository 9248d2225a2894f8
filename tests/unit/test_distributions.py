"""The distributions of client and server say what the whole says, from which they are built."""

from __future__ import annotations

import runpy
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.build_dist import browsed

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


@pytest.mark.parametrize(
    ("remote", "url"),
    [
        ("https://forge.example/group/convgrad.git", "https://forge.example/group/convgrad"),
        (
            "https://user:secret@forge.example/group/convgrad",
            "https://forge.example/group/convgrad",
        ),
        ("git@forge.example:group/convgrad.git", "https://forge.example/group/convgrad"),
        ("ssh://git@forge.example:2222/group/convgrad.git", "https://forge.example/group/convgrad"),
        ("/srv/git/convgrad.git", None),
        ("../convgrad", None),
        ("", None),
    ],
)
def test_the_address_of_a_remote_is_one_for_a_browser(remote: str, url: str | None) -> None:
    assert browsed(remote) == url


def test_the_clients_source_distribution_builds_its_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder of its own, without the pyproject.toml above, from which a checkout reads."""
    monkeypatch.delenv("PROJECT_URL", raising=False)
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path), "-t"]
    subprocess.run([*command, "sdist"], cwd=ROOT / "client", check=True, capture_output=True)
    (source,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = (path for path in tmp_path.iterdir() if path.is_dir())
    subprocess.run([*command, "wheel"], cwd=unpacked, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        described = archive.read(name).decode()
    assert "Requires-Dist: httpx" in described
    assert "Project-URL" not in described


def test_the_server_brings_the_client_of_its_version() -> None:
    whole, service = project("."), completed("service")
    packages = whole["optional-dependencies"]
    assert service["dependencies"] == [f"convgrad=={VERSION}", *packages["service"]]
    client = project("client")
    assert {**client["entry-points"], **service["entry-points"]} == whole["entry-points"]
    assert not client["entry-points"].keys() & service["entry-points"].keys()
    for extra, listed in service["optional-dependencies"].items():
        assert {*listed, "convgrad[service]"} >= set(packages[extra])
        assert "convgrad[service]" not in listed
