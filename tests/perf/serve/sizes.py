"""The two sizes that are measured, as a max pooling: one tensor in, one tensor out."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["MALLOC", "OPERATION", "SIZES", "Size"]

OPERATION = "maxpool2d_fwd"

# What convgrad_service.server.malloc sets, for programs that do not set it themselves. Triton
# gained most by this of the settings tried (its documents name other allocators, not in its wheel).
MALLOC = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
    "MALLOC_TOP_PAD_": str(64 * 2**20),
}


@dataclass(frozen=True)
class Size:
    """Shapes of float32 tensors, and how often each path is measured.

    In each of ``rounds`` its turn is one call that does not count, because it finds the caches full
    of another's data, and ``counted`` calls that do.
    """

    name: str
    input_shape: tuple[int, int, int, int]
    output_shape: tuple[int, int, int, int]
    kernel_size: int
    rounds: int
    counted: int

    @property
    def samples(self) -> int:
        return self.rounds * self.counted

    @property
    def input_bytes(self) -> int:
        return 4 * math.prod(self.input_shape)

    @property
    def output_bytes(self) -> int:
        return 4 * math.prod(self.output_shape)


SIZES = {
    size.name: size
    for size in (
        Size("64 MiB", (16, 256, 64, 64), (16, 256, 16, 16), kernel_size=4, rounds=8, counted=2),
        Size("1 KiB", (1, 64, 2, 2), (1, 64, 2, 2), kernel_size=1, rounds=20, counted=20),
    )
}
