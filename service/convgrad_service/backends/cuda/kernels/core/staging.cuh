// Stores accumulator fragments, rounded, to shared memory for the epilogue, from where TMA or vectors of 16 bytes take
// them. Needs sm_90 (stmatrix).
#pragma once

#include "core/fragments.cuh"
#include "ptx/tma.cuh"

namespace convgrad {

// Warp: stores two fragments that are adjacent along N, rounded to T, by stmatrix or (kTransposed) by columns;
// `to` is this lane's row or column of 16 bytes.
template <class T, bool kTransposed = false>
__device__ __forceinline__ void store_fragments(u32 to, const float (&first)[4], const float (&second)[4]) {
  const u32 words[4] = {narrow_x2<T>(first[0], first[1]), narrow_x2<T>(first[2], first[3]),
                        narrow_x2<T>(second[0], second[1]), narrow_x2<T>(second[2], second[3])};
  if constexpr (kTransposed) {
    stmatrix_trans(to, words);
  } else {
    stmatrix(to, words);
  }
}

// Warpgroup: stores 64 rows x 8 * kCount columns, rounded to T, by columns of 128 bytes (128-byte swizzle), as a TMA
// box whose innermost dimension is along the rows. Columns start at fragment `first` of the accumulators.
template <class T, int kCount, int kN>
__device__ __forceinline__ void stage_columns(u32 staging, const float (&accum)[kN][4], int first) {
  const int lane = threadIdx.x & 31, chunk = threadIdx.x / 32 % 4 * 2 + lane / 8 % 2;
  const u32 to = staging + lane % 8 * 128 + (chunk ^ (lane % 8)) * 16;
#pragma unroll
  for (int j = 0; j + 1 < kCount; j += 2) {
    store_fragments<T, true>(to + (j + lane / 16) * 1024, accum[first + j], accum[first + j + 1]);
  }
  if constexpr (kCount % 2) {
    const float(&one)[4] = accum[first + kCount - 1];
    const u32 words[2] = {narrow_x2<T>(one[0], one[1]), narrow_x2<T>(one[2], one[3])};
    stmatrix_trans(to + (kCount - 1) * 1024, words);
  }
}

}  // namespace convgrad
