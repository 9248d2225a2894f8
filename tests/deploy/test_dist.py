"""The distributions built by `make dist`, inspected and installed in empty environments."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import convgrad
from tests.deploy.build_dist import project_url

pytestmark = pytest.mark.deploy
VERSION = convgrad.__version__
# Dependencies of the service that the client must not have.
OF_THE_SERVICE = ("fastapi", "uvicorn", "uvloop", "protobuf", "prometheus", "convgrad_service")
# e_machine of ELF.
MACHINES = {"x86_64": 62, "aarch64": 183}


@pytest.fixture(scope="module")
def dist(request: pytest.FixtureRequest) -> Path:
    folder = request.config.getoption("--built-dist")
    if folder is None:
        pytest.skip("needs --dist, the folder that build_dist was given")
    return Path(folder).resolve()


def metadata(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return archive.read(name).decode()


def test_the_clients_wheel_is_pure_python_and_has_only_the_client(dist: Path) -> None:
    wheel = dist / f"convgrad-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.partition("/")[0] for name in names} == {
        "convgrad",
        f"convgrad-{VERSION}.dist-info",
    }
    assert {Path(name).suffix for name in names if name.startswith("convgrad/")} == {
        ".py",
        ".typed",
        ".txt",  # suites of layers
    }
    assert any(name.endswith("licenses/LICENSE") for name in names)
    found = dict(re.findall(r"^Project-URL: (\w+), (.*)$", metadata(wheel), re.MULTILINE))
    assert found.get("Homepage") == project_url()
    required = re.findall(r"^Requires-Dist: ([\w-]+)(?!.*extra)", metadata(wheel), re.MULTILINE)
    assert set(required) == {"httpx", "ml-dtypes", "numpy", "pydantic"}


@pytest.mark.parametrize("architecture", MACHINES)
def test_the_services_wheel_has_kernels_of_its_architecture(dist: Path, architecture: str) -> None:
    tag = f"py3-none-manylinux_2_17_{architecture}"
    wheel = dist / f"convgrad_service-{VERSION}-{tag}.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        libraries = {Path(name).name: archive.read(name) for name in names if name.endswith(".so")}
    assert {name.partition("/")[0] for name in names} == {
        "convgrad_service",
        f"convgrad_service-{VERSION}.dist-info",
    }
    levels = ("x86_64", "x86_64_v3", "x86_64_v4") if architecture == "x86_64" else ("aarch64",)
    assert libraries.keys() == {f"libconvgrad_{level}.so" for level in levels}
    for name, library in libraries.items():
        assert library[:6] == b"\x7fELF\x02\x01", name
        assert struct.unpack_from("<H", library, 18)[0] == MACHINES[architecture], name
        versions = re.findall(rb"GLIBC_2\.(\d+)", library)
        assert versions, name
        assert max(map(int, versions)) <= 17, name
    assert f"Requires-Dist: convgrad=={VERSION}" in metadata(wheel)


def test_the_client_installs_quickly_and_without_the_service(dist: Path, tmp_path: Path) -> None:
    python, seconds = _installed(tmp_path, dist / f"convgrad-{VERSION}-py3-none-any.whl", dist)
    print(f"the client installed in {seconds:.1f} s")
    assert seconds < 60  # over a minute means that something was compiled
    listed = _run(python, "-m", "pip", "list", "--format=freeze")
    assert f"convgrad=={VERSION}" in listed
    assert not [name for name in OF_THE_SERVICE if re.search(f"(?im)^{name}", listed)]
    said = _run(python.parent / "convgrad", "operations", "--offline")
    assert "conv_bwd_data" in said
    done = subprocess.run(
        [python.parent / "convgrad", "serve"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "pip install 'convgrad[service]'" in done.stderr
    # The server runs in this test's environment.
    code = (
        "import convgrad, numpy as np; c = convgrad.Client();"
        "print(c.conv_fwd(np.ones((1, 1, 4), 'f'), np.ones((1, 1, 1), 'f')).sum())"
    )
    with _serving(Path(sys.executable), tmp_path) as url:
        assert _run(python, "-c", code, CONVGRAD_URL=url).strip() == "4.0"


def test_the_service_installs_and_serves(dist: Path, tmp_path: Path) -> None:
    (wheel,) = dist.glob(f"convgrad_service-*_{os.uname().machine}.whl")
    python, _ = _installed(tmp_path, wheel, dist)
    with _serving(python, tmp_path) as url:
        assert "ready" in _run(python.parent / "convgrad", "health", "--url", url)


def _installed(folder: Path, wheel: Path, dist: Path) -> tuple[Path, float]:
    """Install a wheel in a new environment; return its Python and the duration in seconds."""
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    started = time.monotonic()
    _run(python, "-m", "pip", "install", "--quiet", "--find-links", str(dist), str(wheel))
    return python, time.monotonic() - started


def _run(*command: str | Path, **environment: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, **environment}
    )
    return done.stdout


@contextmanager
def _serving(python: Path, folder: Path) -> Iterator[str]:
    """Run an environment's `convgrad serve` on free ports; yield its URL."""
    port = folder / "port"
    process = subprocess.Popen(
        [python, "-m", "convgrad", "serve", "--port", "0", "--port-file", port],
        env={**os.environ, "CONVGRAD_GRPC_PORT": "0", "CONVGRAD_LOG_LEVEL": "error"},
        cwd=folder,  # not the checkout, so that its sources are not importable
    )
    try:
        until = time.monotonic() + 120
        while not port.exists():
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port.read_text().strip()}"
    finally:
        process.terminate()
        process.wait(60)
