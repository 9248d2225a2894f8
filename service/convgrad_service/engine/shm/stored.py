"""Tensors stored on the server by owner and name, within a budget and with a time to live.

Each is an anonymous memory file, which workers map like a client's shared memory: requests that
name a tensor read it in place, and outputs to be stored are computed into it. Stored tensors
outlive workers, and expire a set time after their last use.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from convgrad.contract import Operation
from convgrad.errors import MalformedRequest, NotFound, Overloaded, ProblemTooLarge
from convgrad.wire.sentences import shown
from convgrad_service.engine.memory.arena import Arena, memory_file
from convgrad_service.engine.shm.registry import RegionPart, RegionRegistry, out_of_files
from convgrad_service.problems.base import TensorSpec

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}")
# A worker needs two descriptors for each, and may have a thousand.
_MAX_TENSORS = 256
# Not a valid name of an API key.
_OWNER = "\0stored"
_Transfer = Callable[[int, int], int]
# How long memory for an output is kept if its request never ends.
_PENDING_S = 900.0
# Files of dropped tensors are reused for tensors of the same size: each training step stores as
# much as the last, and registering memory for a GPU's copies takes longer than computing with it.
# On a CPU, storing 4 MiB takes 1.2 to 1.4 times as long without.
_SPARE_S = 10.0
_MAX_SPARES = 16


class StoredTensor(NamedTuple):
    """A stored tensor as requests use it: its type and its memory."""

    spec: TensorSpec
    part: RegionPart


class StoredInfo(NamedTuple):
    """A stored tensor as its owner lists it."""

    name: str
    spec: TensorSpec
    expires_in_s: float


@dataclass(slots=True)
class _Tensor:
    spec: TensorSpec
    part: RegionPart
    time_to_live_s: float
    expires_s: float
    timer: asyncio.TimerHandle


class _Spare(NamedTuple):
    size_bytes: int
    timer: asyncio.TimerHandle


class TensorStore:
    """All stored tensors. For the event loop's thread.

    ``longest_s`` is the default and the maximum of the time to live.
    """

    def __init__(
        self, regions: RegionRegistry, arena: Arena, *, budget_bytes: int, longest_s: float
    ) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._regions, self._arena, self._longest_s = regions, arena, longest_s
        self._last_number = 0
        self._count = 0
        self._tensors: dict[tuple[str, str], _Tensor] = {}
        self._pending: dict[str, _Tensor] = {}
        # By region number, oldest first.
        self._spares: dict[int, _Spare] = {}

    def find(self, owner: str, names: Iterable[str]) -> dict[str, StoredTensor]:
        """Return the owner's tensors with these names, and restart their time to live.

        Raises
        ------
        NotFound
            A name is unknown.
        """
        found = {}
        for name in names:
            tensor = self._live(owner, name)
            tensor.expires_s = time.monotonic() + tensor.time_to_live_s
            found[name] = StoredTensor(tensor.spec, tensor.part)
        return found

    def allocate(
        self, specs: Mapping[str, TensorSpec], time_to_live_s: float | None = None
    ) -> dict[str, RegionPart]:
        """Allocate memory for tensors, which get their names with `commit`.

        Raises
        ------
        MalformedRequest
            A name is not valid.
        ProblemTooLarge
            The tensors exceed the whole budget.
        Overloaded
            The tensors exceed what is left of the budget.
        """
        for name in specs:
            _check_name(name)
        needed_bytes = sum(spec.size_bytes for spec in specs.values())
        if needed_bytes > self.budget_bytes:
            raise ProblemTooLarge(
                f"{needed_bytes:,} bytes are to be stored; this server keeps at most "
                f"{self.budget_bytes:,} bytes of tensors"
            )
        self._drop_expired()
        while self._spares and self._over_budget(specs.values()):
            self._discard(next(iter(self._spares)))
        if self.used_bytes + needed_bytes > self.budget_bytes or self._count >= _MAX_TENSORS:
            raise Overloaded(
                f"{self._count} stored tensors hold {self.used_bytes:,} of {self.budget_bytes:,} "
                f"bytes, and these need {needed_bytes:,} more",
                retry_after_s=self._next_s(),
            )
        lives_s = min(time_to_live_s or self._longest_s, self._longest_s)
        made: dict[str, RegionPart] = {}
        try:
            for name, spec in specs.items():
                made[name] = self._allocate(spec, lives_s)
        except BaseException:
            self.abandon(made.values())
            raise
        return made

    def commit(self, owner: str, parts: Mapping[str, RegionPart]) -> None:
        """Name tensors from `allocate`, replacing any with the same names."""
        for name, part in parts.items():
            tensor = self._pending.pop(part.name, None)
            if tensor is None:
                raise NotFound(f"the result {shown(name)} took too long to be stored")
            tensor.timer.cancel()
            if (owner, name) in self._tensors:
                self._remove(owner, name)
            tensor.expires_s = time.monotonic() + tensor.time_to_live_s
            self._tensors[owner, name] = tensor
            self._expire(owner, name, tensor)

    def abandon(self, parts: Iterable[RegionPart]) -> None:
        """Free tensors that will not be committed."""
        for part in parts:
            tensor = self._pending.pop(part.name, None)
            if tensor is not None:
                tensor.timer.cancel()
                self._regions.remove(_OWNER, part.name)

    async def write(self, part: RegionPart, offset: int) -> None:
        """Copy a tensor from the arena to the store."""
        source = self._arena.view(offset, part.size_bytes)
        await self._copy(part, lambda file, at: os.pwrite(file, source[at:], at))

    async def read(self, part: RegionPart, offset: int) -> None:
        """Copy a tensor from the store to the arena."""
        target = self._arena.view(offset, part.size_bytes)
        await self._copy(part, lambda file, at: os.preadv(file, [target[at:]], at))

    def drop(self, owner: str, name: str) -> None:
        """Delete a tensor; requests that use it can still finish.

        Raises
        ------
        NotFound
            The name is unknown.
        """
        self._live(owner, name)
        self._remove(owner, name)

    def list_tensors(self, owner: str) -> list[StoredInfo]:
        """Return the owner's tensors in the order in which they were stored."""
        self._drop_expired()
        now_s = time.monotonic()
        return [
            StoredInfo(name, tensor.spec, tensor.expires_s - now_s)
            for (whose, name), tensor in self._tensors.items()
            if whose == owner
        ]

    def _live(self, owner: str, name: str) -> _Tensor:
        tensor = self._tensors.get((owner, name))
        if tensor is None or tensor.expires_s <= time.monotonic():
            raise NotFound(f"there is no stored tensor {shown(name)}")
        return tensor

    def _allocate(self, spec: TensorSpec, lives_s: float) -> RegionPart:
        self._last_number += 1
        part = RegionPart(_OWNER, str(self._last_number), 0, spec.size_bytes)

        def on_unused(number: int) -> bool:
            self._count -= 1
            self.used_bytes -= spec.size_bytes
            return self._keep_spare(number, spec.size_bytes)

        for number, spare in self._spares.items():
            if spare.size_bytes == spec.size_bytes:
                self._spares.pop(number).timer.cancel()
                self._regions.reuse(number, part, on_unused)
                break
        else:
            self._regions.adopt(part, _memory_file(spec.size_bytes), on_unused)
        self._count += 1
        self.used_bytes += spec.size_bytes
        timer = asyncio.get_running_loop().call_later(_PENDING_S, self.abandon, [part])
        self._pending[part.name] = _Tensor(spec, part, lives_s, 0.0, timer)
        return part

    def _remove(self, owner: str, name: str) -> None:
        tensor = self._tensors.pop((owner, name))
        tensor.timer.cancel()
        self._regions.remove(_OWNER, tensor.part.name)

    def _over_budget(self, specs: Iterable[TensorSpec]) -> bool:
        """Return whether tensors, spare files and ``specs`` together exceed the budget."""
        spares = [spare.size_bytes for spare in self._spares.values()]
        held_bytes = self.used_bytes + sum(spares)
        for spec in specs:
            if spec.size_bytes in spares:
                spares.remove(spec.size_bytes)
            else:
                held_bytes += spec.size_bytes
        return held_bytes > self.budget_bytes

    def _keep_spare(self, number: int, size_bytes: int) -> bool:
        """Keep the file of a dropped tensor for a while if the budget allows; return whether."""
        spare_bytes = sum(spare.size_bytes for spare in self._spares.values())
        held_bytes = self.used_bytes + spare_bytes + size_bytes
        if held_bytes > self.budget_bytes or len(self._spares) >= _MAX_SPARES:
            return False
        timer = asyncio.get_running_loop().call_later(_SPARE_S, self._discard, number)
        self._spares[number] = _Spare(size_bytes, timer)
        return True

    def _discard(self, number: int) -> None:
        if (spare := self._spares.pop(number, None)) is not None:
            spare.timer.cancel()
            self._regions.discard(number)

    async def _copy(self, part: RegionPart, transfer: _Transfer) -> None:
        """Copy in a thread, with the file in use until the end."""
        slices = self._regions.acquire([part])
        descriptor = self._regions.descriptor(slices[0].region)

        def copy() -> None:
            done = 0
            while done < part.size_bytes:
                done += transfer(descriptor, done)

        copying = asyncio.get_running_loop().run_in_executor(None, copy)
        copying.add_done_callback(lambda _: self._regions.release(slices))
        await asyncio.shield(copying)

    def _expire(self, owner: str, name: str, tensor: _Tensor) -> None:
        """Drop a tensor if it has expired; otherwise check again when it will have."""
        if self._tensors.get((owner, name)) is not tensor:
            return
        left_s = tensor.expires_s - time.monotonic()
        if left_s <= 0:
            self._remove(owner, name)
        else:
            loop = asyncio.get_running_loop()
            tensor.timer = loop.call_later(left_s, self._expire, owner, name, tensor)

    def _drop_expired(self) -> None:
        for (owner, name), tensor in list(self._tensors.items()):
            if tensor.expires_s <= time.monotonic():
                self._expire(owner, name, tensor)

    def _next_s(self) -> float:
        """Return the seconds until a tensor expires, from 1 to 60."""
        soonest_s = min((tensor.expires_s for tensor in self._tensors.values()), default=0.0)
        return min(max(soonest_s - time.monotonic(), 1.0), 60.0)


def stored_fields(operation: Operation, fields: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of stored tensors in a request's fields, by field.

    Raises
    ------
    MalformedRequest
        ``stored`` is not a mapping of names, names an unknown field, or a field that is also given.
    """
    named = fields["stored"]
    if not isinstance(named, Mapping) or not all(isinstance(name, str) for name in named.values()):
        raise MalformedRequest(
            f'stored: expected an object of names such as {{"weight": "w1"}}, got {shown(named)}'
        )
    for field in named:
        if field not in operation.tensors:
            tensors = ", ".join(operation.tensors) or "none"
            raise MalformedRequest(
                f"stored: {operation.name} has no tensor {shown(field)}; it has {tensors}"
            )
        if field in fields:
            raise MalformedRequest(
                f"{field} is given both as a tensor and as a stored name; expected one of them"
            )
    return dict(named)


def _memory_file(size_bytes: int) -> int:
    try:
        return memory_file("convgrad-stored", size_bytes)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise out_of_files() from None
        raise


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise MalformedRequest(
            f"a stored tensor cannot be called {shown(name)}: expected 1 to 128 letters, digits, "
            "_, - and ., and not - or . first"
        )
