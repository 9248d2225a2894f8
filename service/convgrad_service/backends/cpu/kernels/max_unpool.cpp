// Max unpooling and its gradient: elements are copied bit for bit, by their flat index in a plane.
//
// max_unpool_scatter: y = 0, then y[indices[i]] = x[i] in the order of i, so that the last wins.
// max_unpool_gather: y[i] = x[indices[i]]. A task is one plane, or a block of channels of an image.
//
// Requires: WindowArgs with x_size, y_size and lanes; all indices inside the plane (the caller
// checks). Deterministic: one thread writes a plane.
#include "windows.hpp"

namespace convgrad {
namespace {

template <class Visit>
CONVGRAD_INLINE void each_block(const WindowArgs& args, Control* control, Visit visit) {
  const i64 width = args.lanes ? args.lanes : 1;
  const i64 blocks = (args.channels + width - 1) / width;
  for (i64 task; (task = take_task(control, 0, args.batch * blocks)) >= 0;) {
    const i64 c = task % blocks * width;
    visit(task / blocks, c, least(width, args.channels - c));
  }
}

template <class Bits, class Index>
void scatter(const WindowArgs& args, Control* control) {
  const i64 from = args.x_size[0] * args.x_size[1] * args.x_size[2];
  const i64 to = args.y_size[0] * args.y_size[1] * args.y_size[2];
  each_block(args, control, [&](i64 n, i64 c, i64 count) {
    for (i64 o = 0; o < to; ++o) {
      Bits* y = at<Bits>(args.y, n, c, o);
      for (i64 lane = 0; lane < count; ++lane) y[lane] = 0;
    }
    for (i64 i = 0; i < from; ++i) {
      const Index* index = at<const Index>(args.indices, n, c, i);
      const Bits* x = at<const Bits>(args.x, n, c, i);
      for (i64 lane = 0; lane < count; ++lane) *at<Bits>(args.y, n, c + lane, index[lane]) = x[lane];
    }
  });
}

template <class Bits, class Index>
void gather(const WindowArgs& args, Control* control) {
  const i64 to = args.y_size[0] * args.y_size[1] * args.y_size[2];
  each_block(args, control, [&](i64 n, i64 c, i64 count) {
    for (i64 i = 0; i < to; ++i) {
      const Index* index = at<const Index>(args.indices, n, c, i);
      Bits* y = at<Bits>(args.y, n, c, i);
      for (i64 lane = 0; lane < count; ++lane) {
        y[lane] = *at<const Bits>(args.x, n, c + lane, index[lane]);
      }
    }
  });
}

template <class Bits>
void move(const WindowArgs& args, Control* control, bool scatters) {
  if (args.index_bytes == 4) {
    scatters ? scatter<Bits, i32>(args, control) : gather<Bits, i32>(args, control);
  } else {
    scatters ? scatter<Bits, i64>(args, control) : gather<Bits, i64>(args, control);
  }
}

void move_any(const WindowArgs& args, Control* control, bool scatters) {
  switch (args.dtype) {
    case kFloat16:
    case kBfloat16: return move<u16>(args, control, scatters);
    case kFloat32: return move<u32>(args, control, scatters);
    case kFloat64: return move<u64>(args, control, scatters);
  }
}

}  // namespace
}  // namespace convgrad

extern "C" CONVGRAD_EXPORT void convgrad_max_unpool_scatter(const convgrad::WindowArgs* args,
                                                            convgrad::Control* control, void*) {
  convgrad::move_any(*args, control, true);
}

extern "C" CONVGRAD_EXPORT void convgrad_max_unpool_gather(const convgrad::WindowArgs* args,
                                                           convgrad::Control* control, void*) {
  convgrad::move_any(*args, control, false);
}
