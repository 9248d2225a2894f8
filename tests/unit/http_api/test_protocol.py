"""Heads of answers leave with the first of their bodies."""

from __future__ import annotations

from typing import Any

from convgrad_service.http_api.connection import CoalescedWriter


class Recorder:
    """A transport that remembers its writes."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: bytes | memoryview) -> None:
        self.writes.append(bytes(data))

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


def joined() -> tuple[CoalescedWriter, Recorder]:
    recorder: Any = Recorder()
    return CoalescedWriter(recorder), recorder


def test_a_small_body_leaves_with_its_head() -> None:
    subject, seen = joined()
    subject.write(b"HTTP/1.1 200 OK\r\n\r\n")
    assert seen.writes == []
    subject.write(b"body")
    subject.write(memoryview(b"more"))
    assert seen.writes == [b"HTTP/1.1 200 OK\r\n\r\nbody", b"more"]


def test_a_large_part_is_not_copied_to_be_joined() -> None:
    subject, seen = joined()
    subject.write(b"head")
    subject.write(memoryview(bytes(100_000)))
    assert [len(write) for write in seen.writes] == [4, 100_000]


def test_an_interim_answer_leaves_at_once() -> None:
    subject, seen = joined()
    subject.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert len(seen.writes) == 1
    subject.write(b"HTTP/1.1 200 OK\r\n\r\n")
    subject.write(b"")
    assert seen.writes[1:] == [b"HTTP/1.1 200 OK\r\n\r\n"]


def test_closing_sends_what_waits() -> None:
    subject, seen = joined()
    subject.write(b"head")
    assert not subject.is_closing()
    subject.close()
    assert seen.writes == [b"head"]
    assert seen.closed
    assert subject.is_closing()
