"""One compilation in a process of its own, and one on a host at a time of the same cubin.

NVRTC compiles one source at a time in a process, and a compilation cannot be interrupted in it: so
each has a process, which runs ``nvrtc.py`` alone, gives way to what computes, and can be killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from convgrad_service.backends.cuda import nvrtc
from convgrad_service.backends.cuda.nvrtc import CompileError

__all__ = ["CompileProcesses", "Request", "exclusive"]

LONGEST_S = 600.0
"""A compilation takes up to 15 s on a free core; one that takes this long never ends."""
_POLL_S = 0.02


class Request(NamedTuple):
    """What one process compiles, with the NVRTC at ``library``."""

    library: str
    source: str
    name: str
    options: list[str]


class CompileProcesses:
    """Runs compilations, each in its process. Safe to call from several threads."""

    def __init__(self) -> None:
        self.closed = threading.Event()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()

    def compile(self, request: Request, longest_s: float = LONGEST_S) -> tuple[bytes, str]:
        """The cubin and the compiler's log.

        Raises
        ------
        CompileError
            The source was refused, or the process ended, took too long or was killed
            by `close`; the message says which.
        """
        with self._process() as process:
            try:
                said, _ = process.communicate(json.dumps(request).encode(), longest_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                raise CompileError(
                    f"compiling {request.name} took longer than {longest_s:g} s"
                ) from None
        if process.returncode != 0:
            raise CompileError(
                f"the process that compiled {request.name} ended with {_ending(process.returncode)}"
            )
        head, _, code = said.partition(b"\n")
        answer = json.loads(head)
        if "error" in answer:
            raise CompileError(answer["error"])
        return code, answer["log"]

    def close(self) -> None:
        """Kill what runs; nothing is compiled from now on."""
        with self._lock:
            self.closed.set()
            for process in self._running:
                process.kill()

    @contextlib.contextmanager
    def _process(self) -> Iterator[subprocess.Popen[bytes]]:
        with self._lock:
            if self.closed.is_set():
                raise CompileError("the backend has been closed")
            process = subprocess.Popen(  # noqa: S603 - this interpreter, our own file
                [sys.executable, "-I", "-S", nvrtc.__file__, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            self._running.add(process)
        try:
            yield process
        finally:
            with self._lock:
                self._running.remove(process)
            # What a process that was killed has not read is still there.
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()


def _ending(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


@contextlib.contextmanager
def exclusive(path: Path, given_up: threading.Event) -> Iterator[None]:
    """Hold the lock file at ``path``, alone of all processes of the host.

    A holder's death frees it. Where the folder cannot be written, nobody is excluded: nothing could
    be left there for others anyway.

    Raises
    ------
    CompileError
        ``given_up`` was set while another process held it.
    """
    while (lock := _opened(path)) is not None:
        try:
            while not _locked(lock):
                if given_up.wait(_POLL_S):
                    raise CompileError("the backend has been closed")
            # Where its last holder has removed the file, the next one is another.
            if os.fstat(lock).st_nlink > 0:
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)
                return
        finally:
            os.close(lock)
    yield


def _opened(path: Path) -> int | None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
    except OSError:
        return None


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
