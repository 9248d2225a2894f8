"""Tensors that stay on the server: by owner and name, within a budget, for a time.

Each lies in an anonymous memory file of its own, which workers map as they map a client's shared
memory: a request that names it reads it in place, and a result to be kept is computed into it. It
outlives every worker, and it goes when its time is over since it was last used.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from convgrad.contract import Operation
from convgrad.errors import MalformedRequest, NotFound, Overloaded, ProblemTooLarge
from convgrad.wire.sentences import shown
from convgrad_service.engine.memory.arena import Arena
from convgrad_service.engine.shm.registry import RegionPart, RegionRegistry
from convgrad_service.problems.base import TensorSpec

__all__ = ["Kept", "StoredInfo", "TensorStore", "TensorStoreClient", "stored_fields"]

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}")
# Two files each in a worker, which may have a thousand.
_MOST = 256
# No client can be called so.
_OWNER = "\0stored"
_Move = Callable[[int, int], int]
# How long a place for a result is held for a request that never comes to its end.
_PENDING_S = 900.0
# Files of dropped tensors are kept for others of their size: a training step stores as much as the
# one before, and memory that a GPU copies from takes longer to make ready than to compute with.
_SPARE_S = 10.0
_MOST_SPARES = 16


class Kept(NamedTuple):
    """A stored tensor as a request uses it: what it is, and where."""

    spec: TensorSpec
    part: RegionPart


class StoredInfo(NamedTuple):
    """A stored tensor as its owner sees it."""

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
    """Drops it when its time is over."""


class _Spare(NamedTuple):
    size_bytes: int
    timer: asyncio.TimerHandle


class TensorStore:
    """All stored tensors. For the loop's thread.

    ``longest_s`` bounds the time to live, and is what a tensor gets for which none was asked.
    """

    def __init__(
        self, regions: RegionRegistry, arena: Arena, *, budget_bytes: int, longest_s: float
    ) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._regions, self._arena, self._longest_s = regions, arena, longest_s
        self._numbers = 0
        self._count = 0
        self._tensors: dict[tuple[str, str], _Tensor] = {}
        self._pending: dict[str, _Tensor] = {}
        # By their files' numbers, the oldest first.
        self._spares: dict[int, _Spare] = {}

    def find(self, owner: str, names: Iterable[str]) -> dict[str, Kept]:
        """The owner's tensors of these names, whose time begins anew.

        Raises
        ------
        NotFound
            There is none of a name.
        """
        found = {}
        for name in names:
            tensor = self._of(owner, name)
            tensor.expires_s = time.monotonic() + tensor.time_to_live_s
            found[name] = Kept(tensor.spec, tensor.part)
        return found

    def make(
        self, specs: Mapping[str, TensorSpec], time_to_live_s: float | None
    ) -> dict[str, RegionPart]:
        """Room for tensors, which have no name until `commit` gives it to them.

        Raises
        ------
        MalformedRequest
            A name is none.
        ProblemTooLarge, Overloaded
            The budget could never hold them, or does not now.
        """
        for name in specs:
            _check(name)
        needed_bytes = sum(spec.size_bytes for spec in specs.values())
        if needed_bytes > self.budget_bytes:
            raise ProblemTooLarge(
                f"{needed_bytes:,} bytes are to be stored; this server keeps at most "
                f"{self.budget_bytes:,} bytes of tensors"
            )
        self._drop_expired()
        while self._spares and self._over_budget(specs.values()):
            self._discard(next(iter(self._spares)))
        if self.used_bytes + needed_bytes > self.budget_bytes or self._count >= _MOST:
            raise Overloaded(
                f"{self._count} stored tensors hold {self.used_bytes:,} of {self.budget_bytes:,} "
                f"bytes, and these need {needed_bytes:,} more",
                retry_after_s=self._next_s(),
            )
        lives_s = min(time_to_live_s or self._longest_s, self._longest_s)
        return {name: self._made(spec, lives_s) for name, spec in specs.items()}

    def commit(self, owner: str, parts: Mapping[str, RegionPart]) -> None:
        """Give tensors that `make` made their names, in the place of what had them before."""
        for name, part in parts.items():
            tensor = self._pending.pop(part.name, None)
            if tensor is None:
                raise NotFound(f"the result {shown(name)} took too long to be stored")
            tensor.timer.cancel()
            if (owner, name) in self._tensors:
                self._remove(owner, name)
            tensor.expires_s = time.monotonic() + tensor.time_to_live_s
            self._tensors[owner, name] = tensor
            self._watch(owner, name, tensor)

    def abandon(self, parts: Iterable[RegionPart]) -> None:
        """Drop tensors that will not be committed."""
        for part in parts:
            tensor = self._pending.pop(part.name, None)
            if tensor is not None:
                tensor.timer.cancel()
                self._regions.remove(_OWNER, part.name)

    async def write(self, part: RegionPart, offset: int) -> None:
        """Copy a tensor from the arena."""
        source = self._arena.view(offset, part.size_bytes)
        await self._moved(part, lambda file, at: os.pwrite(file, source[at:], at))

    async def read(self, part: RegionPart, offset: int) -> None:
        """Copy a tensor to the arena."""
        target = self._arena.view(offset, part.size_bytes)
        await self._moved(part, lambda file, at: os.preadv(file, [target[at:]], at))

    def drop(self, owner: str, name: str) -> None:
        """Forget a tensor; a request that uses it keeps it until it is done.

        Raises
        ------
        NotFound
            There is none of that name.
        """
        self._of(owner, name)
        self._remove(owner, name)

    def listed(self, owner: str) -> list[StoredInfo]:
        """The owner's tensors, in the order in which they came."""
        self._drop_expired()
        now_s = time.monotonic()
        return [
            StoredInfo(name, tensor.spec, tensor.expires_s - now_s)
            for (whose, name), tensor in self._tensors.items()
            if whose == owner
        ]

    def _of(self, owner: str, name: str) -> _Tensor:
        tensor = self._tensors.get((owner, name))
        if tensor is None or tensor.expires_s <= time.monotonic():
            raise NotFound(f"there is no stored tensor {shown(name)}")
        return tensor

    def _made(self, spec: TensorSpec, lives_s: float) -> RegionPart:
        self._numbers += 1
        self._count += 1
        self.used_bytes += spec.size_bytes
        part = RegionPart(_OWNER, str(self._numbers), 0, spec.size_bytes)

        def closed(number: int) -> bool:
            self._count -= 1
            self.used_bytes -= spec.size_bytes
            return self._spare(number, spec.size_bytes)

        for number, spare in self._spares.items():
            if spare.size_bytes == spec.size_bytes:
                self._spares.pop(number).timer.cancel()
                self._regions.adopt_again(number, part, closed)
                break
        else:
            self._regions.adopt(part, _memory_file(spec.size_bytes), closed)
        timer = asyncio.get_running_loop().call_later(_PENDING_S, self.abandon, [part])
        self._pending[part.name] = _Tensor(spec, part, lives_s, 0.0, timer)
        return part

    def _remove(self, owner: str, name: str) -> None:
        tensor = self._tensors.pop((owner, name))
        tensor.timer.cancel()
        self._regions.remove(_OWNER, tensor.part.name)

    def _over_budget(self, specs: Iterable[TensorSpec]) -> bool:
        """Whether tensors and spare files together would take too much with these besides."""
        spares = [spare.size_bytes for spare in self._spares.values()]
        held_bytes = self.used_bytes + sum(spares)
        for spec in specs:
            if spec.size_bytes in spares:
                spares.remove(spec.size_bytes)
            else:
                held_bytes += spec.size_bytes
        return held_bytes > self.budget_bytes

    def _spare(self, number: int, size_bytes: int) -> bool:
        """Whether to keep the file of a dropped tensor for a while."""
        spare_bytes = sum(spare.size_bytes for spare in self._spares.values())
        kept_bytes = self.used_bytes + spare_bytes + size_bytes
        if kept_bytes > self.budget_bytes or len(self._spares) >= _MOST_SPARES:
            return False
        timer = asyncio.get_running_loop().call_later(_SPARE_S, self._discard, number)
        self._spares[number] = _Spare(size_bytes, timer)
        return True

    def _discard(self, number: int) -> None:
        if (spare := self._spares.pop(number, None)) is not None:
            spare.timer.cancel()
            self._regions.discard(number)

    async def _moved(self, part: RegionPart, move: _Move) -> None:
        """Copy piece by piece in a thread, the file held meanwhile."""
        places = self._regions.use([part])
        descriptor = self._regions.descriptor(places[0].file)

        def copy() -> None:
            done = 0
            while done < part.size_bytes:
                done += move(descriptor, done)

        copying = asyncio.get_running_loop().run_in_executor(None, copy)
        copying.add_done_callback(lambda _: self._regions.release(places))
        await asyncio.shield(copying)

    def _watch(self, owner: str, name: str, tensor: _Tensor) -> None:
        """Drop a tensor when its time is over, as a use may have put it off."""
        if self._tensors.get((owner, name)) is not tensor:
            return
        left_s = tensor.expires_s - time.monotonic()
        if left_s <= 0:
            self._remove(owner, name)
        else:
            loop = asyncio.get_running_loop()
            tensor.timer = loop.call_later(left_s, self._watch, owner, name, tensor)

    def _drop_expired(self) -> None:
        for (owner, name), tensor in list(self._tensors.items()):
            if tensor.expires_s <= time.monotonic():
                self._watch(owner, name, tensor)

    def _next_s(self) -> float:
        """Seconds until something expires."""
        soonest_s = min((tensor.expires_s for tensor in self._tensors.values()), default=0.0)
        return min(max(soonest_s - time.monotonic(), 1.0), 60.0)


