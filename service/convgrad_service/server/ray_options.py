"""The options of the Ray Serve application, in a module that does not import Ray."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ByteSize, Field, model_validator


class Options(BaseModel, extra="forbid"):
    """The arguments of `serve run` and of a Serve configuration."""

    min_replicas: int = Field(default=1, ge=1)
    max_replicas: int = Field(default=1, ge=1)
    cpus_per_replica: float = Field(default=1.0, ge=0)
    gpus_per_replica: float = Field(default=0.0, ge=0)
    ongoing_per_replica: int = Field(
        default=2, ge=1, description="Problems sent to one replica at a time; more wait."
    )
    target_ongoing: float = Field(
        default=1.0,
        gt=0,
        description="Replicas are added while there are more problems per replica than this, "
        "queued ones included, and removed while there are fewer.",
    )
    upscale_delay_s: float = Field(
        default=2.0, ge=0, description="How long there must be more before a replica is added."
    )
    downscale_delay_s: float = Field(
        default=60.0, ge=0, description="How long there must be fewer before a replica is removed."
    )
    piece_bytes: ByteSize = Field(
        default=ByteSize(2 * 2**30),
        gt=0,
        description="Problems with more bytes of tensors are split into pieces of about this size.",
    )
    attempts: int = Field(
        default=5,
        ge=1,
        description="Replicas that may be lost while computing a problem before it fails.",
    )
    front_resources: dict[str, float] = Field(
        default_factory=dict, description="Ray resources that place the front end on a node."
    )
    settings: dict[str, Any] = Field(
        default_factory=dict, description="The server's settings by name, such as threads."
    )
    anonymous: bool = Field(
        default=False,
        description="Let anyone who can reach the proxies use the service, without an API key.",
    )

    @model_validator(mode="after")
    def _needs_keys(self) -> Self:
        if not self.anonymous and not self.settings.get("api_keys"):
            raise ValueError(
                "a cluster's proxies listen beyond loopback: expected settings with api_keys, a "
                "key file present on every node, or anonymous: true"
            )
        return self
