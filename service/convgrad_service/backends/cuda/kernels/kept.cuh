// Values that the compiler must keep: it would compute them again in every round of a loop, which
// takes it many instructions and saves registers that are there.
#pragma once

namespace convgrad {

__device__ __forceinline__ int kept_value(int value) {
  asm volatile("" : "+r"(value));
  return value;
}
template <class T>
__device__ __forceinline__ T* kept_pointer(T* value) {
  asm volatile("" : "+l"(value));
  return value;
}

}  // namespace convgrad
