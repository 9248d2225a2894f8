"""Backward calls that native code answers."""

from __future__ import annotations

import subprocess
import sys


def test_prepared_calls_are_launched_by_native_code() -> None:
    command = [sys.executable, "-m", "tests.torch.native_front"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all right" in done.stdout
