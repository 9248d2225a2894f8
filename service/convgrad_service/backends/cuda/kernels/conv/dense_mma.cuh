// The mainloop of the dense tensor-core kernels: tiles in shared memory, fragments, mma.
//
// A tile of an operand in shared memory has rows of 16-byte chunks, in one of two orders:
//   K-major ("along"): rows along M (or N), chunks along K;
//   MN-major ("across"): rows along K, chunks along M (or N).
// Chunks of a row are swizzled so that neither copies nor fragment loads have bank conflicts.
// A warp tile is WM x WN; a step is the depth of one mma: 16 for 16-bit elements, 8 for TF32.
// Needs sm_80.
#pragma once

#include "core/epilogue.cuh"
#include "core/fragments.cuh"
#include "core/operand_scaling.cuh"
#include "core/split_tf32.cuh"

namespace convgrad {

// The swizzled position of a chunk in its row. One chunk of eight consecutive rows, as ldmatrix
// reads it, is in eight different 16-byte banks; so are the four rows x two chunks that a
// transposing load of 32-bit elements reads.
template <int kRowBytes, bool kWordsAcross>
__device__ __forceinline__ int permuted(int row, int chunk) {
  if (kRowBytes == 64) return chunk ^ (row >> 1 & 3);
  if (kWordsAcross) return chunk ^ (row & 3) * 2;
  return chunk ^ (row & 7);
}

// An operand tile in shared memory.
template <class T, int kRows_, int kColumns_, bool kAcross_>
struct Tile {
  static constexpr bool kAcross = kAcross_;
  static constexpr int kRows = kRows_;
  static constexpr int kExtent = kAcross_ ? kColumns_ : kRows_;  // along M or N
  static constexpr int kRowBytes = kColumns_ * static_cast<int>(sizeof(T));
  static constexpr int kChunks = kRowBytes / 16;
  static constexpr int kBytes = kRows * kRowBytes;
  static_assert(kRowBytes == 64 || kRowBytes % 128 == 0, "whole lines of banks");

  __device__ static __forceinline__ u32 at(int row, int chunk) {
    return row * kRowBytes + permuted<kRowBytes, (kAcross && sizeof(T) == 4)>(row, chunk) * 16;
  }
};

// This lane's offset in a tile of the fragment at row (or column) `first` of M or N and mma step 0.
// Tiles are 128-byte aligned, and steps and fragments never carry in the chunk index, so other
// offsets differ by an XOR plus whole rows. The second of a fragment's four 8 x 16-byte matrices
// follows along M for A, along K for B.
template <class T, class Tile, bool kRowsFirst>
__device__ __forceinline__ u32 lane_offset(int first) {
  const int lane = threadIdx.x & 31;
  const int low = (lane & 7) + (kRowsFirst ? lane >> 3 & 1 : lane >> 4) * 8;
  const int depth = kRowsFirst ? lane >> 4 : lane >> 3 & 1;
  if constexpr (!Tile::kAcross) {
    return Tile::at(first + low, depth);
  } else if constexpr (sizeof(T) == 2) {
    const int row = (lane & 7) + depth * 8;
    return Tile::at(row, first / 8 + (kRowsFirst ? lane >> 3 & 1 : lane >> 4));
  } else {
    const int column = first + (lane >> 2);
    return Tile::at(lane & 3, column / 4) + (column & 3) * 4;
  }
}

// Loads the fragments of one mma step for the `index`-th 16 rows (or columns) after `from`. float32
// is rounded to TF32 unless it is split.
template <class T, class Tile, bool kRowsFirst, bool kSplit>
__device__ __forceinline__ void load_fragment(u32 (&to)[4], u32 from, int index, int step) {
  if constexpr (!Tile::kAcross) {
    ldmatrix(to, (from ^ step * 32) + index * 16 * Tile::kRowBytes);
  } else if constexpr (sizeof(T) == 2) {
    const u32 column = Tile::kRowBytes == 64 ? from ^ index * 32
                                             : (from ^ (index & 3) * 32) + index / 4 * 128;
    ldmatrix_trans(to, column + step * 16 * Tile::kRowBytes);
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      // The second register is 8 rows of M later in A, and 4 elements of K later in B.
      const int beyond = kRowsFirst ? j & 1 : j >> 1, deeper = kRowsFirst ? j >> 1 : j & 1;
      const int chunks = index * 4 + beyond * 2;
      to[j] = ld_shared_u32((from ^ (chunks & 7) * 16) + chunks / 8 * 128 +
                        (step * 8 + deeper * 4) * Tile::kRowBytes);
    }
  }
  if constexpr (sizeof(T) == 4 && !kSplit) {
#pragma unroll
    for (int j = 0; j < 4; ++j) to[j] = to_tf32(to[j]);
  }
}

