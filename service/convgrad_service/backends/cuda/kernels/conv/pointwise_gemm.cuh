// What pointwise_gemm.cu is made of: its argument, its places in shared memory, its loads.
#pragma once

#include "hopper.cuh"
#include "overlap.cuh"
#include "warpgroup.cuh"

namespace convgrad {

// result = a * b: `rows` x `columns`, from a reduction of `steps` times DEPTH.
struct PointwiseGemmArgs {
  TensorMap a_map, b_map;  // boxes of a stage, see PointwiseGemm::Side
  TensorMap d_map;         // of the result: boxes of 16 rows (REDUCE 0)
  void* result;            // REDUCE 1, and all that follows up to `row_tiles`
  const void* accumulate;
  const void* bias;
  float* partials;
  u32* counters;
  i64 row_stride, column_stride;  // of the result, in elements
  float alpha, beta;
  int rows, columns, plain, result_in_vectors, wide_result, activation;
  int cluster, parts;  // blocks of a cluster, and clusters, among which a tile's reduction is split
  int steps_each;      // of one of these blocks
  int owned;           // see SplitKReduce
  int row_tiles, steps;
};

// One of the two operands of a step, in shared memory as boxes side by side of rows of kBytes, swizzled
// by as many: along the reduction, a row of the operand a row (K major); or else a step of the
// reduction a row, and as many boxes as hold `kExtent` of the operand's rows (MN major).
template <class T, bool kMn, int kBytes_, int kExtent, int kDepth, bool kWhole>
struct GemmSide {
  static constexpr int kRowBytes = kBytes_, kWide = kBytes_ / static_cast<int>(sizeof(T));
  static constexpr int kBoxes = kMn ? (kExtent + kWide - 1) / kWide : 1;
  static constexpr u32 kBoxBytes = (kMn ? kDepth : kExtent) * kBytes_;
  static constexpr u32 kBytes = kBoxes * kBoxBytes;
  static constexpr Major kMajor = kMn ? kAlongMn : kAlongK;
  static_assert(kMn || kWide == kDepth, "a step is a row");
  static_assert(kBytes % (8 * kBytes_) == 0, "swizzled patterns repeat");

  // One thread: `step` of the reduction, of the operand's rows from `first` on. Where whole boxes make
  // up all of the operand's rows, one copy brings all of a tile's.
  __device__ __forceinline__ static void load(u32 to, const TensorMap& map, u32 barrier, int first,
                                              int step) {
    if constexpr (!kMn) {
      load_tile<2>(to, map, barrier, {step * kDepth, first});
    } else if constexpr (kWhole) {
      load_tile<3>(to, map, barrier, {0, step * kDepth, first / kWide});
    } else {
#pragma unroll
      for (int i = 0; i < kBoxes; ++i) {
        load_tile<3>(to + i * kBoxBytes, map, barrier, {first + i * kWide, step * kDepth, 0});
      }
    }
  }
  // The operand of product `i` of a step, from row `first` of the tile on, a multiple of 64 for MN
  // major. Rows that no box holds repeat others: nobody wants their results.
  __device__ __forceinline__ static u64 operand(u32 stage, int first, int i) {
    if constexpr (kMn) {
      constexpr u32 kNext = kBoxes > 1 ? kBoxBytes : 0;
      return advance(operand_along_mn<kBytes_>(stage + first / kWide * kBoxBytes, kNext),
                     i * 16 * kBytes_);
    } else {
      return advance(operand_along_k<kBytes_>(stage + first * kBytes_), i * 32);
    }
  }
};

// A ring's place and the parity of its phase.
template <int kStages>
struct RingPlace {
  int at = 0;
  u32 parity;

  __device__ __forceinline__ explicit RingPlace(u32 parity) : parity(parity) {}
  __device__ __forceinline__ void step() {
    if (++at == kStages) at = 0, parity ^= 1;
  }
};

}  // namespace convgrad
