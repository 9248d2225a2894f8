"""What is counted of a request once it has been answered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["Record"]


class Record(NamedTuple):
    """One request of a known operation; ``code`` is "ok" or how it failed.

    ``flops`` and ``compulsory_bytes`` are what computing it took at least, 0 where it was not
    computed. ``key`` names the API key that it came with, "" without one.
    """

    operation: str
    transport: str
    code: str
    total_s: float
    stages_s: Mapping[str, float]
    received_bytes: int
    sent_bytes: int
    flops: int = 0
    compulsory_bytes: int = 0
    key: str = ""
