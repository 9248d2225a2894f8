"""Reads request headers: Content-Type and Accept, Content-Encoding, numbers of seconds."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from convgrad.errors import MalformedRequest, NotAcceptable, UnsupportedMediaType

__all__ = [
    "choose_accepted",
    "content_type_parameters",
    "match_content_type",
    "refuse_encoded",
    "seconds_in",
]

_NAME = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_MEDIA_RANGE = re.compile(rf"\s*({_NAME})/({_NAME})\s*")
_PARAMETER = re.compile(rf';\s*(?:({_NAME})\s*=\s*({_NAME}|"(?:[^"\\]|\\.)*"))?\s*')
_MAX_RANGES = 64  # more than any client sends


def match_content_type(header: str | None, known: Sequence[str]) -> str:
    """Return the one of ``known`` that a Content-Type names.

    Parameters are ignored, but for a charset: text is read as UTF-8 and in no other encoding.

    Raises
    ------
    UnsupportedMediaType
        It names none, or is missing.
    """
    expected = " or ".join(known)
    if header is None:
        raise UnsupportedMediaType(f"the request has no Content-Type; expected {expected}")
    parsed = _parse(header)
    if parsed is None or parsed[0] not in known:
        raise UnsupportedMediaType(f"the Content-Type is {header[:200]!r}; expected {expected}")
    media_type, parameters = parsed
    charset = parameters.get("charset", "utf-8").lower()
    if charset not in ("utf-8", "utf8"):
        raise UnsupportedMediaType(f"the charset is {charset[:64]!r}; expected utf-8")
    return media_type


def content_type_parameters(header: str) -> dict[str, str]:
    """Return a Content-Type's parameters by lower-case name; none if it cannot be parsed."""
    parsed = _parse(header)
    return {} if parsed is None else parsed[1]


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
    ranges = [parsed for item in _split(header)[:_MAX_RANGES] if (parsed := _range(item))]
    order = [preferred, *(media_type for media_type in known if media_type != preferred)]
    # max() returns the first of equals, so the order decides ties.
    best = max(order, key=lambda media_type: _quality(media_type, ranges))
    if _quality(best, ranges) <= 0:
        raise NotAcceptable(
            f"Accept is {header[:200]!r}; this server answers with {' or '.join(known)}"
        )
    return best


def refuse_encoded(content_encoding: str | None) -> None:
    """Raise UnsupportedMediaType if the body has a Content-Encoding."""
    encoding = (content_encoding or "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise UnsupportedMediaType(
            f"the Content-Encoding is {encoding[:64]!r}; expected the body as it is (identity)"
        )


def seconds_in(value: str | None, header: str) -> float | None:
    """Return the seconds in the value of ``header``; raises MalformedRequest if it is invalid."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise MalformedRequest(
            f"{header} is {value[:64]!r}; expected a number of seconds above zero"
        )
    return seconds


def _quality(media_type: str, ranges: Sequence[tuple[str, float]]) -> float:
    candidates = (media_type, f"{media_type.partition('/')[0]}/*", "*/*")
    for candidate in candidates:
        qualities = [quality for name, quality in ranges if name == candidate]
        if qualities:
            return max(qualities)
    return 0.0


def _range(item: str) -> tuple[str, float] | None:
    parsed = _parse(item)
    if parsed is None:
        return None
    name, parameters = parsed
    try:
        quality = float(parameters.get("q", "1"))
    except ValueError:
        return None
    return (name, quality) if 0 <= quality <= 1 else None


def _parse(text: str) -> tuple[str, dict[str, str]] | None:
    head = _MEDIA_RANGE.match(text)
    if head is None:
        return None
    parameters = {}
    at = head.end()
    while at < len(text):
        parameter = _PARAMETER.match(text, at)
        if parameter is None:
            return None
        at = parameter.end()
        if parameter[1]:
            parameters[parameter[1].lower()] = _unquoted(parameter[2])
    return f"{head[1]}/{head[2]}".lower(), parameters


def _unquoted(value: str) -> str:
    return re.sub(r"\\(.)", r"\1", value[1:-1]) if value.startswith('"') else value


def _split(header: str) -> list[str]:
    # Split at commas outside of quoted strings.
    return [item for item in re.findall(r'(?:[^,"]|"(?:[^"\\]|\\.)*")+', header) if item.strip()]
