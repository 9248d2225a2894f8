// Direct convolution (forward, backward data and backward weight), one result at a time. It is for
// rare shapes whose tiles would be too large, or would consist mostly of unused elements (a huge
// kernel in padding, or a dilation or stride of thousands of pixels).
//
// A task is one row of results or, for the weight gradient, all taps of one pair of channels. Only
// valid pairs of elements are visited, for any padding, stride and dilation. Needs no workspace and
// accumulates in double. Deterministic: each result is one sum in the order of taps and channels,
// or of samples and positions. Supports any strides, with 64-bit coordinates. A cancelled launch
// ends within a row of terms.
#include "direct_axis.hpp"
#include "elements.hpp"

namespace convgrad {
namespace {

CONVGRAD_INLINE bool stopped(const Control* control) {
  return __atomic_load_n(&control->cancelled, __ATOMIC_RELAXED) != 0;
}

template <class E>
const typename E::Storage* elements(const View& view) {
  return static_cast<const typename E::Storage*>(view.data);
}

template <class R>
void finish(const ConvArgs& args, const View& result, i64 at, i64 add_at, double sum, double bias) {
  double value = args.alpha * sum + bias;
  if (args.accumulate.data && args.beta != 0) {
    value += args.beta * static_cast<double>(R::widen(elements<R>(args.accumulate)[add_at]));
  }
  static_cast<typename R::Storage*>(result.data)[at] =
      R::round(static_cast<typename R::Acc>(value));
}

CONVGRAD_INLINE i64 lead(const View& view, i64 a, i64 b, i64 c) {
  return a * view.stride[0] + b * view.stride[1] + c * view.stride[2];
}
CONVGRAD_INLINE i64 spot(const View& view, i64 z, i64 y, i64 x) {
  return z * view.stride[3] + y * view.stride[4] + x * view.stride[5];
}

// Calls row(offset in a, step in a, offset in b, step in b, count) for all pairs along the two
// outer dimensions. Returns false if the launch was cancelled.
template <class Row>
CONVGRAD_INLINE bool for_rows(const Run* runs, const View& a, const View& b, const Control* control,
                              Row row) {
  const Run &d = runs[0], &h = runs[1], &w = runs[2];
  if (d.count <= 0 || h.count <= 0 || w.count <= 0) return true;
  for (i64 i = 0; i < d.count; ++i) {
    for (i64 j = 0; j < h.count; ++j) {
      if (stopped(control)) return false;
      row(spot(a, d.position + i * d.position_step, h.position + j * h.position_step, w.position),
          w.position_step * a.stride[5],
          spot(b, d.tap + i * d.tap_step, h.tap + j * h.tap_step, w.tap), w.tap_step * b.stride[5],
          w.count);
    }
  }
  return true;
}

// Forward; backward data exchanges the roles of input and output, and of the weight's channels.
template <class E, bool backward>
void gather(const ConvArgs& args, Control* control) {
  const View& source = backward ? args.y : args.x;
  const View& result = backward ? args.x : args.y;
  View weight = args.w;  // dimensions 1 and 2: result and source channels
  if (backward) weight.stride[1] = args.w.stride[2], weight.stride[2] = args.w.stride[1];
  const i64 channels = backward ? args.out_channels : args.in_channels;
  const i64 results = backward ? args.in_channels : args.out_channels;
  const int64_t* size = backward ? args.input : args.output;
  const Line lines[3] = {Line::of(args, 0), Line::of(args, 1), Line::of(args, 2)};
  const i64 by_source = source.stride[2], by_weight = weight.stride[2];
  const i64 rows = size[0] * size[1];
  const i64 total = args.batch * args.groups * results * rows;
  for (i64 task; (task = take_task(control, 0, total)) >= 0;) {
    const i64 y = task % size[1], z = task % rows / size[1], plane = task / rows;
    const i64 j = plane % results, g = plane / results % args.groups;
    const i64 n = plane / results / args.groups;
    double bias = 0;
    if (args.bias.data) {
      bias = E::widen(elements<E>(args.bias)[g * args.bias.stride[0] + j * args.bias.stride[1]]);
    }
    const auto* from = elements<E>(source) + lead(source, n, g, 0);
    const auto* by = elements<E>(weight) + lead(weight, g, j, 0);
    Run runs[3] = {lines[0].template of<backward>(z), lines[1].template of<backward>(y), {}};
    const bool meets = runs[0].count > 0 && runs[1].count > 0;
    for (i64 x = 0; x < size[2]; ++x) {
      if (stopped(control)) return;
      double sum = 0;
      if (meets) {
        runs[2] = lines[2].template of<backward>(x);
        const bool whole = for_rows(
            runs, source, weight, control, [&](i64 a, i64 a_step, i64 b, i64 b_step, i64 count) {
              for (i64 i = 0; i < count; ++i, a += a_step, b += b_step) {
                for (i64 c = 0; c < channels; ++c) {
                  sum += double(E::widen(from[a + c * by_source])) *
                         E::widen(by[b + c * by_weight]);
                }
              }
            });
        if (!whole) return;
      }
      finish<E>(args, result, lead(result, n, g, j) + spot(result, z, y, x),
                lead(args.accumulate, n, g, j) + spot(args.accumulate, z, y, x), sum, bias);
    }
  }
}

template <class E, class R>
void bwd_weight(const ConvArgs& args, Control* control) {
  const Line lines[3] = {Line::of(args, 0), Line::of(args, 1), Line::of(args, 2)};
  const i64 total = args.groups * args.out_channels * args.in_channels;
  for (i64 task; (task = take_task(control, 0, total)) >= 0;) {
    const i64 c = task % args.in_channels, k = task / args.in_channels % args.out_channels;
    const i64 g = task / args.in_channels / args.out_channels;
    Run runs[3];
    for (i64 t = 0; t < args.kernel[0]; ++t) {
      runs[0] = lines[0].of_tap(t);
      for (i64 r = 0; r < args.kernel[1]; ++r) {
        runs[1] = lines[1].of_tap(r);
        for (i64 s = 0; s < args.kernel[2]; ++s) {
          if (stopped(control)) return;
          runs[2] = lines[2].of_tap(s);
          double sum = 0;
          for (i64 n = 0; n < args.batch; ++n) {
            const auto* x = elements<E>(args.x) + lead(args.x, n, g, c);
            const auto* y = elements<E>(args.y) + lead(args.y, n, g, k);
            const bool whole = for_rows(
                runs, args.x, args.y, control,
                [&](i64 a, i64 a_step, i64 b, i64 b_step, i64 count) {
                  for (i64 i = 0; i < count; ++i, a += a_step, b += b_step) {
                    sum += double(E::widen(x[a])) * E::widen(y[b]);
                  }
                });
            if (!whole) return;
          }
          finish<R>(args, args.w, lead(args.w, g, k, c) + spot(args.w, t, r, s),
                    lead(args.accumulate, g, k, c) + spot(args.accumulate, t, r, s), sum, 0);
        }
      }
    }
  }
}

}  // namespace
}  // namespace convgrad

