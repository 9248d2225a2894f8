"""What every benchmark record says of where it comes from."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

__all__ = ["cpu_model", "origin"]


def origin(device: str, versions: Mapping[str, str]) -> dict[str, Any]:
    """The commit, the moment, the device and the versions of what was measured."""
    return {
        "git_sha": _output("git", "describe", "--always", "--dirty", "--abbrev=12"),
        "utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device,
        "driver": None,
        "versions": {"python": platform.python_version(), **versions},
    }


def _output(*command: str) -> str | None:
    here = Path(__file__).parent
    try:
        done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None


def cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
