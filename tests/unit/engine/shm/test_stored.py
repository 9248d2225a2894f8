"""Stored tensors: names, owners, budget, expiry, and use while dropped."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convgrad.dtypes import DType
from convgrad.errors import MalformedRequest, NotFound, Overloaded, ProblemTooLarge
from convgrad_service.engine.memory.arena import Arena
from convgrad_service.engine.shm import stored as stored_module
from convgrad_service.engine.shm.registry import RegionRegistry, RegionSlice
from convgrad_service.engine.shm.stored import TensorStore
from convgrad_service.problems.base import TensorSpec

SPEC = TensorSpec((2, 3), DType.FLOAT32)
Test = Callable[[TensorStore, RegionRegistry, Arena], Awaitable[None]]


def run(test: Test, *, budget_bytes: int = 100, longest_s: float = 60.0) -> None:
    async def within() -> None:
        arena, regions = Arena.create(2**20), RegionRegistry(4)
        try:
            async with asyncio.timeout(10):
                await test(
                    TensorStore(regions, arena, budget_bytes=budget_bytes, longest_s=longest_s),
                    regions,
                    arena,
                )
        finally:
            regions.close()
            arena.close()

    before = _open_files()
    asyncio.run(within())
    assert _open_files() <= before


def _open_files() -> set[str]:
    """The descriptors of stored tensors."""
    found = Path("/proc/self/fd").iterdir()
    return {path.name for path in found if "stored" in str(_target(path))}


def _target(path: Path) -> Path | None:
    try:
        return path.readlink()
    except FileNotFoundError:  # the descriptor of iterdir itself
        return None


def kept(stored: TensorStore, owner: str, name: str, lives_s: float | None = None) -> None:
    stored.commit(owner, stored.allocate({name: SPEC}, lives_s))


def test_write_then_read() -> None:
    async def test(stored: TensorStore, regions: RegionRegistry, arena: Arena) -> None:
        arena.array(4096, SPEC)[:] = np.arange(6).reshape(2, 3)
        made = stored.allocate({"w": SPEC}, None)
        await stored.write(made["w"], 4096)
        with pytest.raises(NotFound, match='no stored tensor "w"'):
            stored.find("me", ["w"])
        stored.commit("me", made)
        found = stored.find("me", ["w"])["w"]
        assert found.spec == SPEC
        await stored.read(found.part, 8192)
        np.testing.assert_array_equal(arena.array(8192, SPEC), arena.array(4096, SPEC))
        with pytest.raises(NotFound):
            stored.find("you", ["w"])
        assert [info.name for info in stored.list_tensors("me")] == ["w"]
        assert stored.list_tensors("you") == []
        assert len(regions) == 0  # stored tensors do not count

    run(test)


def test_storing_a_name_again_replaces_the_tensor() -> None:
    async def test(stored: TensorStore, regions: RegionRegistry, arena: Arena) -> None:
        kept(stored, "", "w")
        before = stored.find("", ["w"])["w"]
        places = regions.acquire([before.part])
        kept(stored, "", "w")
        assert stored.find("", ["w"])["w"].part != before.part
        assert stored.used_bytes == 2 * SPEC.size_bytes  # the first is still in use
        regions.release(places)
        assert stored.used_bytes == SPEC.size_bytes

    run(test)


def test_budget_is_enforced() -> None:
    async def test(stored: TensorStore, regions: RegionRegistry, arena: Arena) -> None:
        for name in "abcd":
            kept(stored, "", name)
        with pytest.raises(
            Overloaded, match="hold 96 of 100 bytes, and these need 24 more"
        ) as caught:
            kept(stored, "", "e")
        assert 1 <= (caught.value.retry_after_s or 0) <= 60
        with pytest.raises(ProblemTooLarge, match="keeps at most 100"):
            stored.allocate({"x": TensorSpec((26,), DType.FLOAT32)}, None)
        stored.drop("", "a")
        kept(stored, "", "e")
        with pytest.raises(NotFound):
            stored.drop("", "a")

    run(test)


def test_tensors_without_a_file_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process runs out of descriptors at the second of two tensors."""
    create, limit = os.memfd_create, 1

    def create_some(name: str, flags: int) -> int:
        nonlocal limit
        if not limit:
            raise OSError(errno.EMFILE, "Too many open files")
        limit -= 1
        return create(name, flags)

    async def test(stored: TensorStore, regions: RegionRegistry, arena: Arena) -> None:
        nonlocal limit
        monkeypatch.setattr(os, "memfd_create", create_some)
        for _ in range(3):
            with pytest.raises(Overloaded, match="can open no more files"):
                stored.allocate({"a": SPEC, "b": SPEC})
            assert stored.used_bytes == 0
        limit = 2
        stored.commit("", stored.allocate({"a": SPEC, "b": SPEC}))
        assert stored.used_bytes == 2 * SPEC.size_bytes

    run(test)


