"""Kernel sources: the headers that they include, and a hash of their code."""

from __future__ import annotations

import hashlib
import re
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
        text = ((folder or KERNELS) / waiting.pop()).read_text(encoding="utf-8")
        for name in _INCLUDE.findall(text):
            if name not in found:
                found[name] = None
                waiting.append(name)
    return list(found)


def source_hash(source: str, folder: Path | None = None) -> str:
    """Hash a kernel source and every header that it includes, without comments and white space.

    Sources with equal hashes compile to the same code, so measurements and checks of one hold for
    the other. File names are not hashed, so a source may move.
    """
    key = hashlib.sha256()
    for name in included(source, folder):
        text = ((folder or KERNELS) / name).read_text(encoding="utf-8")
        code = _STRING_OR_COMMENT.sub(lambda match: match[1] or " ", _INCLUDE.sub("", text))
        lines = (" ".join(line.split()) for line in code.splitlines())
        key.update(f"{chr(10).join(filter(None, lines))}\0".encode())
    return key.hexdigest()[:16]
