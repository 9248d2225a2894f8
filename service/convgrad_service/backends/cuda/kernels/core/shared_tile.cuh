// One operand of a pipeline stage in shared memory, and the mma fragments that warps load from it.
//
// A tile has kRows rows of kChunks 16-byte chunks. The rows of a K-major operand are M (N), those of an
// MN-major operand K. Chunks are swizzled so that eight of one column in consecutive rows (read by
// ldmatrix) and the chunks of one row (written by copies) are in different banks.
//
// Tiles start at multiples of 128 bytes. Adding to a chunk index never carries into set bits, so other
// positions in a row differ from the lane's base address, computed outside the loop, by an XOR.
#pragma once

#include "ptx/mma.cuh"

namespace convgrad {

template <int kRows_, int kChunks_>
struct SharedTile {
  static constexpr int kRows = kRows_, kChunks = kChunks_;
  static constexpr int kRowBytes = kChunks * 16, kBytes = kRows * kRowBytes;
  // Rows that share one 128-byte line of banks, and the bits of a chunk index that are swizzled.
  static constexpr int kLineRows = kChunks >= 8 ? 1 : 8 / kChunks;
  static constexpr int kMask = kChunks >= 8 ? 7 : kChunks - 1;
  // The swizzle repeats after this many rows.
  static constexpr int kPeriod = kLineRows * (kMask + 1);

  __device__ static __forceinline__ u32 offset(int row, int chunk) {
    return (row * kChunks + (chunk ^ (row / kLineRows & kMask))) * 16;
  }
};

// Fragments of the k-th mma of a stage (32 bytes along K): 16 rows of A, or 16 columns of B as two n8
// fragments of two registers each. With kRounds, float32 is rounded to TF32.
template <class T, class Tile, bool kMnMajor, bool kIsA, bool kRounds>
struct Fragments {
  static constexpr int kMmaK = 32 / static_cast<int>(sizeof(T));  // of one mma
  static constexpr int kPer = 16 / static_cast<int>(sizeof(T));    // elements of a chunk

  // This lane's offset in a tile for the fragment that starts at row (column) `first`.
  __device__ static __forceinline__ u32 lane_offset(int first) {
    const int lane = threadIdx.x & 31;
    // The second of a fragment's four 8 x 16-byte matrices follows along M for A, along K for B.
    const int second = lane / 8 & 1, third = lane / 16;
    const int along_mn = kIsA ? second : third, along_k = kIsA ? third : second;
    if constexpr (!kMnMajor) {
      static_assert(Tile::kChunks == 8);
      return Tile::offset(first + along_mn * 8 + lane % 8, along_k);
    } else if constexpr (sizeof(T) == 2) {
      return Tile::offset(along_k * 8 + lane % 8, first / kPer + along_mn);
    } else {
      const int column = first + lane / 4;
      return Tile::offset(lane % 4, column / kPer) + column % kPer * 4;
    }
  }
  // Loads fragment `index`; `from` is lane_offset within a stage.
  __device__ static __forceinline__ void load(u32 (&to)[4], u32 from, int index, int k) {
    if constexpr (!kMnMajor) {
      ldmatrix(to, (from ^ k * 32) + index * 16 * Tile::kRowBytes);
    } else if constexpr (sizeof(T) == 2) {
      ldmatrix_trans(to, (from ^ (index & 3) * 32) + index / 4 * 128 +
                                       k * kMmaK * Tile::kRowBytes);
    } else {
      // ldmatrix cannot transpose 32-bit elements. The swizzle differs four rows further.
      constexpr int kFourRows = 4 / Tile::kLineRows & Tile::kMask;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int along_mn = kIsA ? i & 1 : i / 2, along_k = kIsA ? i / 2 : i & 1;
        const int chunks = index * 4 + along_mn * 2;
        to[i] = ld_shared_u32((from ^ ((chunks & 7) ^ along_k * kFourRows) * 16) + chunks / 8 * 128 +
                          (k * kMmaK + along_k * 4) * Tile::kRowBytes);
      }
    }
    if constexpr (sizeof(T) == 4 && kRounds) {
#pragma unroll
      for (int i = 0; i < 4; ++i) to[i] = to_tf32(to[i]);
    }
  }
};

}  // namespace convgrad
