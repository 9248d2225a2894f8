"""The shared-memory regions that clients have registered: whose they are, and who uses them.

A region is a part of a file below /dev/shm. The server opens the file when it is registered and
knows it by its descriptor from then on, so a client may remove the name at once, and nothing is
left behind when it dies. Workers map the file and compute from and to the client's own pages.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from convgrad.errors import InvalidProblem, MalformedRequest, NotFound, Overloaded
from convgrad.wire.sentences import shown

__all__ = ["ANONYMOUS", "InRegion", "RegionInfo", "RegionPart", "RegionRegistry"]

ANONYMOUS = ""
"""The owner of what is kept where clients have no keys: everybody."""

_FOLDER = Path("/dev/shm")  # noqa: S108 - what shm_open's names mean on Linux
# One file's name. Not a semaphore's, whose bytes are their owner's processes' alone.
_KEY = re.compile(r"/?(?!sem\.)[A-Za-z0-9_][A-Za-z0-9_.\-]{0,250}")
_MAX_NAME_CHARACTERS = 256
_OURS = "convgrad-"
"""How the names of our own client's files begin."""


class RegionInfo(NamedTuple):
    """A region as it was registered: of a file, or of a ``device``'s memory by its ``handle``."""

    name: str
    key: str
    offset: int
    size_bytes: int
    handle: bytes = b""
    device: int | None = None


class RegionPart(NamedTuple):
    """A part of a region, as a request names it."""

    owner: str
    name: str
    offset: int
    size_bytes: int


class InRegion(NamedTuple):
    """A place in a region; ``file`` is the number that the hub gave the region.

    Regions of the same ``identity`` are parts of one file, or one allocation on a ``device``. What
    lies in a ``kept`` one never changes, but for another ``version`` of it.
    """

    file: int
    offset: int
    identity: tuple[int, int] = (0, 0)
    device: int | None = None
    kept: bool = False
    version: int = 0


@dataclass(slots=True, eq=False)
class _Region:
    info: RegionInfo
    number: int
    descriptor: int | None
    identity: tuple[int, int]
    uses: int = 0
    gone: bool = False
    leaving: list[asyncio.Future[None]] = field(default_factory=list)
    closed: Callable[[int], bool] | None = None
    version: int = 0


