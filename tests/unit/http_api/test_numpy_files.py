"""The positions of a form's fields, for any data and any split into blocks."""

from __future__ import annotations

import pytest

from convgrad.errors import MalformedRequest
from convgrad_service.http_api import numpy_files
from convgrad_service.http_api.numpy_files import split_form

BOUNDARY = "----x1"


def form(*fields: tuple[str, bytes], end: bytes = b"--\r\n") -> bytes:
    mark = b"--" + BOUNDARY.encode()
    parts = [
        b'%s\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n'
        % (mark, name.encode(), data)
        for name, data in fields
    ]
    return b"".join(parts) + mark + end


def fields_of(body: bytes) -> dict[str, bytes]:
    view = memoryview(body)
    return {
        name: bytes(view[part.begin : part.begin + part.size_bytes])
        for name, part in split_form(view, BOUNDARY).items()
    }


@pytest.mark.parametrize("block_bytes", [*range(1, 40), 4096])
def test_data_is_found_wherever_a_block_ends(
    monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr(numpy_files, "_BLOCK_BYTES", block_bytes)
    almost = b"\r\n--" + BOUNDARY.encode()[:-1]
    fields = {
        "weight": almost + b"?" + almost,
        "input": b"\r\n-\r\n--\r",
        "empty": b"",
        "stride": b"[2, 2]",
        "one": b"\r",
    }
    assert fields_of(form(*fields.items())) == fields


def test_a_parts_headers_are_read() -> None:
    body = form(("w", b"1")).replace(b"\r\n\r\n", b"\r\nContent-Type: a/b; dtype=c\r\n\r\n", 1)
    (part,) = split_form(memoryview(body), BOUNDARY).values()
    assert part.headers[b"content-type"] == b"a/b; dtype=c"


@pytest.mark.parametrize(
    ("body", "boundary", "said"),
    [
        (form(("w", b"1")), "", "no usable boundary"),
        (form(("w", b"1")), "x" * 71, "no usable boundary"),
        (form(("w", b"1")), "other", "cannot be read"),
        (form(("w", b"1"), end=b""), BOUNDARY, "breaks off after"),
        (form(("w", b"1"))[:60], BOUNDARY, "breaks off after"),
        (b"", BOUNDARY, "breaks off after 0 bytes"),
        (form(("w", b"1"), ("w", b"2")), BOUNDARY, '"w" twice'),
        (form(*((f"f{n}", b"") for n in range(65))), BOUNDARY, "more than 64 fields"),
        (form(("w", b"")).replace(b"form-data", b"file"), BOUNDARY, "has no name"),
        (form(("", b"1")), BOUNDARY, "has no name"),
        (form(("w" * 10_000, b"")), BOUNDARY, "cannot be read"),
        (
            form(("w", b"QUE=")).replace(
                b"\r\n\r\n", b"\r\nContent-Transfer-Encoding: base64\r\n\r\n", 1
            ),
            BOUNDARY,
            "expected a file as it is",
        ),
        (
            form(("w", b"1")).replace(b"\r\n\r\n", b"\r\n" + b"A: b\r\n" * 100 + b"\r\n"),
            BOUNDARY,
            "cannot be read",
        ),
    ],
)
def test_what_is_no_form_is_refused(body: bytes, boundary: str, said: str) -> None:
    with pytest.raises(MalformedRequest, match=said):
        split_form(memoryview(body), boundary)
