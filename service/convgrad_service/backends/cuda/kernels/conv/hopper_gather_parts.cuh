// With PARTS 3, operands of hopper_gather.cu are float32 as bfloat16 parts. An element is the sum of
// 2^(-8 * i) * part i (core/split_floats.cuh: split_weighted_x2), so a product is the sum of 2^(-8 * (i + j)) times
// the products of parts i and j. Those with i + j > 2 are omitted: at most 2^-23 of the product.
#pragma once

#include "ptx/warpgroup.cuh"

namespace convgrad {

// sum += accum * 2^(-8 * kOrder), after the wgmmas of accum.
template <int kOrder, int kMmasM, int kFragmentsN>
__device__ __forceinline__ void add_products(float (&accum)[kMmasM][kFragmentsN][4],
                                             float (&sum)[kMmasM][kFragmentsN][4]) {
  constexpr float kWeight = kOrder == 0 ? 1.0f : kOrder == 1 ? 0x1p-8f : 0x1p-16f;
#pragma unroll
  for (int i = 0; i < kMmasM; ++i) {
    fence_accumulators(accum[i]);
#pragma unroll
    for (int j = 0; j < kFragmentsN; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[i][j][e] = fmaf(accum[i][j][e], kWeight, sum[i][j][e]);
    }
  }
}

// Warpgroup: adds the products of a k-tile's parts to `sum`, the smallest first. Tensor cores truncate their sums:
// those of a k-tile and a weight are added up in float32, while products of other parts, or other warpgroups', run.
//   start(accum, i, j, add)  issues those of part i of A and part j of B, with scale_d = add;
//   release(i)               tells the producers that part i of both has been read.
template <int kMmasM, int kFragmentsN, class Start, class Release>
__device__ __forceinline__ void multiply_parts(const Start& start, const Release& release,
                                               float (&sum)[kMmasM][kFragmentsN][4]) {
  float one[kMmasM][kFragmentsN][4], other[kMmasM][kFragmentsN][4];
  wgmma_fence();
  start(one, 1, 1, 0), start(one, 0, 2, 1);
  wgmma_commit();
  start(other, 2, 0, 0);
  wgmma_commit();
  wgmma_wait<1>();
  add_products<2>(one, sum);
  wgmma_fence();
  start(one, 0, 1, 0), start(one, 1, 0, 1);
  wgmma_commit();
  wgmma_wait<1>();
  release(2);
  add_products<2>(other, sum);
  wgmma_fence();
  start(other, 0, 0, 0);
  wgmma_commit();
  wgmma_wait<1>();
  release(1);
  add_products<1>(one, sum);
  wgmma_wait<0>();
  release(0);
  add_products<0>(other, sum);
}

}  // namespace convgrad
