// One spatial dimension of direct.cpp: enumerates the valid pairs of tap and position. Each result
// is an arithmetic progression found in constant time, so invalid pairs cost nothing, however large
// the kernel or the stride.
#pragma once

#include "conv_args.hpp"
#include "matrix_copy.hpp"

namespace convgrad {

// `count` pairs (tap, position), each advancing by its step.
struct Run {
  i64 count;
  i64 tap;
  i64 tap_step;
  i64 position;
  i64 position_step;
};

CONVGRAD_INLINE i64 floor_div(i64 a, i64 b) { return a >= 0 ? a / b : -((-a + b - 1) / b); }
CONVGRAD_INLINE i64 ceil_div(i64 a, i64 b) { return -floor_div(-a, b); }
CONVGRAD_INLINE i64 modulo(i64 a, i64 b) { return a - floor_div(a, b) * b; }

// Sizes are below 2^31, so products are below 2^62. So is |pad| in a piece of a larger convolution.
struct Line {
  i64 input, kernel, output, stride, dilation, pad;
  i64 common;   // gcd(stride, dilation)
  i64 period;   // stride / common: distance between the valid taps of an input position
  i64 inverse;  // of dilation / common, modulo the period

  static Line of(const ConvArgs& args, int d) {
    Line line{args.input[d], args.kernel[d], args.output[d], args.stride[d], args.dilation[d],
              args.pad[d],   1,              1,              0};
    // Extended Euclid with the invariant a = of_a * dilation (mod stride); ends with a = common.
    i64 a = line.dilation, b = line.stride, of_a = 1, of_b = 0;
    while (b != 0) {
      const i64 times = a / b, rest = a - times * b, next = of_a - times * of_b;
      a = b, of_a = of_b, b = rest, of_b = next;
    }
    line.common = a;
    line.period = line.stride / a;
    line.inverse = modulo(of_a, line.period);
    return line;
  }

  // Valid taps of output position o, with the input positions.
  CONVGRAD_INLINE Run of_output(i64 o) const {
    const i64 start = o * stride - pad;
    const i64 first = most(ceil_div(-start, dilation), 0);
    const i64 last = least(floor_div(input - 1 - start, dilation), kernel - 1);
    return Run{last - first + 1, first, 1, start + first * dilation, dilation};
  }

  // Valid taps of input position i, with the output positions.
  CONVGRAD_INLINE Run of_input(i64 i) const {
    const i64 sum = i + pad;
    if (sum < 0 || sum % common != 0) return Run{0, 0, 1, 0, 0};
    i64 first = most(ceil_div(sum - (output - 1) * stride, dilation), 0);
    const i64 last = least(sum / dilation, kernel - 1);
    first += modulo(sum / common % period * inverse - first, period);
    if (first > last) return Run{0, 0, 1, 0, 0};
    return Run{(last - first) / period + 1, first, period, (sum - first * dilation) / stride,
               -(dilation / common)};
  }

  template <bool backward>
  CONVGRAD_INLINE Run of(i64 position) const {
    return backward ? of_input(position) : of_output(position);
  }

  // Output positions (in the field `tap`) for which a tap is valid, with the input positions.
  CONVGRAD_INLINE Run of_tap(i64 tap) const {
    const i64 start = tap * dilation - pad;
    const i64 first = most(ceil_div(-start, stride), 0);
    const i64 last = least(floor_div(input - 1 - start, stride), output - 1);
    return Run{last - first + 1, first, 1, start + first * stride, stride};
  }
};

}  // namespace convgrad
