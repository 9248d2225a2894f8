"""Requests that schemathesis draws from the OpenAPI document: none is a fault of the server."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.attack.served import MIB, attacked, processes

TOOL = Path(__file__).parents[2] / "build" / "attack-tools" / "bin" / "schemathesis"


@pytest.mark.slow
@pytest.mark.timeout(1900)  # its thousands of requests take minutes, more on a busy machine
def test_whatever_the_document_allows_and_forbids_is_answered(tmp_path: Path) -> None:
    assert TOOL.exists(), "`make attack` installs schemathesis"
    limits = {
        "max_problem_bytes": "16MiB",
        "max_problem_flops": "1e9",
        "max_inflight_bytes": "256MiB",
        "timing_budget_s": "0.05",  # a timing has its device to itself, and /time has many forms
    }
    # The heaps of both processes keep 32 MiB each (max_inflight_bytes / 4 in all), the CPU backend
    # workspaces of 64 MiB (workspace_bytes / 4), and 32 MiB are for caches with a limited number of
    # entries: prepared requests, plans, arguments of kernels.
    kept_bytes = (2 * 32 + 64 + 32) * MIB
    with processes(tmp_path, **limits) as server, attacked(server, more_bytes=kept_bytes):
        # A deadline that has passed already is what 504 says.
        config = tmp_path / "schemathesis.toml"
        config.write_text('checks.not_a_server_error.expected-statuses = ["2xx", "4xx", "504"]\n')
        ran = subprocess.run(
            [
                TOOL,
                f"--config-file={config}",
                "run",
                f"{server.http}/openapi.json",
                "--checks=not_a_server_error,response_schema_conformance,status_code_conformance",
                "--max-examples=10",
                # Two would parse Python code in two threads at once, for which CPython 3.11 raises
                # SystemError now and then (python/cpython#106905).
                "--workers=1",
                "--seed=1",
                "--generation-database=none",
                "--suppress-health-check=all",
                "--phases=examples,coverage,fuzzing",
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=1800,
        )
        print(ran.stdout[-2000:])
        assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
