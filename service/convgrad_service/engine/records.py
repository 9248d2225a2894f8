"""What is counted of a request once it has been answered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["Record"]


class Record(NamedTuple):
    """One request of a known operation; ``code`` is "ok" or how it failed.

    ``accepted`` says whether it was found to be a problem that this server takes.
    """

    operation: str
    transport: str
    code: str
    total_s: float
    stages_s: Mapping[str, float]
    received_bytes: int
    sent_bytes: int
    accepted: bool = True
