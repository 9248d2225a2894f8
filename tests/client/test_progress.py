"""Progress hooks of a running attempt, and the progress bars made from them."""

from __future__ import annotations

import asyncio
import io
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import convgrad
from convgrad import FailureEvent, ProgressEvent
from tests.support.fake_server import FakeServer, answer, ones, problem
from tests.support.local_http import listening

# More than the buffers of a loopback connection hold.
LARGE = np.ones((1, 1, 5 << 20), np.float32)
PAUSE_S = 0.2


@contextmanager
def slow(content: bytes) -> Iterator[str]:
    """The address of a server that takes a body, waits, and sends its answer in two halves."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listener.accept()
        with connection, connection.makefile("rb") as stream:
            time.sleep(PAUSE_S)
            length = 0
            while (line := stream.readline().strip()) != b"":
                if line.lower().startswith(b"content-length:"):
                    length = int(line.partition(b":")[2])
            stream.read(length)
            time.sleep(PAUSE_S)
            head = b"HTTP/1.1 200 OK\r\nContent-Type: application/vnd.safetensors\r\n"
            connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(content) + content[:-1])
            time.sleep(PAUSE_S)
            connection.sendall(content[-1:])

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        thread.join(30)
        listener.close()


@pytest.mark.parametrize("way", ["sync", "async", "httpx"])
def test_an_attempt_is_told_of_from_its_first_byte_to_its_last(way: str) -> None:
    seen: list[ProgressEvent] = []
    hooks: Any = {"progress": [seen.append]}
    reply = answer({"output": LARGE}).content
    call = convgrad.calls.conv_fwd(LARGE, ones(1, 1, 1))

    async def asynchronously(url: str) -> None:
        async with convgrad.AsyncClient(url, event_hooks=hooks) as client:
            await client.call(call)

    with slow(reply) as url:
        if way == "async":
            asyncio.run(asynchronously(url))
        else:
            import httpx

            http = httpx.Client() if way == "httpx" else None
            with convgrad.Client(url, event_hooks=hooks, http_client=http) as client:
                client.call(call)
            if http is not None:
                http.close()
    (body_bytes,) = {event.body_bytes for event in seen}
    assert body_bytes > LARGE.nbytes
    assert len({(event.request_id, event.attempt) for event in seen}) == 1
    sent = [event.sent_bytes for event in seen]
    received = [event.received_bytes for event in seen]
    assert sent == sorted(sent)
    assert received == sorted(received)
    assert any(0 < size < body_bytes for size in sent)
    computing = [event for event in seen if event.sent_bytes == body_bytes]
    assert computing[0].received_bytes == 0
    assert any(0 < event.received_bytes < len(reply) for event in computing)
    assert {event.answer_bytes for event in computing} == {None, len(reply)}


def drawn(use: Callable[[convgrad.EventHooks], object], **options: Any) -> str:
    """Return what a terminal showed while a client with progress bars was used."""
    terminal = io.StringIO()
    console = Console(file=terminal, force_terminal=True, width=100, color_system=None)
    with convgrad.progress_bars(console=console, **options) as hooks:
        use(hooks)
    return terminal.getvalue()


def test_a_bar_says_what_a_call_does() -> None:
    def use(hooks: convgrad.EventHooks) -> None:
        with (
            slow(answer({"output": LARGE}).content) as url,
            convgrad.Client(url, event_hooks=hooks) as client,
        ):
            client.conv_fwd(LARGE, ones(1, 1, 1))

    text = drawn(use, delay_s=0)
    at = [text.index(f"conv_fwd: {word}") for word in ("sending", "computing", "receiving")]
    assert at == sorted(at)
    assert "/21.0 MB" in text


def test_what_takes_no_time_has_no_bar() -> None:
    def use(hooks: convgrad.EventHooks) -> None:
        with FakeServer([answer({"output": ones(1)})]).client(event_hooks=hooks) as client:
            client.conv_fwd(ones(1, 1, 1), ones(1, 1, 1))

    assert "conv_fwd" not in drawn(use)


def test_bars_end_with_failures_and_stay_through_retries() -> None:
    failed: list[FailureEvent] = []

    def use(hooks: convgrad.EventHooks) -> None:
        server = FakeServer([problem("overloaded"), answer({"output": ones(1)})])
        with server.client(event_hooks=hooks) as client:
            client.conv_fwd(ones(1, 1, 1), ones(1, 1, 1))
        refusing = FakeServer([problem("invalid-problem")])
        both: Any = {**hooks, "failure": [*hooks["failure"], failed.append]}
        with (
            refusing.client(event_hooks=both) as client,
            pytest.raises(convgrad.InvalidProblem),
        ):
            client.conv_fwd(ones(1, 1, 1), ones(1, 1, 1))
        (calls,) = {hook.__self__ for hook in hooks["request"]}  # type: ignore[attr-defined]
        assert calls._ids == {}
        assert calls._bars.tasks == []

    drawn(use)
    (event,) = failed
    assert isinstance(event.error, convgrad.InvalidProblem)
    assert str(event).endswith("failed: because (request at-server)")


def test_without_rich_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with (
        pytest.raises(ImportError, match=r"pip install 'convgrad\[progress\]'"),
        convgrad.progress_bars(),
    ):
        pass


def test_the_command_line_shows_bars_when_asked(
    tmp_path: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from convgrad.cli import main

    np.save(tmp_path / "x.npy", ones(1, 1, 1))
    with listening(FakeServer([answer({"output": ones(1)})])) as url:
        files = [f"{name}={tmp_path}/x.npy" for name in ("input", "weight")]
        command = ["call", "conv_fwd", "--url", url, "--input", files[0], "--input", files[1]]
        assert main([*command, "--progress"]) == 0
        monkeypatch.setitem(sys.modules, "rich.console", None)
        assert main([*command, "--progress"]) == 2
    assert "convgrad[progress]" in capsys.readouterr().err
