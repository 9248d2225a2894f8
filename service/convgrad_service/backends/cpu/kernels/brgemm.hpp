// The micro-kernel of the dense engine: a batch-reduce GEMM (BRGEMM) with C in registers.
//
//   C[i][j] (+)= sum over segments b, sum over k < b.k :
//                A[b.a + i * a_row + k * a_step] * B[b.b + k * b_step + j]
//
// M = rows (pixels of a gather, output channels of a weight gradient), N = one or two vectors of
// channels, K = segments x k. A is broadcast, B is loaded as vectors.
//
// K is summed in blocks: a chain of fused multiply-adds starts at zero in each block, and the sums
// of blocks are added to C in order. So the rounding error grows with the root of kBlock + K / kBlock
// instead of K. In a gather, blocks begin at fixed rows of B, so a result depends neither on the
// tiling nor on which taps in padding are skipped.
//
// Registers: rows * vectors accumulators, `vectors` for B and one broadcast: 14 * 2 + 3 of the 32
// of AVX-512, 6 * 2 + 3 of the 16 of AVX2. FMA latency is hidden from 4 * 2 = 8 accumulators on.
#pragma once

#include "elements.hpp"

namespace convgrad {

// One element of the batch: its offsets in A and B, and its length along K.
struct Segment {
  i64 a;
  i64 b;
  i64 k;
};

inline constexpr int kTileRows = kVectorRegisters == 32 ? 14 : 6;
inline constexpr int kTileVectors = 2;
inline constexpr i64 kBlock = 128;  // of K
// Channels of a full register block.
template <class T>
inline constexpr int kTileColumns = kTileVectors * kLanes<T>;

template <class T>
struct Product {
  const T* a;
  i64 a_row;
  i64 a_step;
  const T* b;
  i64 b_step;
  const Segment* segments;
  i64 segment_count;
  T* c;
  i64 c_row;
  bool adds;  // to C, else C is overwritten
  // Rows may be of two lines, half of them each.
  i64 a_line;
  i64 c_line;
};

// Which stride of A is known to be 1: its channels are K in a gather, M in a weight gradient.
enum class Walk { kUnitStep, kUnitRow };

template <class T, int rows, int vectors, Walk walk, int lines>
__attribute__((noinline)) void brgemm_tile(const Product<T>& p) {
  constexpr int lanes = kLanes<T>, of_line = rows / lines;
  const i64 a_row = walk == Walk::kUnitRow ? 1 : p.a_row;
  const i64 a_step = walk == Walk::kUnitStep ? 1 : p.a_step;
  const i64 b_step = walk == Walk::kUnitStep ? kTileColumns<T> : p.b_step;
  const Segment* segment = p.segments;
  const Segment* const end = segment + p.segment_count;
  const T *a = nullptr, *b = nullptr;
  i64 left = 0, at = 0;  // of the segment; index along K
  bool adds = p.adds;
  do {
    Vec<T> sum[rows][vectors];
#pragma clang loop unroll(full)
    for (int i = 0; i < rows; ++i) {
#pragma clang loop unroll(full)
      for (int v = 0; v < vectors; ++v) sum[i][v] = splat<T>(0);
    }
    for (i64 stop = -1; left > 0 || segment < end;) {
      if (left == 0) {
        a = p.a + segment->a;
        b = p.b + segment->b;
        left = segment->k;
        if (walk == Walk::kUnitStep) at = segment->b / kTileColumns<T>;
        ++segment;
      }
      if (stop < 0) stop = (at / kBlock + 1) * kBlock;
      if (at >= stop) break;
      const i64 run = least(left, stop - at);
      left -= run;
      at += run;
      for (i64 k = run; k > 0; --k) {
        Vec<T> column[vectors];
#pragma clang loop unroll(full)
        for (int v = 0; v < vectors; ++v) column[v] = load_raw<Vec<T>>(b + v * lanes);
        const T* row = a;
#pragma clang loop unroll(full)
        for (int i = 0; i < rows; ++i) {
          if (i > 0 && i % of_line == 0) row = a + p.a_line;
          const int next = i % of_line % 3;
          const Vec<T> value = splat<T>(row[next * a_row]);
#pragma clang loop unroll(full)
          for (int v = 0; v < vectors; ++v) sum[i][v] += value * column[v];
          if (next == 2) row += 3 * a_row;
        }
        a += a_step;
        b += b_step;
      }
    }
#pragma clang loop unroll(full)
    for (int i = 0; i < rows; ++i) {
#pragma clang loop unroll(full)
      for (int v = 0; v < vectors; ++v) {
        T* to = p.c + i / of_line * p.c_line + i % of_line * p.c_row + v * lanes;
        store_raw(to, adds ? load_raw<Vec<T>>(to) + sum[i][v] : sum[i][v]);
      }
    }
    adds = true;
  } while (left > 0 || segment < end);
}

// Dispatches to brgemm_tile<rows, vectors> for rows in 1 .. kTileRows and vectors in 1 .. 2. With
// two lines, row_count is even.
template <class T, Walk walk, int lines = 1, int rows = kTileRows>
CONVGRAD_INLINE void brgemm(const Product<T>& product, int row_count, int vectors) {
  if (row_count == rows) {
    if (vectors == 2) {
      brgemm_tile<T, rows, 2, walk, lines>(product);
    } else {
      brgemm_tile<T, rows, 1, walk, lines>(product);
    }
  } else if constexpr (rows > lines) {
    brgemm<T, walk, lines, rows - lines>(product, row_count, vectors);
  }
}

// Divides rows into tiles as evenly as possible, since a tile of one or two rows is latency-bound.
struct Cut {
  i64 tiles;
  i64 base;   // rows per tile
  i64 extra;  // number of leading tiles with one row more
};
CONVGRAD_INLINE Cut cut_rows(i64 count, i64 most) {
  const i64 tiles = (count + most - 1) / most;
  return tiles == 0 ? Cut{0, 0, 0} : Cut{tiles, count / tiles, count % tiles};
}

}  // namespace convgrad
