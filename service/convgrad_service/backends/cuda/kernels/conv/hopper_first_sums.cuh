// The epilogue of hopper_first_taps.cu and hopper_first_split.cu: accumulators through shared memory to
// the block's part of `partials`.
#pragma once

#include "conv/hopper_first_taps.cuh"

namespace convgrad {

// Stores a lane's accumulators to shared memory if `first`, else adds them. Rows are channels,
// `pitch` apart; a lane has two consecutive elements of a window.
template <int kFragments>
__device__ __forceinline__ void leave_sums(float* to, const float (&sum)[kFragments][4], int pitch,
                                           bool first) {
#pragma unroll
  for (int i = 0; i < 2 * kFragments; ++i) {
    float* const two = to + (i / 2 * 8 + i % 2) * pitch;
    const float2 old = first ? make_float2(0, 0) : *reinterpret_cast<float2*>(two);
    *reinterpret_cast<float2*>(two) = make_float2(old.x + sum[i / 2][i % 2], old.y + sum[i / 2][2 + i % 2]);
  }
}

// Writes the block's partial sums by `warps` consumer warps: each warp takes whole channels, and
// its lanes consecutive elements.
template <int kChannels>
__device__ __forceinline__ void put_partials(const HopperFirstTapsArgs& args, const BlockAt& block,
                                             const float* sums, int pitch, int warp, int warps,
                                             int lane) {
  const int columns = args.kernel[2] * args.channels, plane = args.kernel[1] * columns;
  const int all = args.kernel[0] * plane;
  float* const partials =
      args.partials + static_cast<i64>(block.share) * args.y_channels * all + block.tap * plane;
  const int channels = min(kChannels, args.y_channels - block.first_channel);
#pragma unroll 1
  for (int rest = lane; rest < args.tiles * 64; rest += 32) {
    const int place = block.first_tile * 64 + rest, row = place / args.window;
    const int column = place - row * args.window - args.odd;
    if (row >= args.kernel[1] || column < 0 || column >= columns) continue;
    const float* const from = sums + rest;
    float* const to =
        partials + static_cast<i64>(block.first_channel) * all + row * columns + column;
#pragma unroll 4
    for (int channel = warp; channel < channels; channel += warps) {
      to[channel * all] = from[channel * pitch];
    }
  }
}

}  // namespace convgrad
