"""Builds the distributions to publish: source distributions, and wheels from only those.

python -m tests.deploy.build_dist build/dist
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The variable with which cross builds set a wheel's platform.
PLATFORMS = ("linux-x86_64", "linux-aarch64")


def main() -> None:
    target = Path(sys.argv[1]).resolve()
    shutil.rmtree(target, ignore_errors=True)
    for project, platforms in (("client", PLATFORMS[:1]), ("service", PLATFORMS)):
        _hatchling(ROOT / project, "sdist", target, {})
        (source,) = target.glob(f"convgrad{'_service' if project == 'service' else ''}-*.tar.gz")
        for platform in platforms:
            with tempfile.TemporaryDirectory() as folder:
                with tarfile.open(source) as archive:
                    archive.extractall(folder, filter="data")
                (unpacked,) = Path(folder).iterdir()
                _hatchling(unpacked, "wheel", target, {"_PYTHON_HOST_PLATFORM": platform})


def _hatchling(project: Path, kind: str, target: Path, environment: Mapping[str, str]) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(target)]
    subprocess.run(command, cwd=project, env={**os.environ, **environment}, check=True)


if __name__ == "__main__":
    main()
