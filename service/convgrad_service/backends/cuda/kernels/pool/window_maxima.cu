// Max pooling over windows of any kind: maxima and their positions. Launched by window_maxima.py.
//
// y[o] = the maximum of x over the window of o, indices[o] = its flat position in the plane. Of equal
// maxima the first wins; a NaN wins over any number, and of several NaNs the last.
// A thread computes WIDTH adjacent elements of `inner` at one position of y. If ROWS > 0, windows have at
// most ROWS by COLUMNS adjacent positions along their last two axes, all of which are loaded before the
// first comparison. Otherwise they have any number, and a dilation.
// SLIDING: one slice, and windows of 3 by at most 3 positions that slide by one along axis 1. A thread computes
// `run` positions along it; each line is loaded and reduced once for its three windows.
// Block: 128 threads; shared memory: none. Deterministic. Grid: y = chunks of the
// batch. Preconditions: aligned vectors; windows contain a position.
// Index limits: planes and a chunk's threads below 2^31; offsets in 64 bits.
#include "pool/maximum.cuh"
#include "pool/windows.cuh"

using namespace convgrad;

namespace {

using T = ELEMENT;
using S = ElementAccumulator<T>;
using Values = Vector<T, WIDTH>;

// Running maxima of WIDTH windows.
struct Most {
  Maximum<T> of[WIDTH];

  __device__ __forceinline__ void take(const Values& values, int position, bool first) {
#pragma unroll
    for (int v = 0; v < WIDTH; ++v) of[v].take(values.at[v], position, first);
  }
  // A later part of the window.
  __device__ __forceinline__ void meet(const Most& later) {
#pragma unroll
    for (int v = 0; v < WIDTH; ++v) of[v].meet(later.of[v], false);
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(128, 4)
    window_maxima(const __grid_constant__ WindowArgs args) {
  const int thread = static_cast<int>(blockIdx.x) * 128 + static_cast<int>(threadIdx.x);
  if (thread >= args.threads) return;
  const int items[3] = {args.y_size[0], (args.y_size[1] + args.run - 1) / args.run, args.y_size[2]};
  const WindowItem item = item_of(args, thread, items, args.inner / WIDTH);
  if (item.group >= args.batch) return;
  const i64 row = static_cast<i64>(args.x_size[2]) * args.inner;
  const i64 x_plane = row * args.x_size[1] * args.x_size[0];
  const i64 lead = item.group * x_plane + item.vector * WIDTH;
  const T* const x = static_cast<const T*>(args.x) + lead;
  const i64 outputs = static_cast<i64>(args.y_size[0]) * args.y_size[1] * args.y_size[2];
  const auto store = [&](const Most& most, int at1) {
    const i64 position =
        (static_cast<i64>(item.at[0]) * args.y_size[1] + at1) * args.y_size[2] + item.at[2];
    const i64 to = (item.group * outputs + position) * args.inner + item.vector * WIDTH;
    Values values;
    int where[WIDTH];
#pragma unroll
    for (int v = 0; v < WIDTH; ++v) {
      values.at[v] = most.of[v].element();
      where[v] = most.of[v].where;
    }
    if (args.y != nullptr) values.store(static_cast<T*>(args.y) + to);
    store_positions(args, lead, to, where, args.inner / WIDTH % 2 == 0);
  };
#if SLIDING
  // Beside the lines and columns that exist, the nearest of them, which are in the window as well.
  const auto within = [&](int axis, int at) {
    return min(max(at, args.window[axis].low), args.window[axis].high - 1);
  };
  int columns[3];
#pragma unroll
  for (int t = 0; t < 3; ++t) {
    const int start = item.at[2] * args.window[2].whole + args.window[2].first;
    const int last = item.at[2] * args.window[2].whole + args.window[2].last - 1;
    columns[t] = within(2, min(start + t, last));
  }
  const int begin = item.at[1] * args.run, end = min(begin + args.run, args.y_size[1]);
  int next = begin + args.window[1].first;  // the line that is reduced next
  Values ahead[3];
  const auto fetch = [&](int line) {
    const T* const from = x + within(1, line) * row;
#pragma unroll
    for (int t = 0; t < 3; ++t) ahead[t] = Values::load(from + static_cast<i64>(columns[t]) * args.inner);
  };
  Most kept[3];
  const auto keep = [&](Most& as) {
    const int position = within(1, next) * args.x_size[2];
#pragma unroll
    for (int t = 0; t < 3; ++t) as.take(ahead[t], position + columns[t], t == 0);
    ++next;
    fetch(next);
  };
  fetch(next);
  keep(kept[0]);
  keep(kept[1]);
  for (int at1 = begin; at1 < end;) {
#pragma unroll
    for (int turn = 0; turn < 3; ++turn) {
      if (at1 >= end) break;
      keep(kept[(turn + 2) % 3]);
      Most most = kept[turn];
      most.meet(kept[(turn + 1) % 3]);
      most.meet(kept[(turn + 2) % 3]);
      store(most, at1++);
    }
  }
#else
  int start[3], stop[3];
#pragma unroll
  for (int axis = 0; axis < 3; ++axis) {
    start[axis] = ROWS ? window_start(args.window[axis], item.at[axis])
                       : window_first(args, axis, item.at[axis]);
    stop[axis] = window_stop(args.window[axis], item.at[axis]);
  }
  Most most;
#if ROWS
  for (int i0 = start[0]; i0 < stop[0]; ++i0) {
    const int corner = (i0 * args.x_size[1] + start[1]) * args.x_size[2] + start[2];
    const T* const from = x + static_cast<i64>(corner) * args.inner;
    Values values[ROWS][COLUMNS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) {
        const bool there = start[1] + r < stop[1] && start[2] + c < stop[2];
        values[r][c] = there ? Values::load(from + r * row + c * args.inner) : Values::zero();
      }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) {
        if (start[1] + r >= stop[1] || start[2] + c >= stop[2]) continue;
        const bool first = r == 0 && c == 0 && i0 == start[0];
        most.take(values[r][c], corner + r * args.x_size[2] + c, first);
      }
    }
  }
#else
  const i64 step = static_cast<i64>(args.dilation[2]) * args.inner;
  bool first = true;
  for (int i0 = start[0]; i0 < stop[0]; i0 += args.dilation[0]) {
    for (int i1 = start[1]; i1 < stop[1]; i1 += args.dilation[1]) {
      int position = (i0 * args.x_size[1] + i1) * args.x_size[2] + start[2];
      const int end = position - start[2] + stop[2];
      const T* from = x + static_cast<i64>(position) * args.inner;
#pragma unroll 2
      for (; position < end; position += args.dilation[2]) {
        most.take(Values::load(from), position, first);
        first = false;
        from += step;
      }
    }
  }
#endif
  store(most, item.at[1]);
#endif
}
