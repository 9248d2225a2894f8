// float32 as float16, each channel times a power of two: what scaled_halves.cu passes on to those who
// multiply its copies. float16 has the 11 bits of TF32, and 29 powers of two of full precision; what
// lies below loses bits, and is counted.
#pragma once

#include "elements.cuh"

namespace convgrad {

// What is known of a channel. Magnitudes are bits of finite floats: that by which it was scaled at
// first, its largest one. Then how many elements lost bits.
struct alignas(16) ChannelRange {
  u32 guess, peak, lost, unused;
};

// How a channel's sums are unscaled: the power of two, or NaN where that may leave float's range; and how
// many elements have lost bits, as it was copied in the end. They follow the ranges.
struct alignas(8) Unscaling {
  float inverse;
  u32 lost;
};

// A sample's largest magnitude goes to [2^11, 2^12), so that a channel's may be 16 times as large, or for
// some 32: a normal distribution's is 1.5 to 4 times as large.
constexpr u32 kHeadroom = 3;

// 2^e, -127 < e < 128.
__device__ __forceinline__ float power_of_two(int e) {
  return __uint_as_float(static_cast<u32>(127 + e) << 23);
}

// Biased, of subnormals as of the least normal number.
__device__ __forceinline__ int exponent_of(u32 magnitude) {
  return max(1, static_cast<int>(magnitude >> 23));
}

// The power that takes this magnitude to [2^14, 2^15), or below where it is less than 2^-113. From -113
// to 127.
__device__ __forceinline__ int scale_of(u32 magnitude) {
  return min(141 - exponent_of(magnitude), 127);
}

__device__ __forceinline__ u32 guess_from(u32 sampled) {
  return sampled == 0 ? 0 : min(sampled + (kHeadroom << 23), 0x7f7fffffu);
}

// Whether a channel's copy by the guess serves: nothing is too large, and nothing lost bits for a guess
// that was larger than need be.
__device__ __forceinline__ bool stands(const ChannelRange& of) {
  const int above = exponent_of(of.guess) - exponent_of(of.peak);
  // What 2^14 is for the guess may be 2^15 for the peak, if it does not round to infinity.
  const bool fits = above >= 0 || (above == -1 && (of.peak & 0x7fffff) < 0x7ff000);
  return fits && (of.lost == 0 || above <= static_cast<int>(kHeadroom));
}

__device__ __forceinline__ int final_scale(const ChannelRange& of) {
  return scale_of(stands(of) ? of.guess : of.peak);
}

// NaN for magnitudes so far from 1 that a sum might leave float's range between two inverses, or its
// bits.
__device__ __forceinline__ float inverse_of(const ChannelRange& of) {
  if (of.peak == 0) return 1;
  const int scale = final_scale(of);
  return -75 <= scale && scale <= 96 ? power_of_two(-scale) : __uint_as_float(0x7fffffff);
}
__device__ __forceinline__ Unscaling* unscalings_of(ChannelRange* ranges, int count) {
  return reinterpret_cast<Unscaling*>(ranges + count);
}
__device__ __forceinline__ const Unscaling* unscalings_of(const ChannelRange* ranges, int count) {
  return reinterpret_cast<const Unscaling*>(ranges + count);
}

// Of a channel as it was copied: its power of two, how many elements have lost bits, and what no
// magnitude reaches.
struct Scaled {
  int scale;
  float lost, top;

  __device__ __forceinline__ Scaled(const ChannelRange& of, const Unscaling& by)
      : scale(final_scale(of)),
        lost(static_cast<float>(by.lost)),
        top(of.peak == 0 ? 0 : power_of_two(exponent_of(of.peak) - 126 + scale)) {}
};

// A sum of products of two scaled channels, as it would be unscaled. NaN where what was lost might
// be seen. Each element that lost bits stands for an error of at most 2^-25 times the other factor; all
// of them together may take `terms` times 2^-26 of the sum, a quarter of what adding up so many terms
// may.
__device__ __forceinline__ float unscaled(float sum, float terms, const Scaled& x, const Scaled& y) {
  const float most = 2 * (x.lost * y.top + y.lost * x.top);
  if (!(fabsf(sum) * terms >= most)) return __uint_as_float(0x7fffffff);
  // Below 2^-252 nothing is left of any sum.
  const int power = max(-(x.scale + y.scale), -252), half = power >> 1;
  return sum * power_of_two(half) * power_of_two(power - half);
}

}  // namespace convgrad
