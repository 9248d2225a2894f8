"""Shared-memory regions: ownership, unregistration, and truncated files."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from convgrad.dtypes import DType
from convgrad.errors import InvalidProblem, MalformedRequest, NotFound, Overloaded
from convgrad_service.engine.shm.mappings import RegionMappings
from convgrad_service.engine.shm.registry import RegionInfo, RegionPart, RegionRegistry, RegionSlice
from convgrad_service.problems.base import TensorSpec
from tests.support.fake_backends import Zeros

SHM = Path("/dev/shm")  # noqa: S108 - what is tested
PAGE = os.sysconf("SC_PAGE_SIZE")
needs_shm = pytest.mark.skipif(not SHM.is_dir(), reason="needs /dev/shm")
pytestmark = needs_shm


@pytest.fixture
def key() -> Iterator[str]:
    """A file of four pages in /dev/shm."""
    name = f"test-regions-{uuid.uuid4().hex}"
    (SHM / name).write_bytes(bytes(4 * PAGE))
    yield f"/{name}"
    (SHM / name).unlink(missing_ok=True)


@pytest.fixture
def regions() -> Iterator[RegionRegistry]:
    made = RegionRegistry(3)
    yield made
    made.close()


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 10))


def test_regions_are_listed_for_their_owner_only(regions: RegionRegistry, key: str) -> None:
    mine = RegionInfo("a", key, PAGE, 100)
    regions.register("me", mine)
    regions.register("you", RegionInfo("a", key, 0, 4 * PAGE))
    assert regions.list_regions("me", "") == regions.list_regions("me", "a") == [mine]
    assert regions.list_regions("her", "") == []
    with pytest.raises(NotFound, match='no region "b"'):
        regions.list_regions("me", "b")
    with pytest.raises(MalformedRequest, match='"a" is registered already'):
        regions.register("me", mine)
    with pytest.raises(NotFound):
        regions.acquire([RegionPart("her", "a", 0, 1)])

    async def test() -> None:
        await regions.unregister("me", "")
        assert len(regions.list_regions("you", "")) == 1
        await regions.unregister("me", "a")  # again
        regions.register("me", mine)

    run(test)


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        ("", "not the name"),
        ("/", "not the name"),
        ("..", "not the name"),
        ("/../etc/passwd", "not the name"),
        ("a/b", "not the name"),
        ("//a", "not the name"),
        ("sem.other", "not the name"),
        ("a\0b", "not the name"),
        ("a\n", "not the name"),
        ("x" * 300, "not the name"),
        ("convgrad-not-there", "cannot be opened: No such file"),
    ],
)
def test_invalid_keys_are_refused(regions: RegionRegistry, bad: str, sentence: str) -> None:
    with pytest.raises(MalformedRequest, match=sentence):
        regions.register("", RegionInfo("a", bad, 0, 1))
    assert len(regions) == 0


def test_a_shortage_of_descriptors_is_no_fault_of_the_client(
    regions: RegionRegistry, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(Overloaded, match="can open no more files"):
        regions.register("", RegionInfo("a", key, 0, 1))


def test_only_plain_files_are_opened(regions: RegionRegistry, key: str) -> None:
    link, pipe, folder = (SHM / f"test-regions-{uuid.uuid4().hex}" for _ in range(3))
    link.symlink_to(SHM / key[1:])
    os.mkfifo(pipe)
    folder.mkdir()
    try:
        for path in (link, pipe, folder):
            with pytest.raises(MalformedRequest):
                regions.register("", RegionInfo("a", path.name, 0, 1))
    finally:
        link.unlink()
        pipe.unlink()
        folder.rmdir()


@pytest.mark.parametrize(
    ("offset", "size"), [(0, 4 * PAGE + 1), (4 * PAGE, 1), (PAGE, 4 * PAGE), (0, 2**62)]
)
def test_regions_outside_their_file_are_refused(
    regions: RegionRegistry, key: str, offset: int, size: int
) -> None:
    with pytest.raises(MalformedRequest, match=f"has {4 * PAGE:,} bytes"):
        regions.register("", RegionInfo("a", key, offset, size))
    assert key[1:] not in {target.name for target in map(_target, Path("/proc/self/fd").iterdir())}


def test_a_region_without_bytes_is_refused(regions: RegionRegistry, key: str) -> None:
    with pytest.raises(MalformedRequest, match="has 0 bytes; expected 1 or more"):
        regions.register("", RegionInfo("a", key, 0, 0))


def _target(path: Path) -> Path:
    try:
        return path.readlink()
    except FileNotFoundError:  # the descriptor of iterdir itself
        return path


def test_parts_outside_their_region_are_refused(regions: RegionRegistry, key: str) -> None:
    regions.register("", RegionInfo("a", key, PAGE, 100))
    (place,) = regions.acquire([RegionPart("", "a", 10, 90)])
    assert place.offset == PAGE + 10
    with pytest.raises(InvalidProblem, match="bytes 10 to 101"):
        regions.acquire([RegionPart("", "a", 10, 91)])
    os.truncate(SHM / key[1:], PAGE)
    with pytest.raises(InvalidProblem, match="shorter than when it was registered"):
        regions.acquire([RegionPart("", "a", 0, 1)])
    regions.release([place])


def test_number_of_regions_is_limited(regions: RegionRegistry, key: str) -> None:
    for name in "abc":
        regions.register("", RegionInfo(name, key, 0, 1))
    with pytest.raises(Overloaded, match="3 regions are registered"):
        regions.register("", RegionInfo("d", key, 0, 1))


def test_address_space_of_regions_is_limited(regions: RegionRegistry, key: str) -> None:
    """A sparse file may have any size, and workers map it."""
    os.truncate(SHM / key[1:], 2**46)
    with pytest.raises(Overloaded, match="may be mapped"):
        regions.register("", RegionInfo("a", key, 2**45, 1))
    regions.register("", RegionInfo("b", key, 2**45 - 2**20, PAGE))
    with pytest.raises(Overloaded, match="may be mapped"):
        regions.register("", RegionInfo("c", key, 0, 2**20))


def test_unregister_waits_for_requests_in_flight(regions: RegionRegistry, key: str) -> None:
    forgotten: list[int] = []
    regions.on_closed.append(forgotten.append)
    regions.register("", RegionInfo("a", key, 0, PAGE))

    async def test() -> None:
        part = RegionPart("", "a", 0, 1)
        places = regions.acquire([part, part])
        leaving = [asyncio.create_task(regions.unregister("", "a")) for _ in range(2)]
        await asyncio.sleep(0.01)
        with pytest.raises(NotFound):
            regions.acquire([part])
        with pytest.raises(MalformedRequest, match="registered already"):
            regions.register("", RegionInfo("a", key, 0, PAGE))
        regions.release(places[:1])
        await asyncio.sleep(0.01)
        assert not any(task.done() for task in leaving)
        assert not forgotten
        regions.release(places[1:])
        await asyncio.gather(*leaving)
        assert forgotten == [places[0].region]
        regions.register("", RegionInfo("a", key, 0, PAGE))

    run(test)


def test_file_may_be_unlinked_after_registration(regions: RegionRegistry, key: str) -> None:
    regions.register("", RegionInfo("a", key, 0, PAGE))
    (SHM / key[1:]).unlink()
    (place,) = regions.acquire([RegionPart("", "a", 8, 8)])
    mappings = RegionMappings(Zeros())
    _map(mappings, regions, place)
    array = mappings.array(place, TensorSpec((2,), DType.FLOAT32))
    array[:] = (1, 2)
    assert os.pread(regions.descriptor(place.region), 8, 8) == array.tobytes()
    mappings.check([place.region])
    regions.release([place])


def _map(mappings: RegionMappings, regions: RegionRegistry, place: RegionSlice) -> None:
    handle, end = regions.extent(place.region)
    assert handle is None
    mappings.open(place.region, regions.descriptor(place.region), end)


def test_truncated_file_reads_as_zeros_and_is_detected(regions: RegionRegistry, key: str) -> None:
    regions.register("", RegionInfo("a", key, 0, 4 * PAGE))
    (place,) = regions.acquire([RegionPart("", "a", 0, 4 * PAGE)])
    mappings = RegionMappings(Zeros())
    _map(mappings, regions, place)
    array = mappings.array(place, TensorSpec((PAGE,), DType.FLOAT32))
    array[:] = 1
    mappings.check([place.region])
    os.truncate(SHM / key[1:], 2 * PAGE)
    assert array.sum() == PAGE // 2  # and this process has survived
    array[-1] = 5
    with pytest.raises(InvalidProblem, match="register it again"):
        mappings.check([place.region])
    other = RegionSlice(place.region, 3 * PAGE)
    assert not mappings.array(other, TensorSpec((4,), DType.FLOAT32)).any()
    regions.release([place])


def test_bus_error_elsewhere_still_kills_the_process() -> None:
    code = """
