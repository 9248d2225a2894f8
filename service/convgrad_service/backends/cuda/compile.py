"""From an instance to a cubin: NVRTC, and a cache on disk.

A cubin's name is a hash of everything that it depends on: the source with every header that it
includes, the options, the architecture and the compiler's version. Needs no GPU, driver or CuPy.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from convgrad_service.backends.cuda.nvrtc import Nvrtc
from convgrad_service.plans.cuda_program import Instance

__all__ = ["DEFAULT_CACHE", "KERNELS", "Compiler", "Cubin", "Resources"]

KERNELS = Path(__file__).resolve().parent / "kernels"
DEFAULT_CACHE = Path(__file__).resolve().parent / "_cubins"

OPTIONS = (
    "-std=c++20",
    # NaN, Inf and subnormals must survive; one rounding for a*b+c is allowed.
    "--ftz=false",
    "--prec-div=true",
    "--fmad=true",
    "--ptxas-options=-v",
    "--device-as-default-execution-space",
)
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
# As ptxas -v writes them, of one entry each.
_FIELDS = {
    "registers": re.compile(r"Used (\d+) registers"),
    "stack_bytes": re.compile(r"(\d+) bytes stack frame"),
    "spill_store_bytes": re.compile(r"(\d+) bytes spill stores"),
    "spill_load_bytes": re.compile(r"(\d+) bytes spill loads"),
    "shared_bytes": re.compile(r"(\d+) bytes smem"),
}


@dataclass(frozen=True, slots=True)
class Resources:
    """What ptxas says that a kernel uses, a thread (registers, stack) or a block (shared)."""

    registers: int = 0
    stack_bytes: int = 0
    spill_store_bytes: int = 0
    spill_load_bytes: int = 0
    shared_bytes: int = 0

    @classmethod
    def of(cls, log: str) -> Resources:
        """From the compiler's log; of several entries the largest of each number."""
        found = {
            name: max(map(int, pattern.findall(log)), default=0)
            for name, pattern in _FIELDS.items()
        }
        return cls(**found)

    @property
    def spills(self) -> bool:
        return bool(self.spill_store_bytes or self.spill_load_bytes)


@dataclass(frozen=True, slots=True)
class Cubin:
    """Compiled code; ``resources`` is None where it came from the cache."""

    code: bytes
    resources: Resources | None


class Compiler:
    """Compiles instances for one architecture, each once. Safe to call from several threads.

    ``cache`` is the folder of cubins; where it cannot be written, nothing is kept. None: no cache.
    What lies in `DEFAULT_CACHE`, compiled ahead by an image's build perhaps, is used as well.
    ``found`` and ``compiled`` count what `cubin` was asked for, ``compile_s`` what the latter took.
    """

    def __init__(self, nvrtc: Nvrtc, architecture: str, cache: Path | None = DEFAULT_CACHE) -> None:
        self.architecture = architecture
        self._nvrtc = nvrtc
        self._cache = cache
        self._locks: defaultdict[Instance, threading.Lock] = defaultdict(threading.Lock)
        self._counting = threading.Lock()
        self.found = self.compiled = 0
        self.compile_s = 0.0

    def cubin(self, instance: Instance) -> Cubin:
        """From the cache, or compiled and put there.

        Raises:
            CompileError: the source was refused.
        """
        with self._locks[instance]:
            if self._cache is None:
                return self._compile_counted(instance)
            name = self.file_name(instance)
            for folder in (self._cache, DEFAULT_CACHE):
                with contextlib.suppress(OSError):  # not there, or not to be read
                    code = (folder / name).read_bytes()
                    with self._counting:
                        self.found += 1
                    return Cubin(code, None)
            compiled = self._compile_counted(instance)
            _store(self._cache / name, compiled.code)
            return compiled

    def _compile_counted(self, instance: Instance) -> Cubin:
        started_s = time.monotonic()
        compiled = self.compile(instance)
        with self._counting:
            self.compiled += 1
            self.compile_s += time.monotonic() - started_s
        return compiled

    def compile(self, instance: Instance) -> Cubin:
        """Compiled now, whatever the cache holds."""
        source = (KERNELS / instance.source).read_text(encoding="utf-8")
        options = [*self._options(instance), f"--include-path={KERNELS}"]
        code, log = self._nvrtc.compile(source, instance.source, options)
        return Cubin(code, Resources.of(log))

    def _options(self, instance: Instance) -> list[str]:
        defines = [f"--define-macro={name}={value}" for name, value in instance.defines]
        return [*OPTIONS, f"--gpu-architecture={self.architecture}", *defines]

    def file_name(self, instance: Instance) -> str:
        """Of the cubin: equal where everything that it depends on is equal."""
        key = hashlib.sha256()
        for part in (*self._options(instance), str(self._nvrtc.version)):
            key.update(part.encode() + b"\0")
        for name in included(instance.source):
            key.update(name.encode() + b"\0" + (KERNELS / name).read_bytes() + b"\0")
        return f"{instance.entry}-{self.architecture}-{key.hexdigest()[:32]}.cubin"


def included(source: str) -> list[str]:
    """A kernel source and every header that it includes, directly or not, in order of meeting."""
    found: dict[str, None] = {source: None}
    waiting = [source]
    while waiting:
        text = (KERNELS / waiting.pop()).read_text(encoding="utf-8")
        for name in _INCLUDE.findall(text):
            if name not in found:
                found[name] = None
                waiting.append(name)
    return list(found)


def _store(path: Path, code: bytes) -> None:
    """Under a name of its own first: a process that reads meanwhile sees a whole file or none."""
    try:
        if not path.parent.exists():
            path.parent.mkdir(parents=True)
            (path.parent / ".gitignore").write_text("*\n", encoding="utf-8")
        handle, partial = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    except OSError:
        return  # a read-only installation: compiled again in the next process
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(code)
        Path(partial).replace(path)
    except OSError:
        Path(partial).unlink(missing_ok=True)
