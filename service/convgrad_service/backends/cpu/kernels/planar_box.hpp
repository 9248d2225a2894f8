// Packs boxes of a strided activation into planes of accumulators (float, double), and unpacks
// them.
//
// A box holds the channels of some groups, each a plane of box[0] x box[1] x box[2] elements at
// tensor coordinates (first + v) * step + phase. Elements outside the tensor, or at v >= limit,
// read as `fill`. Contiguous columns are copied as vectors; contiguous channels are transposed in
// square register blocks; otherwise elements are copied singly.
#pragma once

#include "conv_args.hpp"
#include "epilogue.hpp"
#include "streams.hpp"
#include "transpose.hpp"

namespace convgrad {

struct Box {
  i64 batch;
  i64 group;   // first group
  i64 groups;  // number of groups
  i64 channels;  // per group
  i64 size[3];   // of the tensor
  i64 step[3];
  i64 phase[3];
  i64 first[3];
  i64 extent[3];  // of the planes
  i64 limit[3];   // elements at v >= limit are `fill` (reading) or skipped (writing)
  i64 row_pitch;
  i64 slice_pitch;
  i64 channel_pitch;
  i64 group_pitch;
  double fill = 0;  // value outside the tensor
  bool streams = false;  // whether whole vectors of channels are written past the caches (streams.hpp)
};

// Range [low, high) of v inside the tensor, in one dimension.
CONVGRAD_INLINE void inside(const Box& box, int d, i64& low, i64& high) {
  const i64 step = box.step[d];
  const i64 before = -box.phase[d] - box.first[d] * step;  // v * step >= before
  low = before <= 0 ? 0 : (before + step - 1) / step;
  const i64 last = box.size[d] - 1 + before;  // v * step <= last
  high = last < 0 ? 0 : last / step + 1;
  if (high > box.limit[d]) high = box.limit[d];
  if (low > high) low = high;
}

// Most gaps have a few elements, for which calling memset would cost more than copying the row.
template <class T>
CONVGRAD_INLINE void fill_with(T* p, i64 n, T value) {
  constexpr int L = kLanes<T>;
  for (; n >= L; n -= L, p += L) store_raw(p, splat(value));
  if (n > 0) store_raw_first<T, L>(p, splat(value), static_cast<int>(n));
}
template <class T>
CONVGRAD_INLINE void fill_zero(T* p, i64 n) {
  fill_with(p, n, T(0));
}

// The even lanes of two vectors.
template <class V, int n>
CONVGRAD_INLINE V even_lanes(V a, V b) {
  if constexpr (n == 16) {
    return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  } else if constexpr (n == 8) {
    return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14);
  } else if constexpr (n == 4) {
    return __builtin_shufflevector(a, b, 0, 2, 4, 6);
  } else {
    return __builtin_shufflevector(a, b, 0, 2);
  }
}

// Reads every other element of a row, n in total, and nothing past the last one.
template <class E>
CONVGRAD_INLINE void read_even(const typename E::Storage* p, i64 n, typename E::Acc* out) {
  using T = typename E::Acc;
  constexpr int L = kLanes<T>;
  i64 column = 0;
  for (; column + L < n; column += L) {
    const auto* from = p + 2 * column;
    store_raw(out + column, even_lanes<Vec<T>, L>(load<E>(from), load<E>(from + L)));
  }
  const int rest = static_cast<int>(n - column), elements = 2 * rest - 1;
  const auto* from = p + 2 * column;
  const Vec<T> a = load_first<E>(from, elements < L ? elements : L);
  const Vec<T> b = elements > L ? load_first<E>(from + L, elements - L) : splat(T(0));
  store_raw_first<T, L>(out + column, even_lanes<Vec<T>, L>(a, b), rest);
}

// Scatters the first n lanes, `step` elements apart. Elements in between are not modified.
template <class S, int lanes>
CONVGRAD_INLINE void store_apart(S* p, VecN<S, lanes> v, i64 step, int n) {
#if defined(CONVGRAD_AVX512)
  if constexpr (sizeof(S) == 4 && lanes == 16) {
    if (step == 2) {
      const __m512 all = __builtin_bit_cast(__m512, v);
      const __m512 low = __builtin_shufflevector(all, all, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6,
                                                 7, 7);
      const __m512 high = __builtin_shufflevector(all, all, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13,
                                                  13, 14, 14, 15, 15);
      const u64 mask = 0x55555555u & ((u64(1) << (2 * n)) - 1);
      _mm512_mask_storeu_ps(p, static_cast<__mmask16>(mask), low);
      if (n > 8) _mm512_mask_storeu_ps(p + 16, static_cast<__mmask16>(mask >> 16), high);
      return;
    }
  }
#endif
  S elements[lanes];
  store_raw(elements, v);
  for (int i = 0; i < n; ++i) p[i * step] = elements[i];
}

// Whether the channels of all groups are contiguous, so that blocks can be transposed.
CONVGRAD_INLINE bool channels_adjacent(const View& view, i64 channels) {
  return (channels == 1 || view.stride[2] == 1) && view.stride[1] == channels;
}

