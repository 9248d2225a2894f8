// The epilogue of hopper_gather.cu with PLANES, for channels-first results (contiguous pixels): accumulators
// of 64 pixels are transposed through shared memory, 128 bytes of channels at a time, so that a warp stores
// runs of pixels.
#pragma once

#include "conv/hopper_gather_result.cuh"

#ifndef PLANES
#define PLANES 0
#endif

namespace convgrad {

// Address of a pixel of a channel in a staging buffer: rows of 64 pixels, with groups of eight swizzled against
// bank conflicts.
template <class T>
__device__ __forceinline__ u32 plane_at(u32 block, int channel, int pixel) {
  if constexpr (sizeof(T) == 2) {
    return block + channel * 128 + (pixel / 8 ^ (channel & 7)) * 16 + pixel % 8 * 2;
  } else {
    return block + channel * 256 + (pixel ^ (channel / 2 & 3) * 8) * 4;
  }
}

// Transposes 64 pixels of a staging buffer's channels, from fragment `first` on.
template <class T, int kFragmentsN>
__device__ __forceinline__ void transpose(u32 block, const float (&accum)[kFragmentsN][4], int first) {
  constexpr int kOf = 128 / static_cast<int>(sizeof(T)) / 8;
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  if constexpr (sizeof(T) == 2) {
    const int pixel = warp * 16 + lane / 8 % 2 * 8;
#pragma unroll
    for (int j = 0; j < kOf && first + j < kFragmentsN; j += 2) {
      const u32 to = plane_at<T>(block, (j + lane / 16) * 8 + lane % 8, pixel);
      store_fragments<T, true>(to, accum[first + j], accum[first + j + 1]);
    }
  } else {
    const int pixel = warp * 16 + lane / 4;
#pragma unroll
    for (int j = 0; j < kOf && first + j < kFragmentsN; ++j) {
      const int channel = j * 8 + lane % 4 * 2;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        st_shared_f32(plane_at<T>(block, channel + e % 2, pixel + e / 2 * 8), accum[first + j][e]);
      }
    }
  }
}

// Stores a staging buffer, sizeof(Raw) / sizeof(T) consecutive pixels at once.
template <class T, class Raw, int kThreads>
__device__ __forceinline__ void store_runs(u32 block, T* to, i64 channel_step, bool there, int pixel,
                                           int channels) {
  constexpr int kSide = static_cast<int>(sizeof(Raw) / sizeof(T)), kOfRow = 64 / kSide;
  constexpr int kStep = kThreads / kOfRow;
#pragma unroll 4
  for (int channel = threadIdx.x % kThreads / kOfRow; channel < channels; channel += kStep) {
    Raw raw;
    ld_shared(plane_at<T>(block, channel, pixel), raw);
    store_if(there, to + channel * channel_step, raw);
  }
}

// Stores all results of a warpgroup, whose threads synchronise at named barrier `barrier`.
template <class T, int kMmasM, int kFragmentsN>
__device__ __forceinline__ void store_planes(const Results<T, kMmasM, kFragmentsN>& to,
                                             const float (&accum)[kMmasM][kFragmentsN][4], int barrier) {
  const HopperGatherArgs& args = to.args;
  constexpr int kChannels = 128 / static_cast<int>(sizeof(T)), kOf = kChannels / 8;
  constexpr int kBlocks = (kFragmentsN + kOf - 1) / kOf;
  const int side = args.wide_stores, thread = threadIdx.x % 128;
  const int pixel = thread % (64 / side) * side;
  const i64 step = args.y_stride[2];
#pragma unroll
  for (int part = 0; part < kMmasM; ++part) {
    const int at = to.first_pixel + part * 64 + pixel;
    const bool there = at < to.phase.pixels;
    T* const y = static_cast<T*>(args.y) + (there ? result_at(args, to.phase, pixel_at(to.phase, at)) : 0) +
                 to.first_channel * step;
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      const int left = min(to.end_channel - to.first_channel, kFragmentsN * 8) - j * kChannels;
      const int channels = min(left, kChannels);
      named_barrier_sync(barrier, 128);
      transpose<T>(to.staging, accum[part], j * kOf);
      named_barrier_sync(barrier, 128);
      T* const here = y + j * kChannels * step;
      if (side * sizeof(T) == 16) {
        store_runs<T, uint4, 128>(to.staging, here, step, there, pixel, channels);
      } else if (side * sizeof(T) == 8) {
        store_runs<T, uint2, 128>(to.staging, here, step, there, pixel, channels);
      } else if (side * sizeof(T) == 4) {
        store_runs<T, unsigned int, 128>(to.staging, here, step, there, pixel, channels);
      } else {
        if constexpr (sizeof(T) == 2) {
          store_runs<T, unsigned short, 128>(to.staging, here, step, there, pixel, channels);
        }
      }
    }
  }
}

}  // namespace convgrad
