"""The arena's allocator and the arena itself."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from convgrad.dtypes import DType
from convgrad_service.engine.memory.arena import PAGE_BYTES, Arena, FreeList
from convgrad_service.engine.memory.tensor_layout import ALIGNMENT_BYTES, pack_offsets
from convgrad_service.problems.base import TensorSpec

PAGES = 40
START = 3 * PAGE_BYTES


class Taking(RuleBasedStateMachine):
    """Random allocations and frees, checked against a map of the owners of all pages."""

    places = Bundle("places")

    def __init__(self) -> None:
        super().__init__()
        self.subject = FreeList(START, PAGES * PAGE_BYTES)
        self.owner: list[int | None] = [None] * PAGES
        self.turn = 0

    @rule(target=places, size=st.integers(1, 20 * PAGE_BYTES))
    def take(self, size: int) -> tuple[int, int] | None:
        pages = -(-size // PAGE_BYTES)
        longest = max(len(run) for run in self._map().split("x"))
        offset = self.subject.allocate(size)
        if offset is None:
            assert longest < pages, "refused although there is room"
            return None
        first = (offset - START) // PAGE_BYTES
        assert offset == START + first * PAGE_BYTES
        assert self.owner[first : first + pages] == [None] * pages, "overlaps another"
        self.turn += 1
        self.owner[first : first + pages] = [self.turn] * pages
        assert self._map().find("." * pages, 0, first) < 0, "not the lowest"
        return offset, size

    @rule(place=consumes(places))
    def give(self, place: tuple[int, int] | None) -> None:
        if place is None:
            return
        offset, size = place
        self.subject.free(offset, size)
        first, pages = (offset - START) // PAGE_BYTES, -(-size // PAGE_BYTES)
        self.owner[first : first + pages] = [None] * pages

    @invariant()
    def nothing_is_lost(self) -> None:
        assert self.subject.used_bytes == self._map().count("x") * PAGE_BYTES

    def _map(self) -> str:
        return "".join("." if owner is None else "x" for owner in self.owner)

    def teardown(self) -> None:
        for offset, size in self._held():
            self.subject.free(offset, size)
        assert self.subject.allocate(PAGES * PAGE_BYTES) == START, "still cut up"

    def _held(self) -> list[tuple[int, int]]:
        held = []
        for turn in sorted({owner for owner in self.owner if owner is not None}):
            first = self.owner.index(turn)
            held.append((START + first * PAGE_BYTES, self.owner.count(turn) * PAGE_BYTES))
        return held


TestTaking = Taking.TestCase


@given(st.lists(st.integers(1, 10**6), max_size=8))
def test_packed_tensors_are_aligned_and_disjoint(sizes: list[int]) -> None:
    specs = [TensorSpec((size,), DType.BFLOAT16) for size in sizes]
    offsets, total = pack_offsets(specs)
    end = 0
    for offset, spec in zip(offsets, specs, strict=True):
        assert offset >= end
        assert offset % ALIGNMENT_BYTES == 0
        end = offset + spec.size_bytes
    assert end <= total < end + ALIGNMENT_BYTES


def test_mappings_share_memory() -> None:
    arena = Arena.create(16 * PAGE_BYTES)
    other = Arena(os.dup(arena.descriptor))
    spec = TensorSpec((2, 3), DType.FLOAT32)
    arena.array(PAGE_BYTES, spec)[...] = np.arange(6).reshape(2, 3)
    assert other.array(PAGE_BYTES, spec).tolist() == [[0, 1, 2], [3, 4, 5]]
    other.view(0, 3)[:] = b"abc"
    assert bytes(arena.view(0, 4)) == b"abc\0"
    other.close()
    arena.close()


def test_arena_cannot_be_resized() -> None:
    arena = Arena.create(16 * PAGE_BYTES)
    for size in (PAGE_BYTES, 32 * PAGE_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.descriptor, size)
    arena.close()


def test_pages_are_resident_from_write_to_discard() -> None:
    arena = Arena.create(2**40)  # more than any machine has
    assert arena.resident_bytes() == 0
    arena.view(2**39, 2**20)[:] = b"x" * 2**20
    assert arena.resident_bytes() == 2**20
    arena.discard(2**39, 2**20)
    assert arena.resident_bytes() == 0
    assert bytes(arena.view(2**39, 4)) == bytes(4)
    arena.close()
