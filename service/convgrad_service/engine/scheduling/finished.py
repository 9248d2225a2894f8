"""What a worker says of a job that is done."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Finished"]


class Finished(NamedTuple):
    """How a job was computed; its outputs lie where the job said. See `Outcome`.

    ``words`` is the answer of a problem whose answer is no tensor, as JSON.
    """

    kernel: str
    compute_s: float
    pieces: int
    workspace_bytes: int
    upload_s: float
    download_s: float
    words: str = ""
