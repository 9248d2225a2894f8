"""Builds the distributions to publish: source distributions, and wheels from only those.

python -m tests.deploy.build_dist build/dist

Their metadata has the URLs of the repository: PROJECT_URL, or else the address of git's ``origin``.
"""

from __future__ import annotations

import os
import re
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


# https://host/path, ssh://git@host:22/path or git@host:path; not a folder.
_REMOTE = re.compile(
    r"(?:(?:https|ssh)://)?(?:[^@/]*@)?([\w-]+(?:\.[\w-]+)+)(?::\d+(?=/))?[:/](.+?)(?:\.git)?/?"
)


def project_url() -> str | None:
    """Return the repository's address as a browser needs it, None if it is not known."""
    if stated := os.environ.get("PROJECT_URL"):
        return stated
    command = ["git", "remote", "get-url", "origin"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return browsed(done.stdout.strip())


def browsed(remote: str) -> str | None:
    """Return the address of a git remote for a browser, without any credentials."""
    found = _REMOTE.fullmatch(remote)
    return None if found is None else f"https://{found[1]}/{found[2].lstrip('/')}"


def main() -> None:
    url = project_url()
    print(f"project URLs: {url or 'none, since there is no PROJECT_URL and no origin'}")
    os.environ["PROJECT_URL"] = url or ""
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
