// Elements at 32-bit addresses in shared memory, which one instruction advances. The emulator's twin is
// tests/emulator/kernels/ptx/shared_element.cuh.
#pragma once

#include "core/vectors.cuh"

namespace convgrad {

// Loads and stores of 2, 4 or 8 bytes, ordered with copies and their waits.
template <class E>
__device__ __forceinline__ E element_at(u32 from) {
  Vector<E, 1> found;
  ld_shared(from, found.raw);
  return found.at[0];
}
__device__ __forceinline__ void st_shared(u32 to, unsigned short raw) {
  asm volatile("st.shared.b16 [%0], %1;" ::"r"(to), "h"(raw) : "memory");
}
__device__ __forceinline__ void st_shared(u32 to, unsigned int raw) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(raw) : "memory");
}
__device__ __forceinline__ void st_shared(u32 to, uint2 raw) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(raw.x), "r"(raw.y) : "memory");
}
template <class E>
__device__ __forceinline__ void store_element(u32 to, E element) {
  Vector<E, 1> given;
  given.at[0] = element;
  st_shared(to, given.raw);
}

// The compiler would otherwise compute several later addresses from one that it keeps.
__device__ __forceinline__ void advance(u32& address, int bytes) {
  asm volatile("add.u32 %0, %0, %1;" : "+r"(address) : "r"(bytes));
}

}  // namespace convgrad
