// Shared by the depthwise kernels: positions as vectors of channels, and runs of taps.
//
// A vector holds one position of adjacent channels, so taps of any stride and dilation are read with
// full-vector loads. Tensors whose channels are contiguous and whose elements are accumulators are
// read in place (`direct`); of others, a task packs its part into a block of the same order, by
// transposing squares in registers. Rows and columns outside the tensor are skipped, the latter by
// code for the few blocks of columns that reach any.
#pragma once

#include "matrix_copy.hpp"
#include "planar_plan.hpp"

namespace convgrad {

// Maximum taps of a run, whose weights stay in registers.
inline constexpr int kRunTaps = 7;

// Columns of a register block, whose multiply-adds overlap to hide latency: of 8, 7 and 4, the
// number that wastes the fewest columns, or else the largest.
inline constexpr i64 kColumns = 8;
CONVGRAD_INLINE i64 columns_together(i64 columns) {
  const auto covered = [&](i64 each) { return ceil_div(columns, each) * each; };
  const i64 best = covered(7) < covered(kColumns) ? 7 : kColumns;
  return covered(4) < covered(best) ? 4 : best;
}

// Blocks of columns for which a vector of channels is processed before the next one. More than one
// only if there are few vectors, so that memory is read in order.
CONVGRAD_INLINE i64 blocks_together(i64 vectors) { return most(1, 8 / vectors); }

// Positions of one image; position (0, 0, 0) of the tensor may lie outside a block.
template <class T>
struct Grid {
  T* data;
  i64 step[3];
  CONVGRAD_INLINE T* at(i64 i0, i64 i1, i64 i2) const {
    return data + i0 * step[0] + i1 * step[1] + i2 * step[2];
  }
};

// The vectors of a task's channels. In a tensor, the last vector ends at the last channel, so it
// overlaps the one before; in a block, it is padded with zeros.
template <class T>
struct Vectors {
  i64 count;
  i64 channels;
  bool direct;
  CONVGRAD_INLINE i64 start(i64 v) const {
    return direct ? least(v * kLanes<T>, channels - kLanes<T>) : v * kLanes<T>;
  }
};

// Whether the taps of a channel are adjacent in the weight, in any order. `seen` has room for them.
template <class T>
bool taps_are_packed(const PlanarArgs& args, T* seen) {
  fill_zero(seen, args.taps);
  for (i64 i = 0; i < args.taps; ++i) {
    const i64 at = args.tap[i].weight;
    if (at < 0 || at >= args.taps || seen[at] != T(0)) return false;
    seen[at] = T(1);
  }
  return true;
}

// Whether a tensor (N, G, 1, 3 spatial) is accessed in place.
template <class E>
CONVGRAD_INLINE bool in_place(const PlanarArgs& args, const View& view) {
  return sizeof(typename E::Storage) == sizeof(typename E::Acc) && view.stride[1] == 1 &&
         args.groups >= kLanes<typename E::Acc>;
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
  i64* left;    // [dst_phases]: the same of the columns that each phase reads
  i64* right;
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
  runs.left = arena.take<i64>(args.dst_phases);
  runs.right = arena.take<i64>(args.dst_phases);
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
    runs.left[p] = runs.right[p] = 0;
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
      const i64 last = run.source[2] + taps - 1;
      const bool only = count == runs.first[p] + 1;
      runs.left[p] = only ? run.source[2] : least(runs.left[p], run.source[2]);
      runs.right[p] = only ? last : most(runs.right[p], last);
      tap += taps;
    }
  }
  runs.first[args.dst_phases] = count;
  return runs;
}

// The source that a run of taps reads for a result row.
template <class T>
struct MetRun {
  const T* row;  // column 0 of the source row
  i64 start;     // source column of the first tap at t = 0
  i64 weight;    // offset of the run's weights or sums
  i64 taps;
};

// The runs of a result row, at a block of columns.
template <class T>
struct Met {
  const MetRun<T>* run;
  i64 count;
  i64 t;       // of the first column
  i64 step;    // source columns from one result column to the next
  i64 column;  // distance of source columns, in elements
  i64 width;   // of the source
};

// What a run reads for a block of columns. Unless all columns are `inside`, those outside of the
// row are not read.
template <class T, bool inside>
struct Columns {
  const T* data;
  i64 first;
  i64 column;
  i64 width;
  i64 step;
  i64 across;  // from one result column to the next, in elements
  CONVGRAD_INLINE Columns(const Met<T>& met, const MetRun<T>& run, i64 offset)
      : first(run.start + met.t * met.step),
        column(met.column),
        width(met.width),
        step(met.step),
        across(met.step * met.column) {
    data = run.row + first * column + offset;
  }
  // At tap s of result column q; with adjacent columns, q + s alone matters.
  CONVGRAD_INLINE bool has(i64 q, i64 s) const {
    return inside || static_cast<u64>(first + q * step + s) < static_cast<u64>(width);
  }
  CONVGRAD_INLINE Vec<T> at(i64 q, i64 s) const {
    return load_raw<Vec<T>>(data + q * across + s * column);
  }
};

// Address of a task's channels at a position of a tensor (N, G, 1, 3 spatial).
template <class S>
CONVGRAD_INLINE S* block_at(const View& view, const TileOrigin& tile, i64 i0, i64 i1, i64 i2) {
  return static_cast<S*>(view.data) + tile.batch * view.stride[0] + tile.group * view.stride[1] +
         i0 * view.stride[3] + i1 * view.stride[4] + i2 * view.stride[5];
}

