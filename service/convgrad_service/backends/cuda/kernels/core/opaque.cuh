// Hides how a value was computed, so that the compiler keeps it in a register instead of rematerialising it
// in every iteration of a loop.
#pragma once

namespace convgrad {

__device__ __forceinline__ int opaque_value(int value) {
  asm volatile("" : "+r"(value));
  return value;
}
// Keeps a load whose only purpose is to bring data into a cache: the compiler must assume that something
// depends on the value.
__device__ __forceinline__ void opaque_use(int value) {
  if (value == static_cast<int>(0x80000001)) __threadfence_block();
}
template <class T>
__device__ __forceinline__ T* opaque_pointer(T* value) {
  asm volatile("" : "+l"(value));
  return value;
}

}  // namespace convgrad
