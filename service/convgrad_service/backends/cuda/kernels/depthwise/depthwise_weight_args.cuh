// What gradients of a depthwise convolution's weight share: arguments, and storing a finished sum.
// Host side: depthwise_weight_args.py.
#pragma once

#include "core/divider.cuh"
#include "core/epilogue.cuh"

namespace convgrad {

// Of tensors with two spatial dimensions.
struct DepthwiseWeightOperands {
  const void* x;           // the input
  const void* y;           // grad_output
  void* w;                 // grad_weight
  const void* accumulate;  // like w, or null
  float* partials;         // [tile of channels][block][tap][channel]
  unsigned* arrived;       // one for each tile, 0 before and after
  i64 x_stride[3];         // N H W, in elements; a pixel's channels are contiguous
  i64 y_stride[3];
  i64 w_stride[3];  // C R S
  i64 accumulate_stride[3];
  double alpha;
  double beta;
  int batch;
  int channels;
  int x_size[2];
  int y_size[2];
  int pad[2];
  int wide;    // the result is in float32
  int blocks;  // that add to the same results
};

// Of tensors with up to three spatial dimensions.
struct DepthwiseWeightVolume {
  const void* x;           // the input
  const void* y;           // grad_output
  void* w;                 // grad_weight
  const void* accumulate;  // like w, or null
  float* partials;         // [set of taps][tile of channels][block][sum]
  unsigned* arrived;       // one for each of the former two, 0 before and after
  i64 x_stride[4];         // N D H W, in elements; a pixel's channels are contiguous
  i64 y_stride[4];
  i64 w_stride[3];  // C, rows of all planes, S
  i64 accumulate_stride[3];
  double alpha;
  double beta;
  int channels;
  int x_size[3];
  int y_size[3];
  int stride[2];  // D H
  int dilation[2];
  int pad[3];
  int wide;     // the result is in float32
  int vectors;  // of channels, in a tile
  Divider by_vectors;
};

// Stores a finished sum as the gradient of channel c and tap (r, s).
template <class R, class Args, class S>
__device__ __forceinline__ void put_gradient(const Args& args, int c, int r, int s, S sum) {
  const R* accumulate = static_cast<const R*>(args.accumulate);
  if (accumulate != nullptr) {
    accumulate += c * args.accumulate_stride[0] + r * args.accumulate_stride[1] +
                  s * args.accumulate_stride[2];
  }
  const R* const no_bias = nullptr;
  sum = finish<R, S>(sum, S(args.alpha), S(args.beta), accumulate, no_bias, kNone);
  static_cast<R*>(args.w)[c * args.w_stride[0] + r * args.w_stride[1] + s * args.w_stride[2]] =
      narrow<R>(sum);
}

// The same, in the type of the other tensors or in float32.
template <class T, class Args>
__device__ __forceinline__ void put_gradient_as(const Args& args, int c, int r, int s, float sum) {
  if (args.wide) {
    put_gradient<float>(args, c, r, s, sum);
  } else {
    put_gradient<T>(args, c, r, s, sum);
  }
}

}  // namespace convgrad
