"""The handlers that XLA calls: what they ask Python for, and what they launch without it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import convgrad.jax as ours
from convgrad.errors import DeviceUnavailable, UnsupportedProblem
from convgrad.jax import _native
from convgrad_service import inprocess
from convgrad_service.inprocess import launch_plan

POINTER, I32, I64, SIZE = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_size_t
BASE = (("struct_size", SIZE), ("extensions", POINTER))


class Get(ctypes.Structure):
    """Arguments of XLA's functions that return a stream, or a device's number."""

    _fields_ = (*BASE, ("context", POINTER), ("found", I64))


class Create(ctypes.Structure):
    _fields_ = (*BASE, ("message", ctypes.c_char_p), ("code", I32))


class Buffer(ctypes.Structure):
    _fields_ = (*BASE, ("dtype", I32), ("data", POINTER), ("rank", I64), ("dims", POINTER))


class Items(ctypes.Structure):
    _fields_ = (*BASE, ("size", I64), ("types", POINTER), ("items", POINTER))


class Text(ctypes.Structure):
    _fields_ = (("data", ctypes.c_char_p), ("size", SIZE))


class Attributes(ctypes.Structure):
    _fields_ = (*BASE, ("size", I64), ("types", POINTER), ("names", POINTER), ("values", POINTER))


class Frame(ctypes.Structure):
    _fields_ = (
        *BASE,
        ("api", POINTER),
        ("context", POINTER),
        ("stage", I32),
        ("arguments", Items),
        ("results", Items),
        ("attributes", Attributes),
    )


class Xla:
    """Stands for XLA, its GPU and CUDA's driver, whose calls are noted."""

    def __init__(self) -> None:
        self.stream, self.device, self.status, self.error = 5, 0, 0, ""
        self.log: list[tuple[Any, ...]] = []
        self._kept: list[Any] = []
        functions = [
            self._function(self._create, ctypes.POINTER(Create), result=POINTER),
            *[0] * 3,
            self._function(self._get_stream, ctypes.POINTER(Get), result=POINTER),
            *[0] * 12,
            self._function(self._get_device, ctypes.POINTER(Get), result=POINTER),
        ]
        # The struct's size, extensions, the version, then its functions.
        self.api = (POINTER * 24)(0, 0, 0, 0, 3 << 32, 0, *functions)
        self.driver = launch_plan.Driver(
            cuMemsetD8Async=self._function(self._clear, POINTER, ctypes.c_ubyte, SIZE, POINTER),
        )

    def _function(self, run: Any, *kinds: Any, result: Any = I32) -> int | None:
        self._kept.append(ctypes.CFUNCTYPE(result, *kinds)(run))
        return ctypes.cast(self._kept[-1], POINTER).value

    def _get_stream(self, given: Any) -> int:
        given.contents.found = self.stream
        return 0

    def _get_device(self, given: Any) -> int:
        given.contents.found = self.device
        return 0

    def _create(self, given: Any) -> int:
        self.error = given.contents.message.decode()
        return 1

    def _clear(self, address: int, _: int, size: int, stream: int) -> int:
        self.log.append(("clear", address, size, stream))
        return self.status

    def call(self, text: bytes, addresses: list[list[int]], stage: int = 3) -> str:
        """Have the handler compute, and return its error."""
        lists = []
        for each in addresses:
            buffers = [Buffer(data=address) for address in each]
            pointers = (POINTER * len(each))(*map(ctypes.addressof, buffers))
            lists.append((Items(0, None, len(each), None, ctypes.addressof(pointers)), buffers))
            lists[-1][0].kept = pointers
        said = Text(text, len(text))
        values = (POINTER * 1)(ctypes.addressof(said))
        attributes = Attributes(0, None, 1, None, None, ctypes.addressof(values))
        api = ctypes.addressof(self.api)
        frame = Frame(0, None, api, None, stage, lists[0][0], lists[1][0], attributes)
        handler = inprocess.native_library().convgrad_xla_cuda
        handler.restype = POINTER
        self.error = ""
        found = handler(ctypes.byref(frame))
        assert (found is None) == (not self.error)
        return self.error


@pytest.fixture
def xla(monkeypatch: pytest.MonkeyPatch) -> Iterator[Xla]:
    fake = Xla()
    monkeypatch.setattr(inprocess, "native_driver", lambda: fake.driver)
    monkeypatch.setattr(jax.ffi, "register_ffi_target", lambda *_, **__: None)
    yield fake
    _native._prepared.cache_clear()


