// Depthwise convolutions of channels-last tensors: one input channel, one output channel a group.
// The host's side is depthwise.py.
#pragma once

#include "epilogue.cuh"
#include "vectors.cuh"

namespace convgrad {

struct DepthwiseArgs {
  const void* x;           // the source: input, or grad_output
  const void* w;
  void* y;                 // the result: output, or grad_input
  const void* accumulate;  // like y, or null
  const void* bias;        // one for each channel, or null
  i64 x_stride[3];         // N H W, in elements; a pixel's channels lie side by side
  i64 w_stride[3];         // C R S
  i64 y_stride[3];
  i64 accumulate_stride[3];
  double alpha;
  double beta;
  int batch;
  int channels;
  int x_size[2];
  int y_size[2];
  int pad[2];
  int activation;
  int rows;    // a thread's rows of the result (backward: of `STRIDE` rows each)
  int strips;  // of COLUMNS columns
  int chunks;  // of `rows` rows
};

struct DepthwiseWeightArgs {
  const void* x;           // the input
  const void* y;           // grad_output
  void* w;                 // grad_weight
  const void* accumulate;  // like w, or null
  void* partials;          // [group of kernel rows][tile of channels][block][tap][channel]
  unsigned* arrived;       // one for each group and tile, 0 before and after
  i64 x_stride[3];         // N H W
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
  int kernel_rows;
  int rows;
  int strips;
  int chunks;
};

}  // namespace convgrad
