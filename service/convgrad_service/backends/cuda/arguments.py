"""Kernel arguments: a ctypes structure that mirrors the kernel's own, packed once.

Only addresses change between runs of a plan, so only they are written when it runs: into a copy of
the structure (`Packed.fill`), or into a `Block` that one launch after another uses.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from convgrad_service.plans.cuda.works import Operand

__all__ = ["Block", "Packed", "fill", "fill_axes", "pack"]

_ADDRESS = struct.Struct("<Q")
_WORD_BYTES = 8
# What the driver demands of a tensor map, which is the most that any member needs.
_BLOCK_ALIGNMENT = 64


class Block:
    """A filled structure in memory, in which the pointers can be set again.

    Attributes
    ----------
    address : int
        Where it starts.
    maps : sequence of (int, int, int, bool)
        Of each tensor map: its offset in the structure, the index of its buffer, an offset into
        the buffer, and whether a bit is cleared where the driver has replaced its address.
    """

    maps: Sequence[tuple[int, int, int, bool]] = ()

    def __init__(self, packed: Packed, filled: bytes | bytearray, buffers: Sequence[str]) -> None:
        """``buffers`` names the buffers in the order in which `point` takes addresses."""
        size = -(-len(filled) // _BLOCK_ALIGNMENT) * _BLOCK_ALIGNMENT
        memory = bytearray(size + _BLOCK_ALIGNMENT)
        # ctypes' view keeps the memory alive, and from being resized.
        self._memory = (ctypes.c_char * len(memory)).from_buffer(memory)
        start = -ctypes.addressof(self._memory) % _BLOCK_ALIGNMENT
        memory[start : start + len(filled)] = filled
        self.address = ctypes.addressof(self._memory) + start
        self._words = memoryview(memory)[start : start + size].cast("Q")
        self._packed, self._buffers = packed, buffers

    @cached_property
    def pointers(self) -> list[tuple[int, int, int]]:
        """Of each pointer: its 8-byte word, the index of its buffer, an offset into the buffer."""
        # Not before the first `point`: most blocks are launched once.
        return [
            (at // _WORD_BYTES, self._buffers.index(buffer), offset)
            for at, buffer, offset in self._packed.pointers
        ]

    def point(self, addresses: Sequence[int]) -> None:
        """Set every pointer; ``addresses`` are those of the buffers."""
        words = self._words
        for word, index, offset in self.pointers:
            words[word] = addresses[index] + offset


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

    def block(self, addresses: Mapping[str, int], buffers: Sequence[str]) -> Block:
        """See `Arguments.block`."""
        return Block(self, self.fill(addresses), buffers)


def fill(args: Any, source: object, *names: str) -> None:
    """Fill in fields that are named like attributes of ``source``; of arrays, every element."""
    for name in names:
        value = getattr(source, name)
        if isinstance(value, tuple | list):
            getattr(args, name)[:] = value
        else:
            setattr(args, name, value)


def fill_axes(args: Any, axes: Sequence[object], *names: str) -> None:
    """Fill in arrays that have an element for each of ``axes``: its attribute of the same name."""
    for name in names:
        getattr(args, name)[:] = [getattr(axis, name) for axis in axes]


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
