"""The emulator detects errors specific to Hopper: missing waits, and misused barriers."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.core.tensor_maps import MapField, TiledMap, pack_maps
from convgrad_service.plans.cuda.program import Instance, Launch
from tests.emulator.backend import works_here
from tests.support.kernels.hopper_probe import Emulated

pytestmark = pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")

BOXES = 16
SOURCE = """
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
using namespace convgrad;
struct ModeArgs { TensorMap map; u32* out; int mode; };
extern "C" __global__ void modes(const __grid_constant__ ModeArgs args) {
  extern __shared__ uint4 shared[];
  const u32 to = (shared_address(shared) + 1023) / 1024 * 1024, barrier = to + 16384;
  if (threadIdx.x != 0) return;
  if (args.mode != 3) mbarrier_init(barrier, 1);
  switch (args.mode) {
    case 0:  // boxes before they are waited for, and after
      mbarrier_arrive_expect_tx(barrier, 16 * 1024);
      for (int i = 0; i < 16; ++i) tma_load(to + i * 1024, args.map, barrier, {0, 0});
      for (int i = 0; i < 16; ++i) args.out[i] = ld_shared_u32(to + i * 1024) == 7;
      mbarrier_wait(barrier, 0);
      for (int i = 0; i < 16; ++i) args.out[i] += 2 * (ld_shared_u32(to + i * 1024) == 7);
      break;
    case 1: mbarrier_wait(barrier, 0); break;
    case 2: mbarrier_arrive_expect_tx(barrier, 1024); mbarrier_arrive(barrier); break;
    case 3: mbarrier_arrive(barrier); break;
    case 4: tma_store(args.map, to, {0, 0}); tma_store_commit(); break;
    case 5:
      for (int i = 0; i < 16; ++i) tma_load(to, args.map, barrier, {0, 0});
      break;
    case 6: tma_load(to + 512, args.map, barrier, {0, 0}); break;
    case 7: tma_load(to, args.map, barrier, {0, 0, 0}); break;
    case 8:  // announced and never brought
      mbarrier_arrive_expect_tx(barrier, 16);
      mbarrier_wait(barrier, 0);
      break;
    case 10: tma_load(to, args.map, barrier, {2, 0}); break;
    case 11: tma_store(args.map, to, {0, -1}); break;
    case 12: tma_store(args.map, to + 128, {0, 0}); break;
    case 9: tma_load(to, *reinterpret_cast<const TensorMap*>(args.out), barrier, {0, 0}); break;
  }
}
"""


class ModeArgs(ctypes.Structure):
    _fields_ = (("map", MapField), ("out", ctypes.c_uint64), ("mode", ctypes.c_int))


def run(folder: Path, mode: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint32]]:
    source = folder / "modes.cu"
    source.write_text(SOURCE, encoding="utf-8")
    one = TiledMap(DType.FLOAT32, (32, 8), (128,), 128, box=(32, 8))
    args = pack_maps(ModeArgs(mode=mode), {"map": ("x", one)}, out="out")
    launch = Launch(Instance(str(source), "modes"), (1, 1, 1), (32, 1, 1), args, 32768)
    buffers = {"x": np.full((8, 32), 7, np.uint32), "out": np.zeros(64, np.uint32)}
    return Emulated()(launch, buffers)["out"]


def test_copies_come_at_once_or_when_waited_for(tmp_path: Path) -> None:
    """So the emulator detects kernels that read or overwrite too early."""
    seen = run(tmp_path, 0)[:BOXES]
    assert set(seen) == {2, 3}


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        (1, "nobody comes to a barrier"),
        (2, "more arrivals than a barrier expects"),
        (3, "a barrier in shared memory that nobody made"),
        (4, "a copy from shared memory that nobody waited for"),
        (5, "a copy to shared memory that nobody waited for"),
        (6, "does not start where its swizzle's pattern does"),
        (7, "a tensor map of other dimensions"),
        (8, "nobody comes to a barrier"),
        (9, "a tensor map that is none"),
        (10, "no multiple of 16 bytes"),
        (11, "before the tensor"),
        (12, "does not start where its swizzle's pattern does"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, mode: int, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        run(tmp_path, mode)
