// Reduction of partial sums in global memory: the second stage of split-K. A vector is four partial sums of a thread.
#pragma once

#include "core/elements.cuh"

namespace convgrad {

__device__ __forceinline__ void add(float4& sum, const float4& more) {
  sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
}

// Adds to kVectors sums, those of vectors `vector_stride` apart, up to kSplits splits that are `split_stride` apart, in
// order; vector v of split i is read where exists(i, v). All loads are in flight at once.
template <int kVectors, int kSplits, class Exists>
__device__ __forceinline__ void add_splits(const float4* from, int vector_stride, i64 split_stride,
                                           const Exists& exists, float4 (&sum)[kVectors]) {
  float4 part[kSplits][kVectors];
#pragma unroll
  for (int i = 0; i < kSplits; ++i) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      part[i][v] = {};
      if (exists(i, v)) part[i][v] = __ldcg(from + i * split_stride + v * vector_stride);
    }
  }
#pragma unroll
  for (int i = 0; i < kSplits; ++i) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) add(sum[v], part[i][v]);
  }
}

// The sum, in order, of vectors first, first + step, ... below `count`; consecutive vectors are `stride`
// float4 apart. Predicated batches keep kInFlight loads in flight in the last batch too, where the
// remainder of an unrolled loop would wait for each load before the next.
__device__ __forceinline__ float4 strided_sum(const float4* from, int first, int step, int count,
                                               i64 stride) {
  constexpr int kInFlight = 12;
  float4 sum = {0, 0, 0, 0};
#pragma unroll 1
  for (int i = first; i < count; i += step * kInFlight) {
    float4 part[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      part[k] = {0, 0, 0, 0};
      if (i + k * step < count) part[k] = __ldcg(from + (i + k * step) * stride);
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) add(sum, part[k]);
  }
  return sum;
}

}  // namespace convgrad
