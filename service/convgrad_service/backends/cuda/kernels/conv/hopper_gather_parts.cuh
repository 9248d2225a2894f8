// The mainloop of hopper_gather.cu with PARTS 3: float32 operands as bfloat16 parts. An element is the sum of
// 2^(-8 * i) * part i (core/split_floats.cuh: split_weighted_x2), so a product is that of 2^(-8 * (i + j)) times the
// products of parts i and j. Those with i + j > 2 are omitted: at most 2^-23 of the product.
#pragma once

#include "conv/hopper_gather_products.cuh"

#if PARTS > 1
namespace convgrad {
namespace {

// sum += accum * 2^(-8 * kOrder), after the wgmmas of accum.
template <int kOrder>
__device__ __forceinline__ void add_products(Sums& accum, Sums& sum) {
  constexpr float kWeight = kOrder == 0 ? 1.0f : kOrder == 1 ? 0x1p-8f : 0x1p-16f;
  fence_sums(accum);
#pragma unroll
  for (int part = 0; part < kMmasM; ++part) {
#pragma unroll
    for (int j = 0; j < kFragmentsN; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[part][j][e] = fmaf(accum[part][j][e], kWeight, sum[part][j][e]);
    }
  }
}

// Adds a tile's products, the smallest of each k-tile first. Tensor cores truncate their sums: those of a k-tile and a
// weight are added up in float32 by the warpgroup, while products of other parts, or of other warpgroups, run.
// None is in flight on return.
__device__ __forceinline__ int mainloop(const HopperGatherArgs& args, const SharedLayout& smem, PipelineState& state,
                                        int steps, int first_row, Sums& sum) {
  static_assert(PARTS == 3, "a weight for each");
  clear(sum);
  Sums one, other;
  int i = 0;
  for_k_tiles(args, steps, [&](auto mmas, int end) {
#pragma unroll 1
    for (; i < end; ++i) {
      int stages[PARTS];
#pragma unroll
      for (int part = PARTS - 1; part >= 0; --part) {
        mbarrier_wait(smem.full_barrier(state.index), state.parity);
        stages[part] = state.index;
        state.advance(STAGES);
      }
      const auto start = [&](Sums& accum, int of_a, int of_b, int add) {
        const u32 rows = smem.stage(stages[of_a]) + first_row * kRowBytes;
        issue_k_tile<decltype(mmas)::value>(accum, rows, smem.stage(stages[of_b]) + kABytes, add);
      };
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
      release_stage(smem, stages[2]);
      add_products<2>(other, sum);
      wgmma_fence();
      start(other, 0, 0, 0);
      wgmma_commit();
      wgmma_wait<1>();
      release_stage(smem, stages[1]);
      add_products<1>(one, sum);
      wgmma_wait<0>();
      release_stage(smem, stages[0]);
      add_products<0>(other, sum);
    }
  });
  return -1;
}

}  // namespace
}  // namespace convgrad
#endif
