"""Registered shared-memory regions: their owners, and which are in use.

A region is part of a file in /dev/shm, or of a GPU's memory. The server opens the file when the
region is registered and uses the descriptor from then on, so a client may unlink the name at once
and leaves nothing behind when it dies. Workers map the file and compute in the client's own pages.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import re
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from convgrad.errors import InvalidProblem, MalformedRequest, NotFound, Overloaded
from convgrad.wire.sentences import shown

_SHM_DIRECTORY = Path("/dev/shm")  # noqa: S108 - where shm_open creates files on Linux
# A file name, but not a POSIX semaphore's.
_KEY = re.compile(r"/?(?!sem\.)[A-Za-z0-9_][A-Za-z0-9_.\-]{0,250}")
_MAX_NAME_CHARACTERS = 256
# Limit of all mappings together. A worker's address space has 2^47 bytes, and files may be sparse.
_MAX_MAPPED_BYTES = 2**45
# The prefix of files that the convgrad client creates.
_CLIENT_PREFIX = "convgrad-"


class RegionInfo(NamedTuple):
    """A registered region: part of the file ``key``, or a ``device``'s memory by IPC handle."""

    name: str
    key: str
    offset: int
    size_bytes: int
    handle: bytes = b""
    device: int | None = None


class RegionPart(NamedTuple):
    """A part of a region, by name, as in a request."""

    owner: str
    name: str
    offset: int
    size_bytes: int


class RegionSlice(NamedTuple):
    """A resolved `RegionPart`: an offset in the file, or device memory, of a region.

    Attributes
    ----------
    region
        The number that the hub has given the region.
    identity
        Equal for regions that share a file or a device allocation.
    stored
        Whether this is a stored tensor, whose data changes only with its ``version``.
    """

    region: int
    offset: int
    identity: tuple[int, int] = (0, 0)
    device: int | None = None
    stored: bool = False
    version: int = 0


@dataclass(slots=True, eq=False)
class _Region:
    owner: str
    info: RegionInfo
    number: int
    descriptor: int | None
    identity: tuple[int, int]
    uses: int = 0
    removed: bool = False
    unregistering: list[asyncio.Future[None]] = field(default_factory=list)
    on_unused: Callable[[int], bool] | None = None
    """Set for the server's own files, see `adopt`."""
    version: int = 0


