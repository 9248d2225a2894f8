"""Malformed bodies against a real server with the real backend: 200 here, 10,000 by `make fuzz`.

Of each: no 5xx, no hang, and an answer of the promised form. Of all together: the server's memory
does not grow past its limit.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from convgrad.contract import OPERATIONS
from tests.support.fuzz_bodies import Shot, shots
from tests.support.http_server import serving_process

MiB = 2**20
# What one server may hold: bodies and arrays, scratch memory, and what the interpreter, Prometheus
# and malloc's caches take beside them.
INFLIGHT, WORKSPACE, BESIDE = 64 * MiB, 32 * MiB, 64 * MiB
LONGEST_S = 10.0

SETTINGS = {
    "CONVGRAD_MAX_JSON_BYTES": "1MiB",
    "CONVGRAD_MAX_BODY_BYTES": "1MiB",
    "CONVGRAD_MAX_PROBLEM_BYTES": "16MiB",
    "CONVGRAD_MAX_PROBLEM_FLOPS": "1e8",
    "CONVGRAD_MAX_INFLIGHT_BYTES": str(INFLIGHT),
    "CONVGRAD_WORKSPACE_BYTES": str(WORKSPACE),
}


def memory_bytes(process: int, line: str) -> int:
    """A line of /proc/<pid>/status: VmRSS is now, VmHWM the most there ever was."""
    status = Path(f"/proc/{process}/status").read_text(encoding="ascii")
    found = next(row for row in status.splitlines() if row.startswith(line))
    return int(found.split()[1]) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_body_does_harm(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    examples = request.config.getoption("--fuzz-examples", default=200)
    seen: dict[int, int] = {}
    with (
        serving_process(tmp_path, SETTINGS) as (url, process),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        for operation in OPERATIONS.values():  # what a first request loads is not growth
            client.post(f"/{operation.name}", json=operation.example)
        before = memory_bytes(process, "VmRSS")

        @settings(
            max_examples=examples,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.explicit, Phase.generate, Phase.shrink),
        )
        @given(shots())
        def shoot(shot: Shot) -> None:
            started = time.monotonic()
            answer = client.post(
                f"/{shot.operation}",
                content=shot.body,
                headers={"Content-Type": shot.content_type},
            )
            took = time.monotonic() - started
            seen[answer.status_code] = seen.get(answer.status_code, 0) + 1
            assert took < LONGEST_S, (took, shot)
            assert answer.status_code < 500, (answer.text, shot)
            if answer.status_code != 200:
                assert answer.headers["content-type"] == "application/problem+json"
                assert answer.json()["code"], shot

        shoot()
        assert client.get("/v2/health/ready").status_code == 200
        grown = memory_bytes(process, "VmHWM") - before
        print(
            f"\n{sum(seen.values())} bodies by status: {dict(sorted(seen.items()))}; memory "
            f"{before / MiB:.0f} MiB before, at most {grown / MiB:.0f} MiB more"
        )
    assert grown < INFLIGHT + WORKSPACE + BESIDE
    assert seen.get(400, 0) > examples // 4, seen
    assert seen.get(200, 0) > 0, seen
