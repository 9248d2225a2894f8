// Summing the accumulators of grouped_weight.cu: over the warps of an item in shared
// memory, then over the blocks that share a slice, in a cluster (st.async) or meeting at a word
// (core/rendezvous.cuh); and storing results.
#pragma once

#include "core/bits16.cuh"
#include "core/epilogue.cuh"
#include "core/partial_sums.cuh"
#include "core/rendezvous.cuh"
#include "ptx/mma.cuh"
#include "ptx/st_async.cuh"
#include "ptx/warpgroup.cuh"

namespace convgrad {

// Where the sums go.
struct WeightResult {
  int in_channels;   // of a group
  int out_channels;
  int items;         // of a block
  int wide;          // w is float32 for any type of x and y
  int bfloat16;      // the type of Bits16
  int quads;         // four adjacent channels of w are results of one group and one aligned vector
  float alpha;
  float beta;
  float* partials;
  void* w;
  const void* accumulate;  // like w, or null
  u32* met;                // zeros, one for the blocks of each x and y; left zero
  i64 w_stride[6];         // G K C T R S
};

// A block's sums: each of kWarps_ warps has kFragments_ fragments of 16 rows by kWide_ of 8 columns.
template <int kFragments_, int kWide_, int kWarps_>
struct SumShape {
  static constexpr int kSummers = kWarps_ * 32;
  // An item's sums in shared memory and in `partials`: [column][row], with rows in quads.
  static constexpr int kRows = kFragments_ * 16, kColumns = kWide_ * 8;
  static constexpr int kRowQuads = kRows / 4, kQuads = kRowQuads * kColumns;
  // An odd multiple of four words puts the columns 2t of a fragment in different banks.
  static constexpr int kSlabPitch = kRows + 4, kSlab = kColumns * kSlabPitch;
};

// A row of a merge: a tap and a channel of x.
struct alignas(16) Row {
  int x;    // offset in x's box, in bytes
  int own;  // its group in the merge; -1 if there is no such row
  i64 w;    // offset of its results in w: with column * w_stride[1], in elements
};

// A warp's item.
struct Item {
  int merge, row, column;  // the first ones
  bool is_there;
};

template <class T>
__device__ __forceinline__ void put(const WeightResult& args, i64 at, float sum) {
  const T* const old = args.accumulate == nullptr ? nullptr : static_cast<const T*>(args.accumulate) + at;
  const T* const no_bias = nullptr;
  static_cast<T*>(args.w)[at] = narrow<T>(finish<T, float>(sum, args.alpha, args.beta, old, no_bias, kNone));
}

template <class T>
__device__ __forceinline__ void put_quad(const WeightResult& args, i64 at, const float4& sum) {
  T* const to = static_cast<T*>(args.w) + at;
  const float4 done = make_float4(sum.x * args.alpha, sum.y * args.alpha, sum.z * args.alpha, sum.w * args.alpha);
  if constexpr (sizeof(T) == 4) {
    *reinterpret_cast<float4*>(to) = done;
  } else {
    *reinterpret_cast<uint2*>(to) = make_uint2(narrow_x2<T>(done.x, done.y), narrow_x2<T>(done.z, done.w));
  }
}

// The results in an item's column `column`, rows from `row` on.
template <class Shape>
struct Quad {
  const Row* rows;
  int column;  // of the merge
  i64 w;       // of the merge and column
  bool any;

