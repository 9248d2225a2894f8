"""The demo's server: a child process, or one that is already running.

The child never outlives the demo: it is stopped however the ``with`` block ends, and signals that
would terminate the demo without unwinding are converted to exceptions.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from convgrad.demo.errors import DemoError

__all__ = ["Server", "local_server", "running_server"]

_HOST = "127.0.0.1"
_START_S = 30.0
_STOP_S = 5.0
_POLL_S = 0.05
_LOG_TAIL_LINES = 15


@dataclass(frozen=True, slots=True)
class Server:
    """The server's address, and its process if the demo started it."""

    url: str
    process: subprocess.Popen[bytes] | None = None
    log: Path | None = None

    def epitaph(self) -> str:
        """Describe how the child ended on its own; empty while it runs."""
        if self.process is None or self.log is None or self.process.poll() is None:
            return ""
        return _death(self.process, self.log)


@contextmanager
def running_server(url: str) -> Iterator[Server]:
    """Use a server that is already running, after checking that it is ready."""
    try:
        answer = _ask_ready(url, timeout_s=5)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise DemoError(f"no server answers at {url}: {error}") from error
    if answer.status_code != httpx.codes.OK:
        raise DemoError(f"the server at {url} is not ready: it answered {answer.status_code}")
    yield Server(url)


@contextmanager
def local_server() -> Iterator[Server]:
    """Start a server on a free local port; stop it when the block ends."""
    with (
        tempfile.TemporaryDirectory(prefix="convgrad-demo-") as folder,
        _signals_as_exceptions(),
    ):
        log, port_file = Path(folder, "server.log"), Path(folder, "port")
        command = [sys.executable, "-m", "convgrad", "serve"]
        command += ["--host", _HOST, "--port", "0", "--port-file", str(port_file)]
        command += ["--grpc-port", "0"]  # a free port
        command += ["--log-level", "warning"]  # no line per request
        with log.open("wb") as sink:
            # In its own session, so that Ctrl-C reaches only the demo, which then stops it.
            process = subprocess.Popen(  # noqa: S603  (our own interpreter and module)
                command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield Server(_address_once_ready(process, port_file, log), process, log)
        finally:
            _stop(process)


def _address_once_ready(process: subprocess.Popen[bytes], port_file: Path, log: Path) -> str:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise DemoError(_death(process, log))
        if port_file.exists():
            url = f"http://{_HOST}:{port_file.read_text().strip()}"
            if _is_ready(url):
                return url
        time.sleep(_POLL_S)
    raise DemoError(f"the server was not ready within {_START_S:g} s{_tail(log)}")


def _is_ready(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return _ask_ready(url, timeout_s=1).status_code == httpx.codes.OK
    return False


def _ask_ready(url: str, timeout_s: float) -> httpx.Response:
    # Ignore proxies set in the environment: they cannot reach the loopback of this machine.
    return httpx.get(f"{url}/v2/health/ready", timeout=timeout_s, trust_env=False)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_S)
    except BaseException as error:
        # Too slow, or a second Ctrl-C: kill it either way.
        process.kill()
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise


def _death(process: subprocess.Popen[bytes], log: Path) -> str:
    status = process.returncode
    how = f"exit status {status}" if status >= 0 else f"signal {-status}"
    return f"the server ended on its own ({how}){_tail(log)}"


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()[-_LOG_TAIL_LINES:]
    return "; its last lines:\n" + "\n".join(f"  {line}" for line in lines) if lines else ""


@contextmanager
def _signals_as_exceptions() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the stack as Ctrl-C does, so that the child is stopped."""
    if threading.current_thread() is not threading.main_thread():  # handlers can only be set there
        yield
        return

    def unwind(number: int, _frame: Any) -> None:
        raise SystemExit(128 + number)

    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {name: signal.signal(getattr(signal, name), unwind) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)
