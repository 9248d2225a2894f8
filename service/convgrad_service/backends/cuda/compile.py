"""From an instance to a cubin: NVRTC in processes side by side, and a cache on disk.

A cubin's name is a hash of everything that it depends on: the source with every header that it
includes, the options, the architecture and the compiler's version. Processes that share a cache
compile each cubin once. Needs no GPU, driver or CuPy.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
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
from convgrad_service.cgroups import usable_cores
from convgrad_service.plans.cuda.program import Instance

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
    ``jobs`` are compiled at a time, by default as many as there are cores. In a ``debug`` build a
    kernel's wait without an end becomes a fault (``core/bounded_wait.cuh``). ``found`` and
    ``compiled`` count the cubins that were asked for, ``compile_s`` is what the latter took, one
    after another.
    """

    def __init__(
        self,
        nvrtc: Nvrtc,
        architecture: str,
        cache: Path | None = DEFAULT_CACHE,
        *,
        jobs: int | None = None,
        debug: bool = False,
    ) -> None:
        self.architecture = architecture
        self._nvrtc = nvrtc
        self._cache = cache
        self._debug = debug
        self._processes = CompileProcesses()
        self._jobs = jobs or usable_cores()
        self._pool = ThreadPoolExecutor(self._jobs, "convgrad-compile")
        self._wanted: dict[Instance, _Wanted] = {}
        self._lock = threading.Lock()
        self.found = self.compiled = 0
        self.compile_s = 0.0

    def cubin(self, instance: Instance) -> Cubin:
        """From the cache, or compiled and put there; waits as long as that takes.

        Raises
        ------
        CompileError
            The source was refused, or its compilation was ended.
        """
        wanted = self._want(instance)
        try:
            return wanted.cubin.result()
        finally:
            # It is loaded now and, if it is ever wanted again, in the cache.
            with self._lock:
                if self._wanted.get(instance) is wanted:
                    del self._wanted[instance]

    def compile_ahead(self, instances: Iterable[Instance]) -> Future[None] | None:
        """Compile what the cache does not hold, side by side; None where it holds everything.

        Once the future is done, `cubin` does not wait; it has the first error, if there was one.
        Cancelled, what has not begun is not compiled, unless others want it too.
        """
        waited = [wanted for wanted in map(self._want, instances) if not wanted.cubin.done()]
        if not waited:
            return None
        done: Future[None] = Future()
        counting, left = threading.Lock(), len(waited)

        def one_less(_: Future[Cubin]) -> None:
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
            wanted.cubin.add_done_callback(one_less)
        return done

    def compile_all(self, instances: Iterable[Instance]) -> list[str]:
        """Have these in the cache; says which were refused, and why."""

        def refusal(instance: Instance) -> str | None:
            try:
                self.cubin(instance)
            except CompileError as error:
                return f"{instance.name}: {error}"
            return None

        with ThreadPoolExecutor(self._jobs) as waiting:
            return [said for said in waiting.map(refusal, instances) if said is not None]

    def compile(self, instance: Instance) -> Cubin:
        """Compiled now, whatever the cache holds; raises as `cubin`."""
        source = (KERNELS / instance.source).read_text(encoding="utf-8")
        options = [*self._options(instance), f"--include-path={KERNELS}"]
        request = Request(self._nvrtc.path, source, instance.source, options)
        code, log = self._processes.compile(request)
        return Cubin(code, Resources.of(log))

    def close(self) -> None:
        """End every compilation; whoever waits for one gets a CompileError."""
        self._processes.close()
        self._pool.shutdown(cancel_futures=True)

    def file_name(self, instance: Instance) -> str:
        """Of the cubin: equal where everything that it depends on is equal."""
        key = hashlib.sha256()
        version = str(self._nvrtc.version)
        for part in (*self._options(instance), version, source_hash(instance.source)):
            key.update(part.encode() + b"\0")
        return f"{instance.entry}-{self.architecture}-{key.hexdigest()[:32]}.cubin"

    def _options(self, instance: Instance) -> list[str]:
        defines = dict(instance.defines)
        # What does not wait is the same in both builds, and compiled once.
        if self._debug and WAITS in included(instance.source):
            defines["BOUNDED_WAITS"] = "1"
        macros = [f"--define-macro={name}={value}" for name, value in defines.items()]
        return [*OPTIONS, f"--gpu-architecture={self.architecture}", *macros]

    def _want(self, instance: Instance) -> _Wanted:
        """What is or will be an instance's cubin, with one more that waits for it."""
        with self._lock:
            wanted = self._wanted.get(instance)
            if wanted is None:
                found = self._cached(instance)
                if found is None:
                    cubin = self._pool.submit(self._found_or_compiled, instance)
                else:
                    cubin = Future()
                    cubin.set_result(found)
                wanted = self._wanted[instance] = _Wanted(instance, cubin)
            wanted.waiting += 1
            return wanted

    def _give_up(self, waited: Iterable[_Wanted]) -> None:
        """One less waits for each of these; what nobody waits for any more does not begin."""
        for wanted in waited:
            with self._lock:
                wanted.waiting -= 1
                if wanted.waiting > 0 or not wanted.cubin.cancel():
                    continue
                del self._wanted[wanted.instance]

    def _cached(self, instance: Instance) -> Cubin | None:
        """From the cache; counted as found. The lock is held."""
        if self._cache is None:
            return None
        name = self.file_name(instance)
        for folder in (self._cache, DEFAULT_CACHE):
            with contextlib.suppress(OSError):  # not there, or not to be read
                code = (folder / name).read_bytes()
                self.found += 1
                return Cubin(code, None)
        return None

    def _found_or_compiled(self, instance: Instance) -> Cubin:
        """Compiled and put into the cache, unless another process of this host just does so."""
        try:
            if self._cache is None:
                return self._compile_counted(instance)
            path = self._cache / self.file_name(instance)
            with exclusive(path.with_suffix(".lock"), self._processes.closed):
                with self._lock:
                    found = self._cached(instance)
                if found is None:
                    found = self._compile_counted(instance)
                    _store(path, found.code)
            return found
        except BaseException:
            # Whoever asks again has it tried again.
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
    """An instance's cubin, and how many wait for it."""

    instance: Instance
    cubin: Future[Cubin]
    waiting: int = 0


def _store(path: Path, code: bytes) -> None:
    """Under a name of its own first: a process that reads meanwhile sees a whole file or none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
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