class Prepared:
    """Stands for an operation of two inputs, an output and a workspace that its plan clears."""

    workspace_bytes = 512

    def __init__(self, log: list[Any], device: int) -> None:
        self.inputs, self.outputs = {"a": 0, "b": 0}, {"c": 0}
        self._log, self._device = log, device
        self._kept: list[Any] = []

    def native(self, addresses: list[int], stream: int) -> Any:
        self._log.append((self._device, stream))
        step = launch_plan._Step(clear_bytes=512, clear_buffer=3)
        branch = launch_plan._Branch(ctypes.addressof(step), 1)
        offsets = (ctypes.c_uint64 * 1)(0)
        plan = launch_plan._Plan(ctypes.addressof(branch), 1, 0, ctypes.addressof(offsets), 1)
        self._kept += step, branch, offsets, plan
        return SimpleNamespace(address=ctypes.addressof(plan), kept=self)


@pytest.fixture
def asked(xla: Xla, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What Python has made plans for: devices and streams."""
    log: list[Any] = []

    def prepare(device: int, operation: str, *_: Any) -> Prepared:
        if operation == "refused":
            raise UnsupportedProblem("no kernel")
        return Prepared(log, device)

    def executor(kind: str, device: int = 0) -> Any:
        assert kind == "cuda"
        return SimpleNamespace(prepare=partial(prepare, device))

    monkeypatch.setattr(inprocess, "executor", executor)
    _native.Native("cuda")
    return log


FIRST, SECOND = [[256, 512], [1024, 2048]], [[4096, 512], [1024, 8192]]


def test_prepared_calls_are_launched_by_native_code(xla: Xla, asked: list[Any]) -> None:
    text = b'["conv_fwd", {}, {}, 512]'
    assert not xla.call(text, FIRST, stage=0), "XLA prepares: nothing to do"
    assert not asked
    for tensors in (FIRST, FIRST, SECOND):
        assert not xla.call(text, tensors)
    assert asked == [(0, 5)]
    assert xla.log == [("clear", 2048, 512, 5)] * 2 + [("clear", 8192, 512, 5)]
    # Another stream, device or operation is another call.
    xla.stream = 6
    assert not xla.call(text, FIRST)
    xla.device = 1
    assert not xla.call(text, FIRST)
    assert not xla.call(b'["conv_fwd", {}, {"groups": 2}, 512]', FIRST)
    assert asked[1:] == [(0, 6), (1, 6), (1, 6)]
    assert xla.log[-1] == ("clear", 2048, 512, 6)


def test_errors_are_xlas(xla: Xla, asked: list[Any]) -> None:
    assert xla.call(b'["refused", {}, {}, 0]', FIRST).endswith("UnsupportedProblem: no kernel")
    assert "workspace of 512 bytes" in xla.call(b'["conv_fwd", {}, {}, 256]', FIRST)
    assert "too many" in xla.call(b'["conv_fwd", {}, {}, 512]', [[256] * 9, [256] * 8])
    xla.status = 700
    assert "launching kernels failed" in xla.call(b'["failed", {}, {}, 512]', FIRST)
    assert not asked[1:]


def test_nothing_is_copied_and_programs_hold_no_addresses() -> None:
    x, weight = jnp.ones((2, 3, 8, 8), "float32"), jnp.ones((4, 3, 3, 3), "float32")

    def gradient(backend: ours.Backend) -> Any:
        def loss(x: jax.Array, weight: jax.Array) -> jax.Array:
            options = {"window_strides": (1, 1), "padding": "SAME", "backend": backend}
            return ours.conv_general_dilated(x, weight, **options).sum()

        return jax.jit(jax.grad(loss, (0, 1)))

    programs = [gradient(ours.Local()).lower(x, weight).as_text() for _ in range(2)]
    assert programs[0] == programs[1]
    assert "@convgrad_cpu" in programs[0]
    assert "callback" not in programs[0]


def test_a_gpu_that_the_service_cannot_use(xla: Xla, monkeypatch: pytest.MonkeyPatch) -> None:
    def executor(*_: Any) -> Any:
        raise DeviceUnavailable("CuPy is missing")

    monkeypatch.setattr(inprocess, "executor", executor)
    with pytest.warns(RuntimeWarning, match="cuda are copied to the host.*CuPy is missing"):
        assert _native.native.__wrapped__("cuda") is None
    assert _native.native("tpu") is None


def test_without_jit() -> None:
    x = jnp.arange(16.0).reshape(1, 4, 4, 1)
    with jax.disable_jit():
        found = ours.max_pool(x, (2, 2), (2, 2))
    assert found[0, :, :, 0].tolist() == [[5, 7], [13, 15]]