class Ask(Protocol):
    """Calls a method of the hub's `TensorStore`, wherever that is."""

    async def __call__(self, method: str, *arguments: Any) -> Any: ...


class TensorStoreClient:
    """`TensorStore` as a front end asks it: the same methods, awaited."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    async def find(self, owner: str, names: Iterable[str]) -> Mapping[str, Kept]:
        """See `TensorStore.find`."""
        found: Mapping[str, Kept] = await self._ask("find", owner, list(names))
        return found

    async def make(
        self, specs: Mapping[str, TensorSpec], time_to_live_s: float | None = None
    ) -> Mapping[str, RegionPart]:
        """See `TensorStore.make`."""
        made: Mapping[str, RegionPart] = await self._ask("make", dict(specs), time_to_live_s)
        return made

    async def commit(self, owner: str, parts: Mapping[str, RegionPart]) -> None:
        """See `TensorStore.commit`."""
        await self._ask("commit", owner, dict(parts))

    async def abandon(self, parts: Iterable[RegionPart]) -> None:
        """See `TensorStore.abandon`."""
        await self._ask("abandon", list(parts))

    async def write(self, part: RegionPart, offset: int) -> None:
        """See `TensorStore.write`."""
        await self._ask("write", part, offset)

    async def read(self, part: RegionPart, offset: int) -> None:
        """See `TensorStore.read`."""
        await self._ask("read", part, offset)

    async def drop(self, owner: str, name: str) -> None:
        """See `TensorStore.drop`."""
        await self._ask("drop", owner, name)

    async def listed(self, owner: str) -> list[StoredInfo]:
        """See `TensorStore.listed`."""
        infos: list[StoredInfo] = await self._ask("listed", owner)
        return infos


def stored_fields(operation: Operation, fields: Mapping[str, Any]) -> dict[str, str]:
    """The tensors of a request that name stored ones.

    Raises
    ------
    MalformedRequest
        What names them is no object of names, or a tensor is no such field or is given as well.
    """
    named = fields["stored"]
    if not isinstance(named, Mapping) or not all(isinstance(name, str) for name in named.values()):
        raise MalformedRequest(
            f'stored: expected an object of names such as {{"weight": "w1"}}, got {shown(named)}'
        )
    for field in named:
        if field not in operation.tensors:
            tensors = ", ".join(operation.tensors)
            raise MalformedRequest(
                f"stored: {operation.name} has no tensor {shown(field)}; it has {tensors}"
            )
        if field in fields:
            raise MalformedRequest(f"{field} is given and named as stored; expected one of them")
    return dict(named)


def _memory_file(size_bytes: int) -> int:
    """An anonymous file that nobody can make shorter."""
    descriptor = os.memfd_create("convgrad-stored", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size_bytes)
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def _check(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise MalformedRequest(
            f"a stored tensor cannot be called {shown(name)}: expected 1 to 128 letters, digits, "
            "_, - and ., and none of the last two first"
        )
