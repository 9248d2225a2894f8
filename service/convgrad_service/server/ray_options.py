"""What the Ray Serve application may be told; apart from it, for it imports Ray."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ByteSize, Field, model_validator

__all__ = ["Options"]


class Options(BaseModel, extra="forbid"):
    """What `serve run` and a Serve configuration may set, beside the server's own settings."""

    min_replicas: int = Field(default=1, ge=1)
    max_replicas: int = Field(default=1, ge=1)
    cpus_per_replica: float = Field(default=1.0, ge=0)
    gpus_per_replica: float = Field(default=0.0, ge=0)
    ongoing_per_replica: int = Field(
        default=2, ge=1, description="Problems that one replica has at a time; more wait."
    )
    target_ongoing: float = Field(
        default=1.0,
        gt=0,
        description="Replicas are added while more problems than this are sent for each of them, "
        "those that wait included, and taken away while fewer are.",
    )
    upscale_delay_s: float = Field(
        default=2.0, ge=0, description="How long there must be more before a replica is added."
    )
    downscale_delay_s: float = Field(
        default=60.0, ge=0, description="How long there must be fewer before one is taken away."
    )
    piece_bytes: ByteSize = Field(
        default=ByteSize(2 * 2**30),
        gt=0,
        description="A problem with more bytes of tensors is computed in pieces of about so many.",
    )
    attempts: int = Field(
        default=5, ge=1, description="Replicas that may be lost with a problem before it fails."
    )
    front_resources: dict[str, float] = Field(
        default_factory=dict, description="Ray resources that keep the front end on some node."
    )
    settings: dict[str, Any] = Field(
        default_factory=dict, description="The server's settings by name, such as threads."
    )
    anonymous: bool = Field(
        default=False, description="Let whoever reaches the proxies use it, without an API key."
    )

    @model_validator(mode="after")
    def _needs_keys(self) -> Self:
        if not self.anonymous and not self.settings.get("api_keys"):
            raise ValueError(
                "a cluster's proxies listen beyond loopback: expected settings with api_keys, a "
                "file of keys that is on every node, or anonymous: true"
            )
        return self
