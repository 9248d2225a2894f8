"""Kernel arguments: a ctypes structure that mirrors the kernel's own, packed once.

Addresses are the only thing that changes between two runs of a plan, so they alone are written
when it runs.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from convgrad_service.plans.cuda.works import Operand

__all__ = ["Packed", "pack"]

_ADDRESS = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Packed:
    """A structure's bytes, and where in them a pointer into which buffer belongs, with how many
    bytes into it."""

    template: bytes
    pointers: tuple[tuple[int, str, int], ...]

    @property
    def buffers(self) -> tuple[str, ...]:
        """See `Arguments.buffers`."""
        return tuple(buffer for _, buffer, _ in self.pointers)

    def renamed(self, names: Mapping[str, str]) -> Packed:
        """See `Arguments.renamed`."""
        pointers = ((at, names.get(buffer, buffer), start) for at, buffer, start in self.pointers)
        return Packed(self.template, tuple(pointers))

    def fill(self, addresses: Mapping[str, int]) -> bytearray:
        """See `Arguments.fill`."""
        filled = bytearray(self.template)
        for at, buffer, start in self.pointers:
            _ADDRESS.pack_into(filled, at, addresses[buffer] + start)
        return filled


def pack(structure: ctypes.Structure, **pointers: Operand | str | None) -> Packed:
    """A structure whose pointer fields get the buffers given here; None stays null.

    What a pointer field holds already is how many bytes into its buffer it points.
    """
    kind = type(structure)
    places = tuple(
        (
            getattr(kind, field).offset,
            given if isinstance(given, str) else given.buffer,
            getattr(structure, field),
        )
        for field, given in pointers.items()
        if given is not None
    )
    return Packed(bytes(structure), places)
