// float32 as numbers of bfloat16 whose sum it is, for products on the tensor cores. Three of them hold
// all of its 24 bits, two 16. They cannot where its last ones would be subnormal or the first one rounds
// to an infinity: such factors are scaled by a power of two before, see SplitPower. An infinity's other
// parts are NaN, so it makes what it feeds NaN.
#pragma once

#include "core/extremes.cuh"
#include "ptx/warpgroup.cuh"

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

// The power of two, as its exponent, that an operand's factors are scaled by before they are split. It
// stays while it serves: data of one kind has it chosen once.
struct SplitPower {
  static constexpr u32 kTiny = (127 - 102) << 23;  // below this the last part may be subnormal
  // 2^-149 to 2^-101; and from the largest down. Products stay below 2^(kMost - 254).
  static constexpr int kLift = 48, kLower = -8, kMost = 127 + 127 + 100;

  int lift = 0;

  __device__ __forceinline__ float by() const { return power_of_two(lift); }
  // `other` is the biased exponent of the other operand's largest factor, scaled, and `lifted` whether it
  // is lifted.
  __device__ __forceinline__ bool serves(const Extremes& of, int other, bool lifted) const {
    const int most = of.exponent();
    const bool tiny = of.least < Extremes::low(kTiny) && lift <= 0;
    const bool large = most == 254 && lift >= 0;
    return !tiny && !large && ((lift <= 0 && !lifted) || most + lift + other <= kMost);
  }
  __device__ __forceinline__ void choose(const Extremes& of, int other, bool lifted) {
    const int most = of.exponent(), room = kMost - other - most;
    lift = most == 254 ? kLower : of.least < Extremes::low(kTiny) ? kLift : 0;
    if (lift > 0 || lifted) lift = max(min(lift, room), lifted ? -kMost / 4 : 0);
  }
};

// Once products have added to `from`, which is scaled: `back` undoes it.
template <int kFragments>
__device__ __forceinline__ void add_to(float (&sum)[kFragments][4], float (&from)[kFragments][4],
                                       float back) {
  hold_sums(from);
#pragma unroll
  for (int i = 0; i < 4 * kFragments; ++i) {
    sum[i / 4][i % 4] = fmaf(from[i / 4][i % 4], back, sum[i / 4][i % 4]);
  }
}

}  // namespace convgrad
