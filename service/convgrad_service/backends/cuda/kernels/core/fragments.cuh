// Accumulator fragments of mma and wgmma, as arrays [M][N] of 16 x 8 (per warp; a lane holds four floats, see
// ptx/mma.cuh): clearing them, and storing their adjacent pairs. See staging.cuh for stores through shared memory.
#pragma once

#include "ptx/mma.cuh"

namespace convgrad {

template <int kM, int kN>
__device__ __forceinline__ void clear(float (&accum)[kM][kN][4]) {
#pragma unroll
  for (int i = 0; i < kM; ++i) {
#pragma unroll
    for (int j = 0; j < kN; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) accum[i][j][e] = 0.0f;
    }
  }
}

// Stores two consecutive elements, rounded to T, at once; `to` is aligned to their combined size.
template <class T>
__device__ __forceinline__ void store_pair(T* to, float first, float second) {
  *reinterpret_cast<u32*>(to) = narrow_x2<T>(first, second);
}
__device__ __forceinline__ void store_pair(float* to, float first, float second) {
  *reinterpret_cast<float2*>(to) = make_float2(first, second);
}

}  // namespace convgrad