import ctypes, mmap, os, sys
from convgrad_service.backends.cpu.guard import Guard
def mapped():
    file = os.memfd_create("x")
    os.ftruncate(file, 8192)
    memory = mmap.mmap(file, 8192)
    return file, memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))
file, memory, address = mapped()
guard = Guard(address, 8192)
os.ftruncate(file, 4096)
assert memory[5000] == 0 and guard.lost() == 4096
guard.remove()
file, memory, address = mapped()
os.ftruncate(file, 0)
print("unguarded now", flush=True)
memory[0]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "unguarded now\n", done.stderr
    assert done.returncode == -signal.SIGBUS


def test_the_backend_is_told_before_first_use_and_before_unmapping(
    regions: RegionRegistry, key: str
) -> None:
    class Adopting(Zeros):
        def __init__(self) -> None:
            super().__init__()
            self.held: dict[int, int] = {}

        def adopt(self, address: int, size_bytes: int) -> None:
            self.held[address] = size_bytes

        def disown(self, address: int) -> None:
            del self.held[address]

    backend = Adopting()
    mappings = RegionMappings(backend)
    regions.register("", RegionInfo("a", key, 0, PAGE))
    (place,) = regions.acquire([RegionPart("", "a", 0, 4)])
    _map(mappings, regions, place)
    _map(mappings, regions, place)  # a second open does nothing
    array = mappings.array(place, TensorSpec((1,), DType.FLOAT32))
    assert backend.held == {array.ctypes.data: PAGE}  # and not the rest of the file
    mappings.close(place.region)
    assert backend.held  # a kernel may still use it
    del array
    assert not backend.held
    regions.release([place])
