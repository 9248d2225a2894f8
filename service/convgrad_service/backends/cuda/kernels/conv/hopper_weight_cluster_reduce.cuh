// Reduction of one tile over the blocks of a cluster, each with its share of the pixels, through
// distributed shared memory. Part of hopper_weight.cu.
#pragma once

#include "conv/hopper_weight_result.cuh"
#include "core/partial_sums.cuh"
#include "ptx/warpgroup.cuh"

namespace convgrad {

// The tile's quads (four adjacent fragments, finished together) are divided into slices, one for each of
// the kCluster blocks that share the tile (every kRankStride-th block of the cluster). Each block stores its
// accumulators in shared memory, where the pipeline's stages were, and sends each slice to its owner as
// soon as it is complete; received quads follow the tile's own. An owner reduces all blocks' quads, in
// their order, as they arrive.
template <int kCluster, int kRankStride, int kRows, int kProducts, int kFragments>
struct ClusterReduction {
  static constexpr int kOwnQuads = kRows * kProducts * kFragments / 4;  // per warpgroup
  static constexpr int kQuads = WARPGROUPS * kOwnQuads;
  static constexpr int kMaxQuads = (kQuads + kCluster - 1) / kCluster;  // quads of a slice
  static constexpr u32 kQuadBytes = 512 * 16;

  __device__ __forceinline__ static int first_of(int block) { return kQuads * block / kCluster; }
  __device__ __forceinline__ static int owner_of(int quad) {
    return ((quad + 1) * kCluster - 1) / kQuads;
  }
  // Index of a received quad, after the tile's own.
  __device__ __forceinline__ static int place_of(int block, int other, int quad) {
    return kQuads + (other < block ? other : other - 1) * kMaxQuads + quad - first_of(block);
  }

  // By the consumer threads, after they have arrived at the cluster barrier to signal that this block's
  // stages are free. `tile` is the block's tile among the cluster's.
  __device__ __forceinline__ static void leave(
      char* base, u32 reduce_barriers, int block, int tile,
      const float (&sum)[kRows][kProducts][kFragments][4]) {
    const int warpgroup = threadIdx.x / 128, thread = threadIdx.x % 128;
    float4* const to = reinterpret_cast<float4*>(base) + warpgroup * (kOwnQuads * 512) + thread;
#pragma unroll
    for (int turn = 0; turn < kOwnQuads; ++turn) {
      // Alternates between the two halves, which belong to different slices.
      const int own = kOwnQuads % 2 ? turn : turn % 2 * (kOwnQuads / 2) + turn / 2;
#pragma unroll
      for (int v = own * 4; v < own * 4 + 4; ++v) {
        const float(&of)[4] = sum[v / kFragments / kProducts][v / kFragments % kProducts][v % kFragments];
        to[v * 128] = make_float4(of[0], of[1], of[2], of[3]);
      }
      fence_proxy_async();
      named_barrier_sync(2 + warpgroup, 128);
      if (turn == 0) cluster_wait();
      const int quad = warpgroup * kOwnQuads + own, other = owner_of(quad);
      if (thread == turn % 4 * 32 && other != block) {
        const u32 sums = shared_address(base);
        bulk_copy_to_peer(sums + place_of(other, block, quad) * kQuadBytes, sums + quad * kQuadBytes,
                   kQuadBytes, reduce_barriers + (quad - first_of(other)) * 8, other * kRankStride + tile);
      }
    }
  }

  // Writes partial sums, or final results if the cluster has all shares. By the same threads; they exit
  // only after all blocks have received everything, because nothing else signals that their sums were
  // read.
  __device__ __forceinline__ static void add(const HopperWeightArgs& args, const Unit& unit,
                                             const float4* sums, u32 reduce_barriers, int block,
                                             const Box* boxes) {
    const WeightResult& of = args.result;
    constexpr int kVectors = kQuads * 512;
    const Place place = convgrad::place_of(of, unit.tile);
    float4* const partials =
        reinterpret_cast<float4*>(of.partials) +
        (static_cast<i64>(unit.share) * of.row_tiles * of.column_tiles + unit.tile) * kVectors;
    const int lane = threadIdx.x % 128, first = first_of(block), end = first_of(block + 1);
    const int own_first = first + threadIdx.x / 128;
    // The block's own quads may have been written by another warpgroup.
    named_barrier_sync(1, WARPGROUPS * 128);
    if (own_first >= end) cluster_arrive();
#pragma unroll 1
    for (int quad = own_first; quad < end; quad += WARPGROUPS) {
      const int index = quad * 512 + lane;
      mbarrier_wait(reduce_barriers + (quad - first) * 8, 0);
      if (quad + WARPGROUPS >= end) cluster_arrive();
      float4 sum[4] = {};
#pragma unroll
      for (int other = 0; other < kCluster; ++other) {
        const int from = other == block ? quad : place_of(block, other, quad);
#pragma unroll
        for (int v = 0; v < 4; ++v) {
          const float4 four = sums[from * 512 + v * 128 + lane];
          convgrad::add(sum[v], four);
        }
      }
      if (of.shares > 1) {
#pragma unroll
        for (int v = 0; v < 4; ++v) partials[index + v * 128] = sum[v];
      } else {
        finish_quad<kRows, kProducts, kFragments>(args, place, index, sum, boxes);
      }
    }
    cluster_wait();
  }
};

}  // namespace convgrad