class RegionRegistry:
    """All registered regions. For the event loop's thread. Without API keys the owner is "".

    The callbacks in ``on_closed`` are called with the number of each region that is closed.
    """

    def __init__(self, max_regions: int) -> None:
        self._max_regions = max_regions
        self._last_number = 0
        self._regions: dict[tuple[str, str], _Region] = {}
        self._by_number: dict[int, _Region] = {}
        self.on_closed: list[Callable[[int], None]] = []

    def __len__(self) -> int:
        """The number of registered regions, without adopted ones."""
        return sum(region.on_unused is None for region in self._regions.values())

    def register(self, owner: str, info: RegionInfo) -> None:
        """Register a region and open its file; device memory is opened by the workers.

        Raises
        ------
        MalformedRequest
            The name is taken, the key is not a file name, or the file does not exist, cannot be
            opened or is smaller than the region.
        Overloaded
            The server has the maximum number of regions.
        """
        if not 0 < len(info.name) <= _MAX_NAME_CHARACTERS:
            raise MalformedRequest(
                f"a region's name has {len(info.name)} characters; expected 1 to "
                f"{_MAX_NAME_CHARACTERS}"
            )
        if (owner, info.name) in self._regions:
            raise MalformedRequest(f"the region {shown(info.name)} is registered already")
        self._drop_orphans()
        if len(self) >= self._max_regions:
            raise Overloaded(
                f"{self._max_regions} regions are registered, the maximum",
                retry_after_s=1.0,
            )
        self._last_number += 1
        if info.device is None:
            descriptor = _opened(info)
            try:
                self._check_address_space(info)
            except Overloaded:
                os.close(descriptor)
                raise
            region = _Region(owner, info, self._last_number, descriptor, _identity(descriptor))
        else:
            number = int.from_bytes(info.handle, "little")
            region = _Region(owner, info, self._last_number, None, (-1 - info.device, number))
        self._add(region)

    def adopt(self, part: RegionPart, descriptor: int, on_unused: Callable[[int], bool]) -> None:
        """Register a whole file of the server's own and take over its descriptor.

        Once it is removed and unused, ``on_unused`` is called with its number; if that returns
        True, the file stays open for `reuse` or `discard`.
        """
        self._last_number += 1
        region = _Region(
            part.owner,
            RegionInfo(part.name, "", 0, part.size_bytes),
            self._last_number,
            descriptor,
            _identity(descriptor),
            on_unused=on_unused,
        )
        self._add(region)

    def reuse(self, number: int, part: RegionPart, on_unused: Callable[[int], bool]) -> None:
        """Adopt a file that stayed open once more, for another tensor of its size.

        Workers still have it mapped, which for a GPU takes as long as computing with it.
        """
        region = self._by_number[number]
        region.info = RegionInfo(part.name, "", 0, part.size_bytes)
        region.removed, region.on_unused = False, on_unused
        region.version += 1
        self._add(region)

    def discard(self, number: int) -> None:
        """Close a file that stayed open."""
        if (region := self._by_number.get(number)) is not None:
            self._end(region)

    def remove(self, owner: str, name: str) -> None:
        """Close a region now, or once no request uses it."""
        region = self._regions[owner, name]
        region.removed = True
        if not region.uses:
            self._close(region)

    async def unregister(self, owner: str, name: str, *, on_device: bool = False) -> None:
        """Close a region, or with ``name`` "" all of the owner's of that kind, once unused.

        New requests cannot use it from now on. Unregistering an unknown name does nothing, so that
        the call is idempotent.
        """
        waits: list[asyncio.Future[None]] = []
        for region in self._of(owner, name, on_device=on_device):
            if not region.uses:
                self._close(region)
                continue
            region.unregistering.append(asyncio.get_running_loop().create_future())
            waits.append(region.unregistering[-1])
        if waits:
            await asyncio.wait(waits)

    def list_regions(self, owner: str, name: str, *, on_device: bool = False) -> list[RegionInfo]:
        """Return the owner's regions of a kind, or the one with that name.

        Raises
        ------
        NotFound
            The owner has no region with that name.
        """
        found = [region.info for region in self._of(owner, name, on_device=on_device)]
        if name and not found:
            raise _unknown(name)
        return found

    def acquire(self, parts: Sequence[RegionPart]) -> tuple[RegionSlice, ...]:
        """Resolve parts; their regions stay open until the slices are passed to `release`.

        Raises
        ------
        NotFound
            A region is not registered, or is being unregistered.
        InvalidProblem
            A part exceeds its region, or the file has become shorter.
        """
        found = [(self._resolve(part), part) for part in parts]
        for region, _ in found:
            region.uses += 1
        return tuple(
            RegionSlice(
                region.number,
                region.info.offset + part.offset,
                region.identity,
                region.info.device,
                region.on_unused is not None,
                region.version,
            )
            for region, part in found
        )

    def release(self, slices: Sequence[RegionSlice]) -> None:
        """End the use of slices that `acquire` returned."""
        for each in slices:
            region = self._by_number[each.region]
            region.uses -= 1
            if not region.uses and (region.unregistering or region.removed):
                self._close(region)

    def descriptor(self, number: int) -> int:
        """Return the descriptor of a region's file."""
        descriptor = self._by_number[number].descriptor
        assert descriptor is not None  # noqa: S101 - see `extent`
        return descriptor

    def extent(self, number: int) -> tuple[bytes | None, int]:
        """Return a region's IPC handle, None for a file, and the bytes from the start to its end.

        A file may have any length beyond that, now or later.
        """
        info = self._by_number[number].info
        return (None if info.device is None else info.handle), info.offset + info.size_bytes

    def close(self) -> None:
        """Close every file."""
        for region in list(self._by_number.values()):
            self._end(region)
        self._regions.clear()

    def _check_address_space(self, added: RegionInfo) -> None:
        """Raise Overloaded if workers could not map this region in addition to all others."""
        files = (each.info for each in self._by_number.values() if each.info.device is None)
        mapped_bytes = sum(info.offset + info.size_bytes for info in files)
        needed_bytes = added.offset + added.size_bytes
        if mapped_bytes + needed_bytes > _MAX_MAPPED_BYTES:
            raise Overloaded(
                f"all regions extend over {mapped_bytes:,} bytes of their files, and this one over "
                f"{needed_bytes:,}; at most {_MAX_MAPPED_BYTES:,} may be mapped",
                retry_after_s=1.0,
            )

    def _drop_orphans(self) -> None:
        """Close files left behind by convgrad clients, which lock their files while they live."""
        for region in list(self._regions.values()):
            name, file = region.info.key.removeprefix("/"), region.descriptor
            if name.startswith(_CLIENT_PREFIX) and not region.uses and file and _is_unlocked(file):
                self._close(region)

    def _of(self, owner: str, name: str, *, on_device: bool) -> list[_Region]:
        return [
            region
            for region in self._regions.values()
            if region.owner == owner
            and (region.info.device is not None) == on_device
            and name in ("", region.info.name)
        ]

    def _resolve(self, part: RegionPart) -> _Region:
        region = self._regions.get((part.owner, part.name))
        if region is None or region.unregistering or region.removed:
            raise _unknown(part.name)
        end = part.offset + part.size_bytes
        if end > region.info.size_bytes:
            raise InvalidProblem(
                f"the request names bytes {part.offset:,} to {end:,} of the region "
                f"{shown(part.name)}, which has {region.info.size_bytes:,}"
            )
        file = region.descriptor
        if file is not None and region.info.offset + end > os.fstat(file).st_size:
            raise InvalidProblem(
                f"the file of the region {shown(part.name)} is shorter than when it was registered"
            )
        return region

    def _add(self, region: _Region) -> None:
        self._regions[region.owner, region.info.name] = self._by_number[region.number] = region

    def _close(self, region: _Region) -> None:
        del self._regions[region.owner, region.info.name]
        if region.on_unused is None or not region.on_unused(region.number):
            self._end(region)

    def _end(self, region: _Region) -> None:
        del self._by_number[region.number]
        if region.descriptor is not None:
            os.close(region.descriptor)
        for on_closed in self.on_closed:
            on_closed(region.number)
        for future in region.unregistering:
            if not future.done():
                future.set_result(None)


