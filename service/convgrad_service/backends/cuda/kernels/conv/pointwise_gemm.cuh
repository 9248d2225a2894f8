// Kernel parameters of pointwise_gemm.cu and its operands' shared-memory layout and loads.
#pragma once

#include "ptx/tma.cuh"
#include "ptx/pdl.cuh"
#include "ptx/warpgroup.cuh"

namespace convgrad {

// result = a * b: M = `rows`, N = `columns`, K = `depth`, in `k_tiles` of DEPTH. Fields are ordered so that
// those read last share constant-cache lines with those read first.
struct PointwiseGemmArgs {
  TensorMap a_map, b_map;  // boxes of a stage, see GemmOperand
  TensorMap d_map;         // the result: boxes of 16 rows (REDUCE 0)
  void* result;            // REDUCE 1 only, like accumulate, bias and the strides
  const void* accumulate;
  const void* bias;
  i64 row_stride, column_stride;  // of the result, in elements
  int rows, columns, plain, result_in_vectors;
  int row_tiles, steps, stages;
  float* partials;
  u32* counters;
  const void* b;  // RESIDENT only, like b_pitch
  i64 b_pitch;    // between elements of K (MN-major) or columns (K-major), in elements
  float alpha, beta;
  int wide_result, activation;
  int cluster, parts;  // a tile's K is split among `cluster` blocks of each of `parts` clusters; or MULTICAST's blocks
  int steps_each;      // k-tiles of one of these blocks
  int owned;           // see SplitKReduce
  int slices;          // see reduce_in_grid (REDUCE 2 only)
  int depth;
  int a_whole, b_whole;  // see GemmOperand
  int image_tiles;       // row tiles of an image (PLANES), or its k-tiles (IMAGES)
  // SHIFTED, and TF32 of planes (pixels, image_stride): pixels of an image, channels that start together
  // (ShiftedPlanes), strides of channels and of the result's images in elements, and the result's pixels that are
  // stored at once.
  int pixels, together, a_channel, b_channel, stored_pixels;
  i64 image_stride;
  // UNALIGNED only, with `a_channel` and `b_channel` as the operands' pitches, `pixels` as the result's columns or those
  // of an image, and `stored_pixels` as those that are stored at once, or 0 where its rows are stored as one run.
  const void* a;
  i64 a_image, b_image;  // strides between images
};

// One operand of a k-tile, in shared memory as boxes of rows of kRowBytes with a swizzle of that width.
// K-major: a box row is kRowBytes along K of one row of the operand; enough boxes for kDepth. MN-major: a
// box row is one element of K; enough boxes for the tile's kExtent rows. With kImages, K-major, K is the pixels of
// several images.
template <class T, bool kMn, int kRowBytes, int kExtent, int kDepth, bool kImages = false>
struct GemmOperand {
  static constexpr int kRowElements = kRowBytes / static_cast<int>(sizeof(T));
  static constexpr int kBoxes = kMn ? (kExtent + kRowElements - 1) / kRowElements : kDepth / kRowElements;
  static constexpr u32 kBoxBytes = (kMn ? kDepth : kExtent) * kRowBytes;
  static constexpr u32 kBytes = kBoxes * kBoxBytes;
  // Of wgmma, which multiplies TF32 with K contiguous only.
  static constexpr Major kMajor = kMn && sizeof(T) == 2 ? kMajorMn : kMajorK;
  static constexpr int kMmaDepth = 32 / static_cast<int>(sizeof(T));  // of a wgmma
  static_assert(kMn || kDepth % kRowElements == 0, "whole rows");
  static_assert(kBoxBytes % (8 * kRowBytes) == 0, "swizzled patterns repeat");

