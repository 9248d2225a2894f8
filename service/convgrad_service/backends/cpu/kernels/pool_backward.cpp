// Max pooling backward: each input position gathers the gradients of the windows whose maximum it
// is, in window order, summed in float (double for F64) and rounded once.
//
// A task is a tile of input positions, for some vectors of channels. It first packs the gradients of all
// windows that may overlap the tile, and the indices of their maxima: those given, or found in the
// input. Then it sums, for each position, the gradients of the windows whose index is the position.
// Windows on the border of a tile are processed by several tasks, but none writes outside its tile.
//
// Requires: PoolArgs from plans/pooling.py. Deterministic: no atomics, and sums are in window
// order. A window's index is met once, by the position that it names, if it is a tap of the window
// inside the input, and never otherwise. So given indices are valid if as many were met as there
// are windows: Control.done[1] counts them.
#include "pool.hpp"

namespace convgrad {
namespace {

CONVGRAD_INLINE i64 floor_quotient(i64 a, i64 b) { return a >= 0 ? a / b : -((-a + b - 1) / b); }

// The windows that may overlap a tile of input positions, including some outside the output.
CONVGRAD_INLINE Windows windows_met(const PoolArgs& args, const PoolTile& tile) {
  i64 first[3], count[3];
  for (int d = 0; d < 3; ++d) {
    const i64 reach = (args.kernel[d] - 1) * args.dilation[d];
    const i64 start = tile.start[d] + args.pad[d];
    first[d] = floor_quotient(start - reach, args.stride[d]);
    count[d] = floor_quotient(start + tile.extent[d] - 1, args.stride[d]) - first[d] + 1;
  }
  return windows_of(args, first, count);
}

// Lists the windows of the block that contain input position i, in one dimension, in ascending
// order (largest tap first). Returns their number.
CONVGRAD_INLINE i64 meetings(const PoolArgs& args, const Windows& windows, int d, i64 i, i64* met) {
  i64 n = 0;
  for (i64 r = args.kernel[d] - 1; r >= 0; --r) {
    const i64 reach = i + args.pad[d] - r * args.dilation[d];
    const i64 window = floor_quotient(reach, args.stride[d]);
    if (window * args.stride[d] == reach) met[n++] = window - windows.first[d];
  }
  return n;
}

// Along W, a tap is at the positions of one stride phase. Consecutive positions of a phase belong
// to consecutive windows.
struct ColumnTap {
  i64 phase;
  i64 window;  // index in the block, for the first position of the phase
};
CONVGRAD_INLINE void column_taps(const PoolArgs& args, const PoolTile& tile, const Windows& windows,
                                 ColumnTap* taps) {
  for (i64 r = 0; r < args.kernel[2]; ++r) {
    const i64 reach = tile.start[2] + args.pad[2] - r * args.dilation[2];
    const i64 window = -floor_quotient(-reach, args.stride[2]);  // rounded up
    taps[r] = {window * args.stride[2] - reach, window - windows.first[2]};
  }
}

// The windows that positions of a plane of the tile may be the maximum of, as offsets in the block.
// Positions of the same phase, a row and a column modulo the stride, have the same list, shifted by
// a window per stride.
struct Meetings {
  i64 phases[2];  // of rows and columns that the tile has
  i64* first;     // [phases[0] * phases[1] + 1]: index of the first offset of each phase
  i64* at;
};

template <class T>
void list_meetings(const PoolArgs& args, const PoolTile& tile, const Windows& windows,
                   const ColumnTap* taps, i64 i0, i64* planes, i64* rows, Meetings& met) {
  const i64 n0 = meetings(args, windows, 0, i0, planes);
  i64 n = 0, p = 0;
  for (i64 row = 0; row < met.phases[0]; ++row) {
    const i64 n1 = meetings(args, windows, 1, tile.start[1] + row, rows);
    for (i64 phase = 0; phase < met.phases[1]; ++phase) {
      met.first[p++] = n;
      for (i64 a = 0; a < n0; ++a) {
        for (i64 b = 0; b < n1; ++b) {
          const i64 base = (planes[a] * windows.count[1] + rows[b]) * windows.count[2];
          for (i64 r = args.kernel[2] - 1; r >= 0; --r) {
            if (taps[r].phase == phase) met.at[n++] = (base + taps[r].window) * kLanes<T>;
          }
        }
      }
    }
  }
  met.first[p] = n;
}

// A row of results. The first `skip` lanes are not written.
template <class T>
struct ResultRow {
  T* data;
  i64 pitch;  // of columns, in elements
  int skip;
};

// U positions of a phase, whose sums overlap to hide latency: the sum of the gradients of the n
// windows `at` whose index is the position. Returns the number of windows met, in each lane.
template <class T, int U>
CONVGRAD_INLINE Mask<T> gather_run(const i64* at, i64 n, const T* index, const T* gradient,
                                   Mask<T> here, i64 step, T* out, i64 pitch, int skip) {
  constexpr int L = kLanes<T>;
  using I = Mask<T>;
  using Lane = typename detail::MaskElement<T>::type;
  Vec<T> sum[U];
  I position[U], met[U];
#pragma clang loop unroll(full)
  for (int u = 0; u < U; ++u) {
    sum[u] = splat(T(0));
    met[u] = I(Lane(0));
    position[u] = here + static_cast<Lane>(u * step);
  }
  for (i64 m = 0; m < n; ++m) {
#pragma clang loop unroll(full)
    for (int u = 0; u < U; ++u) {
      const I chosen = load_raw<I>(index + at[m] + u * L) == position[u];
      const Vec<T> more = sum[u] + load_raw<Vec<T>>(gradient + at[m] + u * L);
      sum[u] = chosen ? more : sum[u];
      met[u] = chosen ? met[u] + Lane(1) : met[u];
    }
  }
#pragma clang loop unroll(full)
  for (int u = 0; u < U; ++u) {
    if (skip == 0) {
      store_raw(out + u * pitch, sum[u]);
    } else {
      store_raw_last<T, L>(out + u * pitch, sum[u], L - skip);
    }
    if (u > 0) met[0] += met[u];
  }
  return met[0];
}

// Computes row v1 of the tile, whose first position has flat index `flat`.
template <class T>
CONVGRAD_INLINE Mask<T> gather_row(const PoolArgs& args, const PoolTile& tile, const Meetings& met,
                                   const T* index, const T* gradient, i64 row_phase, i64 flat,
                                   const ResultRow<T>& row) {
  constexpr int L = kLanes<T>;
  constexpr int U = 4;
  using I = Mask<T>;
  using Lane = typename detail::MaskElement<T>::type;
  const i64 s2 = args.stride[2], pitch = s2 * row.pitch;
  I found = I(Lane(0));
  i64 left = ceil_quotient(tile.extent[2], s2);
  for (i64 phase = 0; phase < met.phases[1]; ++phase) {
    const i64* first = met.first + row_phase * met.phases[1] + phase;
    const i64* at = met.at + first[0];
    const i64 n = first[1] - first[0];
    // Rows of different phases have at most one column less than the first phase.
    const i64 columns = (left - 1) * s2 + phase < tile.extent[2] ? left : left - 1;
    I here = I(static_cast<Lane>(flat + phase));
    const T* where = index;
    const T* grads = gradient;
    T* out = row.data + phase * row.pitch;
    i64 v = 0;
    for (; v + U <= columns; v += U, where += U * L, grads += U * L, out += U * pitch) {
      found += gather_run<T, U>(at, n, where, grads, here, s2, out, pitch, row.skip);
      here += static_cast<Lane>(U * s2);
    }
    for (; v < columns; ++v, where += L, grads += L, out += pitch) {
      found += gather_run<T, 1>(at, n, where, grads, here, s2, out, pitch, row.skip);
      here += static_cast<Lane>(s2);
    }
  }
  return found;
}

template <class E, class Index>
void backward_tasks(const PoolArgs& args, Control* control, void* scratch) {
  using T = typename E::Acc;
  using S = typename E::Storage;
  using Lane = typename detail::MaskElement<T>::type;
  constexpr int L = kLanes<T>;
  const i64 vectors = args.vectors;
  const i64 block = args.windows[0] * args.windows[1] * args.windows[2] * L;
  const View& result = args.grad_input;
  const bool direct = sizeof(S) == sizeof(T) && result.stride[1] == 1 && args.channels >= L;
  // Rows of contiguous columns that are contiguous with each other are unpacked together.
  const bool adjacent = result.stride[1] == 1;
  const bool whole =
      !adjacent && args.tiles[2] == 1 && result.stride[3] == args.input[2] * result.stride[4];
  const i64 results = (adjacent ? 1 : args.tile[1]) * args.tile[2] * L;
  T* rows = static_cast<T*>(scratch);
  T* index = rows + vectors * results;
  T* gradient = index + vectors * block;
  T* x = gradient + vectors * block;
  i64* list = static_cast<i64*>(scratch) + args.scratch_bytes / 8 - args.meeting_words;
  auto* taps = reinterpret_cast<ColumnTap*>(list);
  i64* planes = list + 2 * args.kernel[2];
  i64* row_list = planes + args.kernel[0];
  Meetings meet{{0, 0}, row_list + args.kernel[1], nullptr};
  const Vec<T> none = __builtin_bit_cast(Vec<T>, Mask<T>{} - 1);
  const i64 tasks = pool_tasks<T>(args, vectors);
  i64 found = 0;
  Mask<T> lane{};
  for (int i = 0; i < L; ++i) lane[i] = static_cast<Lane>(i);
  for (i64 task; (task = take_task(control, 0, tasks)) >= 0;) {
    Mask<T> met{};
    const PoolTile all = pool_tile<T>(args, args.input, task, vectors);
    const Windows windows = windows_met(args, all);
    const i64 held = (all.lanes + L - 1) / L;
    // The last vector of contiguous channels overlaps the one before instead of being partial.
    const int skip = direct ? static_cast<int>(held * L - all.lanes) : 0;
    const auto vector_of = [&](i64 v) {
      PoolTile tile = all;
      tile.channel += v * L - (v == held - 1 ? skip : 0);
      tile.lanes = static_cast<int>(least(L, args.channels - tile.channel));
      return tile;
    };
    for (i64 v = 0; v < held; ++v) {
      const PoolTile tile = vector_of(v);
      const BlockBox box = block_box(tile, args.output, windows.first, windows.count);
      read_block<ValueLanes<E>>(args.y, box, splat(T(0)), gradient + v * block);
      if (args.from_indices) {
        read_block<IndexLanes<T, Index>>(args.indices, box, none, index + v * block);
        continue;
      }
      i64 start[3];
      for (int d = 0; d < 3; ++d) start[d] = coordinate(args, d, windows.first[d], 0);
      read_block<ValueLanes<E>>(args.x, block_box(tile, args.input, start, windows.extent),
                                minus_infinity<T>(), x);
      arg_max<T>(args, windows, x, static_cast<T*>(nullptr), index + v * block);
    }
    column_taps(args, all, windows, taps);
    for (int d = 0; d < 2; ++d) meet.phases[d] = least(args.stride[d + 1], all.extent[d + 1]);
    meet.at = meet.first + meet.phases[0] * meet.phases[1] + 1;
    const i64 window_row = windows.count[2] * L;
    for (i64 v0 = 0; v0 < all.extent[0]; ++v0) {
      list_meetings<T>(args, all, windows, taps, all.start[0] + v0, planes, row_list, meet);
      i64 phase = 0, shift = 0;  // of the row's windows, in the block
      for (i64 v1 = 0; v1 < all.extent[1]; ++v1) {
        const i64 flat = flat_index(args, all.start[0] + v0, all.start[1] + v1, all.start[2]);
        for (i64 v = 0; v < held; ++v) {
          const PoolTile tile = vector_of(v);
          const BlockBox out = block_box(tile, args.input, tile.start, tile.extent);
          S* at = element_at<S>(result, out, v0, v1, 0);
          T* packed = rows + v * results + (whole ? v1 * tile.extent[2] * L : 0);
          const int left_out = v == held - 1 ? skip : 0;
          const ResultRow<T> row{direct ? reinterpret_cast<T*>(at) : packed,
                                 direct ? result.stride[4] : L, left_out};
          met += gather_row<T>(args, tile, meet, index + v * block + shift,
                               gradient + v * block + shift, phase, flat, row) &
                 (lane >= static_cast<Lane>(left_out)) & (lane < static_cast<Lane>(tile.lanes));
          if (direct || (whole && v1 + 1 < all.extent[1])) continue;
          const i64 n = (whole ? all.extent[1] : 1) * all.extent[2];
          write_row<ValueLanes<E>>(whole ? element_at<S>(result, out, v0, 0, 0) : at,
                                   result.stride[1], result.stride[4], tile.lanes, n,
                                   whole ? rows + v * results : packed);
        }
        if (++phase == args.stride[1]) {
          phase = 0;
          shift += window_row;
        }
      }
    }
    for (int i = 0; i < L; ++i) found += met[i];
  }
  __atomic_fetch_add(&control->done[1], found, __ATOMIC_RELAXED);
}

template <class E>
void backward(const PoolArgs& args, Control* control, void* scratch) {
  args.index_bytes == 4 ? backward_tasks<E, i32>(args, control, scratch)
                        : backward_tasks<E, i64>(args, control, scratch);
}

}  // namespace
}  // namespace convgrad

extern "C" CONVGRAD_EXPORT void convgrad_pool_backward(const convgrad::PoolArgs* args,
                                                       convgrad::Control* control, void* scratch) {
  using namespace convgrad;
  switch (args->dtype) {
    case kFloat16: return backward<F16>(*args, control, scratch);
    case kBfloat16: return backward<BF16>(*args, control, scratch);
    case kFloat32: return backward<F32>(*args, control, scratch);
    case kFloat64: return backward<F64>(*args, control, scratch);
  }
}
