"""Channels between processes: framing, batching, the end of a channel, and interning."""

from __future__ import annotations

import asyncio
import pickle
import random
import socket
from collections.abc import Coroutine
from typing import Any, NamedTuple

import pytest

from convgrad_service.engine.ipc.channel import (
    MAX_INTERNED,
    Channel,
    InternTable,
    Pipe,
)


class Point(NamedTuple):
    x: int
    y: bytes


class Name(NamedTuple):
    text: str


MESSAGES: list[Any] = [Point(1, b"a" * 100_000), Name("b"), ValueError("c"), Point(2, b"")]


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 10))


def test_messages_arrive_whole_and_in_order() -> None:
    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        seen: list[Any] = []
        ended = asyncio.Event()
        sender = await Channel.open(ours, lambda _: None, lambda: None)
        await Channel.open(theirs, seen.append, ended.set)
        for message in MESSAGES:
            sender.send(message)
        sender.close()
        await ended.wait()
        assert [type(message) for message in seen] == [type(message) for message in MESSAGES]
        assert [seen[0], seen[1], seen[3]] == [MESSAGES[0], MESSAGES[1], MESSAGES[3]]
        sender.send(Name("too late"))  # dropped, and nothing raised

    run(scenario())


@pytest.mark.parametrize("step", [1, 3, 7, 10_000])
def test_messages_split_at_any_byte(step: int) -> None:
    async def scenario() -> None:
        seen: list[Any] = []
        channel = Channel(seen.append, lambda: None)
        texts = [pickle.dumps(Name(str(at))) for at in range(20)]
        sent = b"".join(len(text).to_bytes(4, "little") + text for text in texts)
        for at in range(0, len(sent), step):
            channel.data_received(sent[at : at + step])
        assert seen == [Name(str(at)) for at in range(20)]

    run(scenario())


def test_messages_of_one_iteration_are_one_write_with_lazy_ones() -> None:
    class Transport:
        def __init__(self) -> None:
            self.writes: list[bytes] = []

        def write(self, data: bytes) -> None:
            self.writes.append(data)

        def is_closing(self) -> bool:
            return False

    async def scenario() -> None:
        channel = Channel(lambda _: None, lambda: None)
        transport: Any = Transport()
        channel.connection_made(transport)
        channel.send_lazily(Name("later"))
        await asyncio.sleep(0.01)
        assert transport.writes == []
        channel.send(Name("first"))
        channel.send(Name("second"))
        assert transport.writes == []
        await asyncio.sleep(0.01)
        assert len(transport.writes) == 1
        words = b"later", b"first", b"second"
        assert [transport.writes[0].count(word) for word in words] == [1, 1, 1]
        channel.send_lazily(Name("flushed"))
        channel.flush()
        assert len(transport.writes) == 2

    run(scenario())


def test_pipe_receives_messages_and_eof() -> None:
    ours, theirs = socket.socketpair()
    sender, receiver = Pipe(ours.detach()), Pipe(theirs.detach())
    sender.send((1, "a"))
    sender.send([2.5])
    assert receiver.receive() == (1, "a")
    assert receiver.receive() == [2.5]
    sender.close()
    with pytest.raises(EOFError):
        receiver.receive()
    receiver.close()


def test_text_is_sent_once() -> None:
    table = InternTable()
    number, text = table.intern(b"layer")
    assert text == b"layer"
    assert table.intern(b"layer") == (number, None)


def test_both_ends_agree(seed: int) -> None:
    table, other_end, draw = InternTable(), dict[int, bytes](), random.Random(seed)
    sent_texts = 0
    for _ in range(5000):
        text = b"%d" % int(draw.expovariate(1 / MAX_INTERNED))
        number, sent = table.intern(text)
        assert 0 <= number < MAX_INTERNED
        if sent is not None:
            other_end[number] = sent
            sent_texts += 1
        assert other_end[number] == text
    assert MAX_INTERNED < sent_texts < 5000
