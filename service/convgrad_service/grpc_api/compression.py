"""Inflates messages that clients have compressed, by gzip or by deflate (zlib).

grpcio would inflate every message in its own memory, however many at a time: 3.6 MB sent to sixty
calls took 1.5 GB, and everybody waited for 15 s. So it hands over messages as they were sent.
"""

from __future__ import annotations

import zlib

from convgrad.errors import MalformedRequest, PayloadTooLarge

__all__ = ["inflated", "is_compressed"]

_EITHER_HEADER = zlib.MAX_WBITS + 32
_GZIP, _ZLIB = b"\x1f\x8b", b"\x78"


def is_compressed(message: bytes) -> bool:
    """Return whether a message begins as gzip or zlib do.

    grpcio does not say so. As protobuf, 0x1f is a tag that no message can have, and 0x78 that of a
    field 15, which no message of this server has.
    """
    head = message[:2]
    return head == _GZIP or (head[:1] == _ZLIB and int.from_bytes(head, "big") % 31 == 0)


def inflated(message: bytes, max_bytes: int) -> bytes:
    """Inflate a message, to at most ``max_bytes``.

    Raises
    ------
    MalformedRequest
        It is damaged, incomplete, or followed by something else.
    PayloadTooLarge
        It is longer than that.
    """
    inflating = zlib.decompressobj(_EITHER_HEADER)
    try:
        found = inflating.decompress(message, max_bytes + 1)
    except zlib.error as error:
        raise MalformedRequest(f"the compressed message cannot be read: {error}") from None
    if len(found) > max_bytes:
        raise PayloadTooLarge(
            f"the message has more than {max_bytes:,} bytes once inflated, the maximum"
        )
    if not inflating.eof or inflating.unused_data:
        raise MalformedRequest("the compressed message is not complete, or more follows its end")
    return found
