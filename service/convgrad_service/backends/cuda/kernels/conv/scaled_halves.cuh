// The records of scaled_halves.cu for the kernels that use its float16 copies. float16 has TF32's 11 bits
// of precision over 29 powers of two; smaller elements lose bits and are counted.
#pragma once

#include "core/extremes.cuh"

namespace convgrad {

// A channel's record. As bits of finite floats: the magnitude that its first scale was chosen by, and its
// largest magnitude. Then the number of elements that lost bits, and the largest of those, scaled.
struct alignas(16) ChannelRange {
  u32 guess, peak, lost, lost_peak;
};

// How a channel's sums are unscaled: two powers of two as bfloat16, applied one after the other because
// their product may exceed float32's range; and the last two fields of ChannelRange, as the channel was
// finally copied. Stored after the ranges.
struct alignas(16) Unscaling {
  u32 powers, lost, lost_peak, unused;
};

// A sample's largest magnitude is scaled to [2^11, 2^12), so that the channel's may be 16 to 32 times as
// large; a normal distribution's is 1.5 to 4 times as large.
constexpr u32 kHeadroom = 3;

// Biased exponent; subnormals count as the least normal number.
__device__ __forceinline__ int exponent_of(u32 magnitude) {
  return max(1, static_cast<int>(magnitude >> 23));
}

// The exponent in [-113, 127] that scales this magnitude to [2^14, 2^15), or below if it is less than
// 2^-113.
__device__ __forceinline__ int scale_of(u32 magnitude) {
  return min(141 - exponent_of(magnitude), 127);
}
// Whether the scaled value is a multiple of 2^-24, as all float16 values below 2^-14 are.
__device__ __forceinline__ bool loses_nothing(u32 magnitude) { return scale_of(magnitude) >= 125; }

// Two powers whose product is 2^e.
__device__ __forceinline__ float2 powers_of_two(int e) {
  const int half = e >> 1;
  return make_float2(power_of_two(half), power_of_two(e - half));
}

__device__ __forceinline__ u32 guess_from(u32 sampled) {
  return sampled == 0 ? 0 : min(sampled + (kHeadroom << 23), 0x7f7fffffu);
}

// Whether a channel's first copy is good: nothing is too large, and nothing lost bits because the sample
// suggested too small a scale.
__device__ __forceinline__ bool stands(const ChannelRange& of) {
  const int above = exponent_of(of.guess) - exponent_of(of.peak);
  // The sample's 2^14 may be 2^15 for the peak, unless that rounds to infinity.
  const bool fits = above >= 0 || (above == -1 && (of.peak & 0x7fffff) < 0x7ff000);
  return fits && (of.lost == 0 || above <= static_cast<int>(kHeadroom));
}

__device__ __forceinline__ int final_scale(const ChannelRange& of) {
  return scale_of(stands(of) ? of.guess : of.peak);
}

__device__ __forceinline__ Unscaling* unscalings_of(ChannelRange* ranges, int count) {
  return reinterpret_cast<Unscaling*>(ranges + count);
}
__device__ __forceinline__ const Unscaling* unscalings_of(const ChannelRange* ranges, int count) {
  return reinterpret_cast<const Unscaling*>(ranges + count);
}

}  // namespace convgrad
