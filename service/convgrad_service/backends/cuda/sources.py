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
    found: dict[str, None] = {source: None}
    waiting = [source]
    while waiting:
        names, _ = _read((folder or KERNELS) / waiting.pop())
        waiting += [name for name in names if name not in found]
        found |= dict.fromkeys(names)
    return list(found)


def source_hash(source: str, folder: Path | None = None) -> str:
    """Hash a kernel source and every header that it includes, without comments and white space.

    Sources with equal hashes compile to the same code, so measurements and checks of one hold for
    the other. File names are not hashed, so a source may move.
    """
    key = hashlib.sha256()
    for name in included(source, folder):
        _, code = _read((folder or KERNELS) / name)
        key.update(code + b"\0")
    return key.hexdigest()[:16]


def _read(path: Path) -> tuple[tuple[str, ...], bytes]:
    """Return the names that a file includes, and its code."""
    return _parsed(path.read_text(encoding="utf-8"))


# Cached, because a request that compiles would otherwise spend milliseconds in regular expressions.
@lru_cache(maxsize=1024)
def _parsed(text: str) -> tuple[tuple[str, ...], bytes]:
    code = _STRING_OR_COMMENT.sub(lambda match: match[1] or " ", _INCLUDE.sub("", text))
    lines = (" ".join(line.split()) for line in code.splitlines())
    return tuple(_INCLUDE.findall(text)), "\n".join(filter(None, lines)).encode()