def out_of_files() -> Overloaded:
    """Return the error for a process that can open no more files."""
    return Overloaded("the server can open no more files for now", retry_after_s=1.0)


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
    """Open a region's file and check its size."""
    if not _KEY.fullmatch(info.key):
        raise MalformedRequest(
            f"the key {shown(info.key)} is not the name of a shared-memory file: expected letters, "
            "digits, _, - and . after at most one /"
        )
    if info.size_bytes == 0:
        raise MalformedRequest(f"the region {shown(info.name)} has 0 bytes; expected 1 or more")
    path = _SHM_DIRECTORY / info.key.removeprefix("/")
    try:
        # No symbolic links, which could lead anywhere, and no blocking, as on a pipe.
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise out_of_files() from None
        raise MalformedRequest(
            f"the shared-memory file {shown(info.key)} cannot be opened: {error.strerror}"
        ) from None
    found = os.fstat(descriptor)
    end = info.offset + info.size_bytes
    if stat.S_ISREG(found.st_mode) and end <= found.st_size:
        return descriptor
    os.close(descriptor)
    raise MalformedRequest(
        f"the shared-memory file {shown(info.key)} has {found.st_size:,} bytes; expected at least "
        f"{end:,} for a region of {info.size_bytes:,} at offset {info.offset:,}"
    )
