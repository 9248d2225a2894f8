// The sums of one tile by the blocks of a cluster, each of its share of the pixels, added up through
// their shared memory. Part of hopper_weight.cu.
#pragma once

#include "hopper_weight_finish.cuh"

namespace convgrad {

// Leaves this thread's sums in shared memory, from `base` on, for `sum_cluster`: vectors of four, as
// partial sums lie.
template <int kRows, int kProducts, int kFragments>
__device__ __forceinline__ void leave_sums(char* base, int warpgroup, int thread,
                                           const float (&sum)[kRows][kProducts][kFragments][4]) {
  float4* const to = reinterpret_cast<float4*>(base) +
                     warpgroup * (kRows * kProducts * kFragments * 128) + thread;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int j = 0; j < kProducts; ++j) {
#pragma unroll
      for (int f = 0; f < kFragments; ++f) {
        const float(&of)[4] = sum[i][j][f];
        to[((i * kProducts + j) * kFragments + f) * 128] = make_float4(of[0], of[1], of[2], of[3]);
      }
    }
  }
}

// Adds up what the kCluster blocks left at `base`, in their order, this block's part of it: to
// partial sums, or finished where the cluster has all shares. By the threads that multiplied.
template <int kCluster, int kRows, int kProducts, int kFragments>
__device__ __forceinline__ void sum_cluster(const HopperWeightArgs& args, const Unit& unit,
                                            u32 base, int block, const Box* boxes) {
  const WeightResult& of = args.result;
  constexpr int kEach = kRows * kProducts * kFragments * 128, kVectors = kEach * WARPGROUPS;
  constexpr int kPart = kVectors / kCluster, kThreads = WARPGROUPS * 128;
  static_assert(kPart * kCluster == kVectors, "equal parts");
  const Place place = place_of(of, unit.tile);
  const int tiles = of.row_tiles * of.column_tiles;
  float4* const partials = reinterpret_cast<float4*>(of.partials) +
                           (static_cast<i64>(unit.share) * tiles + unit.tile) * kVectors;
#pragma unroll 2
  for (int i = threadIdx.x; i < kPart; i += kThreads) {
    const int index = block * kPart + i;
    float4 sum = {};
#pragma unroll
    for (int other = 0; other < kCluster; ++other) {
      const float4 four = load_four_of(base + index * 16, other);
      sum.x += four.x, sum.y += four.y, sum.z += four.z, sum.w += four.w;
    }
    if (of.shares > 1) {
      partials[index] = sum;
    } else {
      finish_four<kRows, kProducts, kFragments>(args, place, index, sum, boxes);
    }
  }
}

}  // namespace convgrad
