"""Stored tensors: names and owners, the budget, the time, and what is in flight meanwhile."""

from __future__ import annotations

import asyncio
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
from convgrad_service.engine.shm.registry import InRegion, RegionRegistry
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
    except FileNotFoundError:  # the descriptor that listed the folder
        return None


def kept(stored: TensorStore, owner: str, name: str, lives_s: float | None = None) -> None:
    stored.commit(owner, stored.make({name: SPEC}, lives_s))


def test_what_was_written_is_read() -> None:
    async def test(stored: TensorStore, regions: RegionRegistry, arena: Arena) -> None:
        arena.array(4096, SPEC)[:] = np.arange(6).reshape(2, 3)
        made = stored.make({"w": SPEC}, None)
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
        assert [info.name for info in stored.listed("me")] == ["w"]
        assert stored.listed("you") == []
        assert len(regions) == 0  # of those that clients have registered

    run(test)


def test_a_name_given_again_is_the_new_tensors() -> None:
    async def test(stored: TensorStore, regions: RegionRegistry, arena: Arena) -> None:
        kept(stored, "", "w")
        before = stored.find("", ["w"])["w"]
        places = regions.use([before.part])
        kept(stored, "", "w")
        assert stored.find("", ["w"])["w"].part != before.part
        assert stored.used_bytes == 2 * SPEC.size_bytes  # the first is in use still
        regions.release(places)
        assert stored.used_bytes == SPEC.size_bytes

    run(test)


def test_the_budget_is_kept() -> None:
    async def test(stored: TensorStore, regions: RegionRegistry, arena: Arena) -> None:
        for name in "abcd":
            kept(stored, "", name)
        with pytest.raises(
            Overloaded, match="hold 96 of 100 bytes, and these need 24 more"
        ) as told:
            kept(stored, "", "e")
        assert 1 <= (told.value.retry_after_s or 0) <= 60
        with pytest.raises(ProblemTooLarge, match="keeps at most 100"):
            stored.make({"x": TensorSpec((26,), DType.FLOAT32)}, None)
        stored.drop("", "a")
        kept(stored, "", "e")
        with pytest.raises(NotFound):
            stored.drop("", "a")

    run(test)


def test_what_is_never_committed_is_given_back() -> None:
    async def test(stored: TensorStore, regions: RegionRegistry, arena: Arena) -> None:
        made = stored.make({"a": SPEC, "b": SPEC}, None)
        assert stored.used_bytes == 2 * SPEC.size_bytes
        stored.abandon(made.values())
        stored.abandon(made.values())
        assert stored.used_bytes == 0
        with pytest.raises(NotFound, match="took too long"):
            stored.commit("", made)

    run(test)


def test_time_ends_and_begins_anew_with_each_use() -> None:
    async def test(stored: TensorStore, regions: RegionRegistry, arena: Arena) -> None:
        kept(stored, "", "used", 50)
        kept(stored, "", "idle", 0.2)
        kept(stored, "", "long", 1e9)
        async with asyncio.timeout(30):
            while stored.used_bytes > 2 * SPEC.size_bytes:  # noqa: ASYNC110 - by itself
                await asyncio.sleep(0.01)
        with pytest.raises(NotFound):
            stored.find("", ["idle"])
        used, long = stored.listed("")
        assert used.name == "used"
        assert used.expires_in_s < 49.9
        assert long.expires_in_s <= 60
        stored.find("", ["used"])
        anew, _ = stored.listed("")
        assert used.expires_in_s < anew.expires_in_s <= 50

    run(test)


@pytest.mark.parametrize("name", ["", ".hidden", "-x", "a/b", "a b", "ä", "x" * 129, "a\n"])
def test_names(name: str) -> None:
    async def test(stored: TensorStore, regions: RegionRegistry, arena: Arena) -> None:
        with pytest.raises(MalformedRequest, match="cannot be called"):
            stored.make({name: SPEC}, None)
        assert stored.used_bytes == 0

    run(test)


def test_files_cannot_be_shortened() -> None:
    async def test(stored: TensorStore, regions: RegionRegistry, arena: Arena) -> None:
        made: dict[str, Any] = stored.make({"a": SPEC}, None)
        (place,) = regions.use(list(made.values()))
        with pytest.raises(PermissionError):
            os.ftruncate(regions.descriptor(place.file), 0)
        regions.release([place])

    run(test)


def place(stored: TensorStore, regions: RegionRegistry, name: str) -> InRegion:
    """Where a tensor lies now."""
    (found,) = regions.use([stored.find("", [name])[name].part])
    regions.release([found])
    return found


def test_the_file_of_a_dropped_tensor_serves_the_next_of_its_size() -> None:
    async def test(stored: TensorStore, regions: RegionRegistry, arena: Arena) -> None:
        forgotten: list[int] = []
        regions.forgotten.append(forgotten.append)
        kept(stored, "", "a")
        first = place(stored, regions, "a")
        stored.drop("", "a")
        assert stored.used_bytes == 0
        kept(stored, "", "b")
        second = place(stored, regions, "b")
        # Workers have it mapped still; what they keep on a device is of another version.
        assert (second.file, second.version) == (first.file, first.version + 1)
        assert second.kept
        assert not forgotten
        # One that is in use while it is dropped is kept for others when it is not any more.
        held = regions.use([stored.find("", ["b"])["b"].part])
        stored.drop("", "b")
        kept(stored, "", "c")
        assert place(stored, regions, "c").file != first.file
        regions.release(held)
        kept(stored, "", "d")
        assert place(stored, regions, "d").file == first.file

    run(test)


def test_spare_files_give_way_to_the_budget() -> None:
    async def test(stored: TensorStore, regions: RegionRegistry, arena: Arena) -> None:
        forgotten: list[int] = []
        regions.forgotten.append(forgotten.append)
        for name in "abcd":
            kept(stored, "", name)
        for name in "abcd":
            stored.drop("", name)
        assert not forgotten
        stored.make({"x": TensorSpec((20,), DType.FLOAT32)}, None)  # 80 of 100 bytes
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
