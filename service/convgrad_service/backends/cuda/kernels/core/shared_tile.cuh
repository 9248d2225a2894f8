// A pipeline stage's operand in shared memory, and the mma fragments that warps load from it.
//
// A tile has kRows rows of kChunks chunks of 16 bytes. K-major operands have a row for each M (N) and
// the reduction along it; MN-major operands a row for each element of the reduction. Chunks are
// swizzled so that the eight of one column in neighbouring rows (what ldmatrix reads), and the
// chunks of one row (what copies write), lie in different banks.
#pragma once

#include "tensor_core.cuh"

namespace convgrad {

template <int kRows_, int kChunks_>
struct SharedTile {
  static constexpr int kRows = kRows_, kChunks = kChunks_, kBytes = kRows * kChunks * 16;
  // Rows of one 128-byte line of all banks, and the bits of a chunk that are swizzled.
  static constexpr int kLineRows = kChunks >= 8 ? 1 : 8 / kChunks;
  static constexpr int kMask = kChunks >= 8 ? 7 : kChunks - 1;
  // After so many rows the swizzle repeats.
  static constexpr int kPeriod = kLineRows * (kMask + 1);

  __device__ static __forceinline__ u32 at(int row, int chunk) {
    return (row * kChunks + (chunk ^ (row / kLineRows & kMask))) * 16;
  }
};

// Fragments of the k-th mma of a stage (32 bytes of the reduction) for 16 rows of A from `first` on,
// and for 16 columns of B: two n8 fragments, each of two registers.
template <class T, class Tile, bool kMnMajor>
struct Fragments {
  static constexpr int kDepth = 32 / static_cast<int>(sizeof(T));  // of one mma
  static constexpr int kPer = 16 / static_cast<int>(sizeof(T));    // elements of a chunk

  __device__ static __forceinline__ void load_a(u32 (&a)[4], u32 tile, int first, int k) {
    const int lane = threadIdx.x & 31;
    if constexpr (!kMnMajor) {
      // Whole lines of eight chunks: k moves along them by an exclusive or.
      static_assert(Tile::kChunks == 8);
      load_matrices(a, tile + (Tile::at(first + (lane & 15), lane / 16) ^ k * 32));
    } else if constexpr (sizeof(T) == 2) {
      const u32 at = Tile::at(lane / 16 * 8 + lane % 8, first / 8 + (lane / 8 & 1));
      load_matrices_transposed(a, tile + at + k * kDepth * Tile::kChunks * 16);
    } else {
      load_turned(a, tile, first + lane / 4, k, [](int i) { return i / 2 * 4; },
                  [](int i) { return (i & 1) * 8; });
    }
    round(a);
  }
  __device__ static __forceinline__ void load_b(u32 (&b)[4], u32 tile, int first, int k) {
    const int lane = threadIdx.x & 31;
    if constexpr (!kMnMajor) {
      static_assert(Tile::kChunks == 8);
      const u32 at = Tile::at(first + lane / 16 * 8 + lane % 8, lane / 8 & 1);
      load_matrices(b, tile + (at ^ k * 32));
    } else if constexpr (sizeof(T) == 2) {
      const u32 at = Tile::at(lane & 15, first / 8 + lane / 16);
      load_matrices_transposed(b, tile + at + k * kDepth * Tile::kChunks * 16);
    } else {
      load_turned(b, tile, first + lane / 4, k, [](int i) { return (i & 1) * 4; },
                  [](int i) { return i / 2 * 8; });
    }
    round(b);
  }

 private:
  // ldmatrix cannot transpose 32-bit elements: a word each, at depth lane % 4 + depth(i) and column
  // `column` + beside(i).
  template <class Depth, class Beside>
  __device__ static __forceinline__ void load_turned(u32 (&to)[4], u32 tile, int column, int k,
                                                     Depth depth, Beside beside) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = k * kDepth + (threadIdx.x & 3) + depth(i), at = column + beside(i);
      to[i] = load_word(tile + Tile::at(row, at / kPer) + at % kPer * 4);
    }
  }
  __device__ static __forceinline__ void round(u32 (&words)[4]) {
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = to_tf32(words[i]);
    }
  }
};

}  // namespace convgrad
