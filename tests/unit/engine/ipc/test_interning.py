"""Interning: both ends of a channel agree on every number."""

from __future__ import annotations

import random

from convgrad_service.engine.ipc.channel import MAX_INTERNED, InternTable


def test_text_is_sent_once() -> None:
    table = InternTable()
    number, text = table.intern(b"layer")
    assert text == b"layer"
    assert table.intern(b"layer") == (number, None)


def test_both_ends_agree(seed: int) -> None:
    table, other_end, draw = InternTable(), dict[int, bytes](), random.Random(seed)
    told = 0
    for _ in range(5000):
        text = b"%d" % int(draw.expovariate(1 / MAX_INTERNED))
        number, sent = table.intern(text)
        assert 0 <= number < MAX_INTERNED
        if sent is not None:
            other_end[number] = sent
            told += 1
        assert other_end[number] == text
    assert MAX_INTERNED < told < 5000
