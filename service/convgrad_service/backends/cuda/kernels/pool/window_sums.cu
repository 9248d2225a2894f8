// Average pooling and its gradient, over windows of any kind: sums of x over each window of y,
// divided. Launched by window_sums.py.
//
// y[o] = (sum of x[i] over the window of o) / divisor(o); with WEIGHTED the terms are x[i] / size(i),
// for gradients of windows that differ in size.
// A thread computes WIDTH adjacent elements of `inner` (channels last; 1 with channels first) at
// adjacent positions of y along AXIS. The lines of x in its windows are the positions along AXIS; the
// sum of a line's part of the windows is computed once and added to every window that contains the
// line. AXIS is 2 (columns) with channels last and 1 (rows) with channels first, where lanes run along
// axis 2.
// SLIDING, channels last: windows share lines, and have at most LINES by TAPS positions. A thread
// computes `run` positions, keeps the sums of the last LINES lines, and loads a line ahead. A block has
// 2^lanes_log adjacent vectors of adjacent rows (of all slices and images), so that its loads of a row
// of x meet in the L1 cache. SIMPLE: windows slide by whole positions.
// Otherwise a thread computes RUN positions; with TAPS a window has at most LINES by TAPS positions,
// which are loaded before the first is added, because memory latency dominates.
// Block: 128 threads; shared memory: none. Deterministic: an element's order of additions follows
// from its window. Grid: y = chunks of the batch. Preconditions: aligned vectors of WIDTH
// elements.
// Index limits: extents and a chunk's threads below 2^31; offsets in 64 bits.
#include "pool/windows.cuh"

using namespace convgrad;

namespace {

using T = ELEMENT;
using S = ElementAccumulator<T>;
using Values = Vector<T, WIDTH>;
}  // namespace

#if SLIDING
constexpr int kAhead = 2;
// Whether a load's address is computed from the last one's, and whether lines stay in their registers.
constexpr bool kAdvances = SIMPLE || (sizeof(T) == 2 && !WEIGHTED), kRing = SIMPLE && sizeof(T) == 2;
constexpr int kTurns = kRing ? LINES : 1;
// Other GPUs' compilers need more registers for weights.
constexpr bool kFewer = WIDTH == 8 || (WEIGHTED && __CUDA_ARCH__ != 900);
constexpr bool kFewest = WIDTH == 8 && WEIGHTED && __CUDA_ARCH__ != 900;
constexpr int kBlocks = TAPS > 3 ? (WEIGHTED ? 3 : 4) : kFewest ? 4 : kFewer ? 5 : 6;

