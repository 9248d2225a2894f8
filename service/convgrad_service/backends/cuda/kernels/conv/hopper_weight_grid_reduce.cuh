// Grid-level reduction of a tile's partial sums by the blocks that wrote them, each a part of the tile's
// vectors. Part of hopper_weight.cu. A tile's blocks synchronise by one word (core/rendezvous.cuh), so at
// most 255 shares.
#pragma once

#include "conv/hopper_weight_result.cuh"
#include "core/partial_sums.cuh"
#include "core/rendezvous.cuh"
#include "ptx/warpgroup.cuh"

namespace convgrad {

// A block's part of a tile's vectors: met.rank, + met.blocks, ...
template <int kRows, int kProducts, int kFragments>
struct Adding {
  static constexpr int kThreads = WARPGROUPS * 128;
  static constexpr int kVectors = kThreads * kRows * kProducts * kFragments, kQuads = kVectors / 512;

  const HopperWeightArgs& args;
  const Box* boxes;
  float4* room;
  const float4* partials;
  i64 share_size;
  Place place;
  ReducerRank met;

  // Few shares: each warpgroup reduces quads (four adjacent fragments, finished together) of all shares,
  // or, where there are no more quads than shares, its part of the shares.
  __device__ __forceinline__ void add_quads() const {
    constexpr int kShares = 4;
    const int warpgroup = threadIdx.x / 128, lane = threadIdx.x % 128, shares = args.result.shares;
    const bool apart = kQuads <= shares;
    const int each = apart ? (shares + WARPGROUPS - 1) / WARPGROUPS : shares;
    const int first = apart ? warpgroup * each : 0, last = min(first + each, shares);
    const int step = apart ? met.blocks : met.blocks * WARPGROUPS;
#pragma unroll 1
    for (int quad = apart ? met.rank : met.rank * WARPGROUPS + warpgroup; quad < kQuads;
         quad += step) {
      const int index = quad * 512 + lane;
      float4 sum[4] = {};
#pragma unroll 1
      for (int share = first; share < last; share += kShares) {
        add_splits<4, kShares>(partials + share * share_size + index, 128, share_size,
                               [&](int i, int) { return i < last - share; }, sum);
      }
      if (apart) {
        named_barrier_sync(1, kThreads);
#pragma unroll
        for (int v = 0; v < 4; ++v) room[v * kThreads + threadIdx.x] = sum[v];
        named_barrier_sync(1, kThreads);
        if (warpgroup > 0) continue;
        for (int other = 1; other < WARPGROUPS; ++other) {
#pragma unroll
          for (int v = 0; v < 4; ++v) {
            const float4 four = room[v * kThreads + other * 128 + lane];
            add(sum[v], four);
          }
        }
      }
      finish_quad<kRows, kProducts, kFragments>(args, place, index, sum, boxes);
    }
  }
  // Many shares: groups of `lanes` vectors, each reduced by `slices` parts of the block.
  __device__ __forceinline__ void add_many(int slices) const {
    constexpr int kShares = 16;
    const int thread = threadIdx.x, lanes = kThreads / slices, slice = thread / lanes;
    const int lane = thread - slice * lanes, shares = args.result.shares;
    const int each = (shares + slices - 1) / slices, first = slice * each;
    const int last = min(first + each, shares), groups = (kVectors + lanes - 1) / lanes;
#pragma unroll 1
    for (int group = met.rank; group < groups; group += met.blocks) {
      const int index = group * lanes + lane;
      float4 sum[1] = {};
#pragma unroll 1
      for (int share = first; share < last && index < kVectors; share += kShares) {
        add_splits<1, kShares>(partials + share * share_size + index, 0, share_size,
                               [&](int i, int) { return i < last - share; }, sum);
      }
      named_barrier_sync(1, kThreads);
      room[thread] = sum[0];
      named_barrier_sync(1, kThreads);
      if (slice > 0 || index >= kVectors) continue;
      for (int other = 1; other < slices; ++other) {
        const float4 four = room[other * lanes + lane];
        add(sum[0], four);
      }
      finish_four<kRows, kProducts, kFragments>(args, place, index, sum[0], boxes);
    }
  }
};

// By all consumer threads; `room` is free shared memory.
template <int kRows, int kProducts, int kFragments>
__device__ __forceinline__ void reduce_in_grid(const HopperWeightArgs& args, const Unit& unit,
                                             const Box* boxes, float4* room) {
  using Adds = Adding<kRows, kProducts, kFragments>;
  __shared__ ReducerRank met;
  const WeightResult& of = args.result;
  const int parted = unit.tile - of.whole;
  u32* const word = args.met + parted;
  named_barrier_sync(1, Adds::kThreads);
  if (threadIdx.x == 0) met = rendezvous_meet(word, rendezvous_begun(word), of.shares);
  const i64 share_size = static_cast<i64>(of.row_tiles * of.column_tiles - of.whole) * Adds::kVectors;
  const float4* const partials =
      reinterpret_cast<const float4*>(of.partials) + static_cast<i64>(parted) * Adds::kVectors;
  const Place place = place_of(of, unit.tile);
  named_barrier_sync(1, Adds::kThreads);
  if (met.blocks == 0) return;
  const Adds adds = {args, boxes, room, partials, share_size, place, met};
  if (of.shares <= Adds::kQuads) {
    adds.add_quads();
  } else {
    adds.add_many(args.slices);
  }
  if (threadIdx.x == 0) rendezvous_leave(word, met);
}

}  // namespace convgrad
