"""Where `CudaBackend` has its outputs written, with a CUDA made of plain memory and kernels that
fill what they are given: results that stay on the device, and their copies on the host."""

from __future__ import annotations

import contextlib
import ctypes
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from convgrad.contract import OPERATIONS, validate
from convgrad.errors import DeadlineExceeded
from convgrad_service.backends.cuda import backend as module
from convgrad_service.backends.cuda import device_tensors, memory, pinned
from convgrad_service.backends.cuda.backend import CudaBackend
from convgrad_service.backends.cuda.memory import Lane, arena_of
from convgrad_service.backends.cuda.nvrtc import CompileError
from convgrad_service.backends.cuda.pinned import Pinned
from convgrad_service.backends.cuda.residents import Mirrored, Residents
from convgrad_service.plans.cuda.program import CudaPlan
from convgrad_service.problems import Problem, problem_from
from tests.support.tree_server import until

IMAGES = np.random.default_rng(0).standard_normal((4, 3, 16, 16), np.float32)
WEIGHT = np.random.default_rng(1).standard_normal((5, 3, 1, 1), np.float32)
TENSORS = {"input": IMAGES, "weight": WEIGHT}


class FakeRuntime:
    memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice = 1, 2, 3  # noqa: N815 - CUDA's

    def __init__(self) -> None:
        self.uploaded_bytes = 0

    class CUDARuntimeError(Exception):
        pass

    def memcpyAsync(  # noqa: N802
        self, target: int, source: int, size: int, kind: int, stream: int
    ) -> None:
        self.uploaded_bytes += size * (kind == self.memcpyHostToDevice)
        ctypes.memmove(target, source, size)

    def memcpy2DAsync(  # noqa: N802
        self, target: int, pitch: int, source: int, source_pitch: int, width: int, count: int,
        kind: int, stream: int,
    ) -> None:  # fmt: skip
        for row in range(count):
            self.memcpyAsync(target + row * pitch, source + row * source_pitch, width, kind, 0)

    def memcpy2D(self, *arguments: int) -> None:  # noqa: N802
        self.memcpy2DAsync(*arguments, 0)

    def hostRegister(self, *_: int) -> None:  # noqa: N802
        """Every page may be locked."""

    def hostUnregister(self, address: int) -> None:  # noqa: N802
        """And let go."""


class FakeEvent:
    def __init__(self, disable_timing: bool = False) -> None: ...

    def record(self, stream: Any) -> None: ...

    def synchronize(self) -> None: ...


class FakeStream(contextlib.nullcontext[None]):
    ptr = 7

    def __init__(self, non_blocking: bool = True) -> None:
        super().__init__()

    def synchronize(self) -> None: ...

    def wait_event(self, event: Any) -> None: ...


class FakeMemory:
    """On 256 bytes, as CUDA allocates."""

    def __init__(self, size: int) -> None:
        self._bytes = np.zeros(size + 256, np.uint8)
        self.ptr = -(-self._bytes.ctypes.data // 256) * 256


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime()


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch, runtime: FakeRuntime) -> Iterator[CudaBackend]:
    """One whose kernels write the sums of the inputs' elements plus 0, 1, 2, … to each output."""
    cuda = SimpleNamespace(
        runtime=runtime,
        Event=FakeEvent,
        Stream=FakeStream,
        Device=lambda _: contextlib.nullcontext(),
        alloc=FakeMemory,
        alloc_pinned_memory=lambda size: (ctypes.c_ubyte * size)(),
        get_elapsed_time=lambda begin, end: 1.0,
    )
    for each in (module, memory, device_tensors, pinned):
        monkeypatch.setattr(each, "import_cupy", lambda: SimpleNamespace(cuda=cuda))
    made = object.__new__(CudaBackend)
    made._cuda, made._index, made._poison, made._fault = cuda, 0, False, None
    plan = CudaPlan("fake", 0, 1, (), (), (), ())
    made._prepared = lambda problem: (plan, arena_of(problem, plan))  # type: ignore[assignment]
    made._parts = lambda problem: 1  # type: ignore[method-assign]
    made._kernels = SimpleNamespace(  # type: ignore[assignment]
        prepare=lambda steps: None, compile_ahead=lambda steps: None
    )
    made._graphs = SimpleNamespace(run=filled(lambda: made._now))  # type: ignore[assignment, attr-defined]
    made._residents = Residents(made._uploaded, made._room_for)
    made._pinned = Pinned()
    with ThreadPoolExecutor(4) as copiers:
        made._lanes = queue.SimpleQueue()
        made._lanes.put(Lane(copiers, made._pinned))
        yield made


def filled(problem: Callable[[], Problem]) -> Callable[..., None]:
    def run(plan: CudaPlan, addresses: dict[str, int], stream: Any) -> None:
        def at(name: str, spec: Any) -> NDArray[np.float32]:
            raw = (ctypes.c_ubyte * spec.size_bytes).from_address(addresses[name])
            return np.frombuffer(raw, np.float32)

        total = sum(
            float(at(name, spec).sum(dtype=np.float64)) for name, spec in problem().inputs.items()
        )
        for name, spec in problem().outputs.items():
            at(name, spec)[...] = np.arange(spec.elements, dtype=np.float32) + np.float32(total)

    return run


