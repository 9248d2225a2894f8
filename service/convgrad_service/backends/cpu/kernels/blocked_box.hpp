// Packs boxes of a strided tensor (N, C, 3 spatial) into channel-blocked storage, and unpacks them.
//
// In a block every position is a vector of channels, so windows of any stride and dilation are read
// with full-vector loads, and padding is filled in once. Contiguous channels are copied as vectors;
// contiguous columns are transposed in square register blocks; otherwise elements are copied
// singly.
#pragma once

#include "conv_args.hpp"
#include "transpose.hpp"

namespace convgrad {

// Conversion between the tensor's elements (Storage) and lanes (Acc).
template <class E>
struct ValueLanes {
  using Acc = typename E::Acc;
  using Storage = typename E::Storage;
  static CONVGRAD_INLINE Vec<Acc> get(const Storage* p, int n) { return load_first<E>(p, n); }
  static CONVGRAD_INLINE Vec<Acc> get(const Storage* p) { return load<E>(p); }
  static CONVGRAD_INLINE void put(Storage* p, Vec<Acc> v, int n) { store_first<E>(p, v, n); }
  static CONVGRAD_INLINE void put(Storage* p, Vec<Acc> v) { store<E>(p, v); }
};

// Indices are stored in lanes as wide as the values, bit-cast to T. Those that do not fit become
// negative.
template <class T, class Index>
struct IndexLanes {
  using Acc = T;
  using Storage = Index;
  static constexpr int L = kLanes<T>;
  using Wide = VecN<i64, L>;
  static CONVGRAD_INLINE Vec<T> get(const Storage* p) { return from(load_raw<VecN<Index, L>>(p)); }
  static CONVGRAD_INLINE Vec<T> from(VecN<Index, L> given) {
    if constexpr (sizeof(Index) == sizeof(T)) return __builtin_bit_cast(Vec<T>, given);
    Wide v = __builtin_convertvector(given, Wide);
    if constexpr (sizeof(T) == 4) {
      const Wide none = Wide(i64(-1));
      v = ((v < 0) | (v > 0x7fffffff)) ? none : v;
    }
    return __builtin_bit_cast(Vec<T>, __builtin_convertvector(v, Mask<T>));
  }
  static CONVGRAD_INLINE Vec<T> get(const Storage* p, int n) {
    Index all[L] = {};
    for (int i = 0; i < n; ++i) all[i] = p[i];
    return get(all);
  }
  static CONVGRAD_INLINE void put(Storage* p, Vec<T> v) {
    using Stored = VecN<Index, L>;
    store_raw(p, __builtin_convertvector(__builtin_bit_cast(Mask<T>, v), Stored));
  }
  static CONVGRAD_INLINE void put(Storage* p, Vec<T> v, int n) {
    Index all[L];
    put(all, v);
    for (int i = 0; i < n; ++i) p[i] = all[i];
  }
};

struct BlockBox {
  i64 batch;
  i64 channel;  // of the first lane
  int lanes;    // number of lanes that are channels of the tensor
  i64 size[3];  // of the tensor
  i64 first[3];
  i64 extent[3];

