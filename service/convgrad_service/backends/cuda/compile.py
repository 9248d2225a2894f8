"""Compiling instances to cubins by concurrent NVRTC processes, with a cache on disk.

A cubin's file name contains a hash of everything that it depends on: the source and its headers,
the options, the architecture and the compiler's version. Processes that share a cache compile each
cubin once. Needs no GPU, driver or CuPy.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import struct
import tempfile
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from convgrad_service.backends.cuda.compile_process import CompileProcesses, Request, exclusive
from convgrad_service.backends.cuda.nvrtc import CompileError, Nvrtc
from convgrad_service.backends.cuda.sources import KERNELS, included, source_hash
from convgrad_service.plans.cuda.program import Instance
from convgrad_service.process import usable_cores

__all__ = ["DEFAULT_CACHE", "Compiler", "Cubin", "Resources"]

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
WAITS = "core/bounded_wait.cuh"
_ELF_HEADER_BYTES = 64

# In the output of ptxas -v, for each entry point.
_FIELDS = {
    "registers": re.compile(r"Used (\d+) registers"),
    "stack_bytes": re.compile(r"(\d+) bytes stack frame"),
    "spill_store_bytes": re.compile(r"(\d+) bytes spill stores"),
    "spill_load_bytes": re.compile(r"(\d+) bytes spill loads"),
    "shared_bytes": re.compile(r"(\d+) bytes smem"),
}


@dataclass(frozen=True, slots=True)
class Resources:
    """What a kernel uses according to ptxas: of each thread, or of each block (shared)."""

    registers: int = 0
    stack_bytes: int = 0
    spill_store_bytes: int = 0
    spill_load_bytes: int = 0
    shared_bytes: int = 0

    @classmethod
    def of(cls, log: str) -> Resources:
        """Parse the compiler's log; of several entry points, take the maximum of each number."""
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
    """Compiled code; ``resources`` is None if it came from the cache."""

    code: bytes
    resources: Resources | None


