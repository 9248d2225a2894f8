// float32 as float16, each channel times a power of two: what scaled_halves.cu passes on to those who
// multiply its copies. float16 has the 11 bits of TF32, and 29 powers of two below a channel's
// largest magnitude at full precision; what lies below loses bits, and is counted.
#pragma once

#include "elements.cuh"

namespace convgrad {

// 2^e, -127 < e < 128.
__device__ __forceinline__ float power_of_two(int e) {
  return __uint_as_float(static_cast<u32>(127 + e) << 23);
}

// Where `peaks` has the bits of a channel's largest finite magnitude: the power that takes it to
// [2^14, 2^15), or for subnormals below. From -113 to 140.
__device__ __forceinline__ int scale_of(u32 peak) {
  return 141 - max(1, static_cast<int>(peak >> 23));
}

// Counts follow peaks, after so many channels.
__device__ __forceinline__ int counts_at(int channels) { return (channels + 7) / 8 * 8; }

// What is known of a channel: its peak, and how many of its elements have lost bits.
struct Scaled {
  u32 peak, lost;
};

// A sum of products of two scaled channels, as it would be unscaled. NaN where what was lost might
// be seen. Each count stands for an error of at most 2^-25 times 2^15 of the other factor; all of them
// together may take `terms` times 2^-26 of the sum, a quarter of what adding up so many terms may. A
// channel of zeros has lost nothing, and meets nothing that was.
__device__ __forceinline__ float unscaled(float sum, float terms, const Scaled& x, const Scaled& y) {
  const u32 lost = x.peak == 0 || y.peak == 0 ? 0 : x.lost + y.lost;
  if (!(fabsf(sum) * terms >= 0x1p16f * static_cast<float>(lost))) return __uint_as_float(0x7fffffff);
  const int power = -(scale_of(x.peak) + scale_of(y.peak)), third = power / 3;
  const float once = power_of_two(third);
  return sum * once * once * power_of_two(power - 2 * third);
}

}  // namespace convgrad
