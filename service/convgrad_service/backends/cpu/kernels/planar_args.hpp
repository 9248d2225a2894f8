// Arguments of the planar kernels (grouped*.cpp, depthwise*.cpp). Mirrored in ../planar_args.py.
#pragma once

#include "conv_args.hpp"

namespace convgrad {

// The activation of a forward convolution, applied after the bias.
enum ActivationCode : int32_t { kNone = 0, kRelu = 1, kRelu6 = 2, kSilu = 3 };

// A grouped convolution as unit-stride correlations of planes, the same for all three directions:
//   dst[n, g, k, t * dst_step + dst_phase] =
//       sum over c and the taps of that phase of src[n, g, c, u * src_step + src_phase] * weight,
//       u = t + origin + tap offset
// Forward: src = x, src_step = stride, one dst phase. bwd_data: src = y, dst_step = stride, one src
// phase. bwd_weight: dst = y (read) and src = x, as forward. The origin is chosen such that offsets
// are not negative.
struct PlanarTap {
  int64_t src_phase;
  int64_t offset[3];
  int64_t weight;  // offset from the weight of tap 0, in elements
};

struct PlanarArgs {
  View src;         // N, G, src channels, 3 spatial
  View dst;         // N, G, dst channels, 3 spatial
  View accumulate;  // shape of dst (bwd_weight: of weight); read only if beta != 0
  View weight;      // G, dst channels, src channels; the taps hold the spatial offsets
  View bias;        // G, dst channels; may be null
  int64_t batch;
  int64_t groups;
  int64_t src_channels;  // per group
  int64_t dst_channels;  // per group
  int64_t src_size[3];
  int64_t dst_size[3];
  int64_t src_step[3];
  int64_t dst_step[3];
  int64_t origin[3];
  int64_t tile[3];   // extent of a tile, in t
  int64_t tiles[3];  // number of tiles in each dimension
  int64_t box[3];    // extent of a tile's source: tile + the largest offset
  int64_t group_block;
  int64_t src_phases;
  int64_t dst_phases;
  int64_t taps;
  const int64_t* src_phase;  // [src_phases][3]
  const int64_t* dst_phase;  // [dst_phases][3]
  const int64_t* first_tap;  // [dst_phases + 1]: index of the first tap of each dst phase
  const PlanarTap* tap;      // [taps]
  double alpha;
  double beta;
  void* workspace;  // bwd_weight: the partial sums of each split
  int64_t splits;   // bwd_weight: number of partial sums over (batch, tiles)
  int64_t scratch_bytes;
  int32_t dtype;
  int32_t result_dtype;  // bwd_weight: of the result
  int32_t activation;
  int32_t paired;  // scratch has room for the sums of two phases, and columns have two
};

}  // namespace convgrad
