"""Tiles of hopper_gather, and the time that one is expected to take."""

from __future__ import annotations

from dataclasses import dataclass

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.elements import CUDA_TYPES
from convgrad_service.plans.cuda_device import CudaDevice

__all__ = ["ROW_BYTES", "TILES", "HopperTile"]

ROW_BYTES = 128
"""Of an operand in shared memory: a step's depth."""
STAGING_BYTES = 2 * 64 * ROW_BYTES
ALIGNMENT, BARRIER_BYTES = 1024, 8
# Of a multiprocessor, and what a block has whatever it asks for.
WARPGROUP = 128
# By the number of multiplying warpgroups: of a thread that copies, and of one that multiplies.
REGISTERS = {2: (40, 232), 3: (32, 160)}


@dataclass(frozen=True, slots=True)
class HopperTile:
    """M pixels x N channels of a block, by so many warpgroups, in clusters of so many blocks that
    share the weights.

    ``step_s`` a step (128 bytes of the reduction), while all multiprocessors of an H200 are busy,
    and ``tile_s`` a tile besides, were fitted to tests/perf's dense layers there; they serve to
    choose.
    """

    m: int
    n: int
    warpgroups: int = 2
    cluster: int = 1
    step_s: float = 0.0
    tile_s: float = 1e-6

    @property
    def threads(self) -> int:
        return (self.warpgroups + 1) * WARPGROUP

    @property
    def stage_bytes(self) -> int:
        return (self.m + self.n) * ROW_BYTES

    def stages(self, device: CudaDevice) -> int:
        """As many as fit."""
        room = device.shared_bytes_per_block - ALIGNMENT - self.warpgroups * STAGING_BYTES
        return min(8, room // (self.stage_bytes + 2 * BARRIER_BYTES))

    def shared_bytes(self, stages: int) -> int:
        ring = stages * (self.stage_bytes + 2 * BARRIER_BYTES)
        return ALIGNMENT + ring + self.warpgroups * STAGING_BYTES

    def defines(self, dtype: DType, across: bool, maps: int, stages: int) -> dict[str, object]:
        """What hopper_gather.cu expects."""
        producer, consumer = REGISTERS[self.warpgroups]
        return {
            "ELEMENT": CUDA_TYPES[dtype],
            "ACROSS": int(across),
            "MAPS": maps,
            "BM": self.m,
            "BN": self.n,
            "CONSUMERS": self.warpgroups,
            "CLUSTER": self.cluster,
            "STAGES": stages,
            "PRODUCER_REGISTERS": producer,
            "CONSUMER_REGISTERS": consumer,
        }


TILES = (
    HopperTile(128, 256),
    HopperTile(128, 256, cluster=2),
    HopperTile(256, 128),
    HopperTile(256, 128, cluster=2),
    HopperTile(128, 128),
    HopperTile(128, 128, cluster=2),
    HopperTile(192, 128, 3),
    HopperTile(256, 64),
    HopperTile(128, 64),
)
