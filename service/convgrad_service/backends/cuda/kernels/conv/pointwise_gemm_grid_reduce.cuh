// Split-K reduction of one tile's accumulators over blocks of the grid. Part of pointwise_gemm.cu.
//
// Each block writes its partial sums to a workspace: [tile][share][fragment][lane], four floats as a lane
// holds them of a fragment (16 x 8), of those that the result has. The tile's blocks meet
// (core/rendezvous.cuh), at most 255; then each reduces some of the fragments. `slices` warps divide the
// shares of a fragment, so that all loads of a block are in flight at once; the order of additions depends on
// the number of shares and of slices only.
#pragma once

#include "conv/pointwise_gemm_load.cuh"
#include "core/opaque.cuh"
#include "core/rendezvous.cuh"
#include "ptx/acquire.cuh"

namespace {

constexpr int kWarps = CONSUMERS * 4, kTileVectors = BM * BN / 4;
static_assert(BM / 16 * kFragmentsN < 2048, "see GridReduction::inverse");
// Fragments that a warp reduces at a time, at most, and vectors that it loads at a time.
constexpr int kMostFragments = 4, kLoads = 16;
constexpr u32 kGridReduceBytes = kWarps * kMostFragments * 512;

// How a tile's blocks divide its reduction. Made before the mainloop, while the block waits for its first
// k-tile: after the meeting, the divisions would take as long as the loads.
struct GridReduction {
  int across, fragments;     // fragments of 16 rows, and all, of those that the result has
  int inverse;               // 65,536 over `across`, rounded up: divides numbers below 2,048 by it
  int count, of_warp;        // fragments of a block at a time, and of a warp
  int groups, slice, group;  // warps for different fragments; this warp's slice of the shares, and its group
  int first, shares;         // of the slice

  // Opaque, so that the compiler does not divide where the quotients are used.
  __device__ __forceinline__ GridReduction(const PointwiseGemmArgs& args, const BlockWork& work) {
    const int warp = threadIdx.x / 32, slices = args.slices, each = (args.parts + slices - 1) / slices;
    const int columns = args.columns - work.column;
    across = opaque_value(min(kMixesColumns ? (columns + 15) / 16 * 2 : (columns + 7) / 8, kFragmentsN));
    fragments = opaque_value(min((args.rows - work.row * BM + 15) / 16, BM / 16) * across);
    inverse = opaque_value((65535 + across) / across);
    groups = opaque_value(kWarps / slices);
    group = opaque_value(warp / slices);
    slice = warp - group * slices;
    first = opaque_value(min(slice * each, args.parts));
    shares = opaque_value(min(each, args.parts - first));
    count = opaque_value(min((fragments + args.parts - 1) / args.parts, groups * kMostFragments));
    of_warp = opaque_value((count + groups - 1) / groups);
  }
  __device__ __forceinline__ bool whole() const { return fragments == BM / 16 * kFragmentsN; }
};

// Adds up a lane's vectors of up to kMost fragments, of those `left`, `groups` apart from each other, over
// `shares` shares; to `room`.
template <int kMost>
__device__ __forceinline__ void reduce_slice(const float4* from, int groups, int left, int shares,
                                             float4* room) {
  const int apart = groups * 32;
  constexpr int kShares = kLoads / kMost;
  float4 sum[kMost] = {};
#pragma unroll 1
  for (int share = 0; share < shares; share += kShares, from += kShares * kTileVectors) {
    float4 four[kShares][kMost];
#pragma unroll
    for (int i = 0; i < kShares; ++i) {
#pragma unroll
      for (int f = 0; f < kMost; ++f) {
        four[i][f] = {};
        if (share + i < shares && f * groups < left) four[i][f] = __ldcg(from + i * kTileVectors + f * apart);
      }
    }
#pragma unroll
    for (int i = 0; i < kShares; ++i) {
#pragma unroll
      for (int f = 0; f < kMost; ++f) {
        const float4& one = four[i][f];
        sum[f].x += one.x, sum[f].y += one.y, sum[f].z += one.z, sum[f].w += one.w;
      }
    }
  }
#pragma unroll
  for (int f = 0; f < kMost; ++f) room[f * apart] = sum[f];
}

// Finishes and stores eight columns of a row of the result, consecutive ones or every other one.
__device__ __forceinline__ void store_eight(const PointwiseGemmArgs& args, int row, int column,
                                            float (&sums)[8]) {
  const int left = args.columns - column;
  if (row >= args.rows || left <= 0) return;
  if constexpr (kMixesColumns) {
    const i64 at = row * args.row_stride + column * args.column_stride;
    store_run<T, 8>(args, at, 2 * args.column_stride, (left + 1) / 2, column, sums);
    return;
  }
  const i64 to = row * args.row_stride + column * args.column_stride;
  if (args.plain && args.result_in_vectors && !args.wide_result && left >= 8) {
    const OutputPointer<T> result{static_cast<char*>(args.result), false};
    result.store_vector(to, sums);
  } else {
    store_run<T, 8>(args, to, args.column_stride, left, column, sums);
  }
}

// Writes the first `across` fragments of each 16 rows, without those from `fragments` on.
__device__ __forceinline__ void store_partials(float4* to, int across, int fragments, const Accumulators& accum) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
#pragma unroll
  for (int part = 0; part < kMmasM; ++part) {
    const int first = (warp / 4 * (kMmasM * 4) + part * 4 + warp % 4) * across;
    if (first >= fragments) break;
#pragma unroll
    for (int j = 0; j < kFragmentsN; ++j) {
      const float(&of)[4] = accum[part][j];
      if (j < across) to[(first + j) * 32 + lane] = {of[0], of[1], of[2], of[3]};
    }
  }
}

