"""Notifications to a service manager such as systemd (``Type=notify``); SIGHUP, which it sends."""

from __future__ import annotations

import contextlib
import os
import signal
import socket


def notify(state: str) -> None:
    """Tell the service manager, if one started this process, a state such as ``READY=1``.

    See sd_notify(3). That nobody takes it is no error.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        # "@" stands for the abstract namespace.
        sender.connect(f"\0{address[1:]}" if address.startswith("@") else address)
        sender.send(state.encode())


def ending_signals() -> list[signal.Signals]:
    """Return the signals that end the server; must be called before any is handled.

    A terminal that closes sends SIGHUP to the programs started in it, which then ends the server.
    Elsewhere SIGHUP is a request to read files again, which happens without it: it is ignored.
    """
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN and os.isatty(0):
        return [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return [signal.SIGINT, signal.SIGTERM]
