"""Every snippet of the README and the docs, run as it stands, each page from top to bottom.

A line with ``convgrad serve`` starts the server of what follows, with the settings on that line; a
page that has none finds one running. Only the addresses are replaced, by those of free ports. What
a snippet promises in a comment behind ``print`` must be printed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    page
    for page in (ROOT / "README.md", ROOT / "client" / "README.md", *(ROOT / "docs").rglob("*.md"))
    if re.search(r"^```(python|bash)", page.read_text(), re.MULTILINE)
)
# What installs, builds or tests is tried by targets of its own, and named in other tests.
LEFT_OUT = ("pip install", "make ", "docker ", "helm ", "kubectl ", "export ", "sudo ", "npm ")


class Server:
    """`convgrad serve` on free ports, started again where a page has other settings."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._settings: dict[str, str] = {}
        self.http = self.grpc = 0

    def start(self, command: str) -> None:
        """``NAME=value … convgrad serve --option …``, on a host and ports of our own."""
        words = shlex.split(command, comments=True)
        settings = dict(word.split("=", 1) for word in words[: words.index("convgrad")])
        if self._process is not None and settings == self._settings:
            return
        self.stop()
        self._settings = settings
        with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("", 0)) as other:
            self.http, self.grpc = one.getsockname()[1], other.getsockname()[1]
        port = self._folder / "port"
        port.unlink(missing_ok=True)
        self._process = subprocess.Popen(
            [*(sys.executable, "-m", "convgrad", "serve"), *("--port-file", str(port))],
            env={
                **os.environ,
                **settings,
                "CONVGRAD_BACKEND": "cpu",
                "CONVGRAD_LOG_LEVEL": "error",
                "CONVGRAD_HTTP_PORT": str(self.http),
                "CONVGRAD_GRPC_PORT": str(self.grpc),
            },
        )
        until = time.monotonic() + 60
        while not port.exists():
            assert self._process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.02)

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(60)
            self._process = None

    def addressed(self, text: str) -> str:
        """The text with the addresses that the documents use replaced by this server's."""
        text = text.replace("127.0.0.1:8000", f"127.0.0.1:{self.http}")
        return text.replace("127.0.0.1:8001", f"127.0.0.1:{self.grpc}")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("server"))
    yield made
    made.stop()


@pytest.fixture(autouse=True)
def _pytorch_as_it_was() -> Iterator[None]:
    """The backend in use and the counts of `convgrad.torch` are the process's, not a page's."""

    def forget() -> None:
        if (module := sys.modules.get("convgrad.torch")) is not None:
            module.use(None)
            module.report(reset=True)

    forget()
    yield
    forget()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_runs_from_top_to_bottom(
    page: Path, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    blocks = re.findall(r"^```(python|bash)\n(.*?)^```", page.read_text(), re.M | re.S)
    if server.http == 0 or not any("convgrad serve" in block for _, block in blocks):
        server.start("convgrad serve")
    for language, block in blocks:
        if language == "python":
            _run_python(server.addressed(block), names)
        else:
            _run_shell(block, server)


def _run_python(code: str, names: dict[str, object]) -> None:
    needed = re.match(r"# needs: (\w+)\n", code)
    if needed is not None and importlib.util.find_spec(needed[1]) is None:
        return
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "a snippet", "exec"), names)  # noqa: S102 - our own documents
    promised = re.findall(r"print\(.*\)  # (.*)", code)
    assert promised or "print(" not in code, code
    assert printed.getvalue().strip().splitlines()[-len(promised) or None :] == promised


def _run_shell(block: str, server: Server) -> None:
    for command in _commands(block):
        if "convgrad serve" in command:
            server.start(command)
        elif not command.startswith(LEFT_OUT):
            if command.startswith("curl") and shutil.which("curl") is None:
                continue
            path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            subprocess.run(
                ["sh", "-c", server.addressed(command)],  # as a reader pastes it
                check=True,
                capture_output=True,
                env={**os.environ, "PATH": path},
            )


def _commands(block: str) -> Iterator[str]:
    """The commands of a block, each with the lines that continue it."""
    command = ""
    for line in block.splitlines():
        command += line + "\n"
        try:
            words = shlex.split(command, comments=True)
        except ValueError:  # a quotation that is still open
            continue
        if not line.endswith("\\"):
            if words:
                yield command.strip()
            command = ""
    assert not command.strip(), f"not a whole command: {command}"
