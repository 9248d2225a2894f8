// Planes that do not start at multiples of 16 bytes, as of 14 x 14 or 7 x 7 pixels, for pointwise_gemm.cu (SHIFTED).
//
// `together` channels (1, 2, 4 or 8) do start so. TMA therefore copies channels r, r + together, r + 2 * together, ...
// in one box, for each r below `together`, from the last multiple of 16 bytes before their pixels on: all are the
// same number of elements beyond it. Other warps then move them to where wgmma reads them.
#pragma once

#include "ptx/load_store.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"

namespace convgrad {

// Pixels of a channel in a box of 128 bytes, whatever precedes them.
constexpr int kBoxPixels = 56;

// kBoxes * kBoxPixels of kChannels: a row of pixels for each channel, in blocks of 64 pixels as wgmma reads them (128-byte
// swizzle), followed by zeros up to kChunks chunks.
template <class T, int kChannels, int kBoxes, int kChunks>
struct ShiftedPlanes {
  static_assert(kChannels % 64 == 0 && kBoxes * kBoxPixels <= kChunks * 8, "whole blocks");
  static constexpr u32 kBoxBytes = kChannels * 128, kBytes = kBoxes * kBoxBytes;

  // By one thread of each of kParts warps: `stride` is that of channels.
  template <int kParts>
  __device__ __forceinline__ static void load(u32 to, const TensorMap& map, u32 barrier, int part, int together,
                                              int stride, int channel, int pixel, int image) {
    const int rows = kChannels / together, of_part = (together - part + kParts - 1) / kParts;
    mbarrier_arrive_expect_tx(barrier, of_part * rows * kBoxes * 128);
#pragma unroll
    for (int i = 0; i < 8 / kParts; ++i) {
      const int r = part + i * kParts;
      if (r < together) {
#pragma unroll
        for (int box = 0; box < kBoxes; ++box) {
          tma_load<3>(to + box * kBoxBytes + r * rows * 128, map, barrier,
                      {pixel + box * kBoxPixels + r * stride & ~7, channel / together, image});
        }
      }
    }
  }

  // By kThreads threads: moves what was copied. Pixels from `pixels` on become zeros.
  template <int kThreads>
  __device__ __forceinline__ static void align(u32 from, u32 to, int together, int stride, int pixels, int thread) {
    // Eight neighbouring lanes have different channels of different groups of eight: no bank conflicts.
    const int lane = thread & 7, in_block = (lane + (thread >> 3) & 7) * 8 + lane;
    const int r = lane & together - 1, shift = r * stride & 7;
#pragma unroll 1
    for (int block = thread / 64; block < kChannels / 64 * kBoxes; block += kThreads / 64) {
      const int channel = block % (kChannels / 64) * 64 + in_block, box = block / (kChannels / 64);
      const int copied = r * (kChannels / together) + channel / together;
      const u32 source = from + box * kBoxBytes + copied * 128;
      const int left = pixels - box * kBoxPixels;
      u32 words[32];
#pragma unroll
      for (int chunk = 0; chunk < 8; ++chunk) {
        uint4 raw;
        ld_shared(source + (chunk ^ copied & 7) * 16, raw);
        words[chunk * 4] = raw.x, words[chunk * 4 + 1] = raw.y;
        words[chunk * 4 + 2] = raw.z, words[chunk * 4 + 3] = raw.w;
      }
      // By four, two and one elements.
#pragma unroll
      for (int i = 0; i < 30; ++i) words[i] = shift & 4 ? words[i + 2] : words[i];
#pragma unroll
      for (int i = 0; i < 29; ++i) words[i] = shift & 2 ? words[i + 1] : words[i];
      const u32 halves = shift & 1 ? 0x5432 : 0x3210;
#pragma unroll
      for (int i = 0; i < 28; ++i) words[i] = __byte_perm(words[i], words[i + 1], halves);
      if (left < kBoxPixels) {
#pragma unroll
        for (int i = 0; i < 28; ++i) {
          words[i] = left >= i * 2 + 2 ? words[i] : left > i * 2 ? words[i] & 0xffff : 0;
        }
      }
      const u32 row = to + channel * 128;
#pragma unroll
      for (int i = 0; i < 7; ++i) {
        const u32 chunk[4] = {words[i * 4], words[i * 4 + 1], words[i * 4 + 2], words[i * 4 + 3]};
        st_shared_v4(at(row, box * 7 + i, lane), chunk);
      }
      if (box == kBoxes - 1) {
        const u32 zeros[4] = {};
#pragma unroll
        for (int i = kBoxes * 7; i < kChunks; ++i) st_shared_v4(at(row, i, lane), zeros);
      }
    }
  }

 private:
  __device__ __forceinline__ static u32 at(u32 row, int chunk, int lane) {
    return row + chunk / 8 * (kChannels * 128) + (chunk % 8 ^ lane) * 16;
  }
};

}  // namespace convgrad
