// Planes that do not start at multiples of 16 bytes, as of 14 x 14 or 7 x 7 pixels, for pointwise_gemm.cu (SHIFTED).
//
// Eight channels together do start so. TMA therefore copies channels r, r + 8, r + 16, ... in one box, for each r
// below 8, from the last multiple of 16 bytes before their pixels on: they are all the same number of elements beyond
// it. Other warps then move them to where wgmma reads them.
#pragma once

#include "ptx/load_store.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"

namespace convgrad {

// kPixels of kChannels: a row of pixels for each channel, in boxes of 64 pixels as wgmma reads them (128-byte swizzle).
template <class T, int kChannels, int kPixels>
struct ShiftedPlanes {
  static_assert(sizeof(T) == 2 && kChannels % 64 == 0 && kPixels % 64 == 0, "whole blocks");
  static constexpr int kGroups = kChannels / 8, kChunks = kPixels / 8;
  // As copied: rows of one chunk more, which is an odd number of chunks, against bank conflicts.
  static constexpr u32 kRowBytes = (kChunks + 1) * 16, kBoxBytes = kGroups * kRowBytes, kBytes = 8 * kBoxBytes;
  static_assert(kBoxBytes % 128 == 0, "TMA's alignment");

  // By one thread: `stride` is that of channels.
  __device__ __forceinline__ static void load(u32 to, const TensorMap& map, u32 barrier, int stride, int channel,
                                              int pixel, int image) {
#pragma unroll 1
    for (int r = 0; r < 8; ++r, to += kBoxBytes, pixel += stride) {
      tma_load<3>(to, map, barrier, {pixel & ~7, channel / 8, image});
    }
  }

  // By kThreads threads: moves what was copied. Pixels from `pixels` on become zeros.
  template <int kThreads>
  __device__ __forceinline__ static void align(u32 from, u32 to, int stride, int pixels, int thread) {
    // Eight neighbouring lanes have different channels of different groups: no bank conflicts.
    const int r = thread & 7, in_block = r + (thread >> 3) & 7, shift = r * stride & 7;
#pragma unroll 1
    for (int block = thread / 64; block < kChannels / 64 * (kPixels / 64); block += kThreads / 64) {
      const int group = block % (kChannels / 64) * 8 + in_block, box = block / (kChannels / 64);
      const u32 source = from + r * kBoxBytes + group * kRowBytes + box * 128;
      const u32 row = to + (box * kChannels + group * 8 + r) * 128;
      const int left = pixels - box * 64;
      uint4 next;
      ld_shared(source, next);
#pragma unroll
      for (int chunk = 0; chunk < 8; ++chunk) {
        const uint4 chunk0 = next;
        ld_shared(source + chunk * 16 + 16, next);
        u32 words[4];
        shifted(chunk0, next, shift, words);
        if (left < 64) keep(left - chunk * 8, words);
        st_shared_v4(row + (chunk ^ r) * 16, words);
      }
    }
  }

 private:
  // Elements `shift` to `shift` + 7 of two chunks.
  __device__ __forceinline__ static void shifted(const uint4& a, const uint4& b, int shift, u32 (&to)[4]) {
    const u32 all[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
    u32 by_four[6], by_two[5];
#pragma unroll
    for (int i = 0; i < 6; ++i) by_four[i] = shift & 4 ? all[i + 2] : all[i];
#pragma unroll
    for (int i = 0; i < 5; ++i) by_two[i] = shift & 2 ? by_four[i + 1] : by_four[i];
    const u32 halves = shift & 1 ? 0x5432 : 0x3210;
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = __byte_perm(by_two[i], by_two[i + 1], halves);
  }

  // Keeps the first `count` elements.
  __device__ __forceinline__ static void keep(int count, u32 (&words)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int of_word = count - i * 2;
      words[i] = of_word >= 2 ? words[i] : of_word == 1 ? words[i] & 0xffff : 0;
    }
  }
};

}  // namespace convgrad
