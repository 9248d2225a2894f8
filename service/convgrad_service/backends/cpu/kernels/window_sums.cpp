// Average pooling and its gradient, over arbitrary windows: y = the sum of x over each window. Sums
// are divided by the size of y's window (forward), terms by that of x's window (gradient), or all
// by one number.
//
// A task is a few rows of y. The rows of x that contribute to a row of y are first summed into one
// line, then windows are summed along the line: k0*k1 + k2 additions per element instead of
// k0*k1*k2. A line holds positions (channels first) or positions x channels (channels last), so
// additions are vectorised in both layouts. Rows of y with the same rows of x are summed once: those of a
// gradient whose windows do not overlap.
//
// Requires: WindowArgs; scratch for a line of x and a line of y in accumulators (float, double for
// F64), and for the windows in each dimension.
// Deterministic: the order of summation depends only on the window.
#include "windows.hpp"

namespace convgrad {
namespace {

template <class T>
CONVGRAD_INLINE void clear(T* to, i64 count) {
  for (i64 i = 0; i < count; ++i) to[i] = T(0);
}

// to[i] += factor * from[i]
template <class E, bool scaled>
CONVGRAD_INLINE void add_stored(typename E::Acc* to, const typename E::Storage* from, i64 count,
                                typename E::Acc factor) {
  using T = typename E::Acc;
  constexpr int lanes = kLanes<T>;
  i64 i = 0;
  for (; i + lanes <= count; i += lanes) {
    Vec<T> value = load<E>(from + i);
    if constexpr (scaled) value *= splat<T>(factor);
    pin(value);  // or else some copies of this loop would round the product, and others not
    store_raw(to + i, load_raw<Vec<T>>(to + i) + value);
  }
  if (i == count) return;
  // What follows is only added zeros.
  Vec<T> value = load_first<E>(from + i, static_cast<int>(count - i));
  if constexpr (scaled) value *= splat<T>(factor);
  pin(value);
  store_raw(to + i, load_raw<Vec<T>>(to + i) + value);
}

template <class T>
CONVGRAD_INLINE void add_sums(T* to, const T* from, i64 count) {
  constexpr int lanes = kLanes<T>;
  i64 i = 0;
  for (; i + lanes <= count; i += lanes) {
    store_raw(to + i, load_raw<Vec<T>>(to + i) + load_raw<Vec<T>>(from + i));
  }
  for (; i < count; ++i) to[i] += from[i];
}

template <class E>
CONVGRAD_INLINE void store_divided(typename E::Storage* to, const typename E::Acc* from, i64 count,
                                   typename E::Acc divisor) {
  using T = typename E::Acc;
  constexpr int lanes = kLanes<T>;
  i64 i = 0;
  for (; i + lanes <= count; i += lanes) {
    store<E>(to + i, load_raw<Vec<T>>(from + i) / splat<T>(divisor));
  }
  if (i == count) return;
  const Vec<T> rest = load_raw<Vec<T>>(from + i) / splat<T>(divisor);
  store_first<E>(to + i, rest, static_cast<int>(count - i));
}

// The windows in each dimension, which are the same for all lines; the tables save divisions.
template <class T>
struct LineWindows {
  i64* start[3];  // for each position of y
  i64* stop[3];
  T* size;        // divisor of each window of y (kByOutputs) or x (kByInputs)