template <class E>
void read_box(const View& view, const Box& box, typename E::Acc* planes) {
  using T = typename E::Acc;
  using S = typename E::Storage;
  constexpr int L = kLanes<T>;
  i64 low[3], high[3];
  for (int d = 0; d < 3; ++d) inside(box, d, low[d], high[d]);
  const i64 column_stride = view.stride[5] * box.step[2];
  const i64 all = box.groups * box.channels;
  const bool swap = column_stride != 1 && all > 1 && channels_adjacent(view, box.channels);
  const i64 block = swap ? L : 1;
  for (i64 channel = 0; channel < all; channel += block) {
    const int together = static_cast<int>(all - channel < block ? all - channel : block);
    T* plane[L];
    for (int i = 0; i < together; ++i) {
      const i64 g = (channel + i) / box.channels;
      plane[i] = planes + g * box.group_pitch + (channel + i - g * box.channels) * box.channel_pitch;
    }
    const S* base = static_cast<const S*>(view.data) + box.batch * view.stride[0] +
                    (box.group + channel / box.channels) * view.stride[1] +
                    channel % box.channels * view.stride[2];
    for (i64 v0 = 0; v0 < box.extent[0]; ++v0) {
      for (i64 v1 = 0; v1 < box.extent[1]; ++v1) {
        const i64 row = v0 * box.slice_pitch + v1 * box.row_pitch;
        const bool valid = v0 >= low[0] && v0 < high[0] && v1 >= low[1] && v1 < high[1];
        const i64 begin = valid ? low[2] : box.extent[2];
        const i64 end = valid ? high[2] : box.extent[2];
        for (int i = 0; i < together; ++i) {
          fill_with(plane[i] + row, begin, static_cast<T>(box.fill));
          fill_with(plane[i] + row + end, box.extent[2] - end, static_cast<T>(box.fill));
        }
        if (begin == end) continue;
        const S* source = base +
                          ((box.first[0] + v0) * box.step[0] + box.phase[0]) * view.stride[3] +
                          ((box.first[1] + v1) * box.step[1] + box.phase[1]) * view.stride[4] +
                          ((box.first[2] + begin) * box.step[2] + box.phase[2]) * view.stride[5];
        const i64 n = end - begin;
        if (swap) {
          for (i64 column = 0; column < n; column += L) {
            const int columns = static_cast<int>(n - column < L ? n - column : L);
            Vec<T> square[L];
            const S* from = source + column * column_stride;
            // Unrolled, so that the square stays in registers.
#pragma clang loop unroll(full)
            for (int i = 0; i < L; ++i) {
              square[i] = splat(T(0));
              if (i >= columns) continue;
              square[i] = together == L ? load<E>(from + i * column_stride)
                                        : load_first<E>(from + i * column_stride, together);
            }
            transpose<T>(square);
#pragma clang loop unroll(full)
            for (int i = 0; i < L; ++i) {
              if (i >= together) continue;
              T* to = plane[i] + row + begin + column;
              if (columns == L) {
                store_raw(to, square[i]);
              } else {
                store_raw_first<T, L>(to, square[i], columns);
              }
            }
          }
        } else if (column_stride == 1) {
          T* to = plane[0] + row + begin;
          i64 column = 0;
          for (; column + L <= n; column += L) {
            store_raw(to + column, load<E>(source + column));
          }
          if (column < n) {
            const int rest = static_cast<int>(n - column);
            store_raw_first<T, L>(to + column, load_first<E>(source + column, rest), rest);
          }
        } else if (column_stride == 2) {
          read_even<E>(source, n, plane[0] + row + begin);
        } else {
          T* to = plane[0] + row + begin;
          for (i64 column = 0; column < n; ++column) {
            to[column] = load_one<E>(source + column * column_stride);
          }
        }
      }
    }
  }
}

