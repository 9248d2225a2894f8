"""Kernel sources: the headers that they include, and a hash of their code."""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache
from pathlib import Path

__all__ = ["KERNELS", "included", "source_hash"]

KERNELS = Path(__file__).resolve().parent / "kernels"
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
# Strings first, so that two slashes in one begin no comment.
_STRING_OR_COMMENT = re.compile(r'("(?:\\.|[^"\\\n])*")|//[^\n]*|/\*.*?\*/', re.DOTALL)


def included(source: str, folder: Path | None = None) -> list[str]:
    """Return a kernel source and every header that it includes, directly or not.

    Names are relative to ``folder``, `KERNELS` by default.
    """
    return list(_files(source, folder))


def source_hash(source: str, folder: Path | None = None) -> str:
    """Hash a kernel source and every header that it includes, without comments and white space.

    Sources with equal hashes compile to the same code, so measurements and checks of one hold for
    the other. File names are not hashed, so a source may move.
    """
    return _digest(tuple(_files(source, folder).values()))


def _files(source: str, folder: Path | None) -> dict[str, bytes]:
    """Return the code of a source and of every header that it includes, by name."""
    root = str(folder or KERNELS)
    found: dict[str, bytes] = {source: b""}
    waiting = [source]
    while waiting:
        name = waiting.pop()
        path = f"{root}/{name}"
        state = Path(path).stat()
        names, found[name] = _parsed(path, state.st_mtime_ns, state.st_size)
        waiting += [each for each in names if each not in found]
        found |= {each: b"" for each in names if each not in found}
    return found


# Cached, because a request that compiles would otherwise spend milliseconds in regular expressions
# and reading, and hold the interpreter meanwhile.
@lru_cache(maxsize=1024)
def _parsed(path: str, modified_ns: int, size: int) -> tuple[tuple[str, ...], bytes]:
    """Return the names that a file includes, and its code, if the file has not changed since."""
    text = Path(path).read_text(encoding="utf-8")
    code = _STRING_OR_COMMENT.sub(lambda match: match[1] or " ", _INCLUDE.sub("", text))
    lines = (" ".join(line.split()) for line in code.splitlines())
    return tuple(_INCLUDE.findall(text)), "\n".join(filter(None, lines)).encode()


@lru_cache(maxsize=1024)
def _digest(codes: tuple[bytes, ...]) -> str:
    key = hashlib.sha256()
    for code in codes:
        key.update(code + b"\0")
    return key.hexdigest()[:16]
