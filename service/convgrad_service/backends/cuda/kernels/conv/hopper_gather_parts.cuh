// With PARTS 3, operands of hopper_gather.cu are float32 as bfloat16 parts (conv/float_parts.cu): an element times a power
// of two is the sum of its parts. Of the products of parts i and j, those with i + j > 2 are omitted: at most 2^-23 of
// the product.
#pragma once

#include "core/split_floats.cuh"

namespace convgrad {

// Warpgroup: adds the products of a k-tile's parts, times `unscale`, to `sum`. Tensor cores truncate their sums: those
// of a k-tile, the smallest first, are added up in float32, while other warpgroups' products run.
//   start(accum, i, j, add)  issues those of part i of A and part j of B, with scale_d = add;
//   release(i)               tells the producers that part i of both has been read.
template <int kMmasM, int kFragmentsN, class Start, class Release>
__device__ __forceinline__ void multiply_parts(const Start& start, const Release& release, float unscale,
                                               float (&sum)[kMmasM][kFragmentsN][4]) {
  float products[kMmasM][kFragmentsN][4];
  wgmma_fence();
  start(products, 0, 2, 0), start(products, 2, 0, 1);
  wgmma_commit();
  start(products, 1, 1, 1), start(products, 0, 1, 1), start(products, 1, 0, 1);
  wgmma_commit();
  start(products, 0, 0, 1);
  wgmma_commit();
  wgmma_wait<2>();
  release(2);
  wgmma_wait<1>();
  release(1);
  wgmma_wait<0>();
  release(0);
#pragma unroll
  for (int i = 0; i < kMmasM; ++i) accumulate_scaled(sum[i], products[i], unscale);
}

}  // namespace convgrad
