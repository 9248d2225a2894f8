// The smallest and largest magnitudes of an operand's float32 elements, from which the power of two that
// scales it is chosen. Zero, NaN and infinities are ignored.
#pragma once

#include "core/elements.cuh"

namespace convgrad {

// 2^e, -127 < e < 128.
__device__ __forceinline__ float power_of_two(int e) {
  return __uint_as_float(static_cast<u32>(127 + e) << 23);
}

// Adding an element costs an addition and a comparison for each of the two.
struct Extremes {
  u32 least;
  int most;

  __device__ static __forceinline__ Extremes none() {
    return {~0u, static_cast<int>(0x80000000u)};
  }
  // Monotonic in the magnitude; zero and non-finite values map above all others.
  __device__ static __forceinline__ constexpr u32 low(u32 magnitude) { return magnitude * 2 - 1; }
  // Monotonic in the magnitude; zero and non-finite values map below all others.
  __device__ static __forceinline__ constexpr int high(u32 magnitude) {
    return static_cast<int>(magnitude * 2 + 0x81000000u);
  }
  __device__ __forceinline__ void add(u32 word) {
    least = min(least, low(word));
    most = max(most, high(word));
  }
  __device__ __forceinline__ void add(const Extremes& others) {
    least = min(least, others.least);
    most = max(most, others.most);
  }
  // Biased exponent of the largest magnitude; 0 if it is subnormal or there is none.
  __device__ __forceinline__ int exponent() const {
    const u32 found = static_cast<u32>(most) ^ 0x80000000u;
    return found > 0x01000000u ? static_cast<int>((found - 0x01000000u) >> 24) : 0;
  }
  // Warp: the extremes over all lanes.
  __device__ __forceinline__ Extremes of_warp() const {
    Extremes all = *this;
#pragma unroll
    for (int way = 16; way > 0; way /= 2) {
      all.least = min(all.least, __shfl_xor_sync(~0u, all.least, way));
      all.most = max(all.most, __shfl_xor_sync(~0u, all.most, way));
    }
    return all;
  }
};

}  // namespace convgrad
