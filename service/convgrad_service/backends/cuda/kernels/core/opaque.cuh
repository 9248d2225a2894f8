// Values that the compiler must keep: it would compute them again in every round of a loop, which
// takes it many instructions and saves registers that are there.
#pragma once

namespace convgrad {

__device__ __forceinline__ int opaque_value(int value) {
  asm volatile("" : "+r"(value));
  return value;
}
// Of a value that was read for nothing but its being in a cache from then on: the compiler must think
// that something depends on it.
__device__ __forceinline__ void opaque_use(int value) {
  if (value == static_cast<int>(0x80000001)) __threadfence_block();
}
template <class T>
__device__ __forceinline__ T* opaque_pointer(T* value) {
  asm volatile("" : "+l"(value));
  return value;
}

}  // namespace convgrad