extern "C" CONVGRAD_EXPORT void convgrad_direct_fwd(const convgrad::ConvArgs* args,
                                                    convgrad::Control* control, void*) {
  using namespace convgrad;
  switch (args->dtype) {
    case kFloat16:
      return gather<F16, false>(*args, control);
    case kBfloat16:
      return gather<BF16, false>(*args, control);
    case kFloat32:
      return gather<F32, false>(*args, control);
    case kFloat64:
      return gather<F64, false>(*args, control);
  }
}

extern "C" CONVGRAD_EXPORT void convgrad_direct_bwd_data(const convgrad::ConvArgs* args,
                                                         convgrad::Control* control, void*) {
  using namespace convgrad;
  switch (args->dtype) {
    case kFloat16:
      return gather<F16, true>(*args, control);
    case kBfloat16:
      return gather<BF16, true>(*args, control);
    case kFloat32:
      return gather<F32, true>(*args, control);
    case kFloat64:
      return gather<F64, true>(*args, control);
  }
}

extern "C" CONVGRAD_EXPORT void convgrad_direct_bwd_weight(const convgrad::ConvArgs* args,
                                                           convgrad::Control* control, void*) {
  using namespace convgrad;
  const bool widened = args->result_dtype != args->dtype;
  switch (args->dtype) {
    case kFloat16:
      return widened ? bwd_weight<F16, F32>(*args, control) : bwd_weight<F16, F16>(*args, control);
    case kBfloat16:
      return widened ? bwd_weight<BF16, F32>(*args, control)
                     : bwd_weight<BF16, BF16>(*args, control);
    case kFloat32:
      return bwd_weight<F32, F32>(*args, control);
    case kFloat64:
      return bwd_weight<F64, F64>(*args, control);
  }
}