class RegionRegistry:
    """All registered regions. For the loop's thread.

    ``forgotten`` are called with the number of each region that nobody will use again.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._numbers = 0
        self._regions: dict[tuple[str, str], _Region] = {}
        self._by_number: dict[int, _Region] = {}
        self.forgotten: list[Callable[[int], None]] = []

    def __len__(self) -> int:
        """How many are registered, those that were adopted apart."""
        return sum(region.closed is None for region in self._regions.values())

    def register(self, owner: str, info: RegionInfo) -> None:
        """Open a region's file; of one on a device only a worker can, which has done it once.

        Raises
        ------
        MalformedRequest
            The owner has a region of that name, the key is not a file's name, or the file is not
            there, not ours to open, or smaller than the region.
        Overloaded
            There are as many regions as may be.
        """
        if not 0 < len(info.name) <= _MAX_NAME_CHARACTERS:
            raise MalformedRequest(
                f"a region's name has {len(info.name)} characters; expected 1 to "
                f"{_MAX_NAME_CHARACTERS}"
            )
        if (owner, info.name) in self._regions:
            raise MalformedRequest(f"the region {shown(info.name)} is registered already")
        self._drop_orphans()
        if len(self) >= self._most:
            raise Overloaded(
                f"{self._most} regions are registered, the most there may be", retry_after_s=1.0
            )
        self._numbers += 1
        if info.device is None:
            descriptor = _opened(info)
            region = _Region(info, self._numbers, descriptor, _identity(descriptor))
        else:
            number = int.from_bytes(info.handle, "little")
            region = _Region(info, self._numbers, None, (-1 - info.device, number))
        self._regions[owner, info.name] = self._by_number[region.number] = region

    def adopt(self, part: RegionPart, descriptor: int, closed: Callable[[int], bool]) -> None:
        """Take over a file of the server's own, whole.

        ``closed`` is called with its number when it was removed and nothing uses it any more, and
        says whether to keep it open all the same, for `adopt_again` or `discard`.
        """
        self._numbers += 1
        info = RegionInfo(part.name, "", 0, part.size_bytes)
        region = _Region(info, self._numbers, descriptor, _identity(descriptor), closed=closed)
        self._regions[part.owner, part.name] = self._by_number[region.number] = region

    def adopt_again(self, number: int, part: RegionPart, closed: Callable[[int], bool]) -> None:
        """Use a file that was kept open for another tensor of its size.

        Workers have it mapped still, which for a GPU takes as long as to compute with it.
        """
        region = self._by_number[number]
        region.info = RegionInfo(part.name, "", 0, part.size_bytes)
        region.gone, region.closed = False, closed
        region.version += 1
        self._regions[part.owner, part.name] = region

    def discard(self, number: int) -> None:
        """Close a file that was kept open."""
        if (region := self._by_number.get(number)) is not None:
            self._end(region)

    def remove(self, owner: str, name: str) -> None:
        """Close a region, now or once nothing in flight uses it."""
        region = self._regions[owner, name]
        region.gone = True
        if not region.uses:
            self._close((owner, name), region)

    async def unregister(self, owner: str, name: str, *, on_device: bool = False) -> None:
        """Close a region, or with no name all of the owner's of its kind, once nothing in flight
        uses it.

        No request can use it from now on. Where nothing of that name is registered, nothing is
        done: whoever unregisters twice is right the second time too.
        """
        waits: list[asyncio.Future[None]] = []
        for key, region in self._of(owner, name, on_device=on_device):
            if not region.uses:
                self._close(key, region)
                continue
            region.leaving.append(asyncio.get_running_loop().create_future())
            waits.append(region.leaving[-1])
        if waits:
            await asyncio.wait(waits)

    def listed(self, owner: str, name: str, *, on_device: bool = False) -> list[RegionInfo]:
        """The owner's regions of a kind, or the one of that name.

        Raises
        ------
        NotFound
            The owner has no region of that name.
        """
        found = [region.info for _, region in self._of(owner, name, on_device=on_device)]
        if name and not found:
            raise _unknown(name)
        return found

    def use(self, parts: Sequence[RegionPart]) -> tuple[InRegion, ...]:
        """Where the parts are; their regions stay until `release` is called for each place.

        Raises
        ------
        NotFound
            A region is not registered, or is about to be closed.
        InvalidProblem
            A part is not within its region, or the file has become shorter.
        """
        found = [(self._used(part), part) for part in parts]
        for region, _ in found:
            region.uses += 1
        return tuple(
            InRegion(
                region.number,
                region.info.offset + part.offset,
                region.identity,
                region.info.device,
                region.closed is not None,
                region.version,
            )
            for region, part in found
        )

    def release(self, places: Sequence[InRegion]) -> None:
        """End the use of places that `use` gave."""
        for place in places:
            region = self._by_number[place.file]
            region.uses -= 1
            if not region.uses and (region.leaving or region.gone):
                key = next(key for key, each in self._regions.items() if each is region)
                self._close(key, region)

    def descriptor(self, number: int) -> int:
        """The file of a region, for a worker to map."""
        descriptor = self._by_number[number].descriptor
        assert descriptor is not None  # noqa: S101 - see `handle`
        return descriptor

    def handle(self, number: int) -> tuple[bytes, int] | None:
        """Handle and size of a region on a device, for its worker to open; None for a file."""
        info = self._by_number[number].info
        return None if info.device is None else (info.handle, info.size_bytes)

    def close(self) -> None:
        """Close every file."""
        for region in list(self._by_number.values()):
            self._end(region)
        self._regions.clear()

    def _drop_orphans(self) -> None:
        """Close what clients of ours have left behind: each locks its files while it lives."""
        for key, region in list(self._regions.items()):
            name, file = region.info.key.removeprefix("/"), region.descriptor
            if name.startswith(_OURS) and not region.uses and file and _is_unlocked(file):
                self._close(key, region)

    def _of(
        self, owner: str, name: str, *, on_device: bool
    ) -> Iterator[tuple[tuple[str, str], _Region]]:
        for key, region in list(self._regions.items()):
            kind = region.info.device is not None
            if key[0] == owner and kind == on_device and (not name or key[1] == name):
                yield key, region

    def _used(self, part: RegionPart) -> _Region:
        region = self._regions.get((part.owner, part.name))
        if region is None or region.leaving or region.gone:
            raise _unknown(part.name)
        end = part.offset + part.size_bytes
        if end > region.info.size_bytes:
            raise InvalidProblem(
                f"bytes {part.offset:,} to {end:,} of the region {shown(part.name)} were asked "
                f"for; it has {region.info.size_bytes:,}"
            )
        file = region.descriptor
        if file is not None and region.info.offset + end > os.fstat(file).st_size:
            raise InvalidProblem(
                f"the file of the region {shown(part.name)} is shorter than when it was registered"
            )
        return region

    def _close(self, key: tuple[str, str], region: _Region) -> None:
        del self._regions[key]
        if region.closed is None or not region.closed(region.number):
            self._end(region)

    def _end(self, region: _Region) -> None:
        del self._by_number[region.number]
        if region.descriptor is not None:
            os.close(region.descriptor)
        for forget in self.forgotten:
            forget(region.number)
        for future in region.leaving:
            if not future.done():
                future.set_result(None)


def _identity(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def _is_unlocked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return True


def _unknown(name: str) -> NotFound:
    return NotFound(f"there is no region {shown(name)}")


def _opened(info: RegionInfo) -> int:
    """The file of a region, which holds all of it."""
    if not _KEY.fullmatch(info.key):
        raise MalformedRequest(
            f"the key {shown(info.key)} is not the name of a shared-memory file: expected letters, "
            "digits, _, - and . after at most one /"
        )
    path = _FOLDER / info.key.removeprefix("/")
    try:
        # Not through links, which could lead anywhere, and not waiting, as for a pipe.
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path, flags)
    except OSError as error:
        raise MalformedRequest(
            f"the shared-memory file {shown(info.key)} cannot be opened: {error.strerror}"
        ) from None
    found = os.fstat(descriptor)
    end = info.offset + info.size_bytes
    if stat.S_ISREG(found.st_mode) and info.size_bytes > 0 and end <= found.st_size:
        return descriptor
    os.close(descriptor)
    raise MalformedRequest(
        f"the shared-memory file {shown(info.key)} has {found.st_size:,} bytes; a region of "
        f"{info.size_bytes:,} from {info.offset:,} is not in it"
    )
