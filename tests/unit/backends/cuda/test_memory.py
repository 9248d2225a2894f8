"""Uploads and downloads in stretches of pinned memory, with a CUDA made of plain memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from convgrad_service.backends.cuda import memory, pinned
from convgrad_service.backends.cuda.memory import Bytes, Lane
from convgrad_service.backends.cuda.pinned import Pinned


class FakeRuntime:
    """Copies when it is told to, and counts how often."""

    memcpyDeviceToHost, memcpyHostToDevice = 2, 1  # noqa: N815 - CUDA's own names

    def __init__(self) -> None:
        self.copies: list[tuple[int, int]] = []
        self.locked: list[tuple[int, int]] = []
        self.pooled: list[tuple[object, int]] = []
        self.refuses = False

    def memcpyAsync(  # noqa: N802
        self, target: int, source: int, size: int, kind: int, stream: int
    ) -> None:
        assert stream == 7
        self.copies.append((kind, size))
        ctypes.memmove(target, source, size)

    class CUDARuntimeError(Exception):
        pass

    def hostRegister(self, address: int, size: int, flags: int) -> None:  # noqa: N802
        if self.refuses:
            raise self.CUDARuntimeError
        self.locked.append((address, size))

    def hostUnregister(self, address: int) -> None:  # noqa: N802
        (found,) = (each for each in self.locked if each[0] == address)
        self.locked.remove(found)


class FakeEvent:
    def __init__(self, disable_timing: bool) -> None:
        assert disable_timing

    def record(self, stream: Any) -> None: ...

    def synchronize(self) -> None: ...


class FakeStream:
    """Is the current one inside a `with`, as CuPy's are."""

    current: FakeStream | None = None
    ptr = 7

    def __init__(self, non_blocking: bool) -> None:
        assert non_blocking

    def __enter__(self) -> FakeStream:
        FakeStream.current = self
        return self

    def __exit__(self, *_: object) -> None:
        FakeStream.current = None


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    runtime = FakeRuntime()

    def alloc(size: int) -> None:
        """Record which stream's pool gets the block, once it is freed."""
        runtime.pooled.append((FakeStream.current, size))

    cuda = SimpleNamespace(
        runtime=runtime,
        alloc=alloc,
        Event=FakeEvent,
        Stream=FakeStream,
        alloc_pinned_memory=lambda size: np.empty(size, np.uint8),
    )
    monkeypatch.setattr(memory, "import_cupy", lambda: SimpleNamespace(cuda=cuda))
    return runtime


@pytest.fixture
def lane(runtime: FakeRuntime) -> Iterator[Lane]:
    with ThreadPoolExecutor(memory.COPIERS) as copiers:
        yield Lane(copiers)


