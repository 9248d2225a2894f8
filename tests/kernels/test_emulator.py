"""The emulator detects errors that would fail on a GPU."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from convgrad_service.backends.cuda import sources
from convgrad_service.plans.cuda.program import Instance
from tests.emulator import backend
from tests.emulator.backend import Launching, launch_of, works_here
from tests.emulator.memory import Buffers

pytestmark = pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")

THREADS, SHARED_BYTES = 64, 256
MODES = """
  switch (args.mode) {
    case 0:  // sums of eight neighbouring lanes
      for (u32 by = 4; by > 0; by /= 2) mine += __shfl_xor_sync(~0u, mine, by);
      args.out[thread] = mine;
      break;
    case 1:  // read before the copy is waited for, and after
      cp_async<4>(at + thread * 4, args.in + thread);
      cp_async_commit();
      args.out[thread] = ld_shared_u32(at + thread * 4) == args.in[thread];
      cp_async_wait<0>();
      args.out[thread] += 2 * (ld_shared_u32(at + thread * 4) == args.in[thread]);
      break;
    case 2:  // each half of a warp meets for itself
      args.out[thread] = __ballot_sync(thread & 16 ? 0xffff0000u : 0xffffu, thread % 3 == 0);
      break;
    case 10:
      if (thread != 3) __syncwarp();
      break;
    case 11:
      if (thread < 32) __syncthreads();
      break;
    case 12:
      if (thread % 32 == 0) __syncwarp();
      else __ballot_sync(~0u, 1);
      break;
    case 13:
      args.out[thread] = ld_shared_u32(at + 2);
      break;
    case 14:
      reinterpret_cast<u32*>(shared)[64] = 1;
      break;
    case 15:
      args.out[thread] = ld_shared_u32(at + 256);
      break;
    case 16:
      cp_async<4>(at, args.in - 1);
      break;
    case 17:  // ordinary reads, far before and just behind
      args.out[thread] = args.in[thread - 20000];
      break;
    case 18:
      args.out[thread] = args.in[64 + thread];
      break;
    case 19:
      args.out[thread] = reinterpret_cast<const uint2*>(args.in + 1)->x;
      break;
    case 20: {
      u32 few[4] = {thread, thread, thread, thread};
      for (u32 i = 0; i < 4; ++i) few[i] += args.in[i];
      args.out[thread] = few[args.in[thread] - 996];
      break;
    }
    case 21:  // as if memory began at a multiple of 1,024: here there is no room to make it so
      args.out[thread] = ld_shared_u32((at + 1023) / 1024 * 1024);
      break;
    case 22:
      args.out[-1] = 1;
      break;
    case 23:
      cp_async<4>(at + thread * 4, args.in + thread);
      cp_async_commit();
      cp_async<4>(at + thread * 4, args.in);
      break;
  }
"""
SOURCE = f"""
#include "ptx/mma.cuh"
using namespace convgrad;
struct ProbeArgs {{
  int mode;
  const u32* in;
  u32* out;
}};
extern "C" __global__ void probe(const __grid_constant__ ProbeArgs args) {{
  extern __shared__ uint4 shared[];
  const u32 thread = threadIdx.x, at = shared_address(shared);
  u32 mine = thread;
  {MODES}
}}
"""


class ProbeArgs(ctypes.Structure):
    _fields_ = (("mode", ctypes.c_int), ("given", ctypes.c_void_p), ("out", ctypes.c_void_p))


Probe = Callable[[int], "tuple[str | None, NDArray[np.uint32]]"]


@pytest.fixture
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Probe:
    """Run one mode; return the emulator's message and the output of the threads."""
    for header in ("ptx/mma.cuh", "core/elements.cuh"):
        (tmp_path / header).parent.mkdir(exist_ok=True)
        shutil.copy(sources.KERNELS / header, tmp_path / header)
    (tmp_path / "probe.cu").write_text(SOURCE, encoding="utf-8")
    monkeypatch.setattr(sources, "KERNELS", tmp_path)
    monkeypatch.setattr(backend, "KERNELS", tmp_path)
    launch = launch_of(Instance("probe.cu", "probe", ()))

    def run(mode: int) -> tuple[str | None, NDArray[np.uint32]]:
        memory = Buffers({"in": 4 * THREADS, "out": 4 * THREADS}, 0)
        memory.bytes["in"].view(np.uint32)[:] = np.arange(1000, 1000 + THREADS)
        args = ProbeArgs(mode, memory.addresses["in"], memory.addresses["out"])
        launching = Launching(
            ctypes.addressof(args),
            memory.stretches,
            len(memory.stretches),
            (ctypes.c_uint * 3)(1, 1, 1),
            THREADS,
            SHARED_BYTES,
        )
        said = launch(launching)
        spilled = memory.spilled()
        wrong = f"a write beside {spilled}" if said is None and spilled else said and said.decode()
        return wrong, memory.bytes["out"].view(np.uint32)

    return run


def test_what_is_right_is_computed(probe: Probe) -> None:
    lanes = np.arange(THREADS)
    wrong, sums = probe(0)
    assert wrong is None
    assert (sums == lanes.reshape(-1, 8).sum(1).repeat(8)).all()
    wrong, seen = probe(1)
    assert wrong is None
    assert (seen == 2).all(), "a copy that is not waited for must not be there yet"
    wrong, ballots = probe(2)
    assert wrong is None
    votes = (lanes % 3 == 0).astype(np.uint32) << (lanes % 32).astype(np.uint32)
    assert (ballots == votes.reshape(-1, 16).sum(1).repeat(16)).all()


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        (10, "not all lanes of a warp meet"),
        (11, "not all of a block meets at a barrier"),
        (12, "different instructions"),
        (13, "not aligned"),
        (14, "past the shared memory"),
        (15, "outside shared memory"),
        (16, "at byte -4 of the 256 of in"),
        (17, "outside the buffers"),
        (18, "at byte 256 of the 256 of in"),
        (19, "not aligned to its type: ..."),
        (20, "is beyond the array"),
        (21, "outside shared memory"),
        (22, "a write beside out"),
        (23, "a copy to where another one is under way"),
    ],
)
def test_what_is_wrong_is_said(probe: Probe, mode: int, said: str) -> None:
    wrong, _ = probe(mode)
    assert said in (wrong or "")
