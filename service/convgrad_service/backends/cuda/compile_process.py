"""Compilation in a separate process, and a lock by which a host compiles each cubin once.

NVRTC compiles one source at a time in a process and cannot be interrupted. So each compilation has
its own process, which runs ``nvrtc.py`` at low priority and can be killed.
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
"""Timeout of a compilation, which takes up to 15 s on an idle core."""
_POLL_S = 0.02


class Request(NamedTuple):
    """What one process compiles; ``library`` is the path of NVRTC."""

    library: str
    source: str
    name: str
    options: list[str]


class CompileProcesses:
    """Runs compilations, each in a process of its own. Thread-safe."""

    def __init__(self) -> None:
        self.closed = threading.Event()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()

    def compile(self, request: Request, longest_s: float = LONGEST_S) -> tuple[bytes, str]:
        """Compile; return the cubin and the compiler's log.

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
        """Kill running compilations and refuse new ones."""
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
            # Closing a killed process's pipe fails where it has not read all of its input.
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()


def _ending(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


@contextlib.contextmanager
def exclusive(path: Path, given_up: threading.Event) -> Iterator[None]:
    """Hold the lock file at ``path`` exclusively among the processes of the host.

    The lock is released when its holder dies. Where the folder cannot be written, there is no lock,
    because nothing could be stored there anyway.

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
            # If the last holder has removed the file, open the new one.
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
