// As kernels/ptx/mma_bits16.cuh.
#pragma once

#include "ptx/mma.cuh"

namespace convgrad {

template <int kCount, class... B>
static inline void mma(int bfloat16, float (&c)[4], const u32 (&a)[kCount], B... b) {
  if (bfloat16) {
    mma<bf16>(c, a, b...);
  } else {
    mma<f16>(c, a, b...);
  }
}
template <class T, int kCount, class... B>
static inline void mma_of(int bfloat16, float (&c)[4], const u32 (&a)[kCount], B... b) {
  if constexpr (sizeof(T) == 2) {
    mma(bfloat16, c, a, b...);
  } else {
    mma<T>(c, a, b...);
  }
}
static inline u32 narrow_x2(int bfloat16, float first, float second) {
  return bfloat16 ? narrow_x2<bf16>(first, second) : narrow_x2<f16>(first, second);
}

}  // namespace convgrad
