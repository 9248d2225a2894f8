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

// kPixels of kChannels: a row of pixels for each channel, in boxes of 64 pixels as wgmma reads them (128-byte swizzle).
template <class T, int kChannels, int kPixels>
struct ShiftedPlanes {
  static_assert(sizeof(T) == 2 && kChannels % 64 == 0 && kPixels % 64 == 0, "whole blocks");
  // As copied: rows of one chunk more, which is an odd number of chunks, against bank conflicts.
  static constexpr u32 kRowBytes = (kPixels + 8) * 2, kBytes = kChannels * kRowBytes;
  static_assert(kChannels / 8 * kRowBytes % 128 == 0, "TMA's alignment");

  // By one thread of each of kParts warps: `stride` is that of channels.
  template <int kParts>
  __device__ __forceinline__ static void load(u32 to, const TensorMap& map, u32 barrier, int part, int together,
                                              int stride, int channel, int pixel, int image) {
    const int rows = kChannels / together, of_part = (together - part + kParts - 1) / kParts;
    mbarrier_arrive_expect_tx(barrier, of_part * rows * kRowBytes);
#pragma unroll
    for (int i = 0; i < 8 / kParts; ++i) {
      const int r = part + i * kParts;
      if (r < together) {
        tma_load<3>(to + r * rows * kRowBytes, map, barrier, {pixel + r * stride & ~7, channel / together, image});
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
    for (int block = thread / 64; block < kChannels / 64 * (kPixels / 64); block += kThreads / 64) {
      const int channel = block % (kChannels / 64) * 64 + in_block, box = block / (kChannels / 64);
      const u32 source = from + (r * (kChannels / together) + channel / together) * kRowBytes + box * 128;
      const u32 row = to + (box * kChannels + channel) * 128;
      const int left = pixels - box * 64;
      u32 words[36];
#pragma unroll
      for (int chunk = 0; chunk < 9; ++chunk) {
        uint4 raw;
        ld_shared(source + chunk * 16, raw);
        words[chunk * 4] = raw.x, words[chunk * 4 + 1] = raw.y;
        words[chunk * 4 + 2] = raw.z, words[chunk * 4 + 3] = raw.w;
      }
      // By four, two and one elements.
#pragma unroll
      for (int i = 0; i < 34; ++i) words[i] = shift & 4 ? words[i + 2] : words[i];
#pragma unroll
      for (int i = 0; i < 33; ++i) words[i] = shift & 2 ? words[i + 1] : words[i];
      const u32 halves = shift & 1 ? 0x5432 : 0x3210;
#pragma unroll
      for (int i = 0; i < 32; ++i) words[i] = __byte_perm(words[i], words[i + 1], halves);
      if (left < 64) {
#pragma unroll
        for (int i = 0; i < 32; ++i) {
          words[i] = left >= i * 2 + 2 ? words[i] : left > i * 2 ? words[i] & 0xffff : 0;
        }
      }
#pragma unroll
      for (int chunk = 0; chunk < 8; ++chunk) {
        const u32 of_chunk[4] = {words[chunk * 4], words[chunk * 4 + 1], words[chunk * 4 + 2], words[chunk * 4 + 3]};
        st_shared_v4(row + (chunk ^ lane) * 16, of_chunk);
      }
    }
  }
};

}  // namespace convgrad
