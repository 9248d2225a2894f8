// The gradient of a convolution's weight. Host side: weight_args.py.
//
// w[g, k, c, r] = sum over pixels (n, o) of y[n, g, k, o] * x[n, g, c, o*stride + r*dilation - pad].
// The pixels are divided into `splits` ranges of `split_pixels` (the last may be shorter). One range
// gives the result; several write their sums to separate parts of `partials`, in the order
// (g, k, c, r), and core/split_sum.cu adds the parts in order.
#pragma once

#include "core/epilogue.cuh"

namespace convgrad {

struct WeightArgs {
  const void* x;
  const void* y;
  void* w;
  const void* accumulate;  // like w, or null
  void* partials;          // null with one split
  i64 x_stride[6];         // N G C D H W, in elements
  i64 w_stride[6];         // G K C T R S
  i64 y_stride[6];
  i64 accumulate_stride[6];
  double alpha;
  double beta;
  i64 pixels;
  i64 split_pixels;
  int splits;
  int batch;
  int groups;
  int in_channels;   // in a group
  int out_channels;  // in a group
  int x_size[3];
  int y_size[3];
  int kernel[3];
  int stride[3];
  int dilation[3];
  int pad[3];
  int x_lanes;  // contiguous index of x: 0 pixels, 1 channels
  int y_lanes;
};

// Element offsets of one pixel and tap in x and y, without group and channel; x is negative if the
// tap is in padding.
struct Meeting {
  i64 x, y;
};

__device__ inline Meeting meeting_of(const WeightArgs& args, i64 pixel, const i64 (&tap)[3]) {
  i64 at[3];
  i64 rest = divide(pixel, args.y_size[2], at[2]);
  rest = divide(rest, args.y_size[1], at[1]);
  const i64 n = divide(rest, args.y_size[0], at[0]);
  Meeting met = {n * args.x_stride[0], n * args.y_stride[0]};
  bool inside = true;
#pragma unroll
  for (int dim = 0; dim < 3; ++dim) {
    const i64 position = at[dim] * args.stride[dim] + tap[dim] * args.dilation[dim] - args.pad[dim];
    inside &= position >= 0 && position < args.x_size[dim];
    met.x += position * args.x_stride[3 + dim];
    met.y += at[dim] * args.y_stride[3 + dim];
  }
  if (!inside) met.x = -1;
  return met;
}

__device__ inline void tap_of(const WeightArgs& args, i64 index, i64 (&tap)[3]) {
  const i64 rest = divide(index, args.kernel[2], tap[2]);
  tap[0] = divide(rest, args.kernel[1], tap[1]);
}

// Stores a sum of this block's split. T is the type of w and accumulate, S that of sums.
template <class T, class S>
__device__ inline void put_weight(const WeightArgs& args, i64 split, i64 group, i64 k, i64 c,
                                  i64 tap_index, const i64 (&tap)[3], S sum) {
  if (args.partials != nullptr) {
    const i64 taps = static_cast<i64>(args.kernel[0]) * args.kernel[1] * args.kernel[2];
    const i64 channel = (group * args.out_channels + k) * args.in_channels + c;
    const i64 channels = static_cast<i64>(args.groups) * args.out_channels * args.in_channels;
    static_cast<S*>(args.partials)[(split * channels + channel) * taps + tap_index] = sum;
    return;
  }
  const i64 at[6] = {group, k, c, tap[0], tap[1], tap[2]};
  i64 to = 0, old = 0;
#pragma unroll
  for (int dim = 0; dim < 6; ++dim) {
    to += at[dim] * args.w_stride[dim];
    old += at[dim] * args.accumulate_stride[dim];
  }
  static_cast<T*>(args.w)[to] = narrow<T>(finish_at<T>(args, sum, old));
}

}  // namespace convgrad
