"""Kernel arguments: a ctypes structure that mirrors the kernel's own, packed once.

Only addresses change between runs of a plan, so only they are written when it runs.
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
    """A structure's bytes, with its pointers left out.

    Attributes
    ----------
    template : bytes
        The structure.
    pointers : tuple of (int, str, int)
        Of each pointer: its offset in the structure, the buffer, and an offset into the buffer.
    """

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
    """Pack a structure whose pointer fields get these buffers; None leaves a null pointer.

    The value that a pointer field already holds is an offset in bytes into its buffer.
    """
    kind = type(structure)
    offsets = tuple(
        (
            getattr(kind, field).offset,
            target if isinstance(target, str) else target.buffer,
            getattr(structure, field),
        )
        for field, target in pointers.items()
        if target is not None
    )
    return Packed(bytes(structure), offsets)
