// Partial sums that several blocks left in memory, added up by one of them.
#pragma once

#include "core/elements.cuh"

namespace convgrad {

// The sum, in order, of every `step`-th of `count` vectors that lie `apart` vectors apart, from
// number `first` on. Loads are under way together, those of the last round too: the rest of an
// unrolled loop waits for each before the next.
__device__ __forceinline__ float4 sum_of_every(const float4* from, int first, int step, int count,
                                               i64 apart) {
  constexpr int kTogether = 12;
  float4 sum = {0, 0, 0, 0};
#pragma unroll 1
  for (int i = first; i < count; i += step * kTogether) {
    float4 part[kTogether];
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      part[k] = {0, 0, 0, 0};
      if (i + k * step < count) part[k] = __ldcg(from + (i + k * step) * apart);
    }
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      sum.x += part[k].x, sum.y += part[k].y, sum.z += part[k].z, sum.w += part[k].w;
    }
  }
  return sum;
}

}  // namespace convgrad