// Packs n consecutive positions, in steps of `position` elements.
template <class E>
void read_positions(const typename E::Storage* from, const View& view, i64 channels, i64 n,
                    typename E::Acc* out, i64 position) {
  using T = typename E::Acc;
  constexpr int L = kLanes<T>;
  const i64 channel = view.stride[1], column = view.stride[5];
  if (channel == 1 || channels == 1) {
    for (i64 v = 0; v < n; ++v, from += column, out += position) {
      i64 c = 0;
      for (; c + L <= channels; c += L) store_raw(out + c, load<E>(from + c));
      if (c < channels) {
        store_raw(out + c, load_first<E>(from + c, static_cast<int>(channels - c)));
      }
    }
    return;
  }
  for (i64 c = 0; c < channels; c += L) {
    const int lanes = static_cast<int>(least(channels - c, L));
    for (i64 v = 0; v < n; v += L) {
      const int columns = static_cast<int>(least(n - v, L));
      const auto* corner = from + c * channel + v * column;
      T* to = out + v * position + c;
      Vec<T> square[L];
      if (column == 1 && lanes == L && columns == L) {
#pragma clang loop unroll(full)
        for (int i = 0; i < L; ++i) square[i] = load<E>(corner + i * channel);
        transpose<T>(square);
#pragma clang loop unroll(full)
        for (int j = 0; j < L; ++j) store_raw(to + j * position, square[j]);
        continue;
      }
#pragma clang loop unroll(full)
      for (int i = 0; i < L; ++i) {
        square[i] = i < lanes ? load_strided<E>(corner + i * channel, column, columns)
                              : splat(T(0));
      }
      transpose<T>(square);
#pragma clang loop unroll(full)
      for (int j = 0; j < L; ++j) {
        if (j < columns) store_raw(to + j * position, square[j]);
      }
    }
  }
}

// Unpacks n consecutive positions through an epilogue.
template <class E>
void write_positions(const typename E::Acc* sums, i64 position, i64 channels, i64 n,
                     typename E::Storage* to, const View& view, const typename E::Storage* add,
                     const View& accumulate, const Epilogue<typename E::Acc>& epilogue,
                     const typename E::Acc* bias) {
  using T = typename E::Acc;
  constexpr int L = kLanes<T>;
  const i64 channel = view.stride[1], column = view.stride[5];
  const i64 add_channel = accumulate.stride[1], add_column = accumulate.stride[5];
  if (channel == 1 || channels == 1) {
    for (i64 v = 0; v < n; ++v, to += column, sums += position) {
      for (i64 c = 0; c < channels; c += L) {
        const int lanes = static_cast<int>(least(channels - c, L));
        Vec<T> more = splat(T(0));
        if (add != nullptr) {
          more = load_strided<E>(add + v * add_column + c * add_channel, add_channel, lanes);
        }
        const Vec<T> shift = load_raw<Vec<T>>(bias + c);
        store_some<E>(to + c, epilogue(load_raw<Vec<T>>(sums + c), more, shift), lanes);
      }
    }
    return;
  }
  for (i64 c = 0; c < channels; c += L, sums += L) {
    const int lanes = static_cast<int>(least(channels - c, L));
    for (i64 v = 0; v < n; v += L) {
      const int columns = static_cast<int>(least(n - v, L));
      Vec<T> square[L];
      const T* from = sums + v * position;
      if (columns == L) {
#pragma clang loop unroll(full)
        for (int j = 0; j < L; ++j) square[j] = load_raw<Vec<T>>(from + j * position);
      } else {
#pragma clang loop unroll(full)
        for (int j = 0; j < L; ++j) {
          square[j] = j < columns ? load_raw<Vec<T>>(from + j * position) : splat(T(0));
        }
      }
      transpose<T>(square);
#pragma clang loop unroll(full)
      for (int i = 0; i < L; ++i) {
        if (i >= lanes) continue;
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

// A task's part of a tensor, from coordinates `first` on: the tensor itself if it is accessed in
// place, else a block, into which it is packed. What is outside the tensor is not in a block.
template <class E>
Grid<const typename E::Acc> read_grid(const View& view, const int64_t* size, const TileOrigin& tile,
                                      const i64* first, const i64* extent, bool direct,
                                      typename E::Acc* block, i64 position) {
  using T = typename E::Acc;
  using S = typename E::Storage;
  if (direct) {
    const T* data = reinterpret_cast<const T*>(block_at<const S>(view, tile, 0, 0, 0));
    return {data, {view.stride[3], view.stride[4], view.stride[5]}};
  }
  i64 low[3], high[3];
  for (int d = 0; d < 3; ++d) {
    low[d] = most(0, first[d]);
    high[d] = most(low[d], least(first[d] + extent[d], size[d]));
  }
  const i64 width = high[2] - low[2];
  const i64 row = width * position, plane = (high[1] - low[1]) * row;
  const bool whole = view.stride[4] == width * view.stride[5];
  const i64 rows = whole ? most(1, high[1] - low[1]) : 1;
  for (i64 i0 = low[0]; width > 0 && i0 < high[0]; ++i0) {
    for (i64 i1 = low[1]; i1 < high[1]; i1 += rows) {
      read_positions<E>(block_at<const S>(view, tile, i0, i1, low[2]), view, tile.groups,
                        rows * width, block + (i0 - low[0]) * plane + (i1 - low[1]) * row,
                        position);
    }
  }
  const i64 origin = low[0] * plane + low[1] * row + low[2] * position;
  return {block - origin, {plane, row, position}};
}

}  // namespace convgrad
