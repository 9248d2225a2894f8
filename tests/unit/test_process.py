"""Limits of memory and cores as control groups of both versions state them, in a made-up /proc."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from convgrad_service import process
from convgrad_service.process import memory_bytes, usable_cores

MiB = 2**20
UNLIMITED = 2**63 - 4096


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_host_bytes", lambda: 8192 * MiB)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)), raising=False)


class Host:
    """``group``, with mounts of cgroup file systems below a folder, and files in them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.process = folder, folder / "proc"
        self.process.mkdir()
        self._mounts = ["20 1 0:2 / /tmp rw - tmpfs tmpfs rw"]
        self._groups: list[str] = []
        self._write()

    def mount(self, point: str, kind: str, options: str, root: str = "/") -> Host:
        place = self.folder / point
        place.mkdir(parents=True, exist_ok=True)
        self._mounts.append(
            f"21 20 0:3 {root} {place} rw,nosuid shared:4 - {kind} {kind} {options}"
        )
        return self._write()

    def member(self, line: str) -> Host:
        self._groups.append(line)
        return self._write()

    def file(self, path: str, text: str) -> Host:
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / path).write_text(f"{text}\n")
        return self

    def _write(self) -> Host:
        (self.process / "mountinfo").write_text("\n".join(self._mounts))
        (self.process / "cgroup").write_text("\n".join(self._groups))
        return self

    @property
    def found(self) -> tuple[int | None, int]:
        memory = memory_bytes(self.process)
        return memory and memory // MiB, usable_cores(self.process)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_without_control_groups_there_is_the_whole_host(host: Host, tmp_path: Path) -> None:
    assert host.found == (8192, 16)
    assert memory_bytes(tmp_path / "nothing") == 8192 * MiB
    assert usable_cores(tmp_path / "nothing") == 16


def test_version_2_with_a_limit_above_the_own_group(host: Host) -> None:
    host.mount("cgroup", "cgroup2", "rw").member("0::/pods/one/app")
    host.file("cgroup/pods/one/app/memory.max", "max")
    host.file("cgroup/pods/one/app/cpu.max", "max 100000")
    assert host.found == (8192, 16)
    host.file("cgroup/pods/one/memory.max", str(1024 * MiB))
    host.file("cgroup/pods/one/cpu.max", "250000 100000")
    host.file("cgroup/pods/memory.max", str(4096 * MiB))
    assert host.found == (1024, 3)


def test_version_2_as_a_container_sees_it(host: Host) -> None:
    """In a namespace of its own: its group is the root."""
    host.mount("cgroup", "cgroup2", "rw").member("0::/")
    host.file("cgroup/memory.max", str(512 * MiB)).file("cgroup/cpu.max", "50000 100000")
    assert host.found == (512, 1)


def test_version_1_with_a_hierarchy_for_each_controller(host: Host) -> None:
    host.mount("memory", "cgroup", "rw,memory").member("4:memory:/docker/a")
    host.mount("cpu", "cgroup", "rw,cpu,cpuacct").member("3:cpu,cpuacct:/docker/a")
    host.file("memory/memory.limit_in_bytes", str(UNLIMITED))
    host.file("memory/docker/a/memory.limit_in_bytes", str(UNLIMITED))
    host.file("cpu/docker/a/cpu.cfs_quota_us", "-1").file(
        "cpu/docker/a/cpu.cfs_period_us", "100000"
    )
    assert host.found == (8192, 16)
    host.file("memory/docker/a/memory.limit_in_bytes", str(256 * MiB))
    host.file("cpu/docker/a/cpu.cfs_quota_us", "400000")
    assert host.found == (256, 4)
    # Another controller's group of the same name says nothing.
    host.file("cpu/docker/a/memory.limit_in_bytes", str(MiB))
    assert host.found == (256, 4)


def test_version_1_as_a_container_sees_it(host: Host) -> None:
    """Its group is mounted, while its name is still that of the host."""
    host.mount("memory", "cgroup", "rw,memory", root="/docker/a").member("4:memory:/docker/a")
    host.file("memory/memory.limit_in_bytes", str(64 * MiB))
    assert host.found == (64, 16)


def test_both_versions_side_by_side(host: Host) -> None:
    host.mount("unified", "cgroup2", "rw").member("0::/app")
    host.mount("memory", "cgroup", "rw,memory").member("4:memory:/app")
    host.file("memory/app/memory.limit_in_bytes", str(128 * MiB))
    host.file("unified/app/cpu.max", "200000 100000")
    assert host.found == (128, 2)


def test_a_file_that_says_nonsense_limits_nothing(host: Host) -> None:
    host.mount("cgroup", "cgroup2", "rw").member("0::/")
    host.file("cgroup/memory.max", "much").file("cgroup/cpu.max", "0 0")
    assert host.found == (8192, 16)


def test_the_quota_of_a_real_group() -> None:
    for hierarchy, file, quota in (("", "cpu.max", "50000"), ("cpu", "cpu.cfs_quota_us", "50000")):
        group = Path("/sys/fs/cgroup") / hierarchy / f"convgrad-{uuid.uuid4().hex}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if not (group / file).exists():
                continue  # the system has the other version
            (group / file).write_text(quota)
            join = f'echo $$ > {group}/cgroup.procs && exec "$@"'
            code = "from convgrad_service.process import usable_cores; print(usable_cores())"
            command = ["sh", "-c", join, "sh", sys.executable, "-c", code]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            assert done.stdout == "1\n"
            return
        finally:
            group.rmdir()
    pytest.skip("no control group can be made here: it takes root, and file systems to write to")
