"""The Dockerfile's stage that compiles kernels copies every file that compiling reads."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from convgrad_service.plans.cuda.device import ARCHITECTURES

ROOT = Path(__file__).parents[2]


def stage(name: str) -> str:
    """The instructions of one stage, with continued lines joined."""
    text = re.sub(r"\\\n\s*(#.*\n\s*)*", " ", (ROOT / "Dockerfile").read_text())
    (found,) = re.findall(rf"^FROM \S+ AS {name}$(.*?)(?=^FROM )", text, re.MULTILINE | re.DOTALL)
    return str(found)


def test_kernels_compile_from_what_their_stage_copies(tmp_path: Path) -> None:
    instructions = stage("kernels")
    for line in re.findall(r"^COPY (.*)$", instructions, re.MULTILINE):
        *sources, target = line.split()
        for source in map(Path, sources):
            if (ROOT / source).is_dir():
                ignore = shutil.ignore_patterns("__pycache__", "_cubins", "*.so")
                shutil.copytree(ROOT / source, tmp_path / target, ignore=ignore)
            else:
                (tmp_path / target).mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, tmp_path / target)
    (run,) = re.findall(r"/opt/convgrad/bin/python (-c .*); fi", instructions)
    command = run.replace("${KERNELS}", "row_copy").replace("${ARCHITECTURES}", "sm_80")
    command = command.replace("/kernels", "image").replace("/cubins", "cache")
    done = subprocess.run(
        [sys.executable, *shlex.split(command)],
        cwd=tmp_path,
        env={"PYTHONPATH": "client:service"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "image").rglob("*row_copy*"))


def test_the_image_has_kernels_for_every_architecture_by_default() -> None:
    (default,) = re.findall(r'^ARG ARCHITECTURES="(.*)"$', stage("kernels"), re.MULTILINE)
    assert tuple(default.split()) == ARCHITECTURES


def test_the_base_image_is_pinned_by_digest() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert re.search(
        r"^ARG PYTHON_IMAGE=python:3\.[0-9.]+-slim-bookworm@sha256:[0-9a-f]{64}$", text, re.M
    )
    stages = re.findall(r"^FROM (\S+)(?: AS (\w+))?", text, re.MULTILINE)
    assert {base for base, _ in stages} <= {"${PYTHON_IMAGE}", *(name for _, name in stages)}
