"""Kernel arguments as ctypes structures, parsed from the C++ that declares them.

So each structure is declared once, beside its kernel. Its fields may be numbers, pointers, tensor
maps, other structures, and arrays of these.
"""

from __future__ import annotations

import ctypes
import re
from functools import cache
from typing import Any

from convgrad_service.backends.cuda import sources

__all__ = ["MAP_ALIGNMENT", "MapField", "structure"]

MapField = ctypes.c_uint64 * 16
"""The type of a tensor map field, whose offset is a multiple of `MAP_ALIGNMENT`."""
MAP_ALIGNMENT = 64

_NUMBERS: dict[str, Any] = {
    "int": ctypes.c_int32,
    "u32": ctypes.c_uint32,
    "unsigned": ctypes.c_uint32,
    "i64": ctypes.c_int64,
    "u64": ctypes.c_uint64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "signed char": ctypes.c_int8,
    "unsigned char": ctypes.c_uint8,
    "unsigned short": ctypes.c_uint16,
}
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_CONSTANT = re.compile(r"\bconstexpr int ([^;()]*);")
_DECLARATION = re.compile(
    r"(?:alignas\(\d+\)\s+)?(?:const\s+)?((?:un)?signed (?:char|short)|\w+)\s*(.*)", re.DOTALL
)


def structure(
    source: str, name: str, /, *, anonymous: tuple[str, ...] = (), **constants: int
) -> Any:
    """Return the ctypes structure of a struct defined in ``source`` or in a header it includes.

    Parameters
    ----------
    source : str
        Relative to the folder of kernels, like `Instance.source`.
    name : str
        Name of the struct.
    anonymous : tuple of str
        Fields that are structures whose fields are accessible as the struct's own.
    constants : int
        Values of macros that are array lengths.

    Returns
    -------
    type[ctypes.Structure]
        The elements of an array of tensor maps are separate numbered fields: ``source0``,
        ``source1``.

    Raises
    ------
    LookupError
        There is no such struct, or it has a field of an unknown type or length.
    """
    return _structure(source, name, anonymous, tuple(constants.items()))


@cache
def _structure(
    source: str, name: str, anonymous: tuple[str, ...], constants: tuple[tuple[str, int], ...]
) -> Any:
    for header in sources.included(source):
        found = re.search(
            rf"\bstruct {name}\s*(?::\s*([\w<>]+)\s*)?\{{(.*?)\n\}};", _text(header), re.DOTALL
        )
        if found is not None:
            if header != source:
                # One class, whichever source includes the header.
                return _structure(header, name, anonymous, constants)
            return _Reader(source, dict(constants)).read(name, found[1], found[2], anonymous)
    raise LookupError(f"no struct {name} in {source} or what it includes")


@cache
def _text(header: str) -> str:
    return _COMMENT.sub("", (sources.KERNELS / header).read_text(encoding="utf-8"))


class _Reader:
    """Parses one structure."""

    def __init__(self, source: str, constants: dict[str, int]) -> None:
        self._source, self._given = source, constants
        self._fields: list[tuple[str, Any]] = []

    def read(self, name: str, base: str | None, body: str, anonymous: tuple[str, ...]) -> Any:
        if base is not None:
            self._inherit(base)
        for declaration in filter(None, map(str.strip, body.split(";"))):
            self._declare(declaration)
        return type(name, (ctypes.Structure,), {"_anonymous_": anonymous, "_fields_": self._fields})

    def _inherit(self, base: str) -> None:
        """Add the fields of a base; of a template, its argument's before its own."""
        base, _, argument = base.removesuffix(">").partition("<")
        if argument:
            self._inherit(argument)
        found = re.search(
            rf"\bstruct {base}\s*(?::[^{{]*)?\{{(.*?)\n?\}};", self._all_text(), re.DOTALL
        )
        if found is None:
            raise LookupError(f"no struct {base} in {self._source} or what it includes")
        for declaration in filter(None, map(str.strip, found[1].split(";"))):
            self._declare(declaration)

    def _declare(self, declaration: str) -> None:
        found = _DECLARATION.fullmatch(declaration)
        if found is None:
            raise LookupError(f"not a field: {declaration!r} in {self._source}")
        for one in found[2].split(","):
            declarator = re.fullmatch(r"\s*(\*?)\s*(?:const\s+)?(\w+)((?:\[\w+\])*)\s*", one)
            if declarator is None:
                raise LookupError(f"not a field: {declaration!r} in {self._source}")
            pointer, name, lengths = declarator.groups()
            counts = [self._constant(length) for length in re.findall(r"\w+", lengths)]
            if found[1] == "TensorMap":
                names = [f"{name}{i}" for i in range(counts[0])] if counts else [name]
                self._align()
                self._fields += [(each, MapField) for each in names]
                continue
            kind = ctypes.c_uint64 if pointer else self._type(found[1])
            for count in reversed(counts):
                kind = kind * count
            self._fields.append((name, kind))

    def _align(self) -> None:
        """Pad to a tensor map's alignment, which ctypes does not know."""
        probe: Any = type("_", (ctypes.Structure,), {"_fields_": [*self._fields, ("_", MapField)]})
        gap = -probe._.offset % MAP_ALIGNMENT
        if gap:
            self._fields.append((f"_before_{len(self._fields)}", ctypes.c_char * gap))

    def _type(self, name: str) -> Any:
        # Without the constants, so that there is one class: they concern the outermost structure.
        return _NUMBERS[name] if name in _NUMBERS else structure(self._source, name)

    def _constant(self, name: str) -> int:
        if name.isdecimal():
            return int(name)
        if name in self._given:
            return self._given[name]
        for values in _CONSTANT.findall(self._all_text()):
            for value in values.split(","):
                left, _, right = (part.strip() for part in value.partition("="))
                if left == name:
                    return self._constant(right)
        raise LookupError(f"no constant {name} in {self._source} or what it includes")

    def _all_text(self) -> str:
        return "\n".join(map(_text, sources.included(self._source)))