def tensors() -> list[tuple[int, NDArray[Any]]]:
    """At rising offsets, with gaps; of several types, one transposed, one at an odd address."""
    rng = np.random.default_rng(0)
    odd = np.frombuffer(rng.bytes(801), np.uint8)[1:].view(np.float64)
    arrays: list[NDArray[Any]] = [
        rng.standard_normal((3, 50)).astype(ml_dtypes.bfloat16),
        rng.standard_normal((20, 30)).T,
        odd,
        rng.integers(-5, 5, 7),
        rng.standard_normal((1,)).astype(np.float16),
        rng.standard_normal((4096,)).astype(np.float32),
    ]
    placed, offset = [], 0
    for array in arrays:
        placed.append((offset, array))
        offset += -(-array.nbytes // 256) * 256
    return placed


def test_the_pool_of_a_lane_starts_with_a_block(lane: Lane, runtime: FakeRuntime) -> None:
    assert runtime.pooled == []
    with ThreadPoolExecutor(memory.COPIERS) as copiers:
        pooled = Lane(copiers, pooled_bytes=2**20)
    assert runtime.pooled == [(pooled.stream, 2**20)]


@pytest.mark.parametrize("staging", [64, 1000, 4096, 2**20])
@pytest.mark.parametrize("shared", [1, 300, 2**20])
def test_there_and_back(
    monkeypatch: pytest.MonkeyPatch, lane: Lane, runtime: FakeRuntime, staging: int, shared: int
) -> None:
    monkeypatch.setattr(memory, "STAGING_BYTES", staging)
    monkeypatch.setattr(memory, "SHARED_COPY_BYTES", shared)
    placed = tensors()
    device = np.full(100_000, 0xEE, np.uint8)
    base = device.ctypes.data + 512
    lane.upload(placed, base)
    size = placed[-1][0] + placed[-1][1].nbytes
    assert len(runtime.copies) == -(-size // staging)
    for offset, array in placed:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        np.testing.assert_array_equal(device[512 + offset : 512 + offset + data.size], data)
    assert (device[:512] == 0xEE).all()
    assert (device[512 + size :] == 0xEE).all()

    for first in (0, 2):
        back = [(offset, np.zeros(array.shape, array.dtype)) for offset, array in placed[first:]]
        lane.download(back, base)
        for (_, found), (_, wanted) in zip(back, placed[first:], strict=True):
            assert found.tobytes() == np.ascontiguousarray(wanted).tobytes()


def test_what_fits_goes_in_one_copy(lane: Lane, runtime: FakeRuntime) -> None:
    device = np.zeros(100_000, np.uint8)
    lane.upload(tensors(), device.ctypes.data)
    assert [kind for kind, _ in runtime.copies] == [runtime.memcpyHostToDevice]
    back = [(offset, np.empty(array.shape, array.dtype)) for offset, array in tensors()[3:]]
    lane.download(back, device.ctypes.data)
    assert [kind for kind, _ in runtime.copies[1:]] == [runtime.memcpyDeviceToHost]


@pytest.fixture
def adopted(monkeypatch: pytest.MonkeyPatch, runtime: FakeRuntime) -> tuple[Pinned, Bytes]:
    """Memory of three granules and a bit, adopted."""
    monkeypatch.setattr(
        pinned, "import_cupy", lambda: SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    )
    monkeypatch.setattr(pinned, "GRANULE_BYTES", 4096)
    host = np.zeros(3 * 4096 + 100, np.uint8)
    subject = Pinned()
    subject.adopt(host.ctypes.data, host.nbytes)
    return subject, host


def test_memory_is_locked_when_it_is_used_and_copies_stay_within_a_piece(
    adopted: tuple[Pinned, Bytes], runtime: FakeRuntime
) -> None:
    subject, host = adopted
    start = host.ctypes.data
    assert subject.stretches(host[10:20]) == [(start + 10, 10)]
    assert runtime.locked == [(start, 4096)]
    assert subject.stretches(host[4000:12288]) == [
        (start + 4000, 96),
        (start + 4096, 4096),
        (start + 8192, 4096),
    ]
    assert subject.stretches(host[12200:]) == [(start + 12200, 88), (start + 12288, 100)]
    assert runtime.locked == [(start + 4096 * at, 4096) for at in range(3)] + [(start + 12288, 100)]


def test_what_lies_elsewhere_or_in_pieces_is_not_copied_directly(
    adopted: tuple[Pinned, Bytes], runtime: FakeRuntime
) -> None:
    subject, host = adopted
    assert subject.stretches(np.zeros(10)) is None
    assert subject.stretches(host[::2]) is None
    assert runtime.locked == []
    runtime.refuses = True
    assert subject.stretches(host[:10]) is None
    runtime.refuses = False
    assert subject.stretches(host[:10]) is None  # asked once, and never again


def test_several_ranges_are_adopted_and_let_go(
    adopted: tuple[Pinned, Bytes], runtime: FakeRuntime
) -> None:
    subject, host = adopted
    others = [np.zeros(5000, np.uint8) for _ in range(3)]
    for other in others:
        assert subject.stretches(other[:10]) is None
        subject.adopt(other.ctypes.data, other.nbytes)
    for memory_of in (*others, host):
        start = memory_of.ctypes.data
        assert subject.stretches(memory_of[4090:4100]) == [(start + 4090, 6), (start + 4096, 4)]
    assert len(runtime.locked) == 8
    subject.disown(others[1].ctypes.data)
    assert len(runtime.locked) == 6
    assert subject.stretches(others[1][:10]) is None
    assert subject.stretches(others[2][:10]) is not None
    # What is refused of one is not refused of another.
    subject.adopt(others[1].ctypes.data, others[1].nbytes)
    runtime.refuses = True
    assert subject.stretches(others[1][:10]) is None
    runtime.refuses = False
    assert subject.stretches(host[8192:8200]) is not None


def test_adopted_memory_goes_there_and_back_without_staging(
    adopted: tuple[Pinned, Bytes], runtime: FakeRuntime
) -> None:
    subject, host = adopted
    host[:] = np.random.default_rng(0).integers(0, 256, host.size)
    wanted = host.copy()
    device = np.zeros(20_000, np.uint8)
    with ThreadPoolExecutor(memory.COPIERS) as copiers:
        lane = Lane(copiers, subject)
        places = [(256, host[:5000]), (8192, host[6000:])]
        lane.upload(places, device.ctypes.data)
        np.testing.assert_array_equal(device[256:5256], wanted[:5000])
        np.testing.assert_array_equal(device[8192 : 8192 + host.size - 6000], wanted[6000:])
        host[:] = 0
        elsewhere = np.zeros(100, np.uint8)
        rest = lane.download_soon([*places, (300, elsewhere)], device.ctypes.data)
        assert [offset for offset, _ in rest] == [300]
        np.testing.assert_array_equal(host[:5000], wanted[:5000])
        np.testing.assert_array_equal(host[6000:], wanted[6000:])
        lane.download(rest, device.ctypes.data)
        np.testing.assert_array_equal(elsewhere, wanted[44:144])
        # One tensor elsewhere, and all go by way of staging, which copies the gaps too.
        before = len(runtime.copies)
        lane.upload([*places[:1], (8192, elsewhere)], device.ctypes.data)
        assert len(runtime.copies) == before + 1