  __device__ __forceinline__ Quad(const WeightResult& args, const Item& item, const Row* row_at, int index,
                                  i64 merge_w) {
    const int in_item = index / Shape::kRowQuads;
    rows = row_at + item.row + (index - in_item * Shape::kRowQuads) * 4;
    column = item.column + in_item;
    w = merge_w + column * args.w_stride[1];
    any = args.in_channels % 4 != 0 || is_result(args, rows[0]);
  }
  __device__ __forceinline__ bool is_result(const WeightResult& args, const Row& row) const {
    const int k = column - row.own * args.out_channels;
    return row.own >= 0 && k >= 0 && k < args.out_channels;
  }
  template <class T>
  __device__ __forceinline__ void put_all(const WeightResult& args, const float4& sum) const {
    if (args.quads && args.accumulate == nullptr) {
      const i64 at = w + rows[0].w;
      if (args.wide) {
        put_quad<float>(args, at, sum);
      } else {
        as_type<T>(args.bfloat16, [&](auto like) { put_quad<decltype(like)>(args, at, sum); });
      }
      return;
    }
    float4 left = sum;
#pragma unroll 1
    for (int i = 0; i < 4; ++i) {
      const float each = left.x;
      left = make_float4(left.y, left.z, left.w, 0);
      if (!is_result(args, rows[i])) continue;
      if (args.wide) {
        put<float>(args, w + rows[i].w, each);
      } else {
        as_type<T>(args.bfloat16, [&](auto like) { put<decltype(like)>(args, w + rows[i].w, each); });
      }
    }
  }
};

// Warp: leaves its sums in its slab, transposed: rows are adjacent.
template <class Shape, int kFragments, int kWide>
__device__ __forceinline__ void leave_sums(const float (&sum)[kFragments][kWide][4], float* slabs, int warp) {
  const int lane = threadIdx.x & 31;
  float* const slab = slabs + warp * Shape::kSlab + lane % 4 * 2 * Shape::kSlabPitch + lane / 4;
#pragma unroll
  for (int i = 0; i < kFragments; ++i) {
#pragma unroll
    for (int j = 0; j < kWide; ++j) {
      float* const to = slab + j * 8 * Shape::kSlabPitch + i * 16;
      to[0] = sum[i][j][0], to[Shape::kSlabPitch] = sum[i][j][1];
      to[8] = sum[i][j][2], to[Shape::kSlabPitch + 8] = sum[i][j][3];
    }
  }
}

// How the blocks of a slice add their sums: share `share` of `shares`.
struct Meeting {
  int share, shares;
  bool in_cluster;
  // In a cluster of the shares: the address of an mbarrier that all consumer threads arrive at, and room
  // for received sums.
  u32 barrier;
  float4* received;
  // Otherwise: their word, and how many had begun.
  u32* word;
  u32 begun;
};

// All consumer threads: sum and store. Warp k_split * args.items + item has left its sums in its slab,
// and they have synchronised. `merge_w` is where the item's merge starts in w.
template <class T, class Shape>
__device__ __forceinline__ void sum_items(const WeightResult& args, const Item& item, int number,
                                          int k_split, int k_splits, const Row* row_at, i64 merge_w,
                                          const float* slabs, const Meeting& met) {
  constexpr int kAtOnce = 8, kSummers = Shape::kSummers, kQuads = Shape::kQuads;
  const int lane = threadIdx.x & 31, apart = k_splits * 32, share = met.share, shares = met.shares;
  const int block_quads = args.items * kQuads;
  const i64 column = static_cast<i64>(blockIdx.z) * gridDim.y + blockIdx.y;
  float4* const partials =
      reinterpret_cast<float4*>(args.partials) + column * shares * block_quads + number * kQuads;
  int turn = 0, owner = 0, expected = 0;  // in a cluster, blocks own every shares-th turn
  if (met.in_cluster) cluster_wait();
  if (item.is_there) {
#pragma unroll 2
    for (int index = k_split * 32 + lane; index < kQuads; index += apart) {
      const Quad<Shape> quad(args, item, row_at, index, merge_w);
      if (quad.any) {
        const int in_item = index / Shape::kRowQuads;
        const float* from = slabs + number * Shape::kSlab + index * 4 + in_item * (Shape::kSlabPitch - Shape::kRows);
        float4 sum = *reinterpret_cast<const float4*>(from);
#pragma unroll 1
        for (int i = 1; i < k_splits; ++i) {
          from += args.items * Shape::kSlab;
          add(sum, *reinterpret_cast<const float4*>(from));
        }
        if (shares == 1) {
          quad.template put_all<T>(args, sum);
        } else if (met.in_cluster) {
          const float values[4] = {sum.x, sum.y, sum.z, sum.w};
          st_async(shared_address(met.received + (turn * shares + share) * kSummers + threadIdx.x), values,
                   met.barrier, owner);
          expected += owner == share ? shares : 0;
        } else {
          partials[share * block_quads + index] = sum;
        }
      }
      if (++owner == shares) owner = 0, ++turn;
    }
  }
  if (shares == 1) return;
  if (met.in_cluster) {
    mbarrier_arrive_expect_tx(met.barrier, expected * 16);
    mbarrier_wait(met.barrier, 0);
    if (!item.is_there) return;
    const float4* from = met.received + threadIdx.x;
#pragma unroll 1
    for (int index = (share * k_splits + k_split) * 32 + lane; index < kQuads; index += shares * apart) {
      const Quad<Shape> quad(args, item, row_at, index, merge_w);
      if (quad.any) {
        float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 4
        for (int i = 0; i < shares; ++i) add(sum, from[i * kSummers]);
        quad.template put_all<T>(args, sum);
      }
      from += shares * kSummers;
    }
    return;
  }
  __shared__ ReducerRank shared_met;
  named_barrier_sync(1, kSummers);
  if (threadIdx.x == 0) shared_met = rendezvous_meet(met.word, met.begun, shares);
  named_barrier_sync(1, kSummers);
  const ReducerRank rank = shared_met;
  if (rank.blocks == 0) return;
  if (item.is_there) {
#pragma unroll 1
    for (int index = (rank.rank * k_splits + k_split) * 32 + lane; index < kQuads;
         index += rank.blocks * apart) {
      const Quad<Shape> quad(args, item, row_at, index, merge_w);
      if (!quad.any) continue;
      const float4* from = partials + index;
      float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 1
      for (int first = 0; first < shares; first += kAtOnce, from += kAtOnce * block_quads) {
        float4 read[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (first + i < shares) read[i] = __ldcg(from + i * block_quads);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (first + i < shares) add(sum, read[i]);
        }
      }
      quad.template put_all<T>(args, sum);
    }
  }
  if (threadIdx.x == 0) rendezvous_leave(met.word, rank);
}

}  // namespace convgrad