  LineWindows(const WindowArgs& args, void* scratch) {
    i64* at = static_cast<i64*>(scratch);
    for (int d = 0; d < 3; ++d) {
      start[d] = at;
      stop[d] = at + args.y_size[d];
      at += 2 * args.y_size[d];
      for (i64 o = 0; o < args.y_size[d]; ++o) {
        start[d][o] = args.window[d].start(o);
        stop[d][o] = args.window[d].stop(o);
      }
    }
    size = reinterpret_cast<T*>(at);
    const i64 sizes = args.divide == kByOne ? 0 : args.divide == kByInputs ? args.x_size[2]
                                                                         : args.y_size[2];
    for (i64 i = 0; i < sizes; ++i) size[i] = static_cast<T>(args.counted[2].size(i));
  }
};

// Computes the sums of one row of y from the line of x's sums, each in the order of x.
template <class T>
void windows_of_line(const WindowArgs& args, const LineWindows<T>& windows, T* line, T* sums,
                     i64 width) {
  const WindowRange& window = args.window[2];
  const i64 extent = args.y_size[2];
  if (args.divide == kByInputs) {
    for (i64 i = 0; i < args.x_size[2]; ++i) {
      const T factor = T(1) / windows.size[i];
      for (i64 lane = 0; lane < width; ++lane) line[i * width + lane] *= factor;
    }
  }
  clear(sums, extent * width);
  if (width == 1 && window.unit == 1 && window.step == 1) {
    // Windows with unit stride: the same tap of adjacent windows is contiguous.
    for (i64 tap = window.first; tap < window.last; ++tap) {
      const i64 from = most(0, window.low - tap), to = least(extent, window.high - tap);
      if (from < to) add_sums(sums + from, line + from + tap, to - from);
    }
    return;
  }
  if (width == 1 && window.unit > 1 && window.step == 1) {
    // The gradient of windows with stride `unit`: each position of x adds to its window.
    for (i64 i = 0; i < args.x_size[2]; ++i) {
      const i64 first = i * window.unit - (window.last - window.unit);
      const i64 to = least(extent, first + window.last - window.first);
      for (i64 o = most(0, first); o < to; ++o) sums[o] += line[i];
    }
    return;
  }
  for (i64 o = 0; o < extent; ++o) {
    const i64 stop = windows.stop[2][o];
    if (width == 1) {
      T sum = T(0);
      for (i64 i = windows.start[2][o]; i < stop; ++i) sum += line[i];
      sums[o] = sum;
      continue;
    }
    for (i64 i = windows.start[2][o]; i < stop; ++i) {
      add_sums(sums + o * width, line + i * width, width);
    }
  }
}

// The rows of x of a plane or block that are summed for a row of y.
struct RowsMet {
  i64 n, c;
  i64 start[2], stop[2];
  bool same(const RowsMet& other) const {
    return n == other.n && c == other.c && start[0] == other.start[0] && stop[0] == other.stop[0] &&
           start[1] == other.start[1] && stop[1] == other.stop[1];
  }
};

template <class E>
void window_sums(const WindowArgs& args, Control* control, void* scratch) {
  using T = typename E::Acc;
  using Storage = typename E::Storage;
  T* const line = static_cast<T*>(scratch);
  const i64 most_lanes = args.lanes ? args.lanes : 1;
  T* const sums = line + (args.x_size[2] * most_lanes + 15) / 16 * 16;
  const LineWindows<T> windows(args, sums + (args.y_size[2] * most_lanes + 15) / 16 * 16);
  const auto add_rows = [&](const RowsMet& met, i64 width) {
    const i64 extent = args.x_size[2];
    // Rows are contiguous if a block has all channels.
    const bool together = args.x.step == width;
    clear(line, extent * width);
    for (i64 i0 = met.start[0]; i0 < met.stop[0]; ++i0) {
      for (i64 i1 = met.start[1]; i1 < met.stop[1]; ++i1) {
        const i64 position = (i0 * args.x_size[1] + i1) * extent;
        const Storage* from = at<const Storage>(args.x, met.n, met.c, position);
        const bool scaled = args.divide == kByInputs;
        const T factor =
            scaled ? T(1) / static_cast<T>(args.counted[0].size(i0) * args.counted[1].size(i1))
                   : T(1);
        for (i64 i = 0; i < (together ? 1 : extent); ++i) {
          T* const to = line + i * width;
          const Storage* const stored = from + i * args.x.step;
          const i64 count = together ? extent * width : width;
          scaled ? add_stored<E, true>(to, stored, count, factor)
                 : add_stored<E, false>(to, stored, count, factor);
        }
      }
    }
  };
  RowsMet summed{-1, -1, {}, {}};
  each_row(args, control, [&](const OutputRow& row) {
    const i64 width = row.count, o[2] = {row.o0, row.o1};
    RowsMet met{row.n, row.c, {}, {}};
    for (int d = 0; d < 2; ++d) {
      met.start[d] = windows.start[d][o[d]];
      met.stop[d] = windows.stop[d][o[d]];
    }
    if (!met.same(summed)) {
      add_rows(met, width);
      windows_of_line(args, windows, line, sums, width);
      summed = met;
    }
    const i64 position = (row.o0 * args.y_size[1] + row.o1) * args.y_size[2];
    Storage* to = at<Storage>(args.y, row.n, row.c, position);
    if (args.divide != kByOutputs && args.y.step == width) {
      const T divisor = args.divide == kByOne ? static_cast<T>(args.divisor) : T(1);
      return store_divided<E>(to, sums, args.y_size[2] * width, divisor);
    }
    const i64 outer =
        args.divide == kByOutputs ? args.counted[0].size(row.o0) * args.counted[1].size(row.o1) : 0;
    for (i64 o = 0; o < args.y_size[2]; ++o) {
      T divisor = T(1);
      if (args.divide == kByOne) divisor = static_cast<T>(args.divisor);
      if (args.divide == kByOutputs) divisor = static_cast<T>(outer) * windows.size[o];
      store_divided<E>(to + o * args.y.step, sums + o * width, width, divisor);
    }
  });
}

}  // namespace
}  // namespace convgrad

extern "C" CONVGRAD_EXPORT void convgrad_window_sums(const convgrad::WindowArgs* args,
                                                     convgrad::Control* control, void* scratch) {
  using namespace convgrad;
  switch (args->dtype) {
    case kFloat16: return window_sums<F16>(*args, control, scratch);
    case kBfloat16: return window_sums<BF16>(*args, control, scratch);
    case kFloat32: return window_sums<F32>(*args, control, scratch);
    case kFloat64: return window_sums<F64>(*args, control, scratch);
  }
}
