// float32 as numbers of bfloat16 whose sum it is, for products on the tensor cores. Three of them hold
// all of its 24 bits, two 16. What they cannot hold, because its last ones would be subnormal, becomes
// NaN, and so do infinities: sums that are not finite are taken again by the definition.
#pragma once

#include "warpgroup.cuh"

namespace convgrad {

// Two neighbours, each as so many numbers side by side, the largest first.
template <int kParts>
__device__ __forceinline__ void split_two(float first, float second, u32 (&parts)[kParts]) {
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    parts[i] = narrow_two<bf16>(first, second);
    first -= __uint_as_float(parts[i] << 16);
    second -= __uint_as_float(parts[i] & 0xffff0000);
  }
}

// Grows with the magnitude of a float32; 0 is above all.
__device__ __forceinline__ constexpr u32 magnitude_of(u32 word) { return word * 2 - 1; }
constexpr u32 kLeastSplit = magnitude_of((127 - 102) << 23);  // 2^-102

__device__ __forceinline__ void without_too_small(u32 (&words)[2][4]) {
  u32 least = ~0u;
#pragma unroll
  for (int i = 0; i < 8; ++i) least = min(least, magnitude_of(words[i / 4][i % 4]));
  if (least >= kLeastSplit) return;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (magnitude_of(words[i / 4][i % 4]) < kLeastSplit) words[i / 4][i % 4] = 0x7fffffff;
  }
}

// Once products have added to `from`.
template <int kFragments>
__device__ __forceinline__ void add_to(float (&sum)[kFragments][4], float (&from)[kFragments][4]) {
  hold_sums(from);
#pragma unroll
  for (int i = 0; i < 4 * kFragments; ++i) sum[i / 4][i % 4] += from[i / 4][i % 4];
}

}  // namespace convgrad
