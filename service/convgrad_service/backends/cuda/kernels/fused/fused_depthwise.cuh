// The first convolution of the fused kernel: a depthwise one, a strip of up to four neighbouring
// pixels x eight channels a thread.
#pragma once

#include "fused/fused_args.cuh"
#include "core/vectors.cuh"

namespace convgrad {

constexpr int kVector = 8;        // channels, 16 bytes
constexpr int kChunkChannels = 64;

// The depthwise weights of a chunk of channels: kChunkChannels floats a tap. A thread reads the two
// halves of its vector apart, so that neighbours read side by side.
__device__ __forceinline__ int weight_place(int channel) {
  return (channel & 4) * 8 + (channel >> 3) * 4 + (channel & 3);
}
__device__ __forceinline__ void load_weights(float (&to)[kVector], const float* tap, int vector) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float4 four = *reinterpret_cast<const float4*>(tap + half * 32 + vector * 4);
    to[half * 4 + 0] = four.x;
    to[half * 4 + 1] = four.y;
    to[half * 4 + 2] = four.z;
    to[half * 4 + 3] = four.w;
  }
}

// Any kernel, stride and dilation, over the taps inside the input alone.
template <class T>
__device__ __forceinline__ void sum_taps(float (&sum)[kStripPixels][kVector],
                                         const FusedArgs& args, const Corner& strip, int count,
                                         const T* x, const float* weights, int vector) {
#pragma unroll 1
  for (int t = 0; t < args.kernel[0]; ++t) {
    const int d = strip.d + t * args.dilation[0];
    if (d < 0 || d >= args.input[0]) continue;
#pragma unroll 1
    for (int r = 0; r < args.kernel[1]; ++r) {
      const int h = strip.h + r * args.dilation[1];
      if (h < 0 || h >= args.input[1]) continue;
      const T* const row =
          x + t * args.dilation[0] * args.x_stride[1] + r * args.dilation[1] * args.x_stride[2];
      const float* const tap =
          weights + (t * args.kernel[1] + r) * args.kernel[2] * kChunkChannels;
#pragma unroll 1
      for (int s = 0; s < args.kernel[2]; ++s) {
        float by[kVector];
        load_weights(by, tap + s * kChunkChannels, vector);
#pragma unroll
        for (int j = 0; j < kStripPixels; ++j) {
          const int step = j * args.stride[2] + s * args.dilation[2];
          const int w = strip.w + step;
          if (j >= count || w < 0 || w >= args.input[2]) continue;
          const auto in = Vector<T, kVector>::load(row + step * args.x_stride[3]);
#pragma unroll
          for (int e = 0; e < kVector; ++e) sum[j][e] = fmaf(widen(in.at[e]), by[e], sum[j][e]);
        }
      }
    }
  }
}

// A kernel of kWidth columns without dilation along them: every input is read once for a row of
// taps, and what lies outside counts as zero. One plane of taps, of at most 32 rows; kRows, where it
// is not 0, is their number, and all are read at once, the first kAhead of them ahead of time.
template <class T, int kWidth, int kStride, int kRows, int kAhead>
struct Sliding {
  static constexpr int kColumns = (kStripPixels - 1) * kStride + kWidth;
  using V = Vector<T, kVector>;
  V held[kRows == 0 ? 1 : kRows][kColumns];

  __device__ __forceinline__ static void load(V (&in)[kColumns], const FusedArgs& args,
                                              const Strip& strip, int channel, int r) {
    // In bytes: below 2^32 where it is inside.
    const u32 column_step = static_cast<u32>(args.x_stride[3]) * 2;
    const u32 row_step = static_cast<u32>(args.x_stride[2]) * args.dilation[1] * 2;
    const char* const x = static_cast<const char*>(args.x);
    const u32 columns = strip.rows >> r & 1 ? strip.columns : 0;
    u32 at = (strip.at + channel) * 2 + r * row_step;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      in[c] = V::zero();
      if (columns >> c & 1) in[c] = V::load(reinterpret_cast<const T*>(x + at));
      at += column_step;
    }
  }
  __device__ __forceinline__ static void add(float (&sum)[kStripPixels][kVector],
                                             const V (&in)[kColumns], const float* taps,
                                             int vector) {
    float by[kWidth][kVector];
#pragma unroll
    for (int s = 0; s < kWidth; ++s) load_weights(by[s], taps + s * kChunkChannels, vector);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      float wide[kVector];
#pragma unroll
      for (int e = 0; e < kVector; ++e) wide[e] = widen(in[c].at[e]);
#pragma unroll
      for (int j = 0; j < kStripPixels; ++j) {
        const int s = c - j * kStride;
        if (s < 0 || s >= kWidth) continue;
#pragma unroll
        for (int e = 0; e < kVector; ++e) sum[j][e] = fmaf(wide[e], by[s][e], sum[j][e]);
      }
    }
  }

  // Starts the loads of the first kAhead rows of a strip.
  __device__ __forceinline__ void fetch(const FusedArgs& args, const Strip& strip, int channel) {
#pragma unroll
    for (int r = 0; r < kAhead; ++r) load(held[r], args, strip, channel, r);
  }
  // Adds up a strip, of which the first kAhead rows have been fetched.
  __device__ __forceinline__ void finish(float (&sum)[kStripPixels][kVector],
                                         const FusedArgs& args, const Strip& strip, int channel,
                                         const float* weights, int vector) {
    if constexpr (kRows != 0) {
#pragma unroll
      for (int r = kAhead; r < kRows; ++r) load(held[r], args, strip, channel, r);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        add(sum, held[r], weights + r * kWidth * kChunkChannels, vector);
      }
    } else {
#pragma unroll 1
      for (int r = 0; r < args.kernel[1]; ++r) {
        if (!(strip.rows >> r & 1)) continue;
        load(held[0], args, strip, channel, r);
        add(sum, held[0], weights + r * kWidth * kChunkChannels, vector);
      }
    }
  }
};

}  // namespace convgrad
