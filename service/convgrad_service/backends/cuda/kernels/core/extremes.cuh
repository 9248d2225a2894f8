// The smallest and the largest of float32 factors, by which powers of two are chosen to scale them with.
// Zero, NaN and infinities count in neither.
#pragma once

#include "core/elements.cuh"

namespace convgrad {

// 2^e, -127 < e < 128.
__device__ __forceinline__ float power_of_two(int e) {
  return __uint_as_float(static_cast<u32>(127 + e) << 23);
}

// A word costs an addition and a comparison for either.
struct Extremes {
  u32 least;
  int most;

  __device__ static __forceinline__ Extremes none() {
    return {~0u, static_cast<int>(0x80000000u)};
  }
  // Grows with the magnitude; zero and what is not finite lie above all others.
  __device__ static __forceinline__ constexpr u32 low(u32 magnitude) { return magnitude * 2 - 1; }
  // Likewise; they lie below all others.
  __device__ static __forceinline__ constexpr int high(u32 magnitude) {
    return static_cast<int>(magnitude * 2 + 0x81000000u);
  }
  __device__ __forceinline__ void add(u32 word) {
    least = min(least, low(word));
    most = max(most, high(word));
  }
  // The largest one's biased exponent, of subnormals and where there is none 0.
  __device__ __forceinline__ int exponent() const {
    const u32 found = static_cast<u32>(most) ^ 0x80000000u;
    return found > 0x01000000u ? static_cast<int>((found - 0x01000000u) >> 24) : 0;
  }
  // Of all lanes of a warp.
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