class Compiler:
    """Compiles instances for one architecture, each once. Thread-safe.

    Parameters
    ----------
    cache : Path or None
        Folder of cubins; None disables the cache. Cubins in `DEFAULT_CACHE`, where an image's build
        may have put them, are used as well.
    jobs : int, optional
        Concurrent compilations; by default the number of cores.
    debug : bool
        Turn endless waits in kernels into faults (``core/bounded_wait.cuh``).
    ahead : int
        Processes to start now, for the first compilations.

    Attributes
    ----------
    found, compiled : int
        Cubins requested so far that were cached, and that had to be compiled.
    compile_s : float
        The sum of the latter's compile times.
    """

    def __init__(
        self,
        nvrtc: Nvrtc,
        architecture: str,
        cache: Path | None = DEFAULT_CACHE,
        *,
        jobs: int | None = None,
        debug: bool = False,
        ahead: int = 0,
    ) -> None:
        self.architecture = architecture
        self._nvrtc = nvrtc
        self._cache = cache
        self._debug = debug
        self._processes = CompileProcesses(nvrtc.path, ahead)
        self._jobs = jobs or usable_cores()
        self._pool = ThreadPoolExecutor(self._jobs, "convgrad-compile")
        self._wanted: dict[Instance, _Wanted] = {}
        self._lock = threading.Lock()
        self.found = self.compiled = 0
        self.compile_s = 0.0

    def cubin(self, instance: Instance) -> Cubin:
        """Return a cubin from the cache, or compile and cache it.

        Raises
        ------
        CompileError
            The source was rejected, or its compilation was killed.
        """
        wanted = self._want(instance)
        try:
            return wanted.cubin.result()
        finally:
            # The caller loads it now; if it is needed again, it is in the cache.
            with self._lock:
                if self._wanted.get(instance) is wanted:
                    del self._wanted[instance]

    def compile_ahead(self, instances: Iterable[Instance]) -> Future[None] | None:
        """Start to compile instances that are not cached; return None if all of them are.

        Once the future is done, `cubin` does not wait. Its exception is the first error. Cancelling
        it drops compilations that have not started and that nothing else waits for.
        """
        waited = [wanted for wanted in map(self._want, instances) if not wanted.cubin.done()]
        if not waited:
            return None
        done: Future[None] = Future()
        counting, left = threading.Lock(), len(waited)

        def count_down(_: Future[Cubin]) -> None:
            nonlocal left
            with counting:
                left -= 1
                if left > 0:
                    return
            if not done.set_running_or_notify_cancel():
                return
            errors = [wanted.cubin.exception() for wanted in waited]
            error = next(filter(None, errors), None)
            done.set_result(None) if error is None else done.set_exception(error)

        done.add_done_callback(lambda done: self._give_up(waited) if done.cancelled() else None)
        for wanted in waited:
            wanted.cubin.add_done_callback(count_down)
        return done

    def compile_all(self, instances: Iterable[Instance]) -> list[str]:
        """Compile everything that is not cached; return a message for each rejected instance."""

        def refusal(instance: Instance) -> str | None:
            try:
                self.cubin(instance)
            except CompileError as error:
                return f"{instance.name}: {error}"
            return None

        with ThreadPoolExecutor(self._jobs) as waiting:
            return [text for text in waiting.map(refusal, instances) if text is not None]

    def compile(self, instance: Instance) -> Cubin:
        """Compile an instance, ignoring the cache; raises like `cubin`."""
        source = (KERNELS / instance.source).read_text(encoding="utf-8")
        options = [*self._options(instance), f"--include-path={KERNELS}"]
        code, log = self._processes.compile(Request(source, instance.source, options))
        return Cubin(code, Resources.of(log))

    def is_cached(self, instance: Instance) -> bool:
        """Return whether a file in the cache holds the cubin."""
        return self._cached(self.file_name(instance)) is not None

    def close(self) -> None:
        """Kill every compilation; those who wait for one get a CompileError."""
        self._processes.close()
        self._pool.shutdown(cancel_futures=True)

    def file_name(self, instance: Instance) -> str:
        """Return the cubin's file name, equal if everything that the cubin depends on is equal."""
        key = hashlib.sha256()
        version = str(self._nvrtc.version)
        for part in (*self._options(instance), version, source_hash(instance.source)):
            key.update(part.encode() + b"\0")
        return f"{instance.entry}-{self.architecture}-{key.hexdigest()[:32]}.cubin"

    def _options(self, instance: Instance) -> list[str]:
        defines = dict(instance.defines)
        # Kernels without waits are the same in both builds and compiled once.
        if self._debug and WAITS in included(instance.source):
            defines["BOUNDED_WAITS"] = "1"
        macros = [f"--define-macro={name}={value}" for name, value in defines.items()]
        return [*OPTIONS, f"--gpu-architecture={self.architecture}", *macros]

    def _want(self, instance: Instance) -> _Wanted:
        """Look up or start an instance's compilation, and count one more waiter."""
        with self._lock:
            wanted = self._wanted.get(instance)
            if wanted is None:
                name = self.file_name(instance)
                found = self._cached(name)
                if found is None:
                    cubin = self._pool.submit(self._found_or_compiled, instance, name)
                else:
                    self.found += 1
                    cubin = Future()
                    cubin.set_result(found)
                wanted = self._wanted[instance] = _Wanted(instance, cubin)
            wanted.waiting += 1
            return wanted

    def _give_up(self, waited: Iterable[_Wanted]) -> None:
        """Stop waiting for cubins, and cancel those for which no one else waits."""
        for wanted in waited:
            with self._lock:
                wanted.waiting -= 1
                if wanted.waiting > 0 or not wanted.cubin.cancel():
                    continue
                del self._wanted[wanted.instance]

    def _cached(self, name: str) -> Cubin | None:
        """Read a cubin from the cache."""
        if self._cache is None:
            return None
        for folder in (self._cache, DEFAULT_CACHE):
            with contextlib.suppress(OSError):  # missing or unreadable
                code = (folder / name).read_bytes()
                if _is_whole(code):
                    return Cubin(code, None)
        return None

    def _found_or_compiled(self, instance: Instance, name: str) -> Cubin:
        """Compile and cache an instance, unless another process on this host has just done so."""
        try:
            if self._cache is None:
                return self._compile_counted(instance)
            path = self._cache / name
            with exclusive(path.with_suffix(".lock"), self._processes.closed):
                found = self._cached(name)
                if found is None:
                    found = self._compile_counted(instance)
                    _store(path, found.code)
                else:
                    with self._lock:
                        self.found += 1
            return found
        except BaseException:
            # The next request tries again.
            with self._lock:
                self._wanted.pop(instance, None)
            raise

    def _compile_counted(self, instance: Instance) -> Cubin:
        started_s = time.monotonic()
        compiled = self.compile(instance)
        with self._lock:
            self.compiled += 1
            self.compile_s += time.monotonic() - started_s
        return compiled


@dataclass(slots=True)
class _Wanted:
    """An instance's cubin, and the number of its waiters."""

    instance: Instance
    cubin: Future[Cubin]
    waiting: int = 0


def _is_whole(code: bytes) -> bool:
    """Return whether an ELF file has all its headers, of which NVRTC puts some last."""
    if len(code) < _ELF_HEADER_BYTES or not code.startswith(b"\x7fELF"):
        return False
    tables = struct.unpack_from("<QQ", code, 32)
    sizes = struct.unpack_from("<HHHH", code, 54)  # of an entry, and their number, for each table
    ends = (at + sizes[2 * i] * sizes[2 * i + 1] for i, at in enumerate(tables))
    return bool(max(ends) <= len(code))


def _store(path: Path, code: bytes) -> None:
    """Write a cubin atomically: to a temporary file, which is then renamed."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / ".gitignore").write_text("*\n", encoding="utf-8")
        handle, partial = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    except OSError:
        return  # a read-only installation: the next process compiles it again
    try:
        # Readable by all, unlike mkstemp's files: an image's build fills the cache as root, and the
        # server reads it as another user.
        os.fchmod(handle, 0o644)
        with os.fdopen(handle, "wb") as file:
            file.write(code)
            file.flush()
            os.fsync(handle)  # or the name could outlive a crash that the contents do not
        Path(partial).replace(path)
    except OSError:
        Path(partial).unlink(missing_ok=True)
