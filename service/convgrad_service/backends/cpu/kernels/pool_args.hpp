// Arguments of the max-pooling kernels. Mirrored in ../pool_args.py.
#pragma once

#include "conv_args.hpp"

namespace convgrad {

// Views are (N, C, 3 spatial). In each dimension, tap r of window o is input coordinate
// i = o * stride + r * dilation - pad.
struct PoolArgs {
  View x;        // input
  View y;        // output or grad_output
  View indices;  // flat indices in the input plane; may be null
  View grad_input;
  int64_t batch;
  int64_t channels;
  int64_t input[3];
  int64_t output[3];
  int64_t kernel[3];
  int64_t stride[3];
  int64_t dilation[3];
  int64_t pad[3];
  int64_t tile[3];   // forward: windows; backward: input positions, a multiple of the stride
  int64_t tiles[3];
  int64_t windows[3];  // backward: maximum number of windows that overlap a tile
  int64_t meeting_words;  // backward: 8-byte words at the end of scratch, for lists of windows
  int64_t scratch_bytes;
  int32_t dtype;
  int32_t index_bytes;   // 4 or 8
  int32_t from_indices;  // backward: 1 if indices are given, 0 if x is given
  int32_t vectors;       // backward: of channels, in a task
};

}  // namespace convgrad