template <class T, class Tile, bool kSplit, int kCount>
__device__ __forceinline__ void load_a(u32 (&to)[kCount][4], u32 from, int step) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) load_fragment<T, Tile, true, kSplit>(to[i], from, i, step);
}

// The mainloop of a block over `tiles` k-tiles, with a pipeline of kStages in shared memory. Copies
// of a k-tile are issued between mma instructions, so that tensor cores do not wait for addresses:
//   prepare(tile)   once per k-tile, in order, and for kStages - 1 more past the last;
//   fetch(i)        loads what copy i needs from shared memory, some mma instructions before it;
//   copy(i, stage)  issues copy i of kCopies, which reads nothing if the k-tile is past the last.
// All threads call them together. With kSplit, float32 operands are split, else rounded to TF32. To
// split, own(i) gives the destination of copy i in a stage, and each thread inspects its own copies
// of the next k-tile during the mma instructions of this one.
template <class T, class TileA, class TileB, bool kSplit, int kSteps, int kStages, int kCopies, int kGroups,
          int kRowFragments, int kColumnPairs, class Prepare, class Fetch, class Copy, class Own>
__device__ __forceinline__ void multiply(float (&sum)[kRowFragments][kColumnPairs * 2][4],
                                         u32 ring, int tiles, int warp_row, int warp_column,
                                         Prepare&& prepare, Fetch&& fetch, Copy&& copy, Own&& own,
                                         ScalingFlags* flags) {
  constexpr int kStageBytes = TileA::kBytes + TileB::kBytes;
  constexpr int kACopies = kCopies * TileA::kBytes / kStageBytes;
  OperandScaling<kACopies, kCopies - kACopies> scaling;
  if constexpr (kSplit) scaling.init(flags);
#pragma unroll 1
  for (int stage = 0; stage < kStages - 1; ++stage) {
    prepare(stage);
#pragma unroll
    for (int i = 0; i < kCopies; ++i) fetch(i);
#pragma unroll
    for (int i = 0; i < kCopies; ++i) copy(i, ring + stage * kStageBytes);
    cp_async_commit();
  }
  cp_async_wait<kStages - 2>();
  if constexpr (kSplit) {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) scaling.inspect(i, ring + own(i));
    scaling.apply(flags, ring, own);
  }
  __syncthreads();
  if constexpr (kSplit) scaling.update(flags, ring, own);

  // Fragments are double-buffered: A by mma step; B, to save registers, by 16 columns.
  u32 a[2][kRowFragments][4], b[2][4];
  const u32 a_lane = lane_offset<T, TileA, true>(warp_row);
  const u32 b_lane = TileA::kBytes + lane_offset<T, TileB, false>(warp_column);
  u32 read = ring, write = ring + (kStages - 1) * kStageBytes;
  const u32 end = ring + kStages * kStageBytes;
  static_assert(kSteps % 2 == 0, "a tile starts with the first of the two");
  load_a<T, TileA, kSplit>(a[0], read + a_lane, 0);
  load_fragment<T, TileB, false, kSplit>(b[0], read + b_lane, 0, 0);
  // Copies are issued in groups: each group adds a stall, and so do the addresses of a large group.
  constexpr int kTurns = kSteps * kColumnPairs, kApart = kTurns / kGroups;
  constexpr int kGroup = (kCopies + kGroups - 1) / kGroups;
  // The next tile's chunks are inspected in the second half of the steps.
  constexpr int kLookFrom = kTurns / 2, kLookTurns = kTurns - 1 - kLookFrom;
  constexpr int kLooks = (kCopies + kLookTurns - 1) / kLookTurns;
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    prepare(tile + kStages - 1);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) fetch(i);
    float part[kRowFragments][kColumnPairs * 2][4] = {};
    u32 a_high[kRowFragments][4], a_low[kRowFragments][4];
    const float back = scaling.unscale;
    u32 next = read + kStageBytes;
    if (next == end) next = ring;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int pair = 0; pair < kColumnPairs; ++pair) {
        const int turn = step * kColumnPairs + pair;
        const int now = turn & 1;
        const bool last_pair = pair == kColumnPairs - 1;
        const bool last_step = step == kSteps - 1;
        if (turn < kTurns - 1) {
          if (pair == 0 && !last_step) load_a<T, TileA, kSplit>(a[(step + 1) & 1], read + a_lane, step + 1);
          load_fragment<T, TileB, false, kSplit>(b[now ^ 1], read + b_lane, last_pair ? 0 : pair + 1,
                                         step + last_pair);
          if (turn % kApart == 0 && turn / kApart < kGroups) {
            const int first = turn / kApart * kGroup;
#pragma unroll
            for (int i = first; i < first + kGroup; ++i) {
              if (i < kCopies) copy(i, write);
            }
#pragma unroll
            for (int i = first + kGroup; i < first + 2 * kGroup; ++i) {
              if (i < kCopies) fetch(i);
            }
          }
        } else {
          cp_async_commit();
          write += kStageBytes;
          if (write == end) write = ring;
          // The next k-tile has arrived for all threads, and all have finished reading this one.
          cp_async_wait<kStages - 2>();
          if constexpr (kSplit) scaling.apply(flags, next, own);
          __syncthreads();
          read = next;
          if constexpr (kSplit) scaling.update(flags, read, own);
          load_a<T, TileA, kSplit>(a[0], read + a_lane, 0);
          load_fragment<T, TileB, false, kSplit>(b[0], read + b_lane, 0, 0);
        }
        if constexpr (kSplit) {
          // Copies issued during this k-tile are not committed yet, and are not waited for.
          if (turn == kLookFrom) cp_async_wait<kStages - 3>();
#pragma unroll
          for (int i = (turn - kLookFrom) * kLooks; i < (turn - kLookFrom + 1) * kLooks; ++i) {
            if (i >= 0 && i < kCopies) scaling.inspect(i, next + own(i));
          }
          if (pair == 0) {
#pragma unroll
            for (int i = 0; i < kRowFragments; ++i) {
              split(a[step & 1][i], a_high[i], a_low[i]);
            }
          }
          multiply_split(part, pair, a_high, a_low, b[now]);
        } else {
#pragma unroll
          for (int i = 0; i < kRowFragments; ++i) {
            mma<T>(sum[i][pair * 2], a[step & 1][i], b[now][0], b[now][1]);
            mma<T>(sum[i][pair * 2 + 1], a[step & 1][i], b[now][2], b[now][3]);
          }
        }
      }
    }
    if constexpr (kSplit) {
#pragma unroll
      for (int i = 0; i < kRowFragments; ++i) {
#pragma unroll
        for (int j = 0; j < kColumnPairs * 2; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) sum[i][j][e] = fmaf(part[i][j][e], back, sum[i][j][e]);
        }
      }
    }
  }
  cp_async_wait<0>();
  __syncthreads();
}

}  // namespace convgrad
