// Loading the weights of hopper_grouped.cu to registers: from 16 channels per group on through shared
// memory, to which each block copies them once, otherwise directly.
#pragma once

#include "core/bits16.cuh"
#include "grouped/hopper_grouped.cuh"

namespace convgrad {

// Warp: loads the weights of 3 x 3 taps between kChunks * 8 source channels from `x` on and kFrags * 8
// result channels from `y` on, over all groups, as operand B of mma, block-diagonal. kPairs: loads
// adjacent input channels at once.
template <int kChannels, bool kPairs, int kChunks, int kFrags>
__device__ __forceinline__ void load_weights(const HopperGroupedArgs& args, int x, int y,
                                             u32 (&w)[9][kChunks][kFrags]) {
  const int lane = threadIdx.x & 31;
  const bool across = args.backward;
  const int out = (across ? x : y) + lane / 4, in = (across ? y : x) + lane % 4 * 2;
  const int group = out / kChannels;
  const bool there = group == in / kChannels && group < args.groups;
  const int w_out = args.w_stride[0], w_in = args.w_stride[1];
  const Bits16* const from = static_cast<const Bits16*>(args.w) + group * args.w_group +
                        (out % kChannels * w_out + in % kChannels * w_in);
#pragma unroll
  for (int tap = 0; tap < 9; ++tap) {
    const int r = across ? 2 - tap / 3 : tap / 3, s = across ? 2 - tap % 3 : tap % 3;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int f = 0; f < kFrags; ++f) {
        const int at = r * args.w_stride[2] + s * args.w_stride[3] +
                       (c * (across ? w_out : w_in) + f * (across ? w_in : w_out)) * 8;
        if constexpr (kPairs) {
          load_if(there, from + at, w[tap][c][f]);
        } else {
          unsigned short first, second;
          load_if(there, from + at, first);
          load_if(there, from + at + w_in, second);
          w[tap][c][f] = first | static_cast<u32>(second) << 16;
        }
      }
    }
  }
  if (across) {
    // Pairs must be of source channels.
#pragma unroll
    for (int tap = 0; tap < 9; ++tap) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
#pragma unroll
        for (int f = 0; f < kFrags; ++f) w[tap][c][f] = movmatrix_trans(w[tap][c][f]);
      }
    }
  }
}

// Bytes of an output channel in shared memory, padded to avoid bank conflicts.
template <int kChannels>
constexpr int kWeightPitch = 9 * kChannels * 2 + 16;

// kThreads threads: copy the weights of the block's 64 output channels unchanged.
template <int kChannels, int kThreads>
__device__ __forceinline__ void copy_weights(const HopperGroupedArgs& args, u32 to) {
  constexpr int kRowChunks = 9 * kChannels / 8, kAll = 64 * kRowChunks;
  const int first = blockIdx.x * 64, rows = args.groups * kChannels - first;
  const char* const from =
      static_cast<const char*>(args.w) + static_cast<i64>(first) * kRowChunks * 16;
#pragma unroll
  for (int i = threadIdx.x; i < kAll; i += kThreads) {
    const int row = i / kRowChunks;
    const bool there = row < rows;
    cp_async_zfill(to + i * 16 + row * (kWeightPitch<kChannels> - kRowChunks * 16),
               there ? from + i * 16 : from, there);
  }
  cp_async_commit();
}

// Warp: like load_weights, from shared memory; chunks of 8 channels are relative to the slice.
template <int kChannels, bool kAcross, int kChunks, int kFrags>
__device__ __forceinline__ void take_weights(int x_chunk, int y_chunk, u32 from,
                                             u32 (&w)[9][kChunks][kFrags]) {
  static_assert(kChunks % 2 == 0 && kFrags == 2, "four matrices at once");
  const int lane = threadIdx.x & 31;
  // Matrices: two chunks of the source (lanes 0 to 7 and 8 to 15), for both chunks of the result.
  const int x = x_chunk + (lane >> 3 & 1), y = y_chunk + (lane >> 4);
  const int out = (kAcross ? x : y) * 8 + (lane & 7), in = (kAcross ? y : x) % (kChannels / 8);
#pragma unroll
  for (int tap = 0; tap < 9; ++tap) {
    const int at = kAcross ? 8 - tap : tap;
#pragma unroll
    for (int c = 0; c < kChunks; c += 2) {
      const int row = kAcross ? c * 8 : 0, chunk = at * (kChannels / 8) + (kAcross ? 0 : c);
      const u32 place = from + (out + row) * kWeightPitch<kChannels> + (in + chunk) * 16;
      u32 four[4];
      if constexpr (kAcross) {
        ldmatrix_trans(four, place);
      } else {
        ldmatrix(four, place);
      }
      w[tap][c][0] = four[0], w[tap][c + 1][0] = four[1];
      w[tap][c][1] = four[2], w[tap][c + 1][1] = four[3];
    }
  }
}

}  // namespace convgrad
