// What the pooling kernels receive. Mirrored in ../pool_args.py.
#pragma once

#include "conv_args.hpp"

namespace convgrad {

// Views are (N, C, 3 spatial). Along each dimension input coordinate i and window o meet at tap r
// iff i = o * stride + r * dilation - pad.
struct PoolArgs {
  View x;        // input
  View y;        // output or grad_output
  View indices;  // flat in the input's plane; null where not wanted
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
  int64_t windows[3];  // backward: windows that a tile may meet, at most
  int64_t meeting_words;  // backward: 8-byte words at the scratch's end for lists of windows
  int64_t scratch_bytes;
  int32_t dtype;
  int32_t index_bytes;   // 4 or 8
  int32_t from_indices;  // backward: 1 where the indices are given, 0 where x is
  int32_t unused;
};

}  // namespace convgrad
