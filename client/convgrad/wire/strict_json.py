"""JSON as the standard has it: no NaN literals, no key twice, no surprises from deep nesting.

The stdlib's parser takes more than JSON and keeps the last of two equal keys; here both are
refused, with a sentence instead of a traceback.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from convgrad.errors import MalformedRequest
from convgrad.wire.sentences import shown

__all__ = ["Pairs", "loads", "loads_object"]

Pairs = list[tuple[str, Any]]


def loads(
    text: bytes | bytearray | memoryview | str,
    what: str,
    *,
    pairs_hook: Callable[[Pairs], dict[str, Any]] | None = None,
    position: Callable[[int], int] = lambda index: index,
) -> Any:
    """Parse ``text``; ``what`` names it in sentences, e.g. ``the body``.

    ``pairs_hook`` sees the items of every object before duplicates are looked for; ``position``
    turns an index into ``text`` into the one to report.

    Raises
    ------
    MalformedRequest
        Not UTF-8, not JSON, a key twice in one object, a NaN literal, or nested too deep.
    """

    def unique(pairs: Pairs) -> dict[str, Any]:
        found = dict(pairs) if pairs_hook is None else pairs_hook(pairs)
        if len(found) != len(pairs):
            raise MalformedRequest(f"{what}: the key {shown(_twice(pairs))} stands there twice")
        return found

    def no_constant(name: str) -> Any:
        raise MalformedRequest(f'{what}: {name} is no JSON; write it as the string "{name}"')

    try:
        decoded = text if isinstance(text, str) else str(text, "utf-8")
        return json.loads(decoded, object_pairs_hook=unique, parse_constant=no_constant)
    except UnicodeDecodeError as error:
        raise MalformedRequest(
            f"{what} is not UTF-8: byte {position(error.start)} cannot be decoded"
        ) from None
    except json.JSONDecodeError as error:
        raise MalformedRequest(
            f"{what} is not JSON: {error.msg} (at {position(error.pos)})"
        ) from None
    except RecursionError:
        raise MalformedRequest(f"{what} is nested too deep to be a request") from None
    except ValueError:
        # The one ValueError left: an int of more digits than Python will convert.
        raise MalformedRequest(f"{what} holds an int of thousands of digits") from None


def loads_object(
    text: bytes | bytearray | memoryview | str,
    what: str,
    *,
    pairs_hook: Callable[[Pairs], dict[str, Any]] | None = None,
    position: Callable[[int], int] = lambda index: index,
) -> dict[str, Any]:
    """`loads` of a text that must hold an object."""
    found = loads(text, what, pairs_hook=pairs_hook, position=position)
    if not isinstance(found, dict):
        raise MalformedRequest(f"{what}: expected a JSON object, got {shown(found)}")
    return found


def _twice(pairs: Pairs) -> str:
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            return name
        seen.add(name)
    raise AssertionError("called with unique keys")
