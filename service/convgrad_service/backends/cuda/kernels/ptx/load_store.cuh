// Loads, stores and choices in the form that the compiler would not find by itself. Kernels have no
// assembly of their own for these, so that tests/emulator can stand in for this header.
#pragma once

#include "core/elements.cuh"

namespace convgrad {

// From shared memory, by its own address; in the order of asynchronous copies and their waits.
__device__ __forceinline__ void load_shared(u32 from, unsigned short& raw) {
  asm volatile("ld.shared.b16 %0, [%1];" : "=h"(raw) : "r"(from) : "memory");
}
__device__ __forceinline__ void load_shared(u32 from, unsigned int& raw) {
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(raw) : "r"(from) : "memory");
}
__device__ __forceinline__ void load_shared(u32 from, uint2& raw) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(raw.x), "=r"(raw.y) : "r"(from) : "memory");
}

__device__ __forceinline__ void load_shared(u32 from, uint4& raw) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w)
               : "r"(from)
               : "memory");
}

// Loads and stores under a predicate and not behind a branch, which costs many times as much.
__device__ __forceinline__ void store_if(bool wanted, void* to, unsigned short raw) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; @p st.global.b16 [%0], %1;}" ::"l"(to),
               "h"(raw), "r"(static_cast<int>(wanted))
               : "memory");
}
__device__ __forceinline__ void store_if(bool wanted, void* to, unsigned int raw) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; @p st.global.b32 [%0], %1;}" ::"l"(to),
               "r"(raw), "r"(static_cast<int>(wanted))
               : "memory");
}
__device__ __forceinline__ void store_if(bool wanted, void* to, uint2 raw) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %3, 0; @p st.global.v2.b32 [%0], {%1, %2};}" ::"l"(to),
               "r"(raw.x), "r"(raw.y), "r"(static_cast<int>(wanted))
               : "memory");
}
__device__ __forceinline__ void store_if(bool wanted, void* to, uint4 raw) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %5, 0; @p st.global.v4.b32 [%0], {%1, %2, %3, %4};}" ::"l"(to),
      "r"(raw.x), "r"(raw.y), "r"(raw.z), "r"(raw.w), "r"(static_cast<int>(wanted))
      : "memory");
}
// Zero where it is not wanted.
__device__ __forceinline__ void load_if(bool wanted, const void* from, unsigned short& raw) {
  asm("{.reg .pred p; setp.ne.b32 p, %2, 0; mov.b16 %0, 0; @p ld.global.b16 %0, [%1];}"
      : "=h"(raw)
      : "l"(from), "r"(static_cast<int>(wanted)));
}
__device__ __forceinline__ void load_if(bool wanted, const void* from, unsigned int& raw) {
  asm("{.reg .pred p; setp.ne.b32 p, %2, 0; mov.b32 %0, 0; @p ld.global.b32 %0, [%1];}"
      : "=r"(raw)
      : "l"(from), "r"(static_cast<int>(wanted)));
}

// Loads from shared memory that the compiler leaves where they are: it would move all of them out
// of a loop, into registers that there are not.
__device__ __forceinline__ void reread(const float* from, float (&to)[1]) {
  asm volatile("ld.volatile.shared.f32 %0, [%1];"
               : "=f"(to[0])
               : "r"(static_cast<u32>(__cvta_generic_to_shared(from))));
}
__device__ __forceinline__ void reread(const float* from, float (&to)[2]) {
  asm volatile("ld.volatile.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(to[0]), "=f"(to[1])
               : "r"(static_cast<u32>(__cvta_generic_to_shared(from))));
}

// A choice without a branch around what is chosen.
__device__ __forceinline__ int choose(bool first, int a, int b) {
  int chosen;
  asm("{.reg .pred p; setp.ne.b32 p, %3, 0; selp.b32 %0, %1, %2, p;}"
      : "=r"(chosen)
      : "r"(a), "r"(b), "r"(static_cast<int>(first)));
  return chosen;
}
__device__ __forceinline__ i64 choose(bool first, i64 a, i64 b) {
  i64 chosen;
  asm("{.reg .pred p; setp.ne.b32 p, %3, 0; selp.b64 %0, %1, %2, p;}"
      : "=l"(chosen)
      : "l"(a), "l"(b), "r"(static_cast<int>(first)));
  return chosen;
}

}  // namespace convgrad
