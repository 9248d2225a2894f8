// The sums of one tile by the blocks of a cluster, each of its share of the pixels, added up through
// their shared memory. Part of hopper_weight.cu.
#pragma once

#include "conv/hopper_weight_result.cuh"
#include "ptx/warpgroup.cuh"

namespace convgrad {

// A tile's quads (four neighbouring fragments, which are finished together) in slices, one for each of
// the kCluster blocks that sum it, every kApart-th of a cluster. Each leaves its sums in shared memory,
// where its ring was, and sends the others' quads to them as it goes, behind a place as large as the
// tile's sums; of its own slice it adds up all blocks' quads, in their order, as they come.
template <int kCluster, int kApart, int kRows, int kProducts, int kFragments>
struct ClusterSums {
  static constexpr int kOwnQuads = kRows * kProducts * kFragments / 4;  // of a warpgroup
  static constexpr int kQuads = WARPGROUPS * kOwnQuads;
  static constexpr int kMost = (kQuads + kCluster - 1) / kCluster;  // of a slice
  static constexpr u32 kQuadBytes = 512 * 16;

  __device__ __forceinline__ static int first_of(int block) { return kQuads * block / kCluster; }
  __device__ __forceinline__ static int owner_of(int quad) {
    return ((quad + 1) * kCluster - 1) / kQuads;
  }
  // Of what a block gets from another: the number, from the tile's own sums on.
  __device__ __forceinline__ static int place_of(int block, int other, int quad) {
    return kQuads + (other < block ? other : other - 1) * kMost + quad - first_of(block);
  }

  // By the threads that multiplied, after they have arrived at the cluster's barrier to say that
  // nobody reads this block's ring any more. `tile` is the number of the block's among the cluster's.
  __device__ __forceinline__ static void leave(
      char* base, u32 joined, int block, int tile,
      const float (&sum)[kRows][kProducts][kFragments][4]) {
    const int warpgroup = threadIdx.x / 128, thread = threadIdx.x % 128;
    float4* const to = reinterpret_cast<float4*>(base) + warpgroup * (kOwnQuads * 512) + thread;
#pragma unroll
    for (int turn = 0; turn < kOwnQuads; ++turn) {
      // By turns from either half, which are of different slices.
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
                   kQuadBytes, joined + (quad - first_of(other)) * 8, other * kApart + tile);
      }
    }
  }

  // To partial sums, or finished where the cluster has all shares. By the same threads, which leave
  // when all blocks have got all, for nothing else tells that their sums have been read.
  __device__ __forceinline__ static void add(const HopperWeightArgs& args, const Unit& unit,
                                             const float4* sums, u32 joined, int block,
                                             const Box* boxes) {
    const WeightResult& of = args.result;
    constexpr int kVectors = kQuads * 512;
    const Place place = convgrad::place_of(of, unit.tile);
    float4* const partials =
        reinterpret_cast<float4*>(of.partials) +
        (static_cast<i64>(unit.share) * of.row_tiles * of.column_tiles + unit.tile) * kVectors;
    const int lane = threadIdx.x % 128, first = first_of(block), end = first_of(block + 1);
    const int own_first = first + threadIdx.x / 128;
    // The block's own sums of them may be another warpgroup's.
    named_barrier_sync(1, WARPGROUPS * 128);
    if (own_first >= end) cluster_arrive();
#pragma unroll 1
    for (int quad = own_first; quad < end; quad += WARPGROUPS) {
      const int index = quad * 512 + lane;
      mbarrier_wait(joined + (quad - first) * 8, 0);
      if (quad + WARPGROUPS >= end) cluster_arrive();
      float4 sum[4] = {};
#pragma unroll
      for (int other = 0; other < kCluster; ++other) {
        const int from = other == block ? quad : place_of(block, other, quad);
#pragma unroll
        for (int v = 0; v < 4; ++v) {
          const float4 four = sums[from * 512 + v * 128 + lane];
          sum[v].x += four.x, sum[v].y += four.y, sum[v].z += four.z, sum[v].w += four.w;
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
