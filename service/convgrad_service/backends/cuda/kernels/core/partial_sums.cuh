// Reduction of partial sums in global memory.
#pragma once

#include "core/elements.cuh"

namespace convgrad {

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
    for (int k = 0; k < kInFlight; ++k) {
      sum.x += part[k].x, sum.y += part[k].y, sum.z += part[k].z, sum.w += part[k].w;
    }
  }
  return sum;
}

}  // namespace convgrad