// As rendezvous_meet, without its fences: the addition and the loads order what they must.
__device__ __forceinline__ ReducerRank meet_in_grid(u32* word, u32 begun, u32 parties) {
  const bool waits = (begun & 255) == parties;
  const u32 arrival = waits ? kArrived : kArrived + kExited;
  u32 found = atomic_add_acq_rel(word, arrival);
  if (!waits) return {0, 0};
  const int rank = (found >> 8 & 255) - (found >> 16 & 255);
  found += arrival;
  for (const BoundedWait wait; (found >> 8 & 255) != parties; wait.check()) found = ld_acquire(word);
  return {rank, static_cast<int>(parties - (found >> 16 & 255))};
}

// By all consumer threads, after rendezvous_begin(word) and the mainloop.
__device__ __forceinline__ void reduce_in_grid(const PointwiseGemmArgs& args, const SharedLayout& smem,
                                               const BlockWork& work, const GridReduction& of, u32* word,
                                               const Accumulators& accum) {
  const int lane = threadIdx.x & 31;
  const float4* const partials =
      reinterpret_cast<const float4*>(args.partials) +
      static_cast<i64>(blockIdx.x) * args.parts * kTileVectors;
  // Read before it is needed, as it takes as long as the partial sums' stores.
  const u32 begun = threadIdx.x == 0 ? rendezvous_begun(word) : 0;
  float4* const own = const_cast<float4*>(partials) + static_cast<i64>(work.begin) * kTileVectors;
  if (of.whole()) {
    store_partials(own, kFragmentsN, BM / 16 * kFragmentsN, accum);
  } else {
    store_partials(own, of.across, of.fragments, accum);
  }
  named_barrier_sync(1, kConsumers);
  ReducerRank* const shared_met = reinterpret_cast<ReducerRank*>(smem.pointer(smem.reduce_barrier()));
  if (threadIdx.x == 0) *shared_met = meet_in_grid(word, begun, args.parts);
  named_barrier_sync(1, kConsumers);
  const ReducerRank met = *shared_met;
  if (met.blocks == 0) return;

  // No block polls the word any more once all are done; what it counts is read last.
  const u32 done = threadIdx.x == 0 ? atomicAdd(word, kDone) : 0;

  float4* const room = reinterpret_cast<float4*>(smem.pointer(smem.staging));
  float4* const to = room + (of.slice * of.groups * kMostFragments + of.group) * 32 + lane;
#pragma unroll 1
  for (int f0 = met.rank * of.count; f0 < of.fragments; f0 += met.blocks * of.count) {
    const int end = min(f0 + of.count, of.fragments), left = end - f0 - of.group;
    const float4* const from =
        partials + static_cast<i64>(of.first) * kTileVectors + (f0 + of.group) * 32 + lane;
    if (of.of_warp == 1) {
      reduce_slice<1>(from, of.groups, left, of.shares, to);
    } else if (of.of_warp == 2) {
      reduce_slice<2>(from, of.groups, left, of.shares, to);
    } else {
      reduce_slice<4>(from, of.groups, left, of.shares, to);
    }
    named_barrier_sync(1, kConsumers);
    for (int i = threadIdx.x; i < (end - f0) * 16; i += kConsumers) {
      const int in = i / 16, row = i % 16, fragment = f0 + in;
      const int down = fragment * of.inverse >> 16;
      float sums[8] = {};
#pragma unroll 1
      for (int s = 0; s < args.slices; ++s) {
        const float4* const lanes = room + (s * of.groups * kMostFragments + in) * 32 + row % 8 * 4;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float4 four = lanes[e];
          sums[e * 2] += row < 8 ? four.x : four.z, sums[e * 2 + 1] += row < 8 ? four.y : four.w;
        }
      }
      const int across = fragment - down * of.across;
      store_eight(args, work.row * BM + down * 16 + (kMixesRows ? row % 8 * 2 + row / 8 : row),
                  work.column + (kMixesColumns ? across / 2 * 16 + across % 2 : across * 8), sums);
    }
    if (f0 + met.blocks * of.count < of.fragments) named_barrier_sync(1, kConsumers);
  }
  if (threadIdx.x == 0 && static_cast<int>(done >> 24) == met.blocks - 1) atomicExch(word, 0u);
}

}  // namespace
