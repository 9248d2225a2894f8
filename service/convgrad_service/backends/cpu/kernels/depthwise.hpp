// Shared by the depthwise kernels: channel-blocked storage, and runs of taps.
//
// In a block every position is a vector of channels, so taps of any stride and dilation are read
// with full-vector loads. Unless channels are contiguous in the tensor, packing transposes square
// blocks in registers. Columns outside the tensor are zeros; rows outside are skipped.
#pragma once

#include "matrix_copy.hpp"
#include "planar_plan.hpp"

namespace convgrad {

// Columns of a register block, whose multiply-adds overlap to hide latency. The width that wastes
// fewer columns is used. The last block may extend past the end of a row.
inline constexpr i64 kWide = 8, kNarrow = 7;
// Maximum taps of a run, whose weights stay in registers.
inline constexpr int kRunTaps = 7;

CONVGRAD_INLINE i64 columns_together(i64 columns) {
  return ceil_div(columns, kNarrow) * kNarrow < ceil_div(columns, kWide) * kWide ? kNarrow : kWide;
}

// Taps of one kernel row that read adjacent columns of the source, from left to right.
struct TapRun {
  i64 source[3];  // coordinates that the first tap reads at t = 0
  i64 first;      // index of the first tap in the packed weights
  i64 taps;
};

// The taps of all phases, as runs.
struct Runs {
  TapRun* run;
  i64* first;   // [dst_phases + 1]: index of the first run of each phase
  i64* packed;  // [taps]: index of each tap in the packed weights
  i64 low[3];   // minimum and maximum coordinates read at t = 0
  i64 high[3];
};

CONVGRAD_INLINE i64 tap_source(const PlanarArgs& args, i64 tap, int d) {
  const PlanarTap& at = args.tap[tap];
  return (at.offset[d] + args.origin[d]) * args.src_step[d] + args.src_phase[at.src_phase * 3 + d];
}

// Whether a tap reads the column at distance `step` from that of the previous tap, in the same row.
CONVGRAD_INLINE bool neighbours(const PlanarArgs& args, i64 tap, i64 step) {
  return tap_source(args, tap, 0) == tap_source(args, tap - 1, 0) &&
         tap_source(args, tap, 1) == tap_source(args, tap - 1, 1) &&
         tap_source(args, tap, 2) == tap_source(args, tap - 1, 2) + step;
}

inline Runs make_runs(const PlanarArgs& args, Arena& arena) {
  Runs runs;
  runs.run = arena.take<TapRun>(args.taps);
  runs.first = arena.take<i64>(args.dst_phases + 1);
  runs.packed = arena.take<i64>(args.taps);
  for (int d = 0; d < 3; ++d) {
    runs.low[d] = args.taps > 0 ? tap_source(args, 0, d) : 0;
    runs.high[d] = runs.low[d];
    for (i64 tap = 1; tap < args.taps; ++tap) {
      runs.low[d] = least(runs.low[d], tap_source(args, tap, d));
      runs.high[d] = most(runs.high[d], tap_source(args, tap, d));
    }
  }
  i64 count = 0;
  for (i64 p = 0; p < args.dst_phases; ++p) {
    runs.first[p] = count;
    for (i64 tap = args.first_tap[p], end = args.first_tap[p + 1]; tap < end;) {
      i64 taps = 1, step = 0;
      if (tap + 1 < end) step = neighbours(args, tap + 1, 1) ? 1 : neighbours(args, tap + 1, -1) ? -1 : 0;
      while (step != 0 && taps < kRunTaps && tap + taps < end && neighbours(args, tap + taps, step)) {
        ++taps;
      }
      const i64 leftmost = step < 0 ? tap + taps - 1 : tap;
      TapRun& run = runs.run[count++];
      for (int d = 0; d < 3; ++d) run.source[d] = tap_source(args, leftmost, d);
      run.first = tap;
      run.taps = taps;
      for (i64 i = 0; i < taps; ++i) runs.packed[step < 0 ? tap + taps - 1 - i : tap + i] = tap + i;
      tap += taps;
    }
  }
  runs.first[args.dst_phases] = count;
  return runs;
}

// Address of a task's channels at a position of a tensor (N, G, 1, 3 spatial).
template <class S>
CONVGRAD_INLINE S* block_at(const View& view, const TileOrigin& tile, i64 i0, i64 i1, i64 i2) {
  return static_cast<S*>(view.data) + tile.batch * view.stride[0] + tile.group * view.stride[1] +
         i0 * view.stride[3] + i1 * view.stride[4] + i2 * view.stride[5];
}

// Packs n positions, `width` per row, into rows with a pitch of `pitch` vectors. Each vector of
// channels has its own block; blocks are `block` elements apart.
template <class E>
void read_positions(const typename E::Storage* from, const View& view, i64 channels, i64 n,
                    i64 width, typename E::Acc* out, i64 pitch, i64 block) {
  using T = typename E::Acc;
  constexpr int L = kLanes<T>;
  const i64 channel = view.stride[1], column = view.stride[5];
  if (channel == 1 || channels == 1) {
    for (; n > 0; n -= width, out += pitch * L) {
      for (i64 v = 0; v < width; ++v, from += column) {
        T* to = out + v * L;
        i64 c = 0;
        for (; c + L <= channels; c += L, to += block) store_raw(to, load<E>(from + c));
        if (c < channels) store_raw(to, load_first<E>(from + c, static_cast<int>(channels - c)));
      }
    }
    return;
  }
  for (i64 c = 0; c < channels; c += L, out += block) {
    const int lanes = static_cast<int>(least(channels - c, L));
    i64 at = 0;
    T* row = out;
    for (i64 v = 0; v < n; v += L) {
      const int columns = static_cast<int>(least(n - v, L));
      const auto* corner = from + c * channel + v * column;
      Vec<T> square[L];
      if (column == 1 && lanes == L && columns == L) {
#pragma clang loop unroll(full)
        for (int i = 0; i < L; ++i) square[i] = load<E>(corner + i * channel);
      } else {
        for (int i = 0; i < L; ++i) {
          square[i] = i < lanes ? load_strided<E>(corner + i * channel, column, columns)
                                : splat(T(0));
        }
      }
      transpose<T>(square);
      for (int j = 0; j < columns; ++j) {
        store_raw(row + at * L, square[j]);
        if (++at == width) {
          at = 0;
          row += pitch * L;
        }
      }
    }
  }
}

// Unpacks n positions through an epilogue. They are consecutive in both the blocks and the tensor.
template <class E>
void write_positions(const typename E::Acc* sums, i64 block, i64 channels, i64 n,
                     typename E::Storage* to, const View& view, const typename E::Storage* add,
                     const View& accumulate, const Epilogue<typename E::Acc>& epilogue,
                     const typename E::Acc* bias) {
  using T = typename E::Acc;
  constexpr int L = kLanes<T>;
  const i64 channel = view.stride[1], column = view.stride[5];
  const i64 add_channel = accumulate.stride[1], add_column = accumulate.stride[5];
  if (channel == 1 || channels == 1) {
    const bool plain = add == nullptr && !epilogue.scales && epilogue.activation == kNone;
    for (i64 v = 0; v < n; ++v, to += column, sums += L) {
      i64 c = 0;
      const T* sum = sums;
      for (; plain && c + L <= channels; c += L, sum += block) {
        store<E>(to + c, load_raw<Vec<T>>(sum) + load_raw<Vec<T>>(bias + c));
      }
      for (; c < channels; c += L, sum += block) {
        const int lanes = static_cast<int>(least(channels - c, L));
        Vec<T> more = splat(T(0));
        if (add != nullptr) {
          more = load_strided<E>(add + v * add_column + c * add_channel, add_channel, lanes);
        }
        const Vec<T> shift = load_raw<Vec<T>>(bias + c);
        store_some<E>(to + c, epilogue(load_raw<Vec<T>>(sum), more, shift), lanes);
      }
    }
    return;
  }
  for (i64 c = 0; c < channels; c += L, sums += block) {
    const int lanes = static_cast<int>(least(channels - c, L));
    for (i64 v = 0; v < n; v += L) {
      const int columns = static_cast<int>(least(n - v, L));
      Vec<T> square[L];
#pragma clang loop unroll(full)
      for (int j = 0; j < L; ++j) square[j] = load_raw<Vec<T>>(sums + (v + j) * L);
      transpose<T>(square);
      for (int i = 0; i < lanes; ++i) {
        Vec<T> more = splat(T(0));
        if (add != nullptr) {
          more = load_strided<E>(add + (c + i) * add_channel + v * add_column, add_column, columns);
        }
        const Vec<T> result = epilogue(square[i], more, splat(bias[c + i]));
        typename E::Storage* at = to + (c + i) * channel + v * column;
        if (column == 1) {
          store_some<E>(at, result, columns);
        } else {
          for (int j = 0; j < columns; ++j) store_one<E>(at + j * column, result[j]);
        }
      }
    }
  }
}

// Packs the source blocks of a tile, starting at coordinates `first`. Rows outside the tensor are
// not written, except for `past` vectors of zeros after the last row inside.
template <class E>
void read_source_blocks(const PlanarArgs& args, const TileOrigin& tile, const i64* first,
                        const i64* extent, i64 past, typename E::Acc* out, i64 block) {
  using T = typename E::Acc;
  constexpr int L = kLanes<T>;
  const View& view = args.src;
  const i64 width = extent[2];
  const i64 left = most(0, least(width, -first[2]));
  const i64 right = most(left, least(width, args.src_size[2] - first[2]));
  const i64 top = most(0, -first[1]);
  const i64 bottom = least(extent[1], args.src_size[1] - first[1]);
  const bool whole = right - left == args.src_size[2] &&
                     view.stride[4] == args.src_size[2] * view.stride[5];
  for (i64 v0 = 0; v0 < extent[0]; ++v0) {
    const i64 i0 = first[0] + v0;
    if (i0 < 0 || i0 >= args.src_size[0] || top >= bottom) continue;
    T* plane = out + v0 * extent[1] * width * L;
    for (i64 c = 0; c < tile.groups; c += L) {
      T* rows = plane + c / L * block;
      for (i64 v1 = top; v1 < bottom; ++v1) {
        fill_zero(rows + v1 * width * L, left * L);
        fill_zero(rows + (v1 * width + right) * L, (width - right) * L);
      }
      fill_zero(rows + bottom * width * L, past * L);
    }
    if (left == right) continue;
    const i64 rows = whole ? bottom - top : 1;
    for (i64 v1 = top; v1 < bottom; v1 += rows) {
      read_positions<E>(block_at<const typename E::Storage>(view, tile, i0, first[1] + v1,
                                                            first[2] + left),
                        view, tile.groups, rows * (right - left), right - left,
                        plane + (v1 * width + left) * L, width, block);
    }
  }
}

}  // namespace convgrad
