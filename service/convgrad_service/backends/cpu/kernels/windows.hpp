// Poolings over windows that are ranges of positions, whatever makes them: sliding windows,
// adaptive ones, and the outputs that hold an input position. Mirrored in ../window_args.py.
#pragma once

#include "conv_args.hpp"
#include "elements.hpp"

namespace convgrad {

// A tensor of planes: element (n, c, position) is at n*batch + c*channel + position*step.
struct PlaneView {
  void* data;
  int64_t batch;
  int64_t channel;
  int64_t step;
};

// Window o has the positions from start(o) up to, and without, stop(o).
struct WindowRange {
  int64_t step;
  int64_t first;
  int64_t last;
  int64_t unit;
  int64_t low;
  int64_t high;

  static CONVGRAD_INLINE i64 floored(i64 a, i64 b) {
    if (b == 1) return a;
    return a >= 0 ? a / b : -((b - 1 - a) / b);
  }
  CONVGRAD_INLINE i64 start(i64 o) const { return most(low, floored(o * step + first, unit)); }
  CONVGRAD_INLINE i64 stop(i64 o) const { return least(high, floored(o * step + last, unit)); }
  CONVGRAD_INLINE i64 size(i64 o) const { return stop(o) - start(o); }
};

enum Divide : int32_t { kByOne = 0, kByOutputs = 1, kByInputs = 2 };

struct WindowArgs {
  PlaneView x;        // what is read: an input, or an output's gradient
  PlaneView y;        // what is written
  PlaneView indices;  // of maxima, flat in a plane; null where not wanted
  int64_t batch;
  int64_t channels;
  int64_t x_size[3];
  int64_t y_size[3];
  WindowRange window[3];   // of the positions of y: positions of x
  WindowRange counted[3];  // sizes that make divisors: of windows of y (kByOutputs), x (kByInputs)
  double divisor;          // kByOne: of everything
  int64_t lanes;           // channels that a task takes together; 0 where positions lie together
  int64_t rows_per_task;
  int32_t dtype;
  int32_t index_bytes;  // 4 or 8
  int32_t divide;
  int32_t unused;
};

// A row of y: `count` channels from `c` on (one where positions lie together), at o0 and o1.
struct OutputRow {
  i64 n, c, count, o0, o1;
};

// Calls visit(row) for every row of y of every plane, or of every block of `lanes` channels.
template <class Visit>
CONVGRAD_INLINE void each_row(const WindowArgs& args, Control* control, Visit visit) {
  const i64 width = args.lanes ? args.lanes : 1;
  const i64 blocks = (args.channels + width - 1) / width;
  const i64 rows = args.batch * blocks * args.y_size[0] * args.y_size[1];
  const i64 tasks = (rows + args.rows_per_task - 1) / args.rows_per_task;
  for (i64 task; (task = take_task(control, 0, tasks)) >= 0;) {
    const i64 end = least(rows, (task + 1) * args.rows_per_task);
    for (i64 row = task * args.rows_per_task; row < end; ++row) {
      if (__atomic_load_n(&control->cancelled, __ATOMIC_RELAXED)) return;
      const i64 plane = row / args.y_size[1] / args.y_size[0];
      const i64 c = plane % blocks * width;
      visit(OutputRow{plane / blocks, c, least(width, args.channels - c),
                      row / args.y_size[1] % args.y_size[0], row % args.y_size[1]});
    }
  }
}

template <class T>
CONVGRAD_INLINE T* at(const PlaneView& view, i64 n, i64 c, i64 position) {
  return static_cast<T*>(view.data) + n * view.batch + c * view.channel + position * view.step;
}

}  // namespace convgrad
