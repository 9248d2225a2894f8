// Loads, stores and selects in forms that the compiler does not generate by itself. The emulator's
// twin is tests/emulator/kernels/ptx/load_store.cuh.
#pragma once

#include "core/elements.cuh"

namespace convgrad {

// Load from a shared-state-space address, ordered with asynchronous copies and their waits.
__device__ __forceinline__ void ld_shared(u32 from, unsigned short& raw) {
  asm volatile("ld.shared.b16 %0, [%1];" : "=h"(raw) : "r"(from) : "memory");
}
__device__ __forceinline__ void ld_shared(u32 from, unsigned int& raw) {
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(raw) : "r"(from) : "memory");
}
__device__ __forceinline__ void ld_shared(u32 from, uint2& raw) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(raw.x), "=r"(raw.y) : "r"(from) : "memory");
}

__device__ __forceinline__ void ld_shared(u32 from, uint4& raw) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w)
               : "r"(from)
               : "memory");
}

// Predicated loads and stores: a branch costs many times as much.
__device__ __forceinline__ void store_if(bool pred, void* to, unsigned short raw) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; @p st.global.b16 [%0], %1;}" ::"l"(to),
               "h"(raw), "r"(static_cast<int>(pred))
               : "memory");
}
__device__ __forceinline__ void store_if(bool pred, void* to, unsigned int raw) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; @p st.global.b32 [%0], %1;}" ::"l"(to),
               "r"(raw), "r"(static_cast<int>(pred))
               : "memory");
}
__device__ __forceinline__ void store_if(bool pred, void* to, uint2 raw) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %3, 0; @p st.global.v2.b32 [%0], {%1, %2};}" ::"l"(to),
               "r"(raw.x), "r"(raw.y), "r"(static_cast<int>(pred))
               : "memory");
}
__device__ __forceinline__ void store_if(bool pred, void* to, uint4 raw) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %5, 0; @p st.global.v4.b32 [%0], {%1, %2, %3, %4};}" ::"l"(to),
      "r"(raw.x), "r"(raw.y), "r"(raw.z), "r"(raw.w), "r"(static_cast<int>(pred))
      : "memory");
}
// Zero where `pred` is false.
__device__ __forceinline__ void load_if(bool pred, const void* from, unsigned short& raw) {
  asm("{.reg .pred p; setp.ne.b32 p, %2, 0; mov.b16 %0, 0; @p ld.global.b16 %0, [%1];}"
      : "=h"(raw)
      : "l"(from), "r"(static_cast<int>(pred)));
}
__device__ __forceinline__ void load_if(bool pred, const void* from, unsigned int& raw) {
  asm("{.reg .pred p; setp.ne.b32 p, %2, 0; mov.b32 %0, 0; @p ld.global.b32 %0, [%1];}"
      : "=r"(raw)
      : "l"(from), "r"(static_cast<int>(pred)));
}
// The same, which the compiler does not move behind a barrier or into the branch that uses the value.
__device__ __forceinline__ void load_ahead_if(bool pred, const void* from, unsigned short& raw) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; mov.b16 %0, 0; @p ld.global.b16 %0, [%1];}"
               : "=h"(raw)
               : "l"(from), "r"(static_cast<int>(pred))
               : "memory");
}
__device__ __forceinline__ void load_ahead_if(bool pred, const void* from, unsigned int& raw) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; mov.b32 %0, 0; @p ld.global.b32 %0, [%1];}"
               : "=r"(raw)
               : "l"(from), "r"(static_cast<int>(pred))
               : "memory");
}
__device__ __forceinline__ void load_ahead_if(bool pred, const void* from, uint2& raw) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %3, 0; mov.b32 %0, 0; mov.b32 %1, 0; @p ld.global.v2.b32 {%0, %1}, [%2];}"
               : "=r"(raw.x), "=r"(raw.y)
               : "l"(from), "r"(static_cast<int>(pred))
               : "memory");
}
__device__ __forceinline__ void load_ahead_if(bool pred, const void* from, uint4& raw) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0; "
      "@p ld.global.v4.b32 {%0, %1, %2, %3}, [%4];}"
      : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w)
      : "l"(from), "r"(static_cast<int>(pred))
      : "memory");
}

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
