// Words of global memory through which blocks hand over what they have written, ordered at device scope. The
// emulator's twin is tests/emulator/kernels/ptx/acquire.cuh.
#pragma once

#include "core/elements.cuh"

namespace convgrad {

__device__ __forceinline__ u32 ld_acquire(const u32* from) {
  u32 word;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
  return word;
}
__device__ __forceinline__ u32 atomic_add_acq_rel(u32* at, u32 by) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(at), "r"(by) : "memory");
  return before;
}

}  // namespace convgrad
