"""The report of an answer: how it was computed."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["Report"]


class Report(BaseModel):
    """How the server computed an answer.

    Units: bytes and seconds. A field that a newer server adds is ignored by an older client.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    backend: str = Field(description="The backend that computed: cpu or cuda.")
    kernel: str = Field(description="The kernel that the plan chose.")
    flops: int = Field(
        description="Nominal floating-point operations: two per multiply-add, taps in padding "
        "included."
    )
    bytes: int = Field(description="Compulsory bytes: each input read once, each output written.")
    compute_s: float = Field(description="Seconds the backend computed, transfers not included.")
    pieces: int = Field(default=1, description="Number of pieces into which the problem was split.")
    workspace_bytes: int = Field(default=0, description="Memory used beyond inputs and outputs.")
