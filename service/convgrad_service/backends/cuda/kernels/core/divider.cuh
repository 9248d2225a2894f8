// Division by a divisor that the host knows, as a multiplication and a shift.
#pragma once

#include "core/elements.cuh"

namespace convgrad {

// For a divisor d > 1, n / d == (n * factor >> 32) >> shift for all 0 <= n <= 2^31; for d == 1 `factor` is
// 0. The host computes it by `divider` (gather_axes.py).
struct Divider {
  u32 factor;
  int shift;
};
__device__ __forceinline__ int divide(int n, const Divider& by) {
  return by.factor == 0 ? n : static_cast<int>(__umulhi(n, by.factor) >> by.shift);
}

}  // namespace convgrad
