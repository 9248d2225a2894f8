// The epilogue, applied to accumulators before the only rounding: alpha, beta * accumulate, bias
// and activation.
#pragma once

#include "elements.hpp"
#include "planar_args.hpp"

namespace convgrad {

// exp(x) for x <= 0, accurate to about 1 ulp, including subnormal results. With x = n ln2 + r and
// |r| <= ln2 / 2, exp(r) is a Taylor series, and 2^n is split into two factors so that neither
// underflows. Adding 1.5 * 2^mantissa rounds to an integer, held in the low bits of the sum.
template <class V, class Bits, class T, int terms, int mantissa, int bias>
CONVGRAD_INLINE V exp_of_negative(V x) {
  const V lowest = V(T(sizeof(T) == 4 ? -150.0 : -800.0));
  const V clamped = x < lowest ? lowest : x;
  const V shifter = V(T(sizeof(T) == 4 ? 0x1.8p23 : 0x1.8p52));
  const V shifted = clamped * T(1.4426950408889634074) + shifter;
  const V n = shifted - shifter;
  const T ln2_high = T(sizeof(T) == 4 ? 0x1.62ep-1 : 0x1.62e42fefap-1);
  const T ln2_low = T(0.69314718055994530942 - static_cast<double>(ln2_high));
  const V r = (clamped - n * ln2_high) - n * ln2_low;
  V series = V(T(1));
#pragma clang loop unroll(full)
  for (int i = terms; i > 0; --i) series = series * r * (T(1) / T(i)) + T(1);
  const Bits power = __builtin_bit_cast(Bits, shifted) - __builtin_bit_cast(Bits, shifter);
  const Bits half = power >> 1;
  const V first = __builtin_bit_cast(V, (half + bias) << mantissa);
  const V second = __builtin_bit_cast(V, (power - half + bias) << mantissa);
  return series * first * second;
}
CONVGRAD_INLINE Vec<float> exp_of_negative(Vec<float> x) {
  return exp_of_negative<Vec<float>, Mask<float>, float, 8, 23, 127>(x);
}
CONVGRAD_INLINE Vec<double> exp_of_negative(Vec<double> x) {
  return exp_of_negative<Vec<double>, Mask<double>, double, 14, 52, 1023>(x);
}

// All activations propagate NaN. silu(x) = x / (1 + exp(-x)) is computed from e = exp(-|x|), which
// cannot overflow: for x < 0 it is x * e / (1 + e).
template <class T>
CONVGRAD_INLINE Vec<T> activate(Vec<T> v, int32_t activation) {
  const Vec<T> zero = Vec<T>(T(0));
  if (activation == kNone) return v;
  if (activation == kSilu) {
    const Vec<T> e = exp_of_negative(v < zero ? v : -v);
    const Vec<T> numerator = v < zero ? v * e : v;
    return numerator / (e + T(1));
  }
  const Vec<T> rectified = v < zero ? zero : v;
  if (activation == kRelu) return rectified;
  const Vec<T> six = Vec<T>(T(6));
  return rectified > six ? six : rectified;
}

// The parameters of an epilogue, in the accumulator type.
template <class T>
struct Epilogue {
  T alpha;
  T beta;
  int32_t activation;
  bool scales;  // false if alpha = 1 and nothing is accumulated

  explicit Epilogue(const PlanarArgs& args)
      : alpha(static_cast<T>(args.alpha)),
        beta(static_cast<T>(args.beta)),
        activation(args.activation),
        scales(args.alpha != 1.0 || accumulates(args)) {}
  static bool accumulates(const PlanarArgs& args) {
    return args.beta != 0.0 && args.accumulate.data != nullptr;
  }
  CONVGRAD_INLINE Vec<T> operator()(Vec<T> sum, Vec<T> accumulate, Vec<T> bias) const {
    if (scales) sum = sum * alpha + accumulate * beta;
    return activate<T>(sum + bias, activation);
  }
};

}  // namespace convgrad
