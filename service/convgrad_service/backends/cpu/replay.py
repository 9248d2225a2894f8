"""Replay of small problems: the launches of a problem are recorded once and repeated.

For a problem that takes a few microseconds, most of the time goes to choosing kernels and filling
in their arguments. A recording holds these arguments without tensors. It is made in a dry run, from
tensors of the problem's shapes and strides whose memory is never read, and a pointer in an argument
structure is found by the memory that it points into. What a recording cannot hold is run as
before: copies that are made on the host, and indices that the host checks.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from convgrad.dtypes import DType
from convgrad.errors import Internal
from convgrad_service.backends.cpu.arguments import Buffer, Control, address_of, aligned_array
from convgrad_service.backends.cpu.library import Kernel
from convgrad_service.backends.cpu.runner import Machine, Ran, Runner
from convgrad_service.backends.cpu.threads import Rehearsal, Workspaces
from convgrad_service.problems.base import Piece, Problem

__all__ = ["Recordings"]

Array = NDArray[Any]
# Larger problems take much longer than their preparation.
REPLAYED_BYTES = 8 * 1024 * 1024
KEPT = 1024
_POINTER = struct.Struct("=Q")
_INDICES = (DType.INT32, DType.INT64)


class Recordings:
    """The recordings of one backend, made when a problem is run for the second time."""

    def __init__(self) -> None:
        # None: run once so far; False: cannot be recorded.
        self._known: dict[Any, Recording | Literal[False] | None] = {}

    def of(
        self,
        machine: Machine,
        runner: Runner,
        problem: Problem,
        tensors: Mapping[str, Array],
        out: Mapping[str, Array] | None,
    ) -> Recording | None:
        """Return the recording of a problem on tensors with these strides, if there is one."""
        written = tuple((name, array.strides) for name, array in out.items()) if out else ()
        strides = tuple([array.strides for array in tensors.values()])
        key = problem, tuple(tensors), strides, written
        try:
            known = self._known[key]
        except KeyError:
            if len(self._known) >= KEPT:
                self._known.clear()
            self._known[key] = None
            return None
        if known is None:
            known = self._known[key] = _recorded(machine, runner, problem, tensors, out) or False
        return known or None


@dataclass(frozen=True, slots=True)
class Recording:
    """The launches of a problem; buffers are its inputs, then its outputs, then its workspaces."""

    launches: tuple[_Launch, ...]
    outputs: tuple[tuple[str, tuple[int, ...], np.dtype[Any]], ...]
    workspaces: tuple[int, ...]
    ran: Ran

    def run(self, machine: Machine, tensors: Mapping[str, Array]) -> Ran:
        """Compute the outputs of these tensors.

        Raises
        ------
        WrongIndices
            See `Workers.launch`.
        """
        outputs, addresses = {}, [*map(address_of, tensors.values())]
        for name, shape, dtype in self.outputs:
            array = machine.out.get(name)
            outputs[name] = aligned_array(shape, dtype) if array is None else array
            addresses.append(address_of(outputs[name]))
        workers = machine.workers
        taken = [workers.workspaces.take(size) for size in self.workspaces]
        addresses += [workspace.address for workspace in taken]
        try:
            for launch in self.launches:
                control = workers.launch(
                    launch.kernel,
                    launch.args(addresses),
                    scratch_bytes=launch.scratch_bytes,
                    tasks=launch.tasks,
                    indices=launch.indices,
                )
                if control.error:
                    raise Internal(f"{self.ran.kernel} was given too little work memory")
        finally:
            for workspace in taken:
                workers.workspaces.give(workspace)
        ran = self.ran
        return Ran(outputs, ran.kernel, ran.workspace_bytes, ran.pieces, ran.passed_over)


@dataclass(frozen=True, slots=True)
class _Launch:
    """A launch without tensors: where in the arguments the address of which buffer belongs."""

    kernel: Kernel
    template: ctypes.Structure
    pointers: tuple[tuple[int, int, int], ...]
    """(offset in the structure, index of the buffer, offset in the buffer), in bytes."""
    scratch_bytes: int
    tasks: int | None
    indices: int

    def args(self, addresses: Sequence[int]) -> ctypes.Structure:
        args = type(self.template).from_buffer_copy(self.template)
        for offset, buffer, delta in self.pointers:
            _POINTER.pack_into(args, offset, addresses[buffer] + delta)
        return args


class _Recorder(Rehearsal):
    """Records launches instead of running them, and the workspaces that they take."""

    def __init__(self, threads: int, buffers: Sequence[Array]) -> None:
        super().__init__(threads)
        self._buffers = list(buffers)
        self.taken: list[int] = []
        self.launches: list[_Launch] = []
        self.met: set[int] = set()
        self.holds_everything = True
        self.workspaces = _Taken(self)

    def take(self, size_bytes: int) -> Buffer:
        """Return a workspace, no two of which share memory."""
        buffer = Buffer.of(max(size_bytes, 1))
        self._buffers.append(buffer.memory)
        self.taken.append(buffer.memory.size)
        return buffer

    def to_run(self, pieces: Sequence[Piece]) -> Sequence[Piece]:
        return pieces

    def launch(
        self,
        kernel: Kernel,
        args: ctypes.Structure,
        *,
        scratch_bytes: int = 0,
        tasks: int | None = None,
        indices: int = 0,
        cancelled: object = None,
    ) -> Control:
        # While every buffer is alive: what a pointer points to is looked up by its address.
        pointers = []
        for offset, table in _pointers(type(args)):
            address = _POINTER.unpack_from(args, offset)[0]
            if not address or (table and hasattr(args, "keeps")):
                continue
            found = self._buffer_at(address)
            if found is None:
                self.holds_everything = False
                break
            self.met.add(found)
            pointers.append((offset, found, address - address_of(self._buffers[found])))
        launch = _Launch(kernel, args, tuple(pointers), scratch_bytes, tasks, indices)
        self.launches.append(launch)
        return Control.of(1)

    def _buffer_at(self, address: int) -> int | None:
        """Return the index of the one buffer with this address; None for memory of the host's."""
        ranges = map(_range, self._buffers)
        found = [i for i, (low, high) in enumerate(ranges) if low <= address < high]
        return found[0] if len(found) == 1 else None