def test_abandoned_tensors_are_freed() -> None:
    async def test(stored: TensorStore, regions: RegionRegistry, arena: Arena) -> None:
        made = stored.allocate({"a": SPEC, "b": SPEC}, None)
        assert stored.used_bytes == 2 * SPEC.size_bytes
        stored.abandon(made.values())
        stored.abandon(made.values())
        assert stored.used_bytes == 0
        with pytest.raises(NotFound, match="took too long"):
            stored.commit("", made)

    run(test)


def test_tensors_expire_after_their_last_use() -> None:
    async def test(stored: TensorStore, regions: RegionRegistry, arena: Arena) -> None:
        kept(stored, "", "used", 50)
        kept(stored, "", "idle", 0.2)
        kept(stored, "", "long", 1e9)
        async with asyncio.timeout(30):
            while stored.used_bytes > 2 * SPEC.size_bytes:  # noqa: ASYNC110 - by itself
                await asyncio.sleep(0.01)
        with pytest.raises(NotFound):
            stored.find("", ["idle"])
        used, long = stored.list_tensors("")
        assert used.name == "used"
        assert used.expires_in_s < 49.9
        assert long.expires_in_s <= 60
        stored.find("", ["used"])
        anew, _ = stored.list_tensors("")
        assert used.expires_in_s < anew.expires_in_s <= 50

    run(test)


@pytest.mark.parametrize("name", ["", ".hidden", "-x", "a/b", "a b", "ä", "x" * 129, "a\n"])
def test_invalid_names_are_refused(name: str) -> None:
    async def test(stored: TensorStore, regions: RegionRegistry, arena: Arena) -> None:
        with pytest.raises(MalformedRequest, match="cannot be called"):
            stored.allocate({name: SPEC}, None)
        assert stored.used_bytes == 0

    run(test)


def test_files_are_sealed_against_truncation() -> None:
    async def test(stored: TensorStore, regions: RegionRegistry, arena: Arena) -> None:
        made: dict[str, Any] = stored.allocate({"a": SPEC}, None)
        (place,) = regions.acquire(list(made.values()))
        with pytest.raises(PermissionError):
            os.ftruncate(regions.descriptor(place.region), 0)
        regions.release([place])

    run(test)


def place(stored: TensorStore, regions: RegionRegistry, name: str) -> RegionSlice:
    """Return the slice of a stored tensor."""
    (found,) = regions.acquire([stored.find("", [name])[name].part])
    regions.release([found])
    return found


def test_file_of_a_dropped_tensor_is_reused_for_the_same_size() -> None:
    async def test(stored: TensorStore, regions: RegionRegistry, arena: Arena) -> None:
        forgotten: list[int] = []
        regions.on_closed.append(forgotten.append)
        kept(stored, "", "a")
        first = place(stored, regions, "a")
        stored.drop("", "a")
        assert stored.used_bytes == 0
        kept(stored, "", "b")
        second = place(stored, regions, "b")
        # Workers still have it mapped; copies on a device are recognized by their version.
        assert (second.region, second.version) == (first.region, first.version + 1)
        assert second.stored
        assert not forgotten
        # A tensor dropped while in use becomes a spare once it is unused.
        held = regions.acquire([stored.find("", ["b"])["b"].part])
        stored.drop("", "b")
        kept(stored, "", "c")
        assert place(stored, regions, "c").region != first.region
        regions.release(held)
        kept(stored, "", "d")
        assert place(stored, regions, "d").region == first.region

    run(test)


def test_spare_files_are_closed_when_the_budget_is_needed() -> None:
    async def test(stored: TensorStore, regions: RegionRegistry, arena: Arena) -> None:
        forgotten: list[int] = []
        regions.on_closed.append(forgotten.append)
        for name in "abcd":
            kept(stored, "", name)
        for name in "abcd":
            stored.drop("", name)
        assert not forgotten
        stored.allocate({"x": TensorSpec((20,), DType.FLOAT32)}, None)  # 80 of 100 bytes
        assert len(forgotten) == 4
        assert stored.used_bytes == 80

    run(test)


def test_spare_files_are_closed_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_module, "_SPARE_S", 0.02)

    async def test(stored: TensorStore, regions: RegionRegistry, arena: Arena) -> None:
        before = _open_files()
        kept(stored, "", "a")
        stored.drop("", "a")
        assert len(_open_files() - before) == 1
        await asyncio.sleep(0.1)
        assert _open_files() == before

    run(test)