extern "C" __global__ void __launch_bounds__(128, kBlocks)
    window_sums(const __grid_constant__ WindowArgs args) {
  const int vectors = args.inner / WIDTH, lanes = 1 << args.lanes_log;
  const int blocks = (vectors + lanes - 1) >> args.lanes_log;
  const int runs = (args.y_size[2] + args.run - 1) / args.run;
  const int outer = divide(static_cast<int>(blockIdx.x), args.by_vectors);
  const int rows = divide(outer, args.by_items[2]);
  const int vector = ((static_cast<int>(blockIdx.x) - outer * blocks) << args.lanes_log) +
                     (static_cast<int>(threadIdx.x) & (lanes - 1));
  const int row = rows * (128 >> args.lanes_log) + (static_cast<int>(threadIdx.x) >> args.lanes_log);
  if (vector >= vectors || row >= args.threads) return;
  const int slice = divide(row, args.by_items[1]), image = divide(slice, args.by_items[0]);
  const int at0 = slice - image * args.y_size[0], at1 = row - slice * args.y_size[1];
  const i64 item = static_cast<i64>(blockIdx.y) * args.chunk + image;
  if (item >= args.batch) return;
  const int begin = (outer - rows * runs) * args.run;
  const int end = min(begin + args.run, args.y_size[2]);

  const int start0 = SIMPLE ? 0 : window_start(args.window[0], at0), stop0 = SIMPLE ? 1 : window_stop(args.window[0], at0);
  const int start = window_start<SIMPLE>(args.window[1], at1), stop = window_stop<SIMPLE>(args.window[1], at1);
  const int last = start0 < stop0 ? window_stop<SIMPLE>(args.window[2], end - 1) : 0;
  const i64 x_row = static_cast<i64>(args.x_size[2]) * args.inner;
  const i64 x_slice = x_row * args.x_size[1];
  const T* const x = static_cast<const T*>(args.x) + item * x_slice * args.x_size[0] +
                     start * x_row + vector * WIDTH;
  S first_weight = S(1), weight[TAPS];  // of the first slice, of rows
#if WEIGHTED && !SIMPLE
  first_weight = S(1) / static_cast<S>(window_size<SIMPLE>(args.counted[0], start0));
#endif
#pragma unroll
  for (int t = 0; t < TAPS; ++t) {
    weight[t] = S(1);
#if WEIGHTED
    if (start + t < stop) weight[t] = S(1) / static_cast<S>(window_size<SIMPLE>(args.counted[1], start + t));
#endif
  }
  // The next lines' parts of the windows; the one after them is `line` in slice i0.
  Values ahead[kAhead][TAPS] = {};
  int line = window_start<SIMPLE>(args.window[2], begin), next = line, i0 = start0;
  const T* from = x + start0 * x_slice + static_cast<i64>(line) * args.inner;
  const i64 next_line = SIMPLE ? args.inner : args.inner - (stop0 - start0 - 1) * x_slice;
  const auto load = [&](Values (&values)[TAPS]) {
    if (line >= last) return;
    if (!kAdvances) from = x + i0 * x_slice + static_cast<i64>(line) * args.inner;
#pragma unroll
    for (int t = 0; t < TAPS; ++t) {
      if (start + t < stop) values[t] = Values::load(from + t * x_row);
    }
    const bool stays = !SIMPLE && ++i0 < stop0;
    if (kAdvances) from += stays ? x_slice : next_line;
    if (stays) return;
    i0 = start0;
    ++line;
  };
#pragma unroll
  for (int a = 0; a < kAhead; ++a) load(ahead[a]);

  S by = static_cast<S>(args.divisor), reciprocal = static_cast<S>(args.reciprocal);
  S across = S(1);
  if (args.by_outputs) {
    across = static_cast<S>(window_size<SIMPLE>(args.counted[0], at0)) * static_cast<S>(window_size<SIMPLE>(args.counted[1], at1));
  }
  const i64 position = (item * args.y_size[0] + at0) * args.y_size[1] + at1;
  T* y = static_cast<T*>(args.y) + (position * args.y_size[2] + begin) * args.inner + vector * WIDTH;
  S kept[LINES][WIDTH] = {}, kept_weight[LINES] = {};  // of the last lines; the oldest is at `turn`
  // The next line.
  const auto keep = [&](int turn) {
    S part[WIDTH] = {};
    S slice_weight = first_weight;
#pragma unroll 1
    for (int slices = start0; slices < stop0; ++slices) {
      Values now[TAPS];
#pragma unroll
      for (int t = 0; t < TAPS; ++t) {
        now[t] = ahead[0][t];
#pragma unroll
        for (int a = 1; a < kAhead; ++a) ahead[a - 1][t] = ahead[a][t];
      }
      load(ahead[kAhead - 1]);
#if WEIGHTED && !SIMPLE
      if (slices > start0) slice_weight = S(1) / static_cast<S>(window_size<SIMPLE>(args.counted[0], slices));
#endif
#pragma unroll
      for (int t = 0; t < TAPS; ++t) {
#pragma unroll
        for (int v = 0; v < WIDTH; ++v) {
          const S value = widen(now[t].at[v]);
          part[v] = WEIGHTED ? multiply_add(value, weight[t] * slice_weight, part[v])
                             : part[v] + value;
        }
      }
    }
    const int own = kRing ? turn : LINES - 1;
#pragma unroll
    for (int v = 0; v < WIDTH; ++v) {
#pragma unroll
      for (int l = 1; l < LINES && !kRing; ++l) kept[l - 1][v] = kept[l][v];
      kept[own][v] = part[v];
    }
#if WEIGHTED
#pragma unroll
    for (int l = 1; l < LINES && !kRing; ++l) kept_weight[l - 1] = kept_weight[l];
    kept_weight[own] = S(1) / static_cast<S>(window_size<SIMPLE>(args.counted[2], next));
#endif
    ++next;
  };
  // Window `at`, which starts with `low` and ends with the last of the lines before `high`.
  const auto store = [&](int at, int low, int high, int turn) {
    S sum[WIDTH] = {};
#pragma unroll
    for (int l = 0; l < LINES; ++l) {
      if (high - LINES + l < low) continue;
      const int own = (turn + l) % LINES;
#pragma unroll
      for (int v = 0; v < WIDTH; ++v) {
        sum[v] = WEIGHTED ? multiply_add(kept[own][v], kept_weight[own], sum[v]) : sum[v] + kept[own][v];
      }
    }
    if (args.by_outputs) {
      by = across * static_cast<S>(window_size<SIMPLE>(args.counted[2], at));
      reciprocal = S(1) / by;
    }
    Values values;
#pragma unroll
    for (int v = 0; v < WIDTH; ++v) values.at[v] = narrow<T>(divided<T>(sum[v], by, reciprocal));
    values.store(y);
    y += args.inner;
  };
  if constexpr (!kRing) {
#pragma unroll 1
    for (int at = begin; at < end; ++at) {
      const int low = window_start<SIMPLE>(args.window[2], at);
      const int high = window_stop<SIMPLE>(args.window[2], at);
#pragma unroll 1
      while (next < high) keep(0);
      store(at, low, high, 0);
    }
    return;
  }
  int at = begin;
#pragma unroll 1
  for (;;) {
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      // The windows that end with the last line, and those with no line.
#pragma unroll 1
      while (window_stop<SIMPLE>(args.window[2], at) <= next) {
        store(at, window_start<SIMPLE>(args.window[2], at), next, turn);
        if (++at >= end) return;
      }
      keep(turn);
    }
  }
}
#else
namespace {

constexpr int kOther = 3 - AXIS;
constexpr int kLines = TAPS ? LINES : 1, kTaps = TAPS ? TAPS : WEIGHTED ? 1 : 4;

// Adds a line's part of the windows to each window that contains the line.
__device__ __forceinline__ void add_line(const WindowArgs& args, const S (&part)[WIDTH],
                                         int line, const int (&start)[RUN], const int (&stop)[RUN],
                                         S (&sum)[RUN][WIDTH]) {
  S weight = S(1);
#if WEIGHTED
  weight = S(1) / static_cast<S>(window_size(args.counted[AXIS], line));
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
  const int start0 = window_start(args.window[0], at[0]), stop0 = window_stop(args.window[0], at[0]);
  const int start = window_start(args.window[kOther], at[kOther]);
  const int stop = window_stop(args.window[kOther], at[kOther]);
  int line_start[RUN], line_stop[RUN];
#pragma unroll
  for (int r = 0; r < RUN; ++r) {
    line_start[r] = window_start(args.window[AXIS], at[AXIS] + min(r, run - 1));
    line_stop[r] = window_stop(args.window[AXIS], at[AXIS] + min(r, run - 1));
  }

  const i64 row = static_cast<i64>(args.x_size[2]) * args.inner;
  const i64 step[3] = {row * args.x_size[1], row, args.inner};
  const i64 x_plane = step[0] * args.x_size[0];
  const T* const x = static_cast<const T*>(args.x) + item.group * x_plane +
                     item.vector * WIDTH;
  S sum[RUN][WIDTH] = {};
  S weight[kTaps];
#pragma unroll
  for (int t = 0; t < kTaps; ++t) {
    weight[t] = S(1);
#if WEIGHTED
    if (TAPS && start + t < stop) weight[t] /= static_cast<S>(window_size(args.counted[kOther], start + t));
#endif
  }
#pragma unroll 1
  for (int line = line_start[0]; line < line_stop[RUN - 1]; line += kLines) {
    S part[kLines][WIDTH] = {};
    for (int i0 = start0; i0 < stop0; ++i0) {
      S outer = S(1);
#if WEIGHTED
      outer /= static_cast<S>(window_size(args.counted[0], i0));
#endif
      for (int first = start; first < (TAPS ? start + 1 : stop); first += kTaps) {
        Values values[kLines][kTaps];
#pragma unroll
        for (int l = 0; l < kLines; ++l) {
          const T* const from = x + i0 * step[0] + (line + l) * step[AXIS] + first * step[kOther];
#pragma unroll
          for (int t = 0; t < kTaps; ++t) {
            const bool there = line + l < line_stop[RUN - 1] && first + t < stop;
            values[l][t] = there ? Values::load(from + t * step[kOther]) : Values::zero();
          }
        }
#pragma unroll
        for (int t = 0; t < kTaps; ++t) {
          if (!TAPS && first + t >= stop) continue;
          S own = weight[t] * outer;
#if WEIGHTED
          if (!TAPS) own = outer / static_cast<S>(window_size(args.counted[kOther], first + t));
#endif
#pragma unroll
          for (int l = 0; l < kLines; ++l) {
#pragma unroll
            for (int v = 0; v < WIDTH; ++v) {
              const S value = widen(values[l][t].at[v]);
              part[l][v] = WEIGHTED ? multiply_add(value, own, part[l][v]) : part[l][v] + value;
            }
          }
        }
      }
      // A slice's parts of small windows are added apart, those of others together.
      if (TAPS || i0 + 1 == stop0) {
#pragma unroll
        for (int l = 0; l < kLines; ++l) {
          add_line(args, part[l], line + l, line_start, line_stop, sum);
#pragma unroll
          for (int v = 0; v < WIDTH; ++v) part[l][v] = S(0);
        }
      }
    }
  }

  const i64 y_row = static_cast<i64>(args.y_size[2]) * args.inner;
  const i64 y_step[3] = {y_row * args.y_size[1], y_row, args.inner};
  const i64 y_plane = y_step[0] * args.y_size[0];
  T* const y = static_cast<T*>(args.y) + item.group * y_plane + at[0] * y_step[0] + at[1] * y_step[1] +
               at[2] * y_step[2] + item.vector * WIDTH;
#pragma unroll
  for (int r = 0; r < RUN; ++r) {
    if (r >= run) break;
    int own[3] = {at[0], at[1], at[2]};
    own[AXIS] += r;
    const DividedBy<T> division(args, own[0], own[1], own[2]);
    Values values;
#pragma unroll
    for (int v = 0; v < WIDTH; ++v) {
      values.at[v] = narrow<T>(division(sum[r][v]));
    }
    values.store(y + r * y_step[AXIS]);
  }
}
#endif
