"""`Local` by XLA's FFI: the service's native code computes on XLA's own memory and stream.

It has a handler for each platform, whose structures are mirrored here; see
``inprocess/native/xla_front.cpp``. On a GPU it launches the calls that were prepared before without
Python. A compiled program names an operation by a text, not by an address, so that it can be stored
and exported.
"""

from __future__ import annotations

import ctypes
import json
import warnings
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import jax

from convgrad._bridges import find_in_process
from convgrad.errors import DeviceUnavailable

__all__ = ["PLATFORMS", "Native", "native"]

PLATFORMS = {"cpu": "cpu", "cuda": "CUDA"}
"""XLA's names of the platforms that `Local` computes on, by JAX's."""

_POINTER, _U64 = ctypes.c_void_p, ctypes.c_uint64
_DRIVER_FUNCTIONS = 9
_COMPUTED, _FAILED, _REMEMBERED = range(3)
_MESSAGE_BYTES = 4096
# Prepared operations that are kept, the most recently used ones.
_MOST_PREPARED = 4096
_Ask = ctypes.CFUNCTYPE(
    ctypes.c_int,
    _POINTER,  # the text
    _U64,
    ctypes.c_int32,  # the device
    _POINTER,  # the stream
    ctypes.POINTER(_U64),  # addresses of arguments and results
    _U64,
    _POINTER,  # where a message goes
)


class _Settings(ctypes.Structure):
    _fields_ = (("driver", _POINTER * _DRIVER_FUNCTIONS), ("ask", _Ask))


class _Entry(ctypes.Structure):
    _fields_ = (
        ("key", _POINTER),
        ("hash", _U64),
        ("words", _U64),
        ("plan", _POINTER),
        ("tensors", _U64),
    )


_settings = _Settings()
_remembered: list[Any] = []  # alive for good


class Native:
    """The handler of one platform.

    Parameters
    ----------
    platform : str
        One of `PLATFORMS`.

    Raises
    ------
    convgrad.DeviceUnavailable
        A part of the service that it needs is missing.
    """

    def __init__(self, platform: str) -> None:
        self._platform, self._target = platform, f"convgrad_{platform}"
        service = find_in_process()
        library = service.native_library()
        self._executor = service.executor(platform)
        if platform == "cuda":
            driver = service.native_driver()
            _settings.driver = (_POINTER * _DRIVER_FUNCTIONS).from_buffer_copy(driver)
        _settings.ask = _ASK
        library.convgrad_xla_settings(ctypes.byref(_settings))
        capsule = jax.ffi.pycapsule(library[f"convgrad_xla_{platform}"])
        jax.ffi.register_ffi_target(self._target, capsule, platform=PLATFORMS[platform])

    def call(
        self,
        operation: str,
        inputs: Mapping[str, jax.Array],
        parameters: Mapping[str, Any],
        outputs: Sequence[str],
    ) -> list[jax.Array]:
        """Call the handler, in a program that is being traced for this platform.

        Parameters are as of `Backend.compute`.

        Raises
        ------
        convgrad.ServiceError
            The operation is refused.
        """
        tensors = {name: (each.shape, str(each.dtype)) for name, each in inputs.items()}
        # Kernels are compiled while XLA compiles the program; its first run waits for them.
        planned = self._executor.plan(operation, tensors, parameters)
        room = planned.workspace_bytes
        results = [
            jax.ShapeDtypeStruct(spec.shape, spec.dtype.numpy) for spec in planned.outputs.values()
        ]
        if room:
            results.append(jax.ShapeDtypeStruct((room,), "uint8"))
        given = [inputs[name] for name in planned.inputs]
        text = json.dumps([operation, tensors, parameters, room])
        made = jax.ffi.ffi_call(self._target, results)(*given, operation=text)
        found = dict(zip(planned.outputs, made, strict=False))
        return [found[name] for name in outputs]


@lru_cache(maxsize=4)
def native(platform: str | None) -> Native | None:
    """Return the handler of a platform, or None, with a warning if it should have one."""
    if platform not in PLATFORMS:
        return None
    try:
        return Native(platform)
    except DeviceUnavailable as error:
        text = f"arrays on {platform} are copied to the host and computed there: {error}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
        return None


@lru_cache(maxsize=_MOST_PREPARED)
def _prepared(platform: str, device: int, text: bytes) -> tuple[Any, int]:
    """Return a prepared operation, and the bytes that calls of it have for its workspace."""
    operation, tensors, parameters, room = json.loads(text)
    executor = find_in_process().executor(platform, device)
    prepared = executor.prepare(operation, tensors, parameters)
    if prepared.workspace_bytes > room:
        raise DeviceUnavailable(
            f"{operation} needs a workspace of {prepared.workspace_bytes} bytes on this device, "
            f"and was compiled for another one with {room}"
        )
    return prepared, room


def _answer(
    text: int, size: int, device: int, stream: int | None, addresses: Any, count: int, message: int
) -> int:
    """Have native code remember a call, or compute it."""
    try:
        said = ctypes.string_at(text, size)
        prepared, room = _prepared("cpu" if device < 0 else "cuda", max(device, 0), said)
        tensors = len(prepared.inputs) + len(prepared.outputs)
        places, stream = addresses[:tensors], stream or 0
        plan = prepared.native(places, stream)
        if plan is not None:
            entry = _Entry(plan=plan.address, tensors=tensors)
            if find_in_process().native_library().convgrad_xla_remember(ctypes.byref(entry)):
                _remembered.append((plan, entry))
                return _REMEMBERED
        prepared.launch(places, addresses[tensors] if room else 0, stream)
    except Exception as error:  # noqa: BLE001 - XLA reports it
        kind = type(error)
        said = f"{kind.__module__}.{kind.__qualname__}: {error}".encode()[: _MESSAGE_BYTES - 1]
        ctypes.memmove(message, said + b"\0", len(said) + 1)
        return _FAILED
    return _COMPUTED


_ASK = _Ask(_answer)
