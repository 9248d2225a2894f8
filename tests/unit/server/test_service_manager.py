"""What a service manager is told, and what a server does on SIGHUP."""

from __future__ import annotations

import os
import pty
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from convgrad_service.server.service_manager import notify

ENDING = (
    "from convgrad_service.server.service_manager import ending_signals\n"
    "print([one.name for one in ending_signals()])\n"
)


@pytest.mark.parametrize("abstract", [False, True])
def test_the_service_manager_is_told(
    abstract: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"@convgrad-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(name.replace("@", "\0"))
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        notify("READY=1")
        assert manager.recv(100) == b"READY=1"


def test_without_a_service_manager_nothing_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify("READY=1")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    notify("READY=1")


def ending(stdin: int) -> str:
    return subprocess.run(
        [sys.executable, "-c", ENDING], stdin=stdin, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def test_a_terminal_that_closes_ends_the_server() -> None:
    terminal, inside = pty.openpty()
    # Servers of other tests may have run in this process, and ignore it.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert ending(inside) == "['SIGINT', 'SIGTERM', 'SIGHUP']\n"
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
        assert ending(inside) == "['SIGINT', 'SIGTERM']\n"
    finally:
        signal.signal(signal.SIGHUP, before)
        os.close(terminal)
        os.close(inside)
    assert ending(subprocess.DEVNULL) == "['SIGINT', 'SIGTERM']\n"