class _Taken(Workspaces):
    """A recorder's workspaces."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__(0)
        self.take = recorder.take  # type: ignore[method-assign]

    def give(self, buffer: Buffer) -> None:
        """Keep it: see `_Recorder.take`."""


def _recorded(
    machine: Machine,
    runner: Runner,
    problem: Problem,
    tensors: Mapping[str, Array],
    out: Mapping[str, Array] | None,
) -> Recording | None:
    """Record a problem; None where its launches are not all that it does."""
    if problem.memory_bytes > REPLAYED_BYTES:
        return None
    places = dict(out or {})
    if not all(map(_is_plain, (*tensors.values(), *places.values()))):
        return None
    inputs = {name: _blank(array) for name, array in tensors.items()}
    outputs = {
        name: _blank(places[name]) if name in places else np.empty(spec.shape, spec.dtype.numpy)
        for name, spec in problem.outputs.items()
    }
    recorder = _Recorder(machine.workers.threads, [*inputs.values(), *outputs.values()])
    ran = runner(replace(machine, workers=recorder, out=outputs), problem, inputs, None)
    written = range(len(inputs), len(inputs) + len(outputs))
    if not recorder.holds_everything or not recorder.met.issuperset(written):
        return None  # it also reads or writes memory on the host
    given = sum(spec.elements for spec in problem.inputs.values() if spec.dtype in _INDICES)
    if given != sum(launch.indices for launch in recorder.launches):
        return None  # the host checks them
    if any(array is not outputs[name] for name, array in ran.outputs.items()):
        return None
    return Recording(
        tuple(recorder.launches),
        tuple((name, array.shape, array.dtype) for name, array in outputs.items()),
        tuple(recorder.taken),
        replace(ran, outputs={}),
    )


def _is_plain(array: Array) -> bool:
    """Whether an array has elements, whose distances are whole and not negative."""
    return array.size > 0 and all(
        stride >= 0 and stride % array.itemsize == 0 for stride in array.strides
    )


def _blank(array: Array) -> Array:
    """Return an uninitialised array of the same shape, dtype and strides."""
    low, high = _range(array)
    return np.ndarray(array.shape, array.dtype, np.empty(high - low, np.uint8), 0, array.strides)


def _range(array: Array) -> tuple[int, int]:
    """Return the addresses of the first byte and past the last one; strides are not negative."""
    reach = sum((n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True))
    start = address_of(array)
    return start, start + reach + array.itemsize


@lru_cache
def _pointers(kind: type[ctypes.Structure]) -> tuple[tuple[int, bool], ...]:
    """Return the offsets of a structure's pointers, and whether they are to tables of its own."""
    return tuple(_pointers_in(kind, 0))


def _pointers_in(kind: Any, start: int) -> Iterator[tuple[int, bool]]:
    tables = getattr(kind, "TABLES", ())
    for name, field, *_ in kind._fields_:
        offset = start + getattr(kind, name).offset
        if field is ctypes.c_void_p:
            yield offset, name in tables
        elif issubclass(field, ctypes.Structure):
            yield from _pointers_in(field, offset)
        elif issubclass(field, ctypes.Array) and issubclass(field._type_, ctypes.Structure):
            size = ctypes.sizeof(field._type_)
            for index in range(field._length_):
                yield from _pointers_in(field._type_, offset + index * size)
