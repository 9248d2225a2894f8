// Loads, stores and selects in forms that the compiler does not generate by itself. The emulator's
// twin is tests/emulator/kernels/ptx/load_store.cuh.
#pragma once

#include "core/elements.cuh"

namespace convgrad {

// Inline assembly numbers its operands: those of the loaded or stored words differ with their number.

// ld_shared: loads from a shared-state-space address, ordered with asynchronous copies and their waits.
#define CONVGRAD_LD_SHARED(RAW, TYPE, WORDS, FROM, ...)                                             \
  __device__ __forceinline__ void ld_shared(u32 from, RAW& raw) {                                   \
    asm volatile("ld.shared." TYPE " " WORDS ", [" FROM "];" : __VA_ARGS__ : "r"(from) : "memory"); \
  }
CONVGRAD_LD_SHARED(unsigned short, "b16", "%0", "%1", "=h"(raw))
CONVGRAD_LD_SHARED(unsigned int, "b32", "%0", "%1", "=r"(raw))
CONVGRAD_LD_SHARED(uint2, "v2.b32", "{%0, %1}", "%2", "=r"(raw.x), "=r"(raw.y))
CONVGRAD_LD_SHARED(uint4, "v4.b32", "{%0, %1, %2, %3}", "%4", "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w))

// store_if: a predicated store; a branch costs many times as much.
#define CONVGRAD_STORE_IF(RAW, TYPE, WORDS, PRED, ...)                                                \
  __device__ __forceinline__ void store_if(bool pred, void* to, RAW raw) {                            \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " PRED ", 0; @p st.global." TYPE " [%0], " WORDS ";}" \
                 ::"l"(to), __VA_ARGS__, "r"(static_cast<int>(pred))                                  \
                 : "memory");                                                                         \
  }
CONVGRAD_STORE_IF(unsigned short, "b16", "%1", "%2", "h"(raw))
CONVGRAD_STORE_IF(unsigned int, "b32", "%1", "%2", "r"(raw))
CONVGRAD_STORE_IF(uint2, "v2.b32", "{%1, %2}", "%3", "r"(raw.x), "r"(raw.y))
CONVGRAD_STORE_IF(uint4, "v4.b32", "{%1, %2, %3, %4}", "%5", "r"(raw.x), "r"(raw.y), "r"(raw.z), "r"(raw.w))

// load_if: a predicated load, zero where `pred` is false. load_ahead_if is the same, but the compiler does not
// move it behind a barrier or into the branch that uses the value.
#define CONVGRAD_LOAD_IF(NAME, ASM, CLOBBER, RAW, TYPE, WORDS, ZERO, FROM, PRED, ...)                      \
  __device__ __forceinline__ void NAME(bool pred, const void* from, RAW& raw) {                            \
    ASM("{.reg .pred p; setp.ne.b32 p, " PRED ", 0; " ZERO "@p ld.global." TYPE " " WORDS ", [" FROM "];}" \
        : __VA_ARGS__                                                                                      \
        : "l"(from), "r"(static_cast<int>(pred)) CLOBBER);                                                 \
  }
#define CONVGRAD_LOADS_IF(NAME, ASM, CLOBBER)                                                                 \
  CONVGRAD_LOAD_IF(NAME, ASM, CLOBBER, unsigned short, "b16", "%0", "mov.b16 %0, 0; ", "%1", "%2", "=h"(raw)) \
  CONVGRAD_LOAD_IF(NAME, ASM, CLOBBER, unsigned int, "b32", "%0", "mov.b32 %0, 0; ", "%1", "%2", "=r"(raw))   \
  CONVGRAD_LOAD_IF(NAME, ASM, CLOBBER, uint2, "v2.b32", "{%0, %1}", "mov.b32 %0, 0; mov.b32 %1, 0; ",         \
                   "%2", "%3", "=r"(raw.x), "=r"(raw.y))                                                      \
  CONVGRAD_LOAD_IF(NAME, ASM, CLOBBER, uint4, "v4.b32", "{%0, %1, %2, %3}",                                   \
                   "mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0; ", "%4", "%5",                \
                   "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w))
CONVGRAD_LOADS_IF(load_if, asm, )
CONVGRAD_LOADS_IF(load_ahead_if, asm volatile, : "memory")

// Loads from shared memory that the compiler cannot hoist out of a loop, where they would take more
// registers than there are.
__device__ __forceinline__ void ld_shared_volatile(const float* from, float (&to)[1]) {
  asm volatile("ld.volatile.shared.f32 %0, [%1];"
               : "=f"(to[0])
               : "r"(static_cast<u32>(__cvta_generic_to_shared(from))));
}
__device__ __forceinline__ void ld_shared_volatile(const float* from, float (&to)[2]) {
  asm volatile("ld.volatile.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(to[0]), "=f"(to[1])
               : "r"(static_cast<u32>(__cvta_generic_to_shared(from))));
}

// `a` where `pred` is true, else `b`, without a branch around their computation.
__device__ __forceinline__ int select(bool pred, int a, int b) {
  int selected;
  asm("{.reg .pred p; setp.ne.b32 p, %3, 0; selp.b32 %0, %1, %2, p;}"
      : "=r"(selected)
      : "r"(a), "r"(b), "r"(static_cast<int>(pred)));
  return selected;
}
__device__ __forceinline__ i64 select(bool pred, i64 a, i64 b) {
  i64 selected;
  asm("{.reg .pred p; setp.ne.b32 p, %3, 0; selp.b64 %0, %1, %2, p;}"
      : "=l"(selected)
      : "l"(a), "l"(b), "r"(static_cast<int>(pred)));
  return selected;
}

}  // namespace convgrad