  CONVGRAD_INLINE i64 low(int d) const {
    const i64 v = first[d] < 0 ? -first[d] : 0;
    return v < extent[d] ? v : extent[d];
  }
  CONVGRAD_INLINE i64 high(int d) const {
    const i64 v = size[d] - first[d];
    const i64 held = v < extent[d] ? v : extent[d];
    return held > low(d) ? held : low(d);
  }
};

// Packs n columns, one vector per column: of a row, or of adjacent rows of `width` columns, which
// are `pitch` vectors apart in the block.
template <class Lanes>
CONVGRAD_INLINE void read_row(const typename Lanes::Storage* p, i64 channel_stride,
                              i64 column_stride, int lanes, i64 n, typename Lanes::Acc* out,
                              i64 width, i64 pitch) {
  using T = typename Lanes::Acc;
  constexpr int L = kLanes<T>;
  if (channel_stride == 1 || lanes == 1) {
    for (; n > 0; n -= width, p += width * column_stride, out += pitch * L) {
      if (lanes == L) {
        for (i64 v = 0; v < width; ++v) store_raw(out + v * L, Lanes::get(p + v * column_stride));
      } else {
        for (i64 v = 0; v < width; ++v) {
          store_raw(out + v * L, Lanes::get(p + v * column_stride, lanes));
        }
      }
    }
    return;
  }
  i64 at = 0;
  for (i64 v = 0; v < n; v += L) {
    const int columns = static_cast<int>(n - v < L ? n - v : L);
    Vec<T> square[L];
    if (column_stride == 1 && lanes == L && columns == L) {
#pragma clang loop unroll(full)
      for (int i = 0; i < L; ++i) square[i] = Lanes::get(p + i * channel_stride + v);
    } else {
      for (int i = 0; i < L; ++i) square[i] = splat(T(0));
      for (int i = 0; i < lanes; ++i) {
        const auto* from = p + i * channel_stride + v * column_stride;
        if (column_stride == 1) {
          square[i] = Lanes::get(from, columns);
        } else {
          typename Lanes::Storage all[L] = {};
          for (int j = 0; j < columns; ++j) all[j] = from[j * column_stride];
          square[i] = Lanes::get(all);
        }
      }
    }
    transpose<T>(square);
    for (int j = 0; j < columns; ++j) {
      store_raw(out + at * L, square[j]);
      if (++at == width) {
        at = 0;
        out += pitch * L;
      }
    }
  }
}

template <class Lanes>
CONVGRAD_INLINE void write_row(typename Lanes::Storage* p, i64 channel_stride, i64 column_stride,
                               int lanes, i64 n, const typename Lanes::Acc* in) {
  using T = typename Lanes::Acc;
  constexpr int L = kLanes<T>;
  if (channel_stride == 1 || lanes == 1) {
    for (i64 v = 0; v < n; ++v) {
      const Vec<T> value = load_raw<Vec<T>>(in + v * L);
      if (lanes == L) {
        Lanes::put(p + v * column_stride, value);
      } else {
        Lanes::put(p + v * column_stride, value, lanes);
      }
    }
    return;
  }
  for (i64 v = 0; v < n; v += L) {
    const int columns = static_cast<int>(n - v < L ? n - v : L);
    Vec<T> square[L];
    if (columns == L) {
#pragma clang loop unroll(full)
      for (int j = 0; j < L; ++j) square[j] = load_raw<Vec<T>>(in + (v + j) * L);
    } else {
      for (int j = 0; j < L; ++j) square[j] = splat(T(0));
      for (int j = 0; j < columns; ++j) square[j] = load_raw<Vec<T>>(in + (v + j) * L);
    }
    transpose<T>(square);
    if (column_stride == 1 && lanes == L && columns == L) {
#pragma clang loop unroll(full)
      for (int i = 0; i < L; ++i) Lanes::put(p + i * channel_stride + v, square[i]);
      continue;
    }
    for (int i = 0; i < lanes; ++i) {
      auto* to = p + i * channel_stride + v * column_stride;
      if (column_stride == 1) {
        Lanes::put(to, square[i], columns);
      } else {
        typename Lanes::Storage all[L];
        Lanes::put(all, square[i]);
        for (int j = 0; j < columns; ++j) to[j * column_stride] = all[j];
      }
    }
  }
}

// Address of the element at box position (v0, v1, v2), lane 0.
template <class Storage>
CONVGRAD_INLINE Storage* element_at(const View& view, const BlockBox& box, i64 v0, i64 v1, i64 v2) {
  return static_cast<Storage*>(view.data) + box.batch * view.stride[0] +
         box.channel * view.stride[1] + (box.first[0] + v0) * view.stride[2] +
         (box.first[1] + v1) * view.stride[3] + (box.first[2] + v2) * view.stride[4];
}

// Packs a box into extent[0] * extent[1] * extent[2] vectors, with `fill` outside the tensor.
template <class Lanes>
void read_block(const View& view, const BlockBox& box, Vec<typename Lanes::Acc> fill,
                typename Lanes::Acc* out) {
  using T = typename Lanes::Acc;
  constexpr int L = kLanes<T>;
  const i64 left = box.low(2), right = box.high(2), width = right - left, pitch = box.extent[2];
  const i64 top = box.low(1), bottom = box.high(1);
  const bool whole = view.stride[3] == width * view.stride[4];
  const i64 rows = whole ? bottom - top : 1;
  for (i64 v0 = 0; v0 < box.extent[0]; ++v0) {
    const bool valid = width > 0 && v0 >= box.low(0) && v0 < box.high(0);
    T* plane = out + v0 * box.extent[1] * pitch * L;
    for (i64 v1 = 0; v1 < box.extent[1]; ++v1) {
      const bool inside = valid && v1 >= top && v1 < bottom;
      T* row = plane + v1 * pitch * L;
      for (i64 v = 0; v < (inside ? left : pitch); ++v) store_raw(row + v * L, fill);
      for (i64 v = inside ? right : pitch; v < pitch; ++v) store_raw(row + v * L, fill);
    }
    for (i64 v1 = top; valid && v1 < bottom; v1 += rows) {
      read_row<Lanes>(element_at<const typename Lanes::Storage>(view, box, v0, v1, left),
                      view.stride[1], view.stride[4], box.lanes, rows * width,
                      plane + (v1 * pitch + left) * L, width, pitch);
    }
  }
}

}  // namespace convgrad
