"""What one end of a channel has told the other once, and calls by a number from then on."""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["MOST_NAMED", "InternTable", "Named"]

MOST_NAMED = 256


Named = tuple[int, bytes | None]
"""A text's number, and the text itself where the other end is to learn it."""


class InternTable:
    """The texts that the other end knows: the latest `MOST_NAMED`, whose numbers are below that.

    The other end keeps a text under its number until another comes under the same; as messages
    arrive in order, both ends always mean the same.
    """

    def __init__(self) -> None:
        self._numbers: OrderedDict[bytes, int] = OrderedDict()

    def name(self, text: bytes) -> Named:
        """How to call a text in the next message."""
        number = self._numbers.get(text)
        if number is not None:
            self._numbers.move_to_end(text)
            return number, None
        full = len(self._numbers) >= MOST_NAMED
        number = self._numbers.popitem(last=False)[1] if full else len(self._numbers)
        self._numbers[text] = number
        return number, text
