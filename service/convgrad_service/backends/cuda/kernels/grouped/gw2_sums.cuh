// Summing the accumulators of grouped_weight.cu: over the warps of an item in shared memory, then over
// the blocks that share a slice, which meet at a word (core/rendezvous.cuh); and storing results.
#pragma once

#include "core/rendezvous.cuh"
#include "core/vectors.cuh"
#include "grouped/gw2.cuh"

namespace convgrad {

// An item's sums in shared memory and in `partials`: [column][row], with rows of quads.
constexpr int kRows = MT * 16, kColumns = NF * 8;
constexpr int kQuads = kRows / 4 * kColumns;  // of an item
// Odd multiples of four words put the columns 2t of a fragment in different banks.
constexpr int kSlabPitch = kRows + 4, kSlab = kColumns * kSlabPitch;

// What a block computes: its merges, from group `first_group` on, and its taps, from `first_tap` on.
struct Part {
  int first_group, merges, first_tap, rows;
};

// One quad: four consecutive rows (taps x channels of a merge) of a column.
struct Quad {
  int item, column, row;

  __device__ __forceinline__ explicit Quad(int index) {
    item = index / kQuads;
    const int within = index - item * kQuads;
    column = within / (kRows / 4);
    row = (within - column * (kRows / 4)) * 4;
  }
};

template <class T>
__device__ __forceinline__ void put(const GroupedWeightArgs& args, i64 at, float sum) {
  const T* const old = args.accumulate == nullptr ? nullptr : static_cast<const T*>(args.accumulate) + at;
  const T* const no_bias = nullptr;
  static_cast<T*>(args.w)[at] = narrow<T>(finish<T, float>(sum, args.alpha, args.beta, old, no_bias, kNone));
}

template <class T>
__device__ __forceinline__ void put_quad(const GroupedWeightArgs& args, i64 at, const float4& sum) {
  if constexpr (sizeof(T) == 4) {
    *reinterpret_cast<float4*>(static_cast<T*>(args.w) + at) =
        make_float4(sum.x * args.alpha, sum.y * args.alpha, sum.z * args.alpha, sum.w * args.alpha);
  } else {
    *reinterpret_cast<uint2*>(static_cast<T*>(args.w) + at) =
        make_uint2(narrow_x2<T>(sum.x * args.alpha, sum.y * args.alpha),
                   narrow_x2<T>(sum.z * args.alpha, sum.w * args.alpha));
  }
}

// A row and column of a merge as a result. Channels of different groups have none.
struct Element {
  bool is_result;
  i64 at;

  __device__ __forceinline__ Element(const GroupedWeightArgs& args, const Part& part, int merge, int row,
                                     int column) {
    const int x_merge = args.merged * args.in_channels;
    const int tap = quick_divide(row, x_merge), channel = row - tap * x_merge;
    const int own = quick_divide(channel, args.in_channels), out = quick_divide(column, args.out_channels);
    const int group = part.first_group + merge * args.merged + own;
    is_result = row < part.rows && own == out && merge < part.merges && own < args.merged &&
                group < args.groups;
    const int all = part.first_tap + tap, above = quick_divide(all, args.kernel[2]);
    const int t = quick_divide(above, args.kernel[1]);
    at = group * args.w_stride[0] + (column - out * args.out_channels) * args.w_stride[1] +
         (channel - own * args.in_channels) * args.w_stride[2] + t * args.w_stride[3] +
         (above - t * args.kernel[1]) * args.w_stride[4] + (all - above * args.kernel[2]) * args.w_stride[5];
  }
};

// Whether any of a quad's sums is a result.
__device__ __forceinline__ bool is_needed(const GroupedWeightArgs& args, const Part& part, const Quad& quad,
                                          int first_item, int& merge, int& row, int& column) {
  u32 number = first_item + quad.item;
  column = digit(number, args.column_blocks) * kColumns + quad.column;
  row = digit(number, args.row_blocks) * kRows + quad.row;
  merge = number;
  if (merge >= part.merges || row >= part.rows || column >= args.merged * args.out_channels) return false;
  if (args.in_channels % 4 != 0) return true;
  return Element(args, part, merge, row, column).is_result;
}

template <class T>
__device__ __forceinline__ void finish_quad(const GroupedWeightArgs& args, const Part& part, int merge,
                                            int row, int column, const float4& sum) {
  const Element first(args, part, merge, row, column);
  if (args.quads && args.accumulate == nullptr) {
    if (args.wide) {
      put_quad<float>(args, first.at, sum);
    } else {
      put_quad<T>(args, first.at, sum);
    }
    return;
  }
  const float sums[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    const Element one(args, part, merge, row + i, column);
    if (!one.is_result) continue;
    const float each = i == 0 ? sums[0] : i == 1 ? sums[1] : i == 2 ? sums[2] : sums[3];
    if (args.wide) {
      put<float>(args, one.at, each);
    } else {
      put<T>(args, one.at, each);
    }
  }
}

__device__ __forceinline__ void add(float4& to, const float4& more) {
  to.x += more.x, to.y += more.y, to.z += more.z, to.w += more.w;
}

// Block: sums and stores. `slabs` is shared memory that is free, a slab for each warp; the warp at
// k_split * args.items + item has left its sums there, and the block has synchronised.
template <class T>
__device__ __forceinline__ void sum_items(const GroupedWeightArgs& args, const Part& part, int first_item,
                                          int k_splits, const float* slabs, int shares, int share,
                                          u32* word, u32 begun) {
  constexpr int kThreads = WARPS * 32, kAtOnce = 8;
  const int quads = args.items * kQuads, thread = threadIdx.x;
  const i64 column = static_cast<i64>(blockIdx.y) * gridDim.x + blockIdx.x;
  float4* const partials = reinterpret_cast<float4*>(args.partials) + column * shares * quads;
#pragma unroll 1
  for (int index = thread; index < quads; index += kThreads) {
    const Quad quad(index);
    int merge, row, col;
    if (!is_needed(args, part, quad, first_item, merge, row, col)) continue;
    const float* from = slabs + quad.item * kSlab + quad.column * kSlabPitch + quad.row;
    float4 sum = *reinterpret_cast<const float4*>(from);
#pragma unroll 1
    for (int i = 1; i < k_splits; ++i) {
      from += args.items * kSlab;
      add(sum, *reinterpret_cast<const float4*>(from));
    }
    if (shares == 1) {
      finish_quad<T>(args, part, merge, row, col, sum);
    } else {
      partials[share * quads + index] = sum;
    }
  }
  if (shares == 1) return;
  __shared__ ReducerRank shared_met;
  __syncthreads();
  if (thread == 0) shared_met = rendezvous_meet(word, begun, shares);
  __syncthreads();
  const ReducerRank met = shared_met;
  if (met.blocks == 0) return;
#pragma unroll 1
  for (int index = met.rank * kThreads + thread; index < quads; index += met.blocks * kThreads) {
    const Quad quad(index);
    int merge, row, col;
    if (!is_needed(args, part, quad, first_item, merge, row, col)) continue;
    const float4* from = partials + index;
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 1
    for (int first = 0; first < shares; first += kAtOnce, from += kAtOnce * quads) {
      float4 read[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i < shares) read[i] = __ldcg(from + i * quads);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i < shares) add(sum, read[i]);
      }
    }
    finish_quad<T>(args, part, merge, row, col, sum);
  }
  if (thread == 0) rendezvous_leave(word, met);
}

}  // namespace convgrad
