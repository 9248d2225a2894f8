// What a task of dense_bwd_weight.cpp works on at a time.
#pragma once

#include "elements.hpp"

namespace convgrad {

CONVGRAD_INLINE i64 floor_div(i64 a, i64 b) { return a >= 0 ? a / b : -((-a + b - 1) / b); }
CONVGRAD_INLINE i64 ceil_div(i64 a, i64 b) { return -floor_div(-a, b); }
CONVGRAD_INLINE i64 round_up(i64 a, i64 to) { return (a + to - 1) / to * to; }

template <class T>
CONVGRAD_INLINE void fill_zero(T* data, i64 elements) {
  __builtin_memset(data, 0, static_cast<u64>(elements) * sizeof(T));
}

// Pitch of packed pixels, in elements: an odd number of cache lines, to spread the pixels of a row
// over all L1 cache sets.
template <class T>
CONVGRAD_INLINE i64 pixel_size(i64 channels) {
  const i64 line = 64 / static_cast<i64>(sizeof(T));
  return (ceil_div(channels, line) | 1) * line;
}

// Rows [p, p + rows) of one plane, and the offsets of their operands.
struct Piece {
  i64 n, z, p, rows;
  i64 y, x;
};

// An operand of a tile, packed or in place: where offsets count from, and the steps along its
// dimensions.
template <class T>
struct Operand {
  const T* data;
  i64 plane;
  i64 row;
  i64 pixel;
};

// Pieces of the same columns; `rows` of the tallest.
template <class T>
struct WeightTile {
  i64 count, rows, q0, q1;
  Operand<T> y, x;
};

// Where a chunk is summed: its first element, and the steps from tap to tap and row to row.
template <class T>
struct WeightSums {
  T* data;
  i64 tap;
  i64 row;
};

}  // namespace convgrad
