// What the planar kernels (grouped.cpp) receive. Mirrored in ../planar_args.py.
#pragma once

#include "conv_args.hpp"

namespace convgrad {

// Which function closes a forward convolution, after the bias.
enum ActivationCode : int32_t { kNone = 0, kRelu = 1, kRelu6 = 2, kSilu = 3 };

// A grouped convolution as correlations of planes, the same for all three directions:
//   dst[n, g, k, t * dst_step + dst_phase] =
//       sum over c and the taps of that phase of src[n, g, c, u * src_step + src_phase] * weight,
//       u = t + origin + tap offset
// The forward has src = x, src_step = stride and one dst phase; bwd_data has src = y,
// dst_step = stride and one src phase; bwd_weight pairs dst = y with src = x as the forward does.
// Origin and offsets are such that an offset is never negative.
struct PlanarTap {
  int64_t src_phase;
  int64_t offset[3];
  int64_t weight;  // elements from the weight of tap 0
};

struct PlanarArgs {
  View src;         // N, G, src channels, 3 spatial
  View dst;         // N, G, dst channels, 3 spatial
  View accumulate;  // as dst (bwd_weight: as weight); read only where beta != 0
  View weight;      // G, dst channels, src channels; the spatial part is in the taps
  View bias;        // G, dst channels; added where present
  int64_t batch;
  int64_t groups;
  int64_t src_channels;  // per group
  int64_t dst_channels;  // per group
  int64_t src_size[3];
  int64_t dst_size[3];
  int64_t src_step[3];
  int64_t dst_step[3];
  int64_t origin[3];
  int64_t tile[3];   // extent of a task in t
  int64_t tiles[3];  // tasks along each dimension
  int64_t box[3];    // tile + the largest offset
  int64_t group_block;
  int64_t src_phases;
  int64_t dst_phases;
  int64_t taps;
  const int64_t* src_phase;  // [src_phases][3]
  const int64_t* dst_phase;  // [dst_phases][3]
  const int64_t* first_tap;  // [dst_phases + 1]: the taps of phase p are first_tap[p] ...
  const PlanarTap* tap;      // [taps]
  double alpha;
  double beta;
  void* workspace;  // bwd_weight: the partial sums of each split
  int64_t splits;   // bwd_weight: parts of (batch, tiles) that are summed apart
  int64_t scratch_bytes;
  int32_t dtype;
  int32_t result_dtype;  // of what bwd_weight writes
  int32_t activation;
  int32_t unused;
};

}  // namespace convgrad
