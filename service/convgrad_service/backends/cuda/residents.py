"""Stored tensors on the device: uploaded once, or left there by the request that computed them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgrad_service.problems.base import Problem, Slices

__all__ = ["Mirrored", "Residents", "mirrored", "places_of"]


@dataclass(frozen=True, slots=True)
class Mirrored:
    """A place on the device for a result that stays, or a part of it, and its copy on the host.

    Whoever fills them says so by `written`, once for each byte.
    """

    device: Any
    host: NDArray[Any]
    count: Callable[[int], None]

    @property
    def is_whole(self) -> bool:
        """Whether it lies in one piece, on both."""
        return self.host.flags.c_contiguous

    def __getitem__(self, cut: Slices) -> Mirrored:
        return Mirrored(self.device[cut], self.host[cut], self.count)

    def written(self) -> None:
        """Both hold the result."""
        self.count(self.host.nbytes)

    def fill(self, array: NDArray[Any]) -> None:
        """Fill both from the host, and wait."""
        self.host[...] = array
        self.device.fill(array)
        self.written()


@dataclass(slots=True)
class _Resident:
    version: int
    tensor: Any
    missing_bytes: int = 0


class Residents:
    """Stored tensors on the device, by their keys. Safe to use from any thread.

    How many bytes they are is bounded by whoever stores them. ``upload`` returns a tensor on the
    device, and ``allocate`` an empty one like an array; None where there is no room for it.
    """

    def __init__(
        self,
        upload: Callable[[NDArray[Any]], Any],
        allocate: Callable[[NDArray[Any]], Any],
    ) -> None:
        self._upload, self._allocate = upload, allocate
        self._lock = threading.Lock()
        self._uploading: dict[int, threading.Lock] = {}
        self._found: dict[int, _Resident] = {}

    def __len__(self) -> int:
        """How many there are, those included that are not written yet."""
        return len(self._found)

    def of(self, key: int, version: int, array: NDArray[Any]) -> Any:
        """The tensor on the device, uploaded if it was not; the array itself without room."""
        with self._of_key(key):
            kept = self._found.get(key)
            if kept is not None and kept.version == version and not kept.missing_bytes:
                return kept.tensor
            self._found.pop(key, None)
            found = self._upload(array)
            if found is None:
                return array
            self._found[key] = _Resident(version, found)
            return found

    def place(self, key: int, version: int, array: NDArray[Any]) -> Mirrored | NDArray[Any]:
        """Where to write a result that `of` is to find, and its copy, the array; without room the
        array itself."""
        with self._of_key(key):
            kept = self._found.get(key)
            if kept is None or kept.version != version:
                self._found.pop(key, None)
                tensor = self._allocate(array)
                if tensor is None:
                    return array
                kept = self._found[key] = _Resident(version, tensor, array.nbytes)
        return Mirrored(kept.tensor, array, lambda size: self._written(kept, size))

    def forget(self, key: int) -> None:
        """Let go of one that will not be used again."""
        self._found.pop(key, None)
        with self._lock:
            self._uploading.pop(key, None)

    def clear(self) -> None:
        """Let go of all: others need the memory. What is in use stays until it is not."""
        self._found.clear()

    def _written(self, kept: _Resident, size_bytes: int) -> None:
        with self._lock:
            kept.missing_bytes -= size_bytes

    @contextmanager
    def _of_key(self, key: int) -> Iterator[None]:
        with self._lock:
            lock = self._uploading.setdefault(key, threading.Lock())
        with lock:
            yield


def places_of(problem: Problem, offered: Mapping[str, Any]) -> dict[str, Any]:
    """Where a problem's outputs are to go: to what is offered, but for the scattered parts of what
    is on both, which one copy each would not fill."""
    places = {}
    for name, spec in problem.outputs.items():
        place = offered.get(name)
        scattered = isinstance(place, Mirrored) and not place.is_whole
        taken = name in offered and not scattered
        places[name] = place if taken else np.empty(spec.shape, spec.dtype.numpy)
    return places


def mirrored(outputs: Mapping[str, Any]) -> list[Mirrored]:
    """Those of the outputs that are on both."""
    return [place for place in outputs.values() if isinstance(place, Mirrored)]
