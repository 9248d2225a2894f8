"""Stored tensors on the device: uploaded once, or written there by the request that stores them."""

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
    """A result to be stored, or a slice of it, on the device and on the host.

    The writer of both calls `written`, once for each byte.
    """

    device: Any
    host: NDArray[Any]
    count: Callable[[int], None]

    @property
    def is_whole(self) -> bool:
        """Whether it is contiguous."""
        return self.host.flags.c_contiguous

    def __getitem__(self, cut: Slices) -> Mirrored:
        return Mirrored(self.device[cut], self.host[cut], self.count)

    def written(self) -> None:
        """Report that both hold the result."""
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
    """Stored tensors on the device, by key. Thread-safe.

    Their total size is bounded by the store. ``upload`` copies an array to the device, and
    ``allocate`` allocates a tensor like it; both return None if there is no room.
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
        """Return the number of tensors, those not yet written included."""
        return len(self._found)

    def of(self, key: int, version: int, array: NDArray[Any]) -> Any:
        """Return the tensor on the device, uploaded if needed; the array if there is no room."""
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
        """Return where to write a result to be stored; the array if there is no room."""
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
        """Drop a tensor that will not be used again."""
        self._found.pop(key, None)
        with self._lock:
            self._uploading.pop(key, None)

    def clear(self) -> None:
        """Drop all tensors to free memory; those in use are freed later."""
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
    """Return where a problem's outputs are written: to the places offered, or to new arrays.

    A slice of a `Mirrored` place that is not contiguous is not used: one copy could not fill it.
    """
    places = {}
    for name, spec in problem.outputs.items():
        place = offered.get(name)
        scattered = isinstance(place, Mirrored) and not place.is_whole
        taken = name in offered and not scattered
        places[name] = place if taken else np.empty(spec.shape, spec.dtype.numpy)
    return places


def mirrored(outputs: Mapping[str, Any]) -> list[Mirrored]:
    """Return the outputs that are `Mirrored`."""
    return [place for place in outputs.values() if isinstance(place, Mirrored)]
