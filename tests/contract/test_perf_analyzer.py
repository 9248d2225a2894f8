"""Triton's perf_analyzer drives the server: each transport, with and without shared memory.

Run by `make test-perf-analyzer`, which brings the program; skipped where it is not.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from convgrad_service.backends.cpu import CpuBackend
from tests.support.oip_server import OipServer, serving_oip

BUILD = Path(__file__).parents[2] / "build"
PROGRAM = BUILD / "perf-analyzer" / "bin" / "perf_analyzer"
LIBRARIES = BUILD / "triton" / "lib"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PROGRAM.exists(), reason="make test-perf-analyzer brings it"),
]

SHAPES = {
    "conv_bwd_data": {"grad_output": "1,8,16,16", "weight": "8,4,3,3"},
    "conv_backward": {"grad_output": "1,8,14,14", "input": "1,4,16,16", "weight": "8,4,3,3"},
    "conv3d_transpose": {"input": "1,4,4,4,4", "weight": "4,2,2,2,2"},
}
WAYS = {
    "http": ["-i", "http"],
    "grpc": ["-i", "grpc"],
    "grpc stream": ["-i", "grpc", "--streaming"],
    "grpc gzip": ["-i", "grpc", "--grpc-compression-algorithm", "gzip"],
}
MEMORY = {"none": [], "system": ["--shared-memory", "system"]}


@pytest.fixture(scope="module")
def server() -> Iterator[OipServer]:
    with serving_oip(CpuBackend(), system_shared_memory=True) as running:
        yield running


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """With the libraries that the program is linked to, by the names that it knows."""
    folder = tmp_path_factory.mktemp("libraries")
    for pattern, name in (("libcudart-*.so.12.*", "libcudart.so.12"), ("libb64-*", "libb64.so.0d")):
        (folder / name).symlink_to(next(LIBRARIES.rglob(pattern)))
    return {**os.environ, "LD_LIBRARY_PATH": str(folder)}


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", SHAPES)
def test_it_measures(
    server: OipServer, environment: dict[str, str], model: str, way: str, memory: str
) -> None:
    address = server.http if way == "http" else server.grpc
    shapes = [argument for name, extents in SHAPES[model].items()
              for argument in ("--shape", f"{name}:{extents}")]  # fmt: skip
    done = subprocess.run(
        [
            *(PROGRAM, "-m", model, "-u", address, *WAYS[way], *MEMORY[memory], *shapes),
            *("--output-shared-memory-size", "100000"),
            *("--request-count", "50", "--concurrency-range", "3"),
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "error" not in done.stdout.lower(), done.stdout
    assert "Request count: 50" in done.stdout
    assert re.search(r"Successful request count: \d\d", done.stdout), done.stdout
