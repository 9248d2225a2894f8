// Splits float32 into a sum of bfloat16 parts, for float32 products on the tensor cores: three parts hold all
// 24 bits, two hold 16. The split is inexact where the last part would be subnormal or the first one
// rounds to infinity: such operands are first scaled by a power of two, see SplitScale. The remaining parts of an
// infinity are NaN, so the results that it contributes to are NaN.
#pragma once

#include "core/extremes.cuh"
#include "ptx/warpgroup.cuh"

namespace convgrad {

// Splits two values; parts[i] packs part i of both, the largest part first.
template <int kParts>
__device__ __forceinline__ void split_x2(float first, float second, u32 (&parts)[kParts]) {
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    parts[i] = narrow_x2<bf16>(first, second);
    first -= __uint_as_float(parts[i] << 16);
    second -= __uint_as_float(parts[i] & 0xffff0000);
  }
}

// The exponent of the power of two by which an operand is scaled before it is split. It changes only when
// data leaves the range that it covers, so homogeneous data chooses it once.
struct SplitScale {
  static constexpr u32 kTiny = (127 - 102) << 23;  // below this the last part may be subnormal
  // kScaleUp is for magnitudes of 2^-149 to 2^-101, kScaleDown for the largest; products stay below
  // 2^(kMaxProduct - 254).
  static constexpr int kScaleUp = 48, kScaleDown = -8, kMaxProduct = 127 + 127 + 100;

  int exponent = 0;

  __device__ __forceinline__ float scale() const { return power_of_two(exponent); }
  // `other` is the biased exponent of the other operand's largest scaled element; `lifted` says whether that
  // operand is scaled up.
  __device__ __forceinline__ bool covers(const Extremes& range, int other, bool lifted) const {
    const int largest = range.exponent();
    const bool tiny = range.least < Extremes::low(kTiny) && exponent <= 0;
    const bool large = largest == 254 && exponent >= 0;
    return !tiny && !large && ((exponent <= 0 && !lifted) || largest + exponent + other <= kMaxProduct);
  }
  __device__ __forceinline__ void choose(const Extremes& range, int other, bool lifted) {
    const int largest = range.exponent(), headroom = kMaxProduct - other - largest;
    exponent = largest == 254 ? kScaleDown : range.least < Extremes::low(kTiny) ? kScaleUp : 0;
    if (exponent > 0 || lifted) exponent = max(min(exponent, headroom), lifted ? -kMaxProduct / 4 : 0);
  }
};

// accum += scaled * unscale, after the wgmma that produced `scaled`.
template <int kFragments>
__device__ __forceinline__ void accumulate_scaled(float (&accum)[kFragments][4],
                                                  float (&scaled)[kFragments][4], float unscale) {
  fence_accumulators(scaled);
#pragma unroll
  for (int i = 0; i < 4 * kFragments; ++i) {
    accum[i / 4][i % 4] = fmaf(scaled[i / 4][i % 4], unscale, accum[i / 4][i % 4]);
  }
}

}  // namespace convgrad
