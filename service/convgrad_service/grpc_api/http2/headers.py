"""Header blocks of one connection: what a client sends again and again is decoded once."""

from __future__ import annotations

import hpack

__all__ = ["HeaderDecoder", "Headers"]

Headers = tuple[tuple[bytes, bytes], ...]

# A field that begins above this is one of the table, and changes nothing there.
_LAST_LITERAL = 0x7F
_MAX_KNOWN_BYTES, _MAX_KNOWN = 64, 64


class HeaderDecoder:
    """hpack's decoder, with what blocks that only refer to its table came to.

    gRPC's clients send such a block with every call but the first.
    """

    def __init__(self, max_bytes: int) -> None:
        self._decoder = hpack.Decoder(max_header_list_size=max_bytes)
        self._known: dict[bytes, Headers] = {}

    def decode(self, block: bytes) -> Headers:
        """The headers of a block; raises hpack.HPACKError if it is none, or too many."""
        known = self._known.get(block)
        if known is not None:
            return known
        headers: Headers = tuple(self._decoder.decode(block, raw=True))
        if len(block) > _MAX_KNOWN_BYTES or min(block, default=0) <= _LAST_LITERAL:
            self._known.clear()  # the table that the others refer to may have changed
        elif len(self._known) < _MAX_KNOWN:
            self._known[block] = headers
        return headers
