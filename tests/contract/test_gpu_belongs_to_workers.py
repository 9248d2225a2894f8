"""Only workers touch the GPU: no process that serves holds a CUDA context, or loads CuPy."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import httpx
import pytest

from tests.support.http_server import EXAMPLE, JSON, serving_process

pytestmark = pytest.mark.processes

# Says in which process it is imported; has no GPU, so that ``auto`` goes on with the CPU.
CUPY = """
import pathlib
from types import SimpleNamespace

name = pathlib.Path("/proc/self/comm").read_text().strip()
with (pathlib.Path(__file__).parent / "imported").open("a") as file:
    file.write(name + "\\n")
runtime = SimpleNamespace(getDeviceCount=lambda: 0, CUDARuntimeError=RuntimeError)
cuda = SimpleNamespace(runtime=runtime)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_process_that_serves_loads_cupy(tmp_path: Path) -> None:
    (tmp_path / "cupy.py").write_text(CUPY)
    inherited = os.environ.get("PYTHONPATH")
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path), inherited])),
        "CONVGRAD_BACKEND": "auto",
        "CONVGRAD_HTTP_WORKERS": "2",
    }
    with serving_process(tmp_path, environment) as (url, _):
        for _ in range(8):  # some to each front end, and again what a worker has computed before
            answer = httpx.post(
                f"{url}/conv_bwd_data", content=EXAMPLE, headers={"Content-Type": JSON}, timeout=60
            )
            assert answer.status_code == 200, answer.text
            assert answer.json()["report"]["backend"] == "cpu"
        for path in ("/metrics", "/v2/health/ready", "/operations"):
            assert httpx.get(url + path, timeout=60).status_code == 200
    assert set((tmp_path / "imported").read_text().splitlines()) == {"convgrad-worker"}
