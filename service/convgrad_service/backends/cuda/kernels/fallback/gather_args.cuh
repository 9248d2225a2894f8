// One convolution as a gather: forward, or the gradient of the input. Host side: gather_args.py.
//
// Along each dimension, result position y meets source position x at tap r if
//   forward   x = y*stride + r*dilation - pad
//   backward  y = x*stride + r*dilation - pad.
// Backward results have `stride` phases, y mod stride. In each phase every
// (stride / gcd(stride, dilation))-th tap meets a source, so no inserted zeros are multiplied.
#pragma once

#include "core/elements.cuh"

namespace convgrad {

struct GatherArgs {
  const void* x;           // the source: input, or grad_output
  const void* w;           //
  void* y;                 // the result: output, or grad_input
  const void* accumulate;  // like y, or null
  const void* bias;        // one value for each channel of the result, or null
  i64 x_stride[6];         // N G C D H W, in elements
  i64 w_stride[6];         // G, result channel, source channel, T R S
  i64 y_stride[6];
  i64 accumulate_stride[6];
  double alpha;
  double beta;
  int batch;
  int groups;
  int in_channels;   // of the source, in a group
  int out_channels;  // of the result, in a group
  int x_size[3];
  int y_size[3];
  int kernel[3];
  int stride[3];
  int dilation[3];
  int pad[3];
  int phases[3];  // forward 1, backward min(stride, y_size)
  int backward;
  int activation;
  int lanes;  // index that varies along adjacent threads: 0 pixels, 1 channels
};

// One dimension of one phase: result y0 + m*y_step, m in [0, count), meets source
// x0 + m*x_step + j*x_tap, if that is inside, at tap r0 + j*r_step, j in [0, taps).
struct Axis {
  i64 y0, y_step, count;
  i64 x0, x_step, x_tap;
  i64 r0, r_step, taps;
};

__device__ __forceinline__ i64 modulo(i64 a, i64 b) {
  const i64 rest = a % b;
  return rest < 0 ? rest + b : rest;
}

__device__ inline Axis axis_of(const GatherArgs& args, int dim, i64 phase) {
  const i64 stride = args.stride[dim], dilation = args.dilation[dim], pad = args.pad[dim];
  const i64 taps = args.kernel[dim], size = args.y_size[dim];
  if (!args.backward) return {0, 1, size, -pad, stride, dilation, 0, 1, taps};
  // The first tap of the phase, and the distance to the next.
  i64 rest = modulo(phase + pad, stride);
  const i64 turn = dilation % stride;
  i64 r0 = 0;
  while (rest != 0 && r0 < taps) {
    rest -= turn;
    if (rest < 0) rest += stride;
    ++r0;
    if (r0 >= stride) break;  // no tap meets this phase
  }
  i64 a = stride, b = dilation;
  while (b != 0) {
    const i64 next = a % b;
    a = b;
    b = next;
  }
  const bool none = rest != 0 || r0 >= taps;
  const i64 step = stride / a;
  return {phase,
          stride,
          ceil_div(size - phase, stride),
          none ? 0 : (phase + pad - r0 * dilation) / stride,
          1,
          -(dilation / a),
          r0,
          step,
          none ? 0 : ceil_div(taps - r0, step)};
}

}  // namespace convgrad
