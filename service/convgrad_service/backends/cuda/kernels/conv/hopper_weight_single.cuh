// Kernel parameters of hopper_weight_single.cu, and the pixels of its k-tiles.
#pragma once

#include "core/divider.cuh"
#include "ptx/pdl.cuh"
#include "ptx/tma.cuh"

namespace convgrad {

// Fields are ordered so that those read last share constant-cache lines with those read first.
struct HopperWeightSingleArgs {
  TensorMap x_map, y_map;  // boxes of 64 channels x 64 pixels
  int dims;                // spatial dimensions of the tensor maps
  int steps;               // k-tiles in all
  int cluster, owned;      // see SplitKReduce
  int stages, reduce_bytes;
  int y_size[3];  // D H W
  Divider by_size[3];
  int stride[3], pad[3], dilation[3];
  int kernel[3];
  Divider by_taps, by_plane, by_row;  // all taps, those of a plane and of a row of the kernel
  int in_channels, out_channels;
  // As core/result_run.cuh has them.
  void* result;
  const void* accumulate;
  const void* bias;
  float alpha, beta;
  int plain, wide_result, result_in_vectors, activation;
  i64 w_stride[6];  // G K C T R S, in elements; accumulate's too
};

struct Pixel {
  int n, d, h, w;
};

__device__ __forceinline__ Pixel pixel_at(const HopperWeightSingleArgs& args, int index) {
  const int rest2 = divide(index, args.by_size[2]), rest1 = divide(rest2, args.by_size[1]);
  const int n = divide(rest1, args.by_size[0]);
  return {n, rest1 - n * args.y_size[0], rest2 - rest1 * args.y_size[1], index - rest2 * args.y_size[2]};
}

// Iterates over a block's k-tiles without divisions.
struct Walk {
  Pixel at, by;
  int size[3];

  __device__ __forceinline__ Walk(const HopperWeightSingleArgs& args, int first, int step)
      : at(pixel_at(args, first)), by(pixel_at(args, step)), size{args.y_size[0], args.y_size[1], args.y_size[2]} {}
  __device__ __forceinline__ void next() {
    at.w += by.w, at.h += by.h, at.d += by.d, at.n += by.n;
    if (at.w >= size[2]) at.w -= size[2], ++at.h;
    if (at.h >= size[1]) at.h -= size[1], ++at.d;
    if (at.d >= size[0]) at.d -= size[0], ++at.n;
  }
};

// A column box: 64 input channels of one tap.
struct ColumnBox {
  int c, t, r, s;
};

__device__ __forceinline__ ColumnBox column_box(const HopperWeightSingleArgs& args, int index) {
  const int chunk = divide(index, args.by_taps), tap = index - chunk * args.kernel[0] * args.kernel[1] * args.kernel[2];
  const int outer = divide(tap, args.by_row), t = divide(tap, args.by_plane);
  return {chunk * 64, t, outer - t * args.kernel[1], tap - outer * args.kernel[2]};
}

}  // namespace convgrad
