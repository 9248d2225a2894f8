// Parts of depthwise_mma.cu: its argument, its sizes, the kernel's taps.
// Uses the same macros.
#pragma once

#include "depthwise/depthwise_strips.cuh"

namespace convgrad {

struct DepthwiseMmaArgs {
  const void* x;  // the source: input, or grad_output
  const void* w;
  void* y;                 // the result: output, or grad_input
  const void* accumulate;  // like y, or null
  const void* bias;        // one for each channel, or null
  i64 x_stride[3];         // N H W, in elements; a pixel's channels are contiguous
  i64 w_stride[3];         // C R S
  i64 y_stride[3];
  i64 accumulate_stride[3];
  u32 x_pitch;  // of a row, in units of 16 bytes
  u32 y_pitch;  // in units of 8 bytes
  float alpha;
  float beta;
  int activation;
  int batch;
  int channels;    // channels of the result
  int x_channels;  // equal, or forward channels / multiplier
  int multiplier;  // forward: results for each channel of x
  int x_size[2];
  int y_size[2];
  int pad[2];
  int kernel[2];    // extent of the dilated kernel
  int dilation[2];  // distance of taps in rows and columns
  int flipped;  // whether w is read in reverse
  StripTiling tiling;
};

using T = ELEMENT;

constexpr int kThreads = WARPS * 32;
constexpr int kOwn = CHANNELS;  // channels of a warp
constexpr int kChannels = WARPS * kOwn;
constexpr int kOctets = kChannels / 8;
constexpr int kReach = (KERNEL_H + STRIDE - 1) / STRIDE;
#if BACKWARD
constexpr int kOpen = kReach * STRIDE;  // unfinished rows of the result
constexpr int kTurn = kReach;           // rows of x after which the ring repeats
constexpr int kPhases = STRIDE;         // rows (and columns) of the result for one of x
constexpr int kApart = 1;               // units of x between adjacent strips
#else
constexpr int kOpen = kReach;
constexpr int kTurn = kReach * STRIDE;
constexpr int kPhases = 1;
constexpr int kApart = STRIDE;
#endif
// Rows after which rings and groups repeat.
constexpr int kUnrolled = kTurn % ROWS == 0 ? kTurn : kTurn * ROWS;
constexpr int kColumns = kPhases * kStripColumns;  // columns of the result in a strip
constexpr int kFirst = BACKWARD ? kReach - 1 : KERNEL_H - 1;  // step that finishes rows
constexpr int kStepsApart = BACKWARD ? 1 : STRIDE;            // and steps to the next one that does
// The pairs of taps that can be an element pair of operand B.
constexpr int kLastPair = UNITS * kStripColumns - 2;  // its greatest index along the reduction
#if BACKWARD
constexpr int kPairs = kColumns + STRIDE * kLastPair;
#else
constexpr int kPairs = kLastPair + 1 + (kStripColumns - 1) * STRIDE;
#endif
// Units of a tile, the most if strips share none.
constexpr int kMostSlots = kTileStrips * (UNITS > kApart ? UNITS : kApart);
using Copier = UnitCopier<T, kOctets, kMostSlots * kOwn / 32, kThreads, 1>;
using Lines = Turner<kOctets, WARPS, kMostSlots>;
// Results are in lines too, one unit per strip; one more unit avoids bank conflicts.
constexpr int kResultPitch = (kTileStrips + 1) * 16;
constexpr int kResultBytes = kChannels * kResultPitch;
constexpr int kResultsBytes = kPhases * kPhases * kResultBytes;  // of one step
constexpr int kWarpStrips = kTileStrips / WARPS;                 // strips that a warp stores

// Offset of a strip of results in its line.
__device__ __forceinline__ int result_unit(int channel, int strip) {
  return strip ^ ((channel >> 3 & (kOctets - 1)) << 1);
}

// Finishes a sum.
__device__ __forceinline__ float finished(const DepthwiseMmaArgs& args, float sum, const T* added,
                                          int c) {
#if EPILOGUE
  const T* const bias = static_cast<const T*>(args.bias);
  sum = finish<T, float>(sum, args.alpha, args.beta, added, bias == nullptr ? bias : bias + c,
                         args.activation);
#endif
  return sum;
}

using Taps = u32[kOwn][KERNEL_H][kPhases][UNITS];

// Loads a warp's rows of the kernel as operand B, through a table in shared memory of all pairs of
// taps adjacent along the reduction. `reach` is for backward.
__device__ __forceinline__ void load_taps(Taps& taps, const DepthwiseMmaArgs& args, u32* pairs,
                                          int first_channel, int reach) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int g = lane / 4, t = lane % 4;
  pairs += warp * (kOwn * KERNEL_H * kPairs);
  const i64 tap_row = args.flipped ? -args.w_stride[1] : args.w_stride[1];
#pragma unroll
  for (int first = 0; first < kPairs; first += 32) {
    const int at = first + lane;
#if BACKWARD
    const int s = at + STRIDE * (reach - kLastPair);
    constexpr int next = -STRIDE;
#else
    const int s = at - (kStripColumns - 1) * STRIDE;
    constexpr int next = 1;
#endif
    bool wanted[2];
    const T* from[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int tap = s + e * next, own = tap / args.dilation[1];
      wanted[e] = tap >= 0 && tap < args.kernel[1] && own * args.dilation[1] == tap;
      const int last_row = (args.kernel[0] - 1) / args.dilation[0];
      const int last_column = (args.kernel[1] - 1) / args.dilation[1];
      from[e] = static_cast<const T*>(args.w) +
                (first_channel + warp * kOwn) * args.w_stride[0] +
                (args.flipped ? last_row * args.w_stride[1] + (last_column - own) * args.w_stride[2]
                              : own * args.w_stride[2]);
    }
    // Issue all loads before the first use.
    u32 both[kOwn][KERNEL_H];
#pragma unroll
    for (int channel = 0; channel < kOwn; ++channel) {
      int between = 0;  // rows since the last row of taps
      i64 offset = channel * args.w_stride[0];
#pragma unroll
      for (int r = 0; r < KERNEL_H; ++r) {
        const bool there = between == 0 && r < args.kernel[0] &&
                           first_channel + warp * kOwn + channel < args.channels;
        both[channel][r] = there && wanted[0] ? from[0][offset].bits : 0;
        if (there && wanted[1]) both[channel][r] |= static_cast<u32>(from[1][offset].bits) << 16;
        if (between == 0) offset += tap_row;
        if (++between == args.dilation[0]) between = 0;
      }
    }
    if (at < kPairs) {
#pragma unroll
      for (int channel = 0; channel < kOwn; ++channel) {
#pragma unroll
        for (int r = 0; r < KERNEL_H; ++r) {
          pairs[(channel * KERNEL_H + r) * kPairs + at] = both[channel][r];
        }
      }
    }
  }
  __syncwarp();
#pragma unroll
  for (int channel = 0; channel < kOwn; ++channel) {
#pragma unroll
    for (int r = 0; r < KERNEL_H; ++r) {
#pragma unroll
      for (int phase = 0; phase < kPhases; ++phase) {
#pragma unroll
        for (int unit = 0; unit < UNITS; ++unit) {
          const int from = unit * kStripColumns + 2 * t, to = phase * kStripColumns + g;
#if BACKWARD
          const int at = to + STRIDE * (kLastPair - from);
#else
          const int at = from + (kStripColumns - 1 - to) * STRIDE;
#endif
          taps[channel][r][phase][unit] = pairs[(channel * KERNEL_H + r) * kPairs + at];
        }
      }
    }
  }
}

}  // namespace convgrad
