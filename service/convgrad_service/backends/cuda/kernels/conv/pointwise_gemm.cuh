// What pointwise_gemm.cu is made of: its argument, its places in shared memory, its loads.
#pragma once

#include "ptx/tma.cuh"
#include "ptx/pdl.cuh"
#include "ptx/warpgroup.cuh"

namespace convgrad {

// result = a * b: `rows` x `columns`, from a reduction of `depth`, in `steps` of DEPTH. Ordered so that what
// is read last lies in lines of the constant cache that are read first.
struct PointwiseGemmArgs {
  TensorMap a_map, b_map;  // boxes of a stage, see GemmSide
  TensorMap d_map;         // of the result: boxes of 16 rows (REDUCE 0)
  void* result;            // REDUCE 1, as accumulate, bias and strides
  const void* accumulate;
  const void* bias;
  i64 row_stride, column_stride;  // of the result, in elements
  int rows, columns, plain, result_in_vectors;
  int row_tiles, steps, stages;
  float* partials;
  u32* counters;
  const void* b;  // RESIDENT, as pitch
  i64 b_pitch;    // from a step of the reduction (MN major) or a column to the next, in elements
  float alpha, beta;
  int wide_result, activation;
  int cluster, parts;  // blocks of a cluster, and clusters, among which a tile's reduction is split
  int steps_each;      // of one of these blocks
  int owned;           // see SplitKReduce
  int depth;
  int a_whole, b_whole;  // see GemmSide
};

// One of the two operands of a step, in shared memory as boxes of rows of kRowBytes, swizzled by as many.
// K major: rows lie along the reduction, a row of the operand each, and as many boxes make up kDepth. MN
// major: a row is a step of the reduction, and as many boxes hold the tile's `kExtent` rows.
template <class T, bool kMn, int kRowBytes, int kExtent, int kDepth>
struct GemmSide {
  static constexpr int kWide = kRowBytes / static_cast<int>(sizeof(T));
  static constexpr int kBoxes = kMn ? (kExtent + kWide - 1) / kWide : kDepth / kWide;
  static constexpr u32 kBoxBytes = (kMn ? kDepth : kExtent) * kRowBytes;
  static constexpr u32 kBytes = kBoxes * kBoxBytes;
  static constexpr Major kMajor = kMn ? kMajorMn : kMajorK;
  static_assert(kMn || kDepth % kWide == 0, "whole rows");
  static_assert(kBoxBytes % (8 * kRowBytes) == 0, "swizzled patterns repeat");

  // One thread: `step` of the reduction, of the operand's rows from `first` on. One copy brings all
  // boxes where these make up all of the operand's rows (`whole`).
  __device__ __forceinline__ static void load(u32 to, const TensorMap& map, u32 barrier, int first,
                                              int step, int whole) {
    if constexpr (!kMn) {
#pragma unroll
      for (int i = 0; i < kBoxes; ++i) {
        tma_load<2>(to + i * kBoxBytes, map, barrier, {step * kDepth + i * kWide, first});
      }
    } else if (whole) {
      tma_load<3>(to, map, barrier, {0, step * kDepth, first / kWide});
    } else {
#pragma unroll 1
      for (int i = 0; i < kBoxes; ++i) {
        tma_load<3>(to + i * kBoxBytes, map, barrier, {first + i * kWide, step * kDepth, 0});
      }
    }
  }
  // The operand of product `i` of a step, from row `first` of the tile on, a multiple of 64 for MN
  // major.
  __device__ __forceinline__ static u64 operand(u32 stage, int first, int i) {
    if constexpr (kMn) {
      return advance_descriptor(
          mn_major_descriptor<kRowBytes>(stage + first / kWide * kBoxBytes, kBoxBytes), i * 16 * kRowBytes);
    } else {
      constexpr int kOf = kRowBytes / 32;  // a row's products
      return advance_descriptor(k_major_descriptor<kRowBytes>(stage + first * kRowBytes),
                     i / kOf * kBoxBytes + i % kOf * 32);
    }
  }
  // So many threads: all steps from the first on, of the rows from `first` on, without the copy engine,
  // which takes two clocks for each row of a box, however short. Zeros beyond `rows` and `depth`.
  __device__ __forceinline__ static void load_all(u32 to, const T* from, i64 pitch, int first, int rows,
                                                  int depth, int steps, int thread, int threads) {
    constexpr int kChunk = 16 / sizeof(T), kAcross = kMn ? kBoxes * kWide / kChunk : kDepth / kChunk;
    constexpr int kDown = kMn ? kDepth : kExtent;
    for (int i = thread; i < steps * kDown * kAcross; i += threads) {
      const int chunk = i % kAcross, row = i / kAcross % kDown, step = i / (kAcross * kDown);
      const int k = step * kDepth + (kMn ? row : chunk * kChunk);
      const int mn = first + (kMn ? chunk * kChunk : row);
      const int left = kMn ? rows - mn : depth - k;
      const bool there = k < depth && mn < rows;
      const T* const at = there ? from + (kMn ? k * pitch + mn : mn * pitch + k) : from;
      const int box = chunk * kChunk / kWide, in = chunk % (kWide / kChunk);
      const u32 start = to + step * kBytes + box * kBoxBytes + row * kRowBytes;
      const u32 swapped = in ^ (start >> 7 & (kRowBytes / 16 - 1));
      cp_async<16>(start + swapped * 16, at, there ? min(left * static_cast<int>(sizeof(T)), 16) : 0);
    }
  }
};

// A place in a ring of `stages`, and the parity of its phase.
struct RingPlace {
  u32 parity;
  int at = 0;

  __device__ __forceinline__ explicit RingPlace(u32 parity) : parity(parity) {}
  __device__ __forceinline__ void step(int stages) {
    if (++at == stages) at = 0, parity ^= 1;
  }
};

}  // namespace convgrad
