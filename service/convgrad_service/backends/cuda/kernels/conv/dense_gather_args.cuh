// Kernel parameters of dense_gather.cu. Launched by dense_gather.py.
#pragma once

#include "core/elements.cuh"

namespace convgrad {

constexpr int kMaxPhases = 16;

struct Phase {
  int taps, r0, x0, y0, count;
  u32 factor;  // for division by the count
  int shift;
};

struct DenseGatherArgs {
  const void* x;           // the source: input, or grad_output
  const void* w;           // the weight
  void* y;                 // the result: output, or grad_input
  const void* accumulate;  // like y, or null
  const void* bias;        // one per result channel, or null
  i64 x_stride[6];         // N G C D H W, in elements
  i64 w_stride[6];         // G, result channel, source channel, T R S
  i64 y_stride[6];         // accumulate's too
  float alpha;
  float beta;
  int batch;
  int in_channels;   // of the source, in one group
  int out_channels;  // of the result, in one group
  int activation;
  int wide_stores;  // the result's channels are contiguous in whole, aligned 16-byte chunks
  int runs_of_pixels;  // most runs of four pixels are contiguous in the result, aligned
  int plain;           // no epilogue
  int may_skip_taps;     // some tile may be entirely outside the source at some tap
  int x_size[3];
  int x_step[3];
  int x_tap[3];
  int y_step[3];
  int r_step[3];
  int phases[3];
  Phase phase[3][kMaxPhases];
};

}  // namespace convgrad
