// Average pooling and its gradient, over windows of any kind: sums of x over each window of y,
// divided. The host's side is window_sums.py.
//
// y[o] = (sum of x[i] over the window of o) / divisor(o); with WEIGHTED the terms are x[i] / size(i),
// for gradients of windows that differ in size.
// A thread computes WIDTH adjacent elements of `inner` (channels last; 1 with channels first) at RUN
// adjacent positions of y along AXIS. It walks over the lines of x in its windows
// along AXIS: the sum of a line's part is computed once and added to every window that contains the
// line. AXIS is 2 (columns) with channels last and 1 (rows) with channels first, where lanes run along
// axis 2; lines run along the other one. With TAPS a line has at most TAPS of those positions, and
// LINES lines are loaded before the first is added, because memory latency dominates.
// Block: 128 threads; shared memory: none. Deterministic: an element's order of additions follows
// from its window. Relies on its launcher for the grid (chunks of the batch along y), and for aligned
// vectors of WIDTH elements.
// Index limits: extents and a chunk's threads below 2^31; offsets in 64 bits.
#include "pool/windows.cuh"

using namespace convgrad;

namespace {

using T = ELEMENT;
using S = ElementAccumulator<T>;
using Values = Vector<T, WIDTH>;
constexpr int kOther = 3 - AXIS;

// Adds a line's part of the windows to each window that contains the line.
__device__ __forceinline__ void add_line(const WindowArgs& args, const S (&part)[WIDTH],
                                         int line, const int (&start)[RUN], const int (&stop)[RUN],
                                         S (&sum)[RUN][WIDTH]) {
  S weight = S(1);
#if WEIGHTED
  weight = S(1) / static_cast<S>(args.counted[AXIS].size(line));
#endif
#pragma unroll
  for (int r = 0; r < RUN; ++r) {
    if (line < start[r] || line >= stop[r]) continue;
#pragma unroll
    for (int v = 0; v < WIDTH; ++v) {
      sum[r][v] = WEIGHTED ? multiply_add(part[v], weight, sum[r][v]) : sum[r][v] + part[v];
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(128, 4)
    window_sums(const __grid_constant__ WindowArgs args) {
  const int thread = static_cast<int>(blockIdx.x) * 128 + static_cast<int>(threadIdx.x);
  if (thread >= args.threads) return;
  int items[3] = {args.y_size[0], args.y_size[1], args.y_size[2]};
  items[AXIS] = (items[AXIS] + RUN - 1) / RUN;
  const WindowItem item = item_of(args, thread, items, args.inner / WIDTH);
  if (item.group >= args.batch) return;

  int at[3] = {item.at[0], item.at[1], item.at[2]};
  at[AXIS] *= RUN;
  const int run = min(RUN, args.y_size[AXIS] - at[AXIS]);
  const int start0 = args.window[0].start(at[0]), stop0 = args.window[0].stop(at[0]);
  const int start = args.window[kOther].start(at[kOther]);
  const int stop = args.window[kOther].stop(at[kOther]);
  int line_start[RUN], line_stop[RUN];
#pragma unroll
  for (int r = 0; r < RUN; ++r) {
    line_start[r] = args.window[AXIS].start(at[AXIS] + min(r, run - 1));
    line_stop[r] = args.window[AXIS].stop(at[AXIS] + min(r, run - 1));
  }

  const i64 row = static_cast<i64>(args.x_size[2]) * args.inner;
  const i64 step[3] = {row * args.x_size[1], row, args.inner};
  const i64 x_plane = step[0] * args.x_size[0];
  const T* const x = static_cast<const T*>(args.x) + item.group * x_plane +
                     item.vector * WIDTH + start * step[kOther];
  S sum[RUN][WIDTH] = {};
#if TAPS
  S weight[TAPS];
#pragma unroll
  for (int t = 0; t < TAPS; ++t) {
    weight[t] = S(1);
#if WEIGHTED
    if (start + t < stop) weight[t] = S(1) / static_cast<S>(args.counted[kOther].size(start + t));
#endif
  }
#pragma unroll 1
  for (int line = line_start[0]; line < line_stop[RUN - 1]; line += LINES) {
    for (int i0 = start0; i0 < stop0; ++i0) {
      Values values[LINES][TAPS];
#pragma unroll
      for (int l = 0; l < LINES; ++l) {
        const T* const from = x + i0 * step[0] + (line + l) * step[AXIS];
#pragma unroll
        for (int t = 0; t < TAPS; ++t) {
          const bool there = line + l < line_stop[RUN - 1] && start + t < stop;
          values[l][t] = there ? Values::load(from + t * step[kOther]) : Values::zero();
        }
      }
      S outer = S(1);
#if WEIGHTED
      outer = S(1) / static_cast<S>(args.counted[0].size(i0));
#endif
#pragma unroll
      for (int l = 0; l < LINES; ++l) {
        S part[WIDTH] = {};
#pragma unroll
        for (int t = 0; t < TAPS; ++t) {
#pragma unroll
          for (int v = 0; v < WIDTH; ++v) {
            const S value = widen(values[l][t].at[v]);
            part[v] = WEIGHTED ? multiply_add(value, weight[t] * outer, part[v]) : part[v] + value;
          }
        }
        add_line(args, part, line + l, line_start, line_stop, sum);
      }
    }
  }
#else
#pragma unroll 1
  for (int line = line_start[0]; line < line_stop[RUN - 1]; ++line) {
    S part[WIDTH] = {};
    for (int i0 = start0; i0 < stop0; ++i0) {
      const T* from = x + i0 * step[0] + line * step[AXIS];
      S outer = S(1);
#if WEIGHTED
      outer = S(1) / static_cast<S>(args.counted[0].size(i0));
#pragma unroll 1
#else
#pragma unroll 4
#endif
      for (int i = start; i < stop; ++i) {
        S weight = outer;
#if WEIGHTED
        weight = outer / static_cast<S>(args.counted[kOther].size(i));
#endif
        const Values values = Values::load(from);
#pragma unroll
        for (int v = 0; v < WIDTH; ++v) {
          const S value = widen(values.at[v]);
          part[v] = WEIGHTED ? multiply_add(value, weight, part[v]) : part[v] + value;
        }
        from += step[kOther];
      }
    }
    add_line(args, part, line, line_start, line_stop, sum);
  }
#endif

  const i64 y_row = static_cast<i64>(args.y_size[2]) * args.inner;
  const i64 y_step[3] = {y_row * args.y_size[1], y_row, args.inner};
  const i64 y_plane = y_step[0] * args.y_size[0];
  T* const y = static_cast<T*>(args.y) + item.group * y_plane + at[0] * y_step[0] + at[1] * y_step[1] +
               at[2] * y_step[2] + item.vector * WIDTH;
  S by = static_cast<S>(args.divisor), reciprocal = static_cast<S>(args.reciprocal);
  S across = S(1);
  if (args.by_outputs) {
    across = static_cast<S>(args.counted[0].size(at[0])) *
             static_cast<S>(args.counted[kOther].size(at[kOther]));
  }
#pragma unroll
  for (int r = 0; r < RUN; ++r) {
    if (r >= run) break;
    if (args.by_outputs) {
      by = across * static_cast<S>(args.counted[AXIS].size(at[AXIS] + r));
      reciprocal = S(1) / by;
    }
    Values values;
#pragma unroll
    for (int v = 0; v < WIDTH; ++v) {
      values.at[v] = narrow<T>(divided<T>(sum[r][v], by, reciprocal));
    }
    values.store(y + r * y_step[AXIS]);
  }
}