  // By one thread: loads k-tile `step` of the operand's rows from `first` on, or of `image`; MN-major in a
  // single copy if the boxes cover all of the operand's rows (`whole`). With kMulticast to the blocks `to_blocks`.
  template <bool kMulticast = false>
  __device__ __forceinline__ static void load(u32 to, const TensorMap& map, u32 barrier, int first,
                                              int step, int whole, int image = 0, u32 to_blocks = 0) {
    if constexpr (!kMn) {
#pragma unroll
      for (int i = 0; i < kBoxes; ++i) {
        const int k = step * kDepth + i * kRowElements;
        if constexpr (kImages) {
          box<kMulticast, 3>(to_blocks, to + i * kBoxBytes, map, barrier, {k, first, image});
        } else {
          box<kMulticast, 2>(to_blocks, to + i * kBoxBytes, map, barrier, {k, first});
        }
      }
    } else if (whole) {
      box<kMulticast, 3>(to_blocks, to, map, barrier, {0, step * kDepth, first / kRowElements});
    } else {
#pragma unroll 1
      for (int i = 0; i < kBoxes; ++i) {
        box<kMulticast, 3>(to_blocks, to + i * kBoxBytes, map, barrier,
                           {first + i * kRowElements, step * kDepth, image});
      }
    }
  }
  template <bool kMulticast, int kDims>
  __device__ __forceinline__ static void box(u32 to_blocks, u32 to, const TensorMap& map, u32 barrier,
                                             const int (&at)[kDims]) {
    tma_load_multicast<kDims, kMulticast>(to_blocks, to, map, barrier, at);
  }
  // The descriptor for wgmma `i` of a k-tile, from row `first` of the tile on (MN-major: a multiple of 64).
  __device__ __forceinline__ static u64 descriptor(u32 stage, int first, int i) {
    if constexpr (kMn) {
      return advance_descriptor(
          mn_major_descriptor<kRowBytes>(stage + first / kRowElements * kBoxBytes, kBoxBytes),
          i * 16 * kRowBytes);
    } else {
      constexpr int kMmasPerRow = kRowBytes / 32;  // wgmmas of a row
      return advance_descriptor(k_major_descriptor<kRowBytes>(stage + first * kRowBytes),
                     i / kMmasPerRow * kBoxBytes + i % kMmasPerRow * 32);
    }
  }
  // By `threads` threads: loads all k-tiles of the rows from `first` on by cp.async, because TMA takes two
  // clocks per box row, however short. Zeros beyond `rows` and `depth`.
  __device__ __forceinline__ static void load_resident(u32 to, const T* from, i64 pitch, int first,
                                                       int rows, int depth, int steps, int thread,
                                                       int threads) {
    constexpr int kChunk = 16 / sizeof(T),
                  kChunksPerRow = kMn ? kBoxes * kRowElements / kChunk : kDepth / kChunk;
    constexpr int kRowCount = kMn ? kDepth : kExtent;
    for (int i = thread; i < steps * kRowCount * kChunksPerRow; i += threads) {
      const int chunk = i % kChunksPerRow, row = i / kChunksPerRow % kRowCount,
                step = i / (kChunksPerRow * kRowCount);
      const int k = step * kDepth + (kMn ? row : chunk * kChunk);
      const int mn = first + (kMn ? chunk * kChunk : row);
      const int left = kMn ? rows - mn : depth - k;
      const bool in_bounds = k < depth && mn < rows;
      const T* const source = in_bounds ? from + (kMn ? k * pitch + mn : mn * pitch + k) : from;
      const int box = chunk * kChunk / kRowElements, in = chunk % (kRowElements / kChunk);
      const u32 start = to + step * kBytes + box * kBoxBytes + row * kRowBytes;
      const u32 swizzled = in ^ (start >> 7 & (kRowBytes / 16 - 1));
      cp_async<16>(start + swizzled * 16, source,
                   in_bounds ? min(left * static_cast<int>(sizeof(T)), 16) : 0);
    }
  }
};

// core/pipeline_state.cuh with its members swapped, which decides how this kernel's registers are allocated.
struct PipelineState {
  u32 parity = 0;
  int index = 0;

  __device__ __forceinline__ void advance(int stages) {
    if (++index == stages) index = 0, parity ^= 1;
  }
  // Past `steps` k-tiles of which another warpgroup computes the tile.
  __device__ __forceinline__ void skip(int steps, int stages) {
    index += steps;
    parity ^= index / stages & 1, index %= stages;
  }
};

}  // namespace convgrad
