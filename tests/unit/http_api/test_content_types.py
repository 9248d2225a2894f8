"""Content-Type and Accept, header by header."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convgrad.errors import NotAcceptable, UnsupportedMediaType
from convgrad_service.http_api.content_types import choose_accepted, match_content_type

KNOWN = ("application/json", "application/vnd.safetensors")
JSON, BINARY = KNOWN


@pytest.mark.parametrize(
    ("header", "chosen"),
    [
        (None, BINARY),
        ("", BINARY),
        ("*/*", BINARY),
        ("application/*;q=0.2", BINARY),
        (JSON, JSON),
        (f"{JSON}, {BINARY}", BINARY),
        (f"{JSON};q=1, {BINARY};q=0.999", JSON),
        (f"*/*;q=0.1, {JSON}", JSON),
        (f"{BINARY};q=0, */*", JSON),
        (f"application/*;q=0.9, */*;q=1, {BINARY};q=0.5", JSON),
        (f'text/html;x="a,b;c", {JSON}', JSON),
        (f"{JSON};q=2, {BINARY};q=0.1", BINARY),
        (f"{JSON};q=abc, {BINARY};q=0.1", BINARY),
        (f";;, {JSON}", JSON),
    ],
)
def test_accept(header: str | None, chosen: str) -> None:
    assert choose_accepted(header, KNOWN, preferred=BINARY) == chosen


@pytest.mark.parametrize("header", ["text/*", "a/b", f"{JSON};q=0", "*/*;q=0.0", "*"])
def test_accept_of_nothing_known(header: str) -> None:
    with pytest.raises(NotAcceptable):
        choose_accepted(header, KNOWN, preferred=JSON)


@pytest.mark.parametrize("header", [None, "", "json", "text/json", f"{JSON} x", f"{JSON}; charset"])
def test_content_types_refused(header: str | None) -> None:
    with pytest.raises(UnsupportedMediaType):
        match_content_type(header, KNOWN)


@given(st.text(max_size=200))
def test_any_header_is_read_or_refused(header: str) -> None:
    with contextlib.suppress(UnsupportedMediaType):
        assert match_content_type(header, KNOWN) in KNOWN
    with contextlib.suppress(NotAcceptable):
        assert choose_accepted(header, KNOWN, preferred=JSON) in KNOWN


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "hostile",
    ['"' * 60_000, "a/b;" + " " * 60_000, "a/b" + ";" * 60_000, "*/*," * 20_000, "\\" * 9999],
)
def test_a_hostile_header_is_read_in_linear_time(hostile: str) -> None:
    with contextlib.suppress(NotAcceptable):
        choose_accepted(hostile, KNOWN, preferred=JSON)
    with contextlib.suppress(UnsupportedMediaType):
        match_content_type(hostile, KNOWN)
