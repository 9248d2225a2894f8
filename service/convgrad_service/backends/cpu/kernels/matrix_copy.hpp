// Packs small matrices from a tensor's layout and element type into row-major blocks of
// accumulators, and unpacks them through an epilogue.
//
//   read_matrix    block[i][j] = widen(source[i * row + j * column])
//   write_matrix   result[i * row + j * column] = round(alpha * block[i][j]
//                      + beta * accumulate[...] + bias[j])
//
// Contiguous columns are copied as vectors, contiguous rows are transposed in square register
// blocks. Other strides, and blocks with too few columns, are copied element by element.
#pragma once

#include "conv_args.hpp"
#include "transpose.hpp"

namespace convgrad {

// Whether an activation (conv_args.hpp) is stored as a product reads it: accumulators, channels
// contiguous. Where all pixels would share a few sets of the L1 cache, a packed copy is faster.
template <class E>
CONVGRAD_INLINE bool in_place(const View& view) {
  constexpr i64 kPitch = 1024 / static_cast<i64>(sizeof(typename E::Acc));
  if (sizeof(typename E::Storage) != sizeof(typename E::Acc) || view.stride[2] != 1) return false;
  for (const i64 stride : view.stride) {
    if (stride < 0) return false;
  }
  return view.stride[5] % kPitch != 0;
}

// Elements from the first of an activation to the end of its last, if no stride is negative.
inline i64 span(const View& view, i64 batch, i64 groups, i64 channels, const int64_t* size) {
  const i64 sizes[6] = {batch, groups, channels, size[0], size[1], size[2]};
  i64 elements = 1;
  for (int i = 0; i < 6; ++i) elements += (sizes[i] - 1) * view.stride[i];
  return elements;
}

// Writes block[i * block_row + j] for i < rows, j < columns, and nothing else.
template <class E>
void read_matrix(const typename E::Storage* source, i64 row, i64 column, i64 rows, i64 columns,
                 typename E::Acc* block, i64 block_row) {
  using T = typename E::Acc;
  constexpr int lanes = kLanes<T>;
  if (column == 1) {
    if (row == columns && block_row == columns) {
      columns *= rows;
      rows = 1;
    }
    for (i64 i = 0; i < rows; ++i) {
      const auto* from = source + i * row;
      T* to = block + i * block_row;
      i64 j = 0;
      for (; j + lanes <= columns; j += lanes) store_raw(to + j, load<E>(from + j));
      const int rest = static_cast<int>(columns - j);
      if (rest) store_raw_first<T, lanes>(to + j, load_first<E>(from + j, rest), rest);
    }
  } else if (row == 1 && columns * 4 > lanes) {
    // Rows are innermost: the source is read in a few long streams, which the CPU prefetches.
    for (i64 j = 0; j < columns; j += lanes) {
      const int width = static_cast<int>(least(lanes, columns - j));
      for (i64 i = 0; i < rows; i += lanes) {
        const int height = static_cast<int>(least(lanes, rows - i));
        Vec<T> square[lanes];
        const auto* from = source + i + j * column;
        if (height == lanes && width == lanes) {
#pragma clang loop unroll(full)
          for (int l = 0; l < lanes; ++l) square[l] = load<E>(from + l * column);
        } else {
#pragma clang loop unroll(full)
          for (int l = 0; l < lanes; ++l) {
            square[l] = l < width ? load_first<E>(from + l * column, height) : splat<T>(0);
          }
        }
        transpose<T>(square);
        T* to = block + i * block_row + j;
        if (height == lanes && width == lanes) {
#pragma clang loop unroll(full)
          for (int l = 0; l < lanes; ++l) store_raw(to + l * block_row, square[l]);
        } else {
#pragma clang loop unroll(full)
          for (int l = 0; l < lanes; ++l) {
            if (l < height) store_raw_first<T, lanes>(to + l * block_row, square[l], width);
          }
        }
      }
    }
  } else {
    for (i64 i = 0; i < rows; ++i) {
      for (i64 j = 0; j < columns; ++j) {
        block[i * block_row + j] = load_one<E>(source + i * row + j * column);
      }
    }
  }
}

// The destination and epilogue of write_matrix. `accumulate` and `bias` may be null.
template <class E>
struct Destination {
  typename E::Storage* result;
  i64 row;
  i64 column;
  const typename E::Storage* accumulate;
  i64 accumulate_row;
  i64 accumulate_column;
  const typename E::Storage* bias;  // by column
  i64 bias_column;
  typename E::Acc alpha;
  typename E::Acc beta;
};

template <class E>
CONVGRAD_INLINE Vec<typename E::Acc> load_strided(const typename E::Storage* p, i64 stride, int n) {
  using T = typename E::Acc;
  constexpr int lanes = kLanes<T>;
  if (stride == 1) return n == lanes ? load<E>(p) : load_first<E>(p, n);
  T values[lanes] = {};
  for (int l = 0; l < n; ++l) values[l] = load_one<E>(p + l * stride);
  return load_raw<Vec<T>>(values);
}

template <class E>
CONVGRAD_INLINE void store_some(typename E::Storage* p, Vec<typename E::Acc> value, int n) {
  if (n == kLanes<typename E::Acc>) {
    store<E>(p, value);
  } else {
    store_first<E>(p, value, n);
  }
}

template <class E>
void write_matrix(const typename E::Acc* block, i64 block_row, i64 rows, i64 columns,
                  const Destination<E>& to) {
  using T = typename E::Acc;
  constexpr int lanes = kLanes<T>;
  if (to.column == 1) {
    for (i64 j = 0; j < columns; j += lanes) {
      const int width = static_cast<int>(least(lanes, columns - j));
      Vec<T> bias = splat<T>(0);
      if (to.bias) bias = load_strided<E>(to.bias + j * to.bias_column, to.bias_column, width);
      for (i64 i = 0; i < rows; ++i) {
        Vec<T> value = load_raw<Vec<T>>(block + i * block_row + j) * to.alpha;
        if (to.accumulate) {
          const auto* from = to.accumulate + i * to.accumulate_row + j * to.accumulate_column;
          value += load_strided<E>(from, to.accumulate_column, width) * to.beta;
        }
        if (to.bias) value += bias;
        store_some<E>(to.result + i * to.row + j, value, width);
      }
    }
  } else if (to.row == 1) {
    for (i64 j = 0; j < columns; j += lanes) {
      const int width = static_cast<int>(least(lanes, columns - j));
      for (i64 i = 0; i < rows; i += lanes) {
        const int height = static_cast<int>(least(lanes, rows - i));
        Vec<T> square[lanes];
        const T* from = block + i * block_row + j;
        if (height == lanes) {
#pragma clang loop unroll(full)
          for (int l = 0; l < lanes; ++l) square[l] = load_raw<Vec<T>>(from + l * block_row);
        } else {
#pragma clang loop unroll(full)
          for (int l = 0; l < lanes; ++l) {
            square[l] = l < height ? load_raw<Vec<T>>(from + l * block_row) : splat<T>(0);
          }
        }
        transpose<T>(square);
        if (width == lanes && height == lanes && !to.accumulate && !to.bias) {
#pragma clang loop unroll(full)
          for (int l = 0; l < lanes; ++l) {
            store<E>(to.result + i + (j + l) * to.column, square[l] * to.alpha);
          }
          continue;
        }
#pragma clang loop unroll(full)
        for (int l = 0; l < lanes; ++l) {
          if (l >= width) continue;
          Vec<T> value = square[l] * to.alpha;
          if (to.accumulate) {
            const auto* add =
                to.accumulate + i * to.accumulate_row + (j + l) * to.accumulate_column;
            value += load_strided<E>(add, to.accumulate_row, height) * to.beta;
          }
          if (to.bias) value += load_one<E>(to.bias + (j + l) * to.bias_column);
          store_some<E>(to.result + i + (j + l) * to.column, value, height);
        }
      }
    }
  } else {
    for (i64 i = 0; i < rows; ++i) {
      for (i64 j = 0; j < columns; ++j) {
        T value = block[i * block_row + j] * to.alpha;
        if (to.accumulate) {
          value += load_one<E>(to.accumulate + i * to.accumulate_row +
                               j * to.accumulate_column) * to.beta;
        }
        if (to.bias) value += load_one<E>(to.bias + j * to.bias_column);
        store_one<E>(to.result + i * to.row + j * to.column, value);
      }
    }
  }
}

}  // namespace convgrad