def run(backend: CudaBackend, tensors: dict[str, Any], **more: Any) -> tuple[Problem, Any]:
    given = {name: np.zeros(tensor.shape, np.float32) for name, tensor in tensors.items()}
    problem = problem_from("conv_fwd", validate(OPERATIONS["conv_fwd"].request, given))
    backend._now = problem  # type: ignore[attr-defined]
    return problem, backend.run(problem, tensors, **more).outputs["output"]


def wanted(tensors: dict[str, NDArray[Any]], shape: tuple[int, ...]) -> NDArray[np.float32]:
    total = sum(float(tensor.sum(dtype=np.float64)) for tensor in tensors.values())
    return (np.arange(np.prod(shape), dtype=np.float32) + np.float32(total)).reshape(shape)


@pytest.mark.parametrize("locked", [True, False])
def test_a_kept_result_is_on_the_device_and_on_the_host(
    backend: CudaBackend, runtime: FakeRuntime, locked: bool
) -> None:
    host = np.zeros((4, 5, 16, 16), np.float32)
    if locked:  # else it goes by way of staging buffers
        backend.adopt(host.ctypes.data, host.nbytes)
    place = backend.resident_place(3, 0, host)
    _, found = run(backend, TENSORS, out={"output": place})
    expected = wanted(TENSORS, host.shape)
    assert found is place
    assert (host == expected).all()
    before = runtime.uploaded_bytes
    kept = backend.resident(3, 0, host)
    host[...] = 0  # what is computed with lies on the device
    _, plain = run(backend, {"input": kept, "weight": np.zeros((2, 5, 1, 1), np.float32)})
    assert runtime.uploaded_bytes == before + 2 * 5 * 4
    assert (plain == wanted({"input": expected}, plain.shape)).all()


def test_a_part_of_a_kept_result_goes_where_it_belongs(
    backend: CudaBackend, runtime: FakeRuntime
) -> None:
    host = np.zeros((4, 5, 16, 16), np.float32)
    for start, stop in ((0, 1), (1, 4)):
        part = {"input": IMAGES[start:stop], "weight": WEIGHT}
        place = backend.resident_place(3, 0, host)[slice(start, stop),]
        _, found = run(backend, part, out={"output": place})
        assert found is place
        assert (host[start:stop] == wanted(part, (stop - start, 5, 16, 16))).all()
    expected, before = host.copy(), runtime.uploaded_bytes
    kept = backend.resident(3, 0, host)
    assert runtime.uploaded_bytes == before
    back = np.zeros_like(host)
    kept.read(back)
    assert (back == expected).all()


def test_what_lies_scattered_is_computed_elsewhere_and_put_there(backend: CudaBackend) -> None:
    host = np.zeros((4, 5, 32, 16), np.float32)
    rows = (slice(None), slice(None), slice(16, 32))
    place = backend.resident_place(3, 0, host)[rows]
    assert isinstance(place, Mirrored)
    _, found = run(backend, TENSORS, out={"output": place})
    assert isinstance(found, np.ndarray)
    place.fill(found)
    back = np.zeros_like(host)
    backend.resident_place(3, 0, host).device.read(back)
    assert (back[rows] == wanted(TENSORS, (4, 5, 16, 16))).all()
    assert (back == host).all()


def test_a_request_that_waits_for_a_compiler_takes_no_lane(backend: CudaBackend) -> None:
    compiled: Future[None] = Future()
    ahead: list[Future[None] | None] = [compiled, None]
    backend._kernels.compile_ahead = lambda steps: ahead.pop(0)  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as other:
        cold = other.submit(run, backend, TENSORS)
        until(lambda: len(ahead) == 1)
        _, warm = run(backend, TENSORS)
        assert not cold.done()
        compiled.set_result(None)
        assert (cold.result()[1] == warm).all()


def test_one_that_nobody_wants_any_more_stops_waiting_for_a_compiler(backend: CudaBackend) -> None:
    compiled: Future[None] = Future()
    backend._kernels.compile_ahead = lambda steps: compiled  # type: ignore[method-assign]
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(DeadlineExceeded):
        run(backend, TENSORS, cancelled=cancelled)
    assert compiled.cancelled()


def test_one_whose_kernels_do_not_compile_fails_and_no_other(backend: CudaBackend) -> None:
    failed: Future[None] = Future()
    failed.set_exception(CompileError("refused"))
    ahead: list[Future[None] | None] = [failed, None]
    backend._kernels.compile_ahead = lambda steps: ahead.pop(0)  # type: ignore[method-assign]
    with pytest.raises(CompileError):
        run(backend, TENSORS)
    run(backend, TENSORS)
