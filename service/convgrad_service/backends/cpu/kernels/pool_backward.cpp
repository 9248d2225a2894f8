// Max pooling backward: each input position gathers the gradients of the windows whose maximum it
// is, in window order, summed in float (double for F64) and rounded once.
//
// A task is a tile of input positions, for a vector of channels. It first computes the indices of
// the maxima of all windows that may overlap the tile, from the input or by reading and checking
// given indices. Then it sums, for each position, the gradients of the windows whose index is the
// position. Windows on the border of a tile are processed by several tasks, but none writes outside
// its tile.
//
// Requires: PoolArgs from plans/pooling.py. Deterministic: no atomics, and sums are in window
// order. An index that is not a valid tap of its window contributes nothing and is reported:
// Control.error becomes 1 + the position of the first one, in (N, C, output) order.
#include "pool.hpp"

namespace convgrad {
namespace {

// All bits set in the lanes whose index is a tap of the window inside the input. Without dilation,
// a row of taps is a range of flat indices.
template <class T>
CONVGRAD_INLINE Mask<T> in_window(const PoolArgs& args, Mask<T> relative, TapRange taps0,
                                  TapRange taps1, TapRange taps2) {
  using I = Mask<T>;
  using Lane = typename detail::MaskElement<T>::type;
  I found = I(Lane(0));
  const i64 d2 = args.dilation[2];
  for (i64 r0 = taps0.low; r0 < taps0.high; ++r0) {
    for (i64 r1 = taps1.low; r1 < taps1.high; ++r1) {
      if (d2 == 1) {
        const I column = relative - static_cast<Lane>(tap_flat(args, r0, r1, taps2.low));
        found |= (column >= Lane(0)) & (column < static_cast<Lane>(taps2.high - taps2.low));
        continue;
      }
      for (i64 r2 = taps2.low; r2 < taps2.high; ++r2) {
        found |= relative == static_cast<Lane>(tap_flat(args, r0, r1, r2));
      }
    }
  }
  return found;
}

// Checks each index against its window; invalid ones become -1 and are reported.
template <class T>
void check_indices(const PoolArgs& args, Control* control, const PoolTile& tile,
                   const Windows& windows, T* index) {
  constexpr int L = kLanes<T>;
  using I = Mask<T>;
  using Lane = typename detail::MaskElement<T>::type;
  I used = I(Lane(0));
  for (int lane = 0; lane < tile.lanes; ++lane) used[lane] = Lane(-1);
  for (i64 w0 = 0; w0 < windows.count[0]; ++w0) {
    if (!windows.in_output(args, 0, w0)) continue;
    const i64 o0 = windows.first[0] + w0;
    const TapRange taps0 = taps_inside(args, 0, o0);
    for (i64 w1 = 0; w1 < windows.count[1]; ++w1) {
      if (!windows.in_output(args, 1, w1)) continue;
      const i64 o1 = windows.first[1] + w1;
      const TapRange taps1 = taps_inside(args, 1, o1);
      const i64 row = (w0 * windows.count[1] + w1) * windows.count[2];
      const i64 reach = (args.kernel[2] - 1) * args.dilation[2];
      i64 base = windows.base(args, w0, w1, 0);
      for (i64 w2 = 0; w2 < windows.count[2]; ++w2, base += args.stride[2]) {
        if (!windows.in_output(args, 2, w2)) continue;
        T* at = index + (row + w2) * L;
        const I given = load_raw<I>(at);
        const i64 i2 = coordinate(args, 2, windows.first[2] + w2, 0);
        const bool interior = i2 >= 0 && i2 + reach < args.input[2];
        const TapRange taps2 =
            interior ? TapRange{0, args.kernel[2]} : taps_inside(args, 2, windows.first[2] + w2);
        // The only negative index is -1; base may be any negative number.
        const I found = in_window<T>(args, given - static_cast<Lane>(base), taps0, taps1, taps2) &
                        (given >= Lane(0));
        if (__builtin_reduce_or(~found & used) == 0) continue;
        store_raw(at, given | ~found);
        Lane lanes[L];
        store_raw(lanes, found);
        for (int lane = 0; lane < tile.lanes; ++lane) {
          if (lanes[lane] != 0) continue;
          const i64 plane = tile.batch * args.channels + tile.channel + lane;
          report(control, ((plane * args.output[0] + o0) * args.output[1] + o1) * args.output[2] +
                              windows.first[2] + w2);
        }
      }
    }
  }
}

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

// Computes one row of grad_input: row[v] = the sum of the gradients of the windows whose index is
// that position.
template <class T>
void gather_row(const PoolArgs& args, const PoolTile& tile, const Windows& windows,
                const ColumnTap* taps, const T* index, const T* gradient, i64 i0, i64 i1, i64* met,
                T* row) {
  constexpr int L = kLanes<T>;
  using I = Mask<T>;
  using Lane = typename detail::MaskElement<T>::type;
  const i64 s2 = args.stride[2];
  i64* met1 = met + args.kernel[0];
  i64* at = met1 + args.kernel[1];
  const i64 n0 = meetings(args, windows, 0, i0, met);
  const i64 n1 = meetings(args, windows, 1, i1, met1);
  for (i64 phase = 0; phase < s2 && phase < tile.extent[2]; ++phase) {
    i64 n = 0;
    for (i64 a = 0; a < n0; ++a) {
      for (i64 b = 0; b < n1; ++b) {
        const i64 base = (met[a] * windows.count[1] + met1[b]) * windows.count[2];
        for (i64 r = args.kernel[2] - 1; r >= 0; --r) {
          if (taps[r].phase == phase) at[n++] = (base + taps[r].window) * L;
        }
      }
    }
    Lane flat = static_cast<Lane>(flat_index(args, i0, i1, tile.start[2] + phase));
    const T* where = index;
    const T* grads = gradient;
    for (i64 v = phase; v < tile.extent[2]; v += s2, where += L, grads += L) {
      const I here = I(flat);
      Vec<T> sum = splat(T(0));
      for (i64 m = 0; m < n; ++m) {
        const I chosen = load_raw<I>(where + at[m]) == here;
        const Vec<T> more = sum + load_raw<Vec<T>>(grads + at[m]);
        sum = chosen ? more : sum;
      }
      store_raw(row + v * L, sum);
      flat += static_cast<Lane>(s2);
    }
  }
}

template <class E, class Index>
void backward_tasks(const PoolArgs& args, Control* control, void* scratch) {
  using T = typename E::Acc;
  constexpr int L = kLanes<T>;
  const i64 windows_at_most = args.windows[0] * args.windows[1] * args.windows[2];
  T* row = static_cast<T*>(scratch);
  T* index = row + args.tile[2] * L;
  T* gradient = index + windows_at_most * L;
  T* x = gradient + windows_at_most * L;
  i64* met = static_cast<i64*>(scratch) + args.scratch_bytes / 8 - args.meeting_words;
  auto* taps = reinterpret_cast<ColumnTap*>(met);
  met += 2 * args.kernel[2];
  const Vec<T> none = __builtin_bit_cast(Vec<T>, Mask<T>{} - 1);
  const i64 tasks = pool_tasks<T>(args);
  for (i64 task; (task = take_task(control, 0, tasks)) >= 0;) {
    const PoolTile tile = pool_tile<T>(args, args.input, task);
    const Windows windows = windows_met(args, tile);
    const BlockBox box = block_box(tile, args.output, windows.first, windows.count);
    read_block<ValueLanes<E>>(args.y, box, splat(T(0)), gradient);
    if (args.from_indices) {
      read_block<IndexLanes<T, Index>>(args.indices, box, none, index);
      check_indices<T>(args, control, tile, windows, index);
    } else {
      i64 start[3];
      for (int d = 0; d < 3; ++d) start[d] = coordinate(args, d, windows.first[d], 0);
      read_block<ValueLanes<E>>(args.x, block_box(tile, args.input, start, windows.extent),
                                minus_infinity<T>(), x);
      arg_max<T>(args, windows, x, static_cast<T*>(nullptr), index);
    }
    column_taps(args, tile, windows, taps);
    const BlockBox out = block_box(tile, args.input, tile.start, tile.extent);
    for (i64 v0 = 0; v0 < tile.extent[0]; ++v0) {
      for (i64 v1 = 0; v1 < tile.extent[1]; ++v1) {
        gather_row<T>(args, tile, windows, taps, index, gradient, tile.start[0] + v0,
                      tile.start[1] + v1, met, row);
        write_row<ValueLanes<E>>(element_at<typename E::Storage>(args.grad_input, out, v0, v1, 0),
                                 args.grad_input.stride[1], args.grad_input.stride[4], tile.lanes,
                                 tile.extent[2], row);
      }
    }
  }
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