// Unpacks a box through an epilogue. `accumulate` has the tensor's shape and its own strides. With a
// step of 2 along contiguous columns, `odd` may hold the planes of the columns in between, or null.
template <class E>
void write_box(const View& view, const View& accumulate, const View& bias,
               const Epilogue<typename E::Acc>& epilogue, const Box& box,
               const typename E::Acc* planes, const typename E::Acc* odd = nullptr) {
  using T = typename E::Acc;
  using S = typename E::Storage;
  constexpr int L = kLanes<T>;
  i64 low[3], high[3];
  for (int d = 0; d < 3; ++d) inside(box, d, low[d], high[d]);
  const bool adds = epilogue.scales && epilogue.beta != T(0) && accumulate.data != nullptr;
  const i64 column_stride = view.stride[5] * box.step[2];
  const i64 add_stride = accumulate.stride[5] * box.step[2];
  const i64 all = box.groups * box.channels;
  const bool swap = column_stride != 1 && all > 1 && channels_adjacent(view, box.channels) &&
                    (!adds || channels_adjacent(accumulate, box.channels));
  const i64 block = swap ? L : 1;
  const i64 n = high[2] - low[2];
  const S* biases = static_cast<const S*>(bias.data);
  const auto offset = [&](const View& of, i64 channel, i64 v0, i64 v1) {
    return box.batch * of.stride[0] + (box.group + channel / box.channels) * of.stride[1] +
           channel % box.channels * of.stride[2] +
           ((box.first[0] + v0) * box.step[0] + box.phase[0]) * of.stride[3] +
           ((box.first[1] + v1) * box.step[1] + box.phase[1]) * of.stride[4] +
           ((box.first[2] + low[2]) * box.step[2] + box.phase[2]) * of.stride[5];
  };
  const auto bias_of = [&](i64 channel) {
    if (biases == nullptr) return T(0);
    return load_one<E>(biases + (box.group + channel / box.channels) * bias.stride[0] +
                       channel % box.channels * bias.stride[1]);
  };
  for (i64 channel = 0; channel < all; channel += block) {
    const int together = static_cast<int>(all - channel < block ? all - channel : block);
    const T* plane[L];
    Vec<T> shift = splat(T(0));
    for (int i = 0; i < together; ++i) {
      const i64 g = (channel + i) / box.channels;
      plane[i] = planes + g * box.group_pitch + (channel + i - g * box.channels) * box.channel_pitch;
      shift[i] = bias_of(channel + i);
    }
    if (!swap) shift = splat(T(shift[0]));
    for (i64 v0 = low[0]; v0 < high[0]; ++v0) {
      for (i64 v1 = low[1]; v1 < high[1]; ++v1) {
        const i64 row = v0 * box.slice_pitch + v1 * box.row_pitch + low[2];
        S* target = static_cast<S*>(view.data) + offset(view, channel, v0, v1);
        const S* add = adds ? static_cast<const S*>(accumulate.data) +
                                  offset(accumulate, channel, v0, v1)
                            : nullptr;
        if (odd != nullptr) {
          // Whole rows are written, in which both phases alternate.
          const i64 whole = least(2 * n, box.size[2] - 2 * (box.first[2] + low[2]));
          for (i64 column = 0; column < n; column += L) {
            const int columns = static_cast<int>(least(n - column, L));
            const T* even = plane[0] + row + column;
            Vec<T> both[2];
            interleave<Vec<T>, L>(load_raw_first<T, L>(even, columns),
                                  load_raw_first<T, L>(odd + (even - planes), columns), both[0],
                                  both[1]);
            for (int half = 0; half < 2; ++half) {
              const i64 from = 2 * column + half * L;
              if (from >= whole) break;
              const int lanes = static_cast<int>(least(whole - from, L));
              const Vec<T> more = adds ? load_first<E>(add + from, lanes) : splat(T(0));
              const Vec<T> result = epilogue(both[half], more, shift);
              if (lanes == L) {
                store<E>(target + from, result);
              } else {
                store_first<E>(target + from, result, lanes);
              }
            }
          }
        } else if (swap) {
          const bool streams = box.streams && streams_at(target, column_stride);
          for (i64 column = 0; column < n; column += L) {
            const int columns = static_cast<int>(n - column < L ? n - column : L);
            Vec<T> square[L];
#pragma clang loop unroll(full)
            for (int i = 0; i < L; ++i) {
              square[i] = splat(T(0));
              if (i >= together) continue;
              square[i] = columns == L ? load_raw<Vec<T>>(plane[i] + row + column)
                                       : load_raw_first<T, L>(plane[i] + row + column, columns);
            }
            transpose<T>(square);
#pragma clang loop unroll(full)
            for (int i = 0; i < L; ++i) {
              if (i >= columns) continue;
              S* to = target + (column + i) * column_stride;
              Vec<T> more = splat(T(0));
              if (adds) more = load_first<E>(add + (column + i) * add_stride, together);
              const Vec<T> result = epilogue(square[i], more, shift);
              if (together < L) {
                store_first<E>(to, result, together);
              } else if (streams) {
                stream_raw(to, E::round(result));
              } else {
                store<E>(to, result);
              }
            }
          }
        } else {
          const bool contiguous = column_stride == 1 && (!adds || add_stride == 1);
          i64 column = 0;
          for (; contiguous && !adds && column + L <= n; column += L) {
            const Vec<T> sum = load_raw<Vec<T>>(plane[0] + row + column);
            store<E>(target + column, epilogue(sum, splat(T(0)), shift));
          }
          for (; column < n; column += L) {
            const int columns = static_cast<int>(n - column < L ? n - column : L);
            const Vec<T> sum = load_raw_first<T, L>(plane[0] + row + column, columns);
            Vec<T> more = splat(T(0));
            if (contiguous) {
              if (adds) more = load_first<E>(add + column, columns);
              const Vec<T> result = epilogue(sum, more, shift);
              if (columns == L) {
                store<E>(target + column, result);
              } else {
                store_first<E>(target + column, result, columns);
              }
              continue;
            }
            if (adds) {
              for (int i = 0; i < columns; ++i) more[i] = load_one<E>(add + (column + i) * add_stride);
            }
            const StoredVec<E> result = E::round(epilogue(sum, more, shift));
            store_apart<S, L>(target + column * column_stride, result, column_stride, columns);
          }
        }
      }
    }
  }
}

}  // namespace convgrad
