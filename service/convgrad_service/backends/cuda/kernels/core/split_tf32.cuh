// Full-precision float32 on tensor cores: an operand is the sum of two TF32 numbers, high + low, and
//   a * b = a.high * b.high + a.high * b.low + a.low * b.high,
// where the omitted term, and the bits of low that mma truncates, are at most 2^-21 of |a * b|. As mma
// truncates its accumulators, mainloops promote them to float32 sums after every k-tile.
//
// The low part of an infinity is NaN, which propagates to the result. Operands whose low part would underflow
// TF32, or whose high part would round to infinity, are scaled by powers of two beforehand; see OperandScaling.
#pragma once

#include "ptx/mma.cuh"

namespace convgrad {

__device__ __forceinline__ void split(const u32 (&words)[4], u32 (&high)[4], u32 (&low)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    high[i] = (words[i] + 0x1000) & ~0x1fffu;
    low[i] = __float_as_uint(__uint_as_float(words[i]) - __uint_as_float(high[i]));
  }
}

// Adds the products of kRows split fragments of A with 16 columns of B, the `pair`-th two fragments of the
// accumulators. Small products first, and no two consecutive mma instructions on one accumulator.
template <int kRows, int kColumns>
__device__ __forceinline__ void multiply_split(float (&sum)[kRows][kColumns][4], int pair,
                                               const u32 (&a_high)[kRows][4],
                                               const u32 (&a_low)[kRows][4], const u32 (&b)[4]) {
  u32 b_high[4], b_low[4];
  split(b, b_high, b_low);
  auto add = [&](const u32 (&from_a)[kRows][4], const u32 (&from_b)[4]) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      mma<float>(sum[i][pair * 2], from_a[i], from_b[0], from_b[1]);
      mma<float>(sum[i][pair * 2 + 1], from_a[i], from_b[2], from_b[3]);
    }
  };
  add(a_low, b_high);
  add(a_high, b_low);
  add(a_high, b_high);
}

}  // namespace convgrad
