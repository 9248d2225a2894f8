// Division by what a plan knows: a product.
#pragma once

#include "core/elements.cuh"

namespace convgrad {

// By a positive number: n / by == (n * factor >> 32) >> shift for all n from 0 to 2^31, but for
// by == 1, where factor is 0.
struct Divider {
  u32 factor;
  int shift;
};
__device__ __forceinline__ int divide(int n, const Divider& by) {
  return by.factor == 0 ? n : static_cast<int>(__umulhi(n, by.factor) >> by.shift);
}

}  // namespace convgrad
