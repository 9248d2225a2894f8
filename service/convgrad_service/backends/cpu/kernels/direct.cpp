// Convolution forward, backward data and backward weight straight from the definition, one result
// at a time: for the rare shapes whose tiles would not fit into bounded memory (a huge kernel, a
// dilation of thousands of pixels).
//
// A task is one plane of results: of one sample and channel (of one pair of channels for the
// weight). Needs no workspace. Sums in double. Deterministic: each result is one sum in the order
// of taps and channels, or of samples and positions. Any strides; coordinates in 64 bits.
#include "conv_args.hpp"
#include "elements.hpp"

namespace convgrad {
namespace {

struct Point {
  i64 at[3];
};

CONVGRAD_INLINE i64 volume(const int64_t* size) { return size[0] * size[1] * size[2]; }
CONVGRAD_INLINE Point point(i64 index, const int64_t* size) {
  return Point{{index / (size[1] * size[2]), index / size[2] % size[1], index % size[2]}};
}
CONVGRAD_INLINE i64 offset(const View& view, const Point& p) {
  return p.at[0] * view.stride[3] + p.at[1] * view.stride[4] + p.at[2] * view.stride[5];
}

// The input position that output position o meets at a tap; false where that is padding.
CONVGRAD_INLINE bool input_at(const ConvArgs& args, const Point& o, const Point& tap, Point* i) {
  for (int d = 0; d < 3; ++d) {
    i->at[d] = o.at[d] * args.stride[d] + tap.at[d] * args.dilation[d] - args.pad[d];
    if (i->at[d] < 0 || i->at[d] >= args.input[d]) return false;
  }
  return true;
}
// The output position that input position i meets at a tap; false where there is none.
CONVGRAD_INLINE bool output_at(const ConvArgs& args, const Point& i, const Point& tap, Point* o) {
  for (int d = 0; d < 3; ++d) {
    const i64 numerator = i.at[d] + args.pad[d] - tap.at[d] * args.dilation[d];
    o->at[d] = numerator / args.stride[d];
    if (numerator < 0 || o->at[d] * args.stride[d] != numerator) return false;
    if (o->at[d] >= args.output[d]) return false;
  }
  return true;
}

template <class E>
const typename E::Storage* elements(const View& view) {
  return static_cast<const typename E::Storage*>(view.data);
}

template <class R>
void finish(const ConvArgs& args, const View& result, i64 base, i64 add_base, const Point& p,
            double sum, double bias) {
  double value = args.alpha * sum + bias;
  if (args.accumulate.data && args.beta != 0) {
    value += args.beta * static_cast<double>(R::widen(
                             elements<R>(args.accumulate)[add_base + offset(args.accumulate, p)]));
  }
  auto* to = static_cast<typename R::Storage*>(result.data) + base + offset(result, p);
  *to = R::round(static_cast<typename R::Acc>(value));
}

CONVGRAD_INLINE i64 lead(const View& view, i64 a, i64 b, i64 c) {
  return a * view.stride[0] + b * view.stride[1] + c * view.stride[2];
}

template <class E>
void forward(const ConvArgs& args, Control* control) {
  const i64 total = args.batch * args.groups * args.out_channels;
  for (i64 task; (task = take_task(control, 0, total)) >= 0;) {
    const i64 k = task % args.out_channels, g = task / args.out_channels % args.groups;
    const i64 n = task / args.out_channels / args.groups;
    double bias = 0;
    if (args.bias.data) {
      bias = E::widen(elements<E>(args.bias)[g * args.bias.stride[0] + k * args.bias.stride[1]]);
    }
    for (i64 index = 0; index < volume(args.output); ++index) {
      const Point o = point(index, args.output);
      double sum = 0;
      for (i64 tap_index = 0; tap_index < volume(args.kernel); ++tap_index) {
        const Point tap = point(tap_index, args.kernel);
        Point i;
        if (!input_at(args, o, tap, &i)) continue;
        const auto* x = elements<E>(args.x) + lead(args.x, n, g, 0) + offset(args.x, i);
        const auto* w = elements<E>(args.w) + lead(args.w, g, k, 0) + offset(args.w, tap);
        for (i64 c = 0; c < args.in_channels; ++c) {
          sum += double(E::widen(x[c * args.x.stride[2]])) * E::widen(w[c * args.w.stride[2]]);
        }
      }
      finish<E>(args, args.y, lead(args.y, n, g, k), lead(args.accumulate, n, g, k), o, sum, bias);
    }
  }
}

template <class E>
void bwd_data(const ConvArgs& args, Control* control) {
  const i64 total = args.batch * args.groups * args.in_channels;
  for (i64 task; (task = take_task(control, 0, total)) >= 0;) {
    const i64 c = task % args.in_channels, g = task / args.in_channels % args.groups;
    const i64 n = task / args.in_channels / args.groups;
    double bias = 0;
    if (args.bias.data) {
      bias = E::widen(elements<E>(args.bias)[g * args.bias.stride[0] + c * args.bias.stride[1]]);
    }
    for (i64 index = 0; index < volume(args.input); ++index) {
      const Point i = point(index, args.input);
      double sum = 0;
      for (i64 tap_index = 0; tap_index < volume(args.kernel); ++tap_index) {
        const Point tap = point(tap_index, args.kernel);
        Point o;
        if (!output_at(args, i, tap, &o)) continue;
        const auto* y = elements<E>(args.y) + lead(args.y, n, g, 0) + offset(args.y, o);
        const auto* w = elements<E>(args.w) + lead(args.w, g, 0, c) + offset(args.w, tap);
        for (i64 k = 0; k < args.out_channels; ++k) {
          sum += double(E::widen(y[k * args.y.stride[2]])) * E::widen(w[k * args.w.stride[1]]);
        }
      }
      finish<E>(args, args.x, lead(args.x, n, g, c), lead(args.accumulate, n, g, c), i, sum, bias);
    }
  }
}

template <class E, class R>
void bwd_weight(const ConvArgs& args, Control* control) {
  const i64 total = args.groups * args.out_channels * args.in_channels;
  for (i64 task; (task = take_task(control, 0, total)) >= 0;) {
    const i64 c = task % args.in_channels, k = task / args.in_channels % args.out_channels;
    const i64 g = task / args.in_channels / args.out_channels;
    for (i64 tap_index = 0; tap_index < volume(args.kernel); ++tap_index) {
      const Point tap = point(tap_index, args.kernel);
      double sum = 0;
      for (i64 n = 0; n < args.batch; ++n) {
        const auto* x = elements<E>(args.x) + lead(args.x, n, g, c);
        const auto* y = elements<E>(args.y) + lead(args.y, n, g, k);
        for (i64 index = 0; index < volume(args.output); ++index) {
          const Point o = point(index, args.output);
          Point i;
          if (!input_at(args, o, tap, &i)) continue;
          sum += double(E::widen(x[offset(args.x, i)])) * E::widen(y[offset(args.y, o)]);
        }
      }
      finish<R>(args, args.w, lead(args.w, g, k, c), lead(args.accumulate, g, k, c), tap, sum, 0);
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
      return forward<F16>(*args, control);
    case kBfloat16:
      return forward<BF16>(*args, control);
    case kFloat32:
      return forward<F32>(*args, control);
    case kFloat64:
      return forward<F64>(*args, control);
  }
}

extern "C" CONVGRAD_EXPORT void convgrad_direct_bwd_data(const convgrad::ConvArgs* args,
                                                         convgrad::Control* control, void*) {
  using namespace convgrad;
  switch (args->dtype) {
    case kFloat16:
      return bwd_data<F16>(*args, control);
    case kBfloat16:
      return bwd_data<BF16>(*args, control);
    case kFloat32:
      return bwd_data<F32>(*args, control);
    case kFloat64:
      return bwd_data<F64>(*args, control);
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
