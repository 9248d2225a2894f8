// The end of hopper_first_taps.cu and hopper_first_split.cu: a block's sums, from registers by way of
// shared memory to its own part of `partials`.
#pragma once

#include "hopper_first_taps.cuh"

namespace convgrad {

using T = ELEMENT;

// A result again, over the rows of y from `line` to `end`.
__device__ __forceinline__ float again(const HopperFirstTapsArgs& args, int line, int end, int k,
                                       int r, int column) {
  float sum = 0;
#pragma unroll 1
  for (; line < end; ++line) {
    const int walk = line / args.y_size[0], p = line - walk * args.y_size[0];
    const int n = walk / args.segments, h = p * args.stride[0] - args.pad[0] + r;
    if (static_cast<u32>(h) >= static_cast<u32>(args.x_size[0])) continue;
    const T* const x_row =
        static_cast<const T*>(args.x) + n * args.x_stride[0] + h * args.x_stride[1];
    const T* const y_row =
        static_cast<const T*>(args.y) + n * args.y_stride[0] + p * args.y_stride[1] + k;
    const int q0 = (walk - n * args.segments) * args.segment;
    const int q1 = min(q0 + args.segment, args.y_size[1]);
#pragma unroll 1
    for (int q = q0; q < q1; ++q) {
      const int element = window_of(args, q) + args.odd + column;
      if (static_cast<u32>(element) >= static_cast<u32>(args.x_size[1] * args.channels)) continue;
      sum += widen(y_row[q * args.y_stride[2]]) * widen(x_row[element]);
    }
  }
  return sum;
}

// A lane's sums to shared memory, added to those that are there if they are not the `first`: rows of a
// channel each, `pitch` apart, of two neighbours of a window.
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

// The block's sums to its part, by the `warps` warps that multiply: lanes have neighbouring places,
// warps channels.
template <int kChannels>
__device__ __forceinline__ void put_partials(const HopperFirstTapsArgs& args, const BlockAt& block,
                                             const float* sums, int pitch, int warp, int warps,
                                             int lane) {
  const int columns = args.kernel[1] * args.channels, all = args.kernel[0] * columns;
  float* const partials = args.partials + static_cast<i64>(block.share) * args.y_channels * all;
  const int channels = min(kChannels, args.y_channels - block.first_channel);
  bool odd = false;
  const auto put = [&](bool anew) {
#pragma unroll 1
    for (int rest = lane; rest < args.tiles * 64; rest += 32) {
      const int place = block.first_tile * 64 + rest, row = place / args.window;
      const int column = place - row * args.window - args.odd;
      if (row >= args.kernel[0] || column < 0 || column >= columns) continue;
      const float* const from = sums + rest;
      float* const to =
          partials + static_cast<i64>(block.first_channel) * all + row * columns + column;
      if (!anew) {
#pragma unroll 4
        for (int channel = warp; channel < channels; channel += warps) {
          const float value = from[channel * pitch];
          odd |= !is_finite(value);
          to[channel * all] = value;
        }
      } else {
#pragma unroll 1
        for (int channel = warp; channel < channels; channel += warps) {
          if (is_finite(from[channel * pitch])) continue;
          to[channel * all] =
              again(args, block.line, block.end, block.first_channel + channel, row, column);
        }
      }
    }
  };
  put(false);
  if (odd) put(true);
}

}  // namespace convgrad
