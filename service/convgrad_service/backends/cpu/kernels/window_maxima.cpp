// Max pooling over arbitrary windows: the maxima with their flat indices, and the gradient.
//
// window_maxima: y = the maximum of x over the window, indices = its position. The first of equal
// maxima wins; NaN wins over numbers, and the last of several NaNs. window_routes: y[i] = the sum
// of x[o] over the windows o that contain i and whose index is i, in the order of o, rounded once.
//
// A task is a few rows of y, of one plane or a block of channels. Requires: WindowArgs and, for
// window_maxima, scratch for one value and one index per lane. Deterministic.
#include "windows.hpp"

namespace convgrad {
namespace {

template <class E, class Index>
void maxima(const WindowArgs& args, Control* control, void* scratch) {
  using T = typename E::Acc;
  using Storage = typename E::Storage;
  const i64 lanes = args.lanes ? args.lanes : 1;
  i64* const where = static_cast<i64*>(scratch);
  T* const best = reinterpret_cast<T*>(where + lanes);
  each_row(args, control, [&](const OutputRow& row) {
    for (i64 o2 = 0; o2 < args.y_size[2]; ++o2) {
      const i64 o[3] = {row.o0, row.o1, o2};
      i64 start[3], stop[3];
      for (int d = 0; d < 3; ++d) {
        start[d] = args.window[d].start(o[d]);
        stop[d] = args.window[d].stop(o[d]);
      }
      bool some = false;
      for (i64 i0 = start[0]; i0 < stop[0]; ++i0) {
        for (i64 i1 = start[1]; i1 < stop[1]; ++i1) {
          i64 position = (i0 * args.x_size[1] + i1) * args.x_size[2] + start[2];
          for (i64 i2 = start[2]; i2 < stop[2]; ++i2, ++position) {
            const Storage* from = at<const Storage>(args.x, row.n, row.c, position);
            for (i64 lane = 0; lane < row.count; ++lane) {
              const T value = load_one<E>(from + lane);
              const bool wins = !some || value > best[lane] || value != value;
              best[lane] = wins ? value : best[lane];
              where[lane] = wins ? position : where[lane];
            }
            some = true;
          }
        }
      }
      const i64 position = (row.o0 * args.y_size[1] + row.o1) * args.y_size[2] + o2;
      // Copies the element instead of rounding the widened value, to preserve the bits of a NaN.
      if (args.y.data != nullptr) {
        Storage* to = at<Storage>(args.y, row.n, row.c, position);
        for (i64 lane = 0; lane < row.count; ++lane) {
          to[lane] = *at<const Storage>(args.x, row.n, row.c + lane, where[lane]);
        }
      }
      if (args.indices.data == nullptr) continue;
      Index* to = at<Index>(args.indices, row.n, row.c, position);
      for (i64 lane = 0; lane < row.count; ++lane) to[lane] = static_cast<Index>(where[lane]);
    }
  });
}

template <class E, class Index>
void routes(const WindowArgs& args, Control* control, void*) {
  using T = typename E::Acc;
  using Storage = typename E::Storage;
  each_row(args, control, [&](const OutputRow& row) {
    const i64 line = (row.o0 * args.y_size[1] + row.o1) * args.y_size[2];
    for (i64 i2 = 0; i2 < args.y_size[2]; ++i2) {
      const i64 start = args.window[2].start(i2), stop = args.window[2].stop(i2);
      Storage* to = at<Storage>(args.y, row.n, row.c, line + i2);
      for (i64 lane = 0; lane < row.count; ++lane) {
        T sum = T(0);
        for (i64 o0 = args.window[0].start(row.o0); o0 < args.window[0].stop(row.o0); ++o0) {
          for (i64 o1 = args.window[1].start(row.o1); o1 < args.window[1].stop(row.o1); ++o1) {
            const i64 from = (o0 * args.x_size[1] + o1) * args.x_size[2];
            for (i64 o2 = start; o2 < stop; ++o2) {
              const i64 c = row.c + lane;
              if (*at<const Index>(args.indices, row.n, c, from + o2) != line + i2) continue;
              sum += load_one<E>(at<const Storage>(args.x, row.n, c, from + o2));
            }
          }
        }
        store_one<E>(to + lane, sum);
      }
    }
  });
}

template <class E>
void run_maxima(const WindowArgs& args, Control* control, void* scratch) {
  args.index_bytes == 4 ? maxima<E, i32>(args, control, scratch)
                        : maxima<E, i64>(args, control, scratch);
}
template <class E>
void run_routes(const WindowArgs& args, Control* control, void* scratch) {
  args.index_bytes == 4 ? routes<E, i32>(args, control, scratch)
                        : routes<E, i64>(args, control, scratch);
}

}  // namespace
}  // namespace convgrad

extern "C" CONVGRAD_EXPORT void convgrad_window_maxima(const convgrad::WindowArgs* args,
                                                       convgrad::Control* control, void* scratch) {
  using namespace convgrad;
  switch (args->dtype) {
    case kFloat16: return run_maxima<F16>(*args, control, scratch);
    case kBfloat16: return run_maxima<BF16>(*args, control, scratch);
    case kFloat32: return run_maxima<F32>(*args, control, scratch);
    case kFloat64: return run_maxima<F64>(*args, control, scratch);
  }
}

extern "C" CONVGRAD_EXPORT void convgrad_window_routes(const convgrad::WindowArgs* args,
                                                       convgrad::Control* control, void* scratch) {
  using namespace convgrad;
  switch (args->dtype) {
    case kFloat16: return run_routes<F16>(*args, control, scratch);
    case kBfloat16: return run_routes<BF16>(*args, control, scratch);
    case kFloat32: return run_routes<F32>(*args, control, scratch);
    case kFloat64: return run_routes<F64>(*args, control, scratch);
  }
}
