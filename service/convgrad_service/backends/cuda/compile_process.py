"""Compilation in separate processes, and a lock by which a host compiles each cubin once.

NVRTC compiles one source at a time in a process and cannot be interrupted. So each concurrent
compilation has its own process, which runs ``nvrtc.py`` at low priority and can be killed.
Processes are used again, and can be started ahead, because starting one and loading NVRTC into it
takes about as long as compiling a small kernel.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from convgrad_service.backends.cuda import nvrtc
from convgrad_service.backends.cuda.nvrtc import CompileError

__all__ = ["CompileProcesses", "Request", "end_all", "exclusive", "pipes_of"]

LONGEST_S = 600.0
"""Timeout of a compilation, which takes up to 15 s on an idle core."""
MOST_IDLE = 8
"""Processes that wait for a compilation: each has 10 MB of its own, and 20 to 40 MB after one."""
_POLL_S = 0.02


class Request(NamedTuple):
    """What is compiled; see `Nvrtc.compile`."""

    source: str
    name: str
    options: list[str]


class CompileProcesses:
    """Runs compilations, each in a process of its own, with the NVRTC at ``library``. Thread-safe.

    ``ahead`` processes are started for the first compilations. All processes end with this one, or
    once this object is closed.
    """

    def __init__(self, library: str, ahead: int = 0) -> None:
        self.closed = threading.Event()
        self._library = library
        self._running: set[subprocess.Popen[bytes]] = set()
        self._idle = [self._start() for _ in range(ahead)]
        self._lock = threading.Lock()
        weakref.finalize(self, end_all, self._idle)

    def compile(self, request: Request, longest_s: float = LONGEST_S) -> tuple[bytes, str]:
        """Compile; return the cubin and the compiler's log.

        Raises
        ------
        CompileError
            The source was refused, or the process ended, took too long or was killed
            by `close`; the message says which.
        """
        process = self._take()
        answer = None
        try:
            answer = _answer_of(process, request, longest_s)
        finally:
            self._give_back(process, usable=answer is not None)
        head, code = answer
        if "error" in head:
            raise CompileError(head["error"])
        return code, head["log"]

    def close(self) -> None:
        """Kill all processes, with their compilations, and refuse new ones."""
        with self._lock:
            self.closed.set()
            for process in self._running:
                process.kill()
            end_all(self._idle)

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(  # noqa: S603 - this interpreter, our own file
            [sys.executable, "-I", "-S", nvrtc.__file__, self._library],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def _take(self) -> subprocess.Popen[bytes]:
        """Return an idle process, or a new one."""
        with self._lock:
            if self.closed.is_set():
                raise CompileError("the backend has been closed")
            while self._idle:
                process = self._idle.pop()
                if process.poll() is None:
                    break
                _end(process)  # someone has killed it
            else:
                process = self._start()
            self._running.add(process)
        return process

    def _give_back(self, process: subprocess.Popen[bytes], *, usable: bool) -> None:
        with self._lock:
            self._running.remove(process)
            if usable and len(self._idle) < MOST_IDLE and not self.closed.is_set():
                self._idle.append(process)
                return
        _end(process)


def _answer_of(
    process: subprocess.Popen[bytes], request: Request, longest_s: float
) -> tuple[dict[str, Any], bytes]:
    """Have a process compile; return its answer's head and the cubin. Raises CompileError."""
    requests, answers = pipes_of(process)
    head = code = b""
    size = 0
    # A process that has ended does not read, and its answer is empty or cut off.
    with contextlib.suppress(OSError):
        requests.write(json.dumps(request).encode() + b"\n")
        requests.flush()
        answered = select.poll()
        answered.register(answers, select.POLLIN)
        if not answered.poll(longest_s * 1e3):
            raise CompileError(f"compiling {request.name} took longer than {longest_s:g} s")
        head = answers.readline()
        if head.endswith(b"\n"):
            size = json.loads(head)["size"]
            code = answers.read(size)
    if not head.endswith(b"\n") or len(code) < size:
        ending = _ending(process.wait())
        raise CompileError(f"the process that compiled {request.name} ended with {ending}")
    return json.loads(head), code


def pipes_of(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    """Return a child's standard input and output."""
    assert process.stdin is not None  # noqa: S101
    assert process.stdout is not None  # noqa: S101
    return process.stdin, process.stdout


def end_all(processes: list[subprocess.Popen[bytes]]) -> None:
    """Kill processes that have pipes, and remove them from the list."""
    while processes:
        _end(processes.pop())


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    # Closing a killed process's pipe fails where it has not read all of its input.
    for pipe in pipes_of(process):
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
