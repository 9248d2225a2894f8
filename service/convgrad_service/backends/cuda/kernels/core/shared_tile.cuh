// A pipeline stage's operand in shared memory, and the mma fragments that warps load from it.
//
// A tile has kRows rows of kChunks chunks of 16 bytes. K-major operands have a row for each M (N) and
// the reduction along it; MN-major operands a row for each element of the reduction. Chunks are
// swizzled so that the eight of one column in neighbouring rows (what ldmatrix reads), and the
// chunks of one row (what copies write), lie in different banks.
//
// Tiles start at multiples of 128 bytes. What is added to a chunk's number never carries into bits
// that are set, so elsewhere in a row is an address with bits flipped: found once, outside the loop.
#pragma once

#include "ptx/mma.cuh"

namespace convgrad {

template <int kRows_, int kChunks_>
struct SharedTile {
  static constexpr int kRows = kRows_, kChunks = kChunks_;
  static constexpr int kRowBytes = kChunks * 16, kBytes = kRows * kRowBytes;
  // Rows of one 128-byte line of all banks, and the bits of a chunk that are swizzled.
  static constexpr int kLineRows = kChunks >= 8 ? 1 : 8 / kChunks;
  static constexpr int kMask = kChunks >= 8 ? 7 : kChunks - 1;
  // After so many rows the swizzle repeats.
  static constexpr int kPeriod = kLineRows * (kMask + 1);

  __device__ static __forceinline__ u32 at(int row, int chunk) {
    return (row * kChunks + (chunk ^ (row / kLineRows & kMask))) * 16;
  }
};

// Fragments of the k-th mma of a stage (32 bytes of the reduction): 16 rows of A, or 16 columns of B,
// which are two n8 fragments of two registers each.
template <class T, class Tile, bool kMnMajor, bool kOfA>
struct Fragments {
  static constexpr int kDepth = 32 / static_cast<int>(sizeof(T));  // of one mma
  static constexpr int kPer = 16 / static_cast<int>(sizeof(T));    // elements of a chunk

  // Where in a tile this lane finds its part of the first fragment from row (column) `first` on.
  __device__ static __forceinline__ u32 lane_at(int first) {
    const int lane = threadIdx.x & 31;
    // Of the four 8 x 16-byte matrices of a fragment, A's second is further along M, B's further
    // along the reduction.
    const int second = lane / 8 & 1, third = lane / 16;
    const int beyond = kOfA ? second : third, deeper = kOfA ? third : second;
    if constexpr (!kMnMajor) {
      static_assert(Tile::kChunks == 8);
      return Tile::at(first + beyond * 8 + lane % 8, deeper);
    } else if constexpr (sizeof(T) == 2) {
      return Tile::at(deeper * 8 + lane % 8, first / kPer + beyond);
    } else {
      const int column = first + lane / 4;
      return Tile::at(lane % 4, column / kPer) + column % kPer * 4;
    }
  }
  // The `index`-th fragment; `from` is lane_at within a stage.
  __device__ static __forceinline__ void load(u32 (&to)[4], u32 from, int index, int k) {
    if constexpr (!kMnMajor) {
      load_matrices(to, (from ^ k * 32) + index * 16 * Tile::kRowBytes);
    } else if constexpr (sizeof(T) == 2) {
      load_matrices_transposed(to, (from ^ (index & 3) * 32) + index / 4 * 128 +
                                       k * kDepth * Tile::kRowBytes);
    } else {
      // ldmatrix does not transpose 32-bit elements. Four rows on, other chunks are swizzled.
      constexpr int kFourRows = 4 / Tile::kLineRows & Tile::kMask;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int beyond = kOfA ? i & 1 : i / 2, deeper = kOfA ? i / 2 : i & 1;
        const int chunks = index * 4 + beyond * 2;
        to[i] = load_word((from ^ ((chunks & 7) ^ deeper * kFourRows) * 16) + chunks / 8 * 128 +
                          (k * kDepth + deeper * 4) * Tile::kRowBytes);
      }
    }
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int i = 0; i < 4; ++i) to[i] = to_tf32(to[i]);
    }
  }
};

}  // namespace convgrad
