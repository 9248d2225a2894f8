// Arguments of poolings whose windows are arbitrary ranges of positions: sliding windows, adaptive
// windows, and the outputs whose windows contain an input position. Mirrored in ../window_args.py.
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

// Window o is the range [start(o), stop(o)).
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
  PlaneView x;        // read: an input, or the gradient of an output
  PlaneView y;        // written
  PlaneView indices;  // of maxima, flat in a plane; may be null
  int64_t batch;
  int64_t channels;
  int64_t x_size[3];
  int64_t y_size[3];
  WindowRange window[3];   // for each position of y, a range of positions of x
  WindowRange counted[3];  // sizes are the divisors: of windows of y (kByOutputs) or x (kByInputs)
  double divisor;          // kByOne: the only divisor
  int64_t lanes;           // channels of a block (channels last); 0 if channels first
  int64_t rows_per_task;
  int32_t dtype;
  int32_t index_bytes;  // 4 or 8
  int32_t divide;
  int32_t unused;
};

// A row of y at o0 and o1: `count` channels from `c` on (one if channels first).
struct OutputRow {
  i64 n, c, count, o0, o1;
};

// Calls visit(row) for every row of y, of each plane or each block of `lanes` channels.
template <class Visit>
CONVGRAD_INLINE void each_row(const WindowArgs& args, Control* control, Visit visit) {
  const i64 width = args.lanes ? args.lanes : 1;
  const i64 blocks = (args.channels + width - 1) / width;
  const i64 rows = args.batch * blocks * args.y_size[0] * args.y_size[1];
  const i64 tasks = (rows + args.rows_per_task - 1) / args.rows_per_task;
  for (i64 task; (task = take_task(control, 0, tasks)) >= 0;) {
    const i64 begin = task * args.rows_per_task, end = least(rows, begin + args.rows_per_task);
    i64 plane = begin / args.y_size[1] / args.y_size[0];
    OutputRow row{0, 0, 0, begin / args.y_size[1] % args.y_size[0], begin % args.y_size[1]};
    for (i64 i = begin; i < end; ++i) {
      if (__atomic_load_n(&control->cancelled, __ATOMIC_RELAXED)) return;
      if (i == begin || (row.o0 == 0 && row.o1 == 0)) {
        row.n = plane / blocks;
        row.c = plane % blocks * width;
        row.count = least(width, args.channels - row.c);
      }
      visit(row);
      if (++row.o1 < args.y_size[1]) continue;
      row.o1 = 0;
      if (++row.o0 < args.y_size[0]) continue;
      row.o0 = 0;
      ++plane;
    }
  }
}

template <class T>
CONVGRAD_INLINE T* at(const PlaneView& view, i64 n, i64 c, i64 position) {
  return static_cast<T*>(view.data) + n * view.batch + c * view.channel + position * view.step;
}

}  // namespace convgrad
