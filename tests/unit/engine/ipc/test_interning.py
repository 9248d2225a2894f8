"""What is told once: both ends of a channel mean the same by a number, whatever was forgotten."""

from __future__ import annotations

import random

from convgrad_service.engine.ipc.interning import MOST_NAMED, InternTable


def test_a_text_is_told_once() -> None:
    glossary = InternTable()
    number, text = glossary.name(b"layer")
    assert text == b"layer"
    assert glossary.name(b"layer") == (number, None)


def test_both_ends_mean_the_same(seed: int) -> None:
    glossary, other_end, draw = InternTable(), dict[int, bytes](), random.Random(seed)
    told = 0
    for _ in range(5000):
        text = b"%d" % int(draw.expovariate(1 / MOST_NAMED))
        number, sent = glossary.name(text)
        assert 0 <= number < MOST_NAMED
        if sent is not None:
            other_end[number] = sent
            told += 1
        assert other_end[number] == text
    assert MOST_NAMED < told < 5000
