"""Content-Type, Accept and Content-Encoding: which of its forms a server reads and answers with."""

from __future__ import annotations

import re
from collections.abc import Sequence

from convgrad.errors import NotAcceptable, UnsupportedMediaType
from convgrad_service.http_api.problem_details import EncodingRefused

_NAME = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_MEDIA_RANGE = re.compile(rf"\s*({_NAME})/({_NAME})\s*")
_PARAMETER = re.compile(rf';\s*(?:({_NAME})\s*=\s*({_NAME}|"(?:[^"\\]|\\.)*"))?\s*')
# Commas within quoted strings do not separate.
_ITEM = re.compile(r'(?:[^,"]|"(?:[^"\\]|\\.)*")+')
_MAX_RANGES = 64  # more than any client sends


def _alternatives(names: Sequence[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def match_content_type(header: str | None, known: Sequence[str]) -> str:
    """Return the one of ``known`` that a Content-Type names.

    Parameters are ignored, but for a charset: text is read as UTF-8 and in no other encoding.

    Raises
    ------
    UnsupportedMediaType
        It names none, or is missing.
    """
    expected = _alternatives(known)
    if header is None:
        raise UnsupportedMediaType(f"the request has no Content-Type; expected {expected}")
    media_type, parameters = _parse(header)
    if media_type not in known:
        raise UnsupportedMediaType(f"the Content-Type is {header[:200]!r}; expected {expected}")
    charset = parameters.get("charset", "utf-8").lower()
    if charset not in ("utf-8", "utf8"):
        raise UnsupportedMediaType(f"the charset is {charset[:64]!r}; expected utf-8")
    return media_type


def content_type_parameters(header: str) -> dict[str, str]:
    """Return a Content-Type's parameters by lower-case name; none if it cannot be parsed."""
    return _parse(header)[1]


def choose_accepted(header: str | None, known: Sequence[str], preferred: str) -> str:
    """Return the one of ``known`` that an Accept header prefers; ``preferred`` wins a tie.

    Each type gets the q of the most specific range that covers it (RFC 9110, 12.5.1); ranges that
    cannot be read are skipped.

    Raises
    ------
    NotAcceptable
        None of them has a q above zero.
    """
    if header is None or not header.strip():
        return preferred
    qualities: dict[str, float] = {}
    items = [item for item in _ITEM.findall(header) if item.strip()]
    for name, parameters in map(_parse, items[:_MAX_RANGES]):
        qualities[name] = max(_quality(parameters), qualities.get(name, -1.0))

    def quality(media_type: str) -> float:
        ranges = (media_type, f"{media_type.partition('/')[0]}/*", "*/*")
        return next((found for each in ranges if (found := qualities.get(each, -1.0)) >= 0), 0.0)

    # max() returns the first of equals, so the order decides ties.
    best = max([preferred, *known], key=quality)
    if quality(best) <= 0:
        raise NotAcceptable(
            f"Accept is {header[:200]!r}; this server answers with {_alternatives(known)}"
        )
    return best


def refuse_encoded(content_encoding: str) -> None:
    """Raise EncodingRefused if the body has a Content-Encoding."""
    encoding = content_encoding.strip().lower()
    if encoding not in ("", "identity"):
        raise EncodingRefused(
            f"the Content-Encoding is {encoding[:64]!r}; expected an uncompressed body (identity)"
        )


def _quality(parameters: dict[str, str]) -> float:
    """Return the q of a range, -1 if it cannot be read."""
    try:
        quality = float(parameters.get("q", "1"))
    except ValueError:
        return -1.0
    return quality if 0 <= quality <= 1 else -1.0


def _parse(text: str) -> tuple[str, dict[str, str]]:
    """Return a media type and its parameters, both in lower case; "" if it cannot be parsed."""
    head = _MEDIA_RANGE.match(text)
    if head is None:
        return "", {}
    parameters = {}
    at = head.end()
    while at < len(text):
        parameter = _PARAMETER.match(text, at)
        if parameter is None:
            return "", {}
        at = parameter.end()
        if (name := parameter[1]) is not None:
            value = parameter[2]
            quoted = value.startswith('"')
            parameters[name.lower()] = re.sub(r"\\(.)", r"\1", value[1:-1]) if quoted else value
    return f"{head[1]}/{head[2]}".lower(), parameters
