// float32 as float16, each channel times a power of two: what scaled_halves.cu passes on to those who
// multiply its copies. float16 has the 11 bits of TF32, and 29 powers of two of full precision; what
// lies below loses bits, and is counted.
#pragma once

#include "core/extremes.cuh"

namespace convgrad {

// What is known of a channel. Magnitudes are bits of finite floats: that by which it was scaled at
// first, its largest one. Then how many elements lost bits, and the largest of those, scaled.
struct alignas(16) ChannelRange {
  u32 guess, peak, lost, lost_peak;
};

// How a channel's sums are unscaled: two powers of two one after the other, for their product may be
// outside float32's range, each as a number of bfloat16; and the last two of ChannelRange, as the channel
// was copied in the end. They follow the ranges.
struct alignas(16) Unscaling {
  u32 powers, lost, lost_peak, unused;
};

// A sample's largest magnitude goes to [2^11, 2^12), so that a channel's may be 16 times as large, or for
// some 32: a normal distribution's is 1.5 to 4 times as large.
constexpr u32 kHeadroom = 3;

// Biased, of subnormals as of the least normal number.
__device__ __forceinline__ int exponent_of(u32 magnitude) {
  return max(1, static_cast<int>(magnitude >> 23));
}

// The power that takes this magnitude to [2^14, 2^15), or below where it is less than 2^-113. From -113
// to 127.
__device__ __forceinline__ int scale_of(u32 magnitude) {
  return min(141 - exponent_of(magnitude), 127);
}
// Whether what is scaled so is a multiple of 2^-24, as all of float16 is that lies below 2^-14.
__device__ __forceinline__ bool loses_nothing(u32 magnitude) { return scale_of(magnitude) >= 125; }

// Two powers whose product is 2^e.
__device__ __forceinline__ float2 powers_of_two(int e) {
  const int half = e >> 1;
  return make_float2(power_of_two(half), power_of_two(e - half));
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

__device__ __forceinline__ Unscaling* unscalings_of(ChannelRange* ranges, int count) {
  return reinterpret_cast<Unscaling*>(ranges + count);
}
__device__ __forceinline__ const Unscaling* unscalings_of(const ChannelRange* ranges, int count) {
  return reinterpret_cast<const Unscaling*>(ranges + count);
}

}  // namespace convgrad
