// Elementwise activation: dst = activation(src), rounded once, for convolution kernels without a
// fused activation.
//
// A task is a few rows of a six-dimensional view, whose last dimension is contiguous in dst (the
// host orders the dimensions). Deterministic. Indices are 64-bit. src may be dst.
#include "conv_args.hpp"
#include "epilogue.hpp"

namespace convgrad {

// Mirrored in ../activation.py.
struct ActivationArgs {
  View src;
  View dst;
  int64_t size[6];
  int32_t src_dtype;  // the accumulator type, or dst_dtype
  int32_t dst_dtype;
  int32_t activation;
  int32_t unused;
};

namespace {

inline constexpr i64 kRowsPerTask = 16;

template <class From, class To>
void activate_rows(const ActivationArgs& args, Control* control) {
  using T = typename To::Acc;
  constexpr int L = kLanes<T>;
  const i64 rows = args.size[0] * args.size[1] * args.size[2] * args.size[3] * args.size[4];
  const i64 columns = args.size[5];
  const bool contiguous = args.src.stride[5] == 1 && args.dst.stride[5] == 1;
  const i64 tasks = (rows + kRowsPerTask - 1) / kRowsPerTask;
  for (i64 task; (task = take_task(control, 0, tasks)) >= 0;) {
    const i64 last = (task + 1) * kRowsPerTask < rows ? (task + 1) * kRowsPerTask : rows;
    for (i64 row = task * kRowsPerTask; row < last; ++row) {
      const auto* src = static_cast<const typename From::Storage*>(args.src.data);
      auto* dst = static_cast<typename To::Storage*>(args.dst.data);
      i64 rest = row;
      for (int d = 4; d >= 0; --d) {
        src += rest % args.size[d] * args.src.stride[d];
        dst += rest % args.size[d] * args.dst.stride[d];
        rest /= args.size[d];
      }
      for (i64 column = 0; column < columns; column += L) {
        const int n = static_cast<int>(columns - column < L ? columns - column : L);
        if (contiguous) {
          const Vec<T> v = load_first<From>(src + column, n);
          store_first<To>(dst + column, activate<T>(v, args.activation), n);
          continue;
        }
        Vec<T> v = splat(T(0));
        for (int i = 0; i < n; ++i) v[i] = load_one<From>(src + (column + i) * args.src.stride[5]);
        v = activate<T>(v, args.activation);
        for (int i = 0; i < n; ++i) store_one<To>(dst + (column + i) * args.dst.stride[5], v[i]);
      }
    }
  }
}

}  // namespace
}  // namespace convgrad

extern "C" CONVGRAD_EXPORT void convgrad_activation(const convgrad::ActivationArgs* args,
                                                    convgrad::Control* control, void*) {
  using namespace convgrad;
  const bool widened = args->src_dtype == kFloat32;
  switch (args->dst_dtype) {
    case kFloat16:
      return widened ? activate_rows<F32, F16>(*args, control)
                     : activate_rows<F16, F16>(*args, control);
    case kBfloat16:
      return widened ? activate_rows<F32, BF16>(*args, control)
                     : activate_rows<BF16, BF16>(*args, control);
    case kFloat32: return activate_rows<F32, F32>(*args, control);
    case kFloat64: return activate_rows<F64, F64>(*args, control);
  }
}
