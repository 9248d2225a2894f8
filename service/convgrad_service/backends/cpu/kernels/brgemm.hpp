// The micro-kernel of the dense engine: a batch-reduce GEMM (BRGEMM) with C in registers.
//
//   C[i][j] (+)= sum over segments b, sum over k < b.k :
//                A[b.a + i * a_row + k * a_step] * B[b.b + k * b_step + j]
//
// In a gather, B is a panel whose rows are as wide as the tile, and b.b counts rows.
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

// One element of the batch: where it is in A and B, and its length along K.
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
  i64 fetched = 0;       // of A in a weight gradient: how far from the first row
  int last = kLanes<T>;  // lanes of the last vector that a gather stores
};

// Which stride of A is known to be 1: its channels are K in a gather, M in a weight gradient.
enum class Walk { kUnitStep, kUnitRow };

// Where row r of a line is: at (odd factor of r) * pitch * 2^n, which an address computes from the
// odd multiples of the pitch in registers. Additions would take cycles from the ports that multiply.
template <class T, int rows>
struct RowOffsets {
  i64 odd[rows / 2 + 1];  // bytes
  explicit CONVGRAD_INLINE RowOffsets(i64 pitch) {
#pragma clang loop unroll(full)
    for (int i = 0; i < rows / 2 + 1; ++i) {
      odd[i] = (2 * i + 1) * pitch * static_cast<i64>(sizeof(T));
      __asm__("" : "+r"(odd[i]));  // not to be computed anew
    }
  }
  CONVGRAD_INLINE const T* at(const T* first, int r) const {
    if (r == 0) return first;
    const int twos = __builtin_ctz(static_cast<u32>(r));
    return reinterpret_cast<const T*>(reinterpret_cast<const char*>(first) +
                                      (odd[(r >> twos) / 2] << twos));
  }
};

template <class T, int rows, int vectors, Walk walk, int lines>
__attribute__((noinline)) void brgemm_tile(const Product<T>& p) {
  constexpr int lanes = kLanes<T>, of_line = rows / lines;
  const i64 a_step = walk == Walk::kUnitStep ? 1 : p.a_step;
  const i64 b_step = walk == Walk::kUnitStep ? vectors * lanes : p.b_step;
  const RowOffsets<T, walk == Walk::kUnitRow ? 1 : of_line> offsets(p.a_row);
  const Segment* segment = p.segments;
  const Segment* const end = segment + p.segment_count;
  const T *a[lines] = {}, *b = nullptr;
  i64 left = 0, at = 0;  // of the segment; index along K
  bool adds = p.adds;
  do {
    Vec<T> sum[rows][vectors];
#pragma clang loop unroll(full)
    for (int i = 0; i < rows; ++i) {
#pragma clang loop unroll(full)
      for (int v = 0; v < vectors; ++v) sum[i][v] = splat<T>(0);
    }
    // Multiplies what is `ahead` steps of K on.
    const auto multiply = [&](int ahead) __attribute__((always_inline)) {
      Vec<T> column[vectors];
#pragma clang loop unroll(full)
      for (int v = 0; v < vectors; ++v) column[v] = load_raw<Vec<T>>(b + ahead * b_step + v * lanes);
      // Into the L2 cache, since the tile's part of A and B fill the L1 cache. With one vector or few
      // rows, loads take longer than products.
      if (walk == Walk::kUnitRow && vectors > 1 && rows > 6) {
        __builtin_prefetch(a[0] + ahead * a_step + p.fetched, 0, 2);
      }
#pragma clang loop unroll(full)
      for (int i = 0; i < rows; ++i) {
        const T* const line = a[i / of_line] + ahead * a_step;
        const int r = i % of_line;
        const Vec<T> value = splat<T>(walk == Walk::kUnitRow ? line[r] : *offsets.at(line, r));
#pragma clang loop unroll(full)
        for (int v = 0; v < vectors; ++v) sum[i][v] += value * column[v];
      }
    };
    const auto advance = [&](int steps) __attribute__((always_inline)) {
#pragma clang loop unroll(full)
      for (int l = 0; l < lines; ++l) {
        a[l] += steps * a_step;
        __asm__("" : "+r"(a[l]));  // one pointer for all rows
      }
      b += steps * b_step;
    };
    for (i64 stop = -1; left > 0 || segment < end;) {
      if (left == 0) {
#pragma clang loop unroll(full)
        for (int l = 0; l < lines; ++l) a[l] = p.a + segment->a + l * p.a_line;
        b = p.b + segment->b * (walk == Walk::kUnitStep ? b_step : 1);
        left = segment->k;
        if (walk == Walk::kUnitStep) at = segment->b;
        ++segment;
      }
      if (stop < 0) stop = (at / kBlock + 1) * kBlock;
      if (at >= stop) break;
      const i64 run = least(left, stop - at);
      left -= run;
      at += run;
      i64 k = run;
      for (; walk == Walk::kUnitStep && k > 1; k -= 2) {
        multiply(0);
        multiply(1);
        advance(2);
      }
      for (; k > 0; --k) {
        multiply(0);
        advance(1);
      }
    }
#pragma clang loop unroll(full)
    for (int i = 0; i < rows; ++i) {
#pragma clang loop unroll(full)
      for (int v = 0; v < vectors; ++v) {
        T* to = p.c + i / of_line * p.c_line + i % of_line * p.c_row + v * lanes;
        if (walk == Walk::kUnitStep && v == vectors - 1 && p.last < lanes) {
          if (adds) sum[i][v] += load_raw_first<T, lanes>(to, p.last);
          store_raw_first<T, lanes>(to, sum[i][v], p.last);
        } else {
          store_raw(to, adds ? load_raw<Vec<T>>(to) + sum[i][v] : sum[i][v]);
        }
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
