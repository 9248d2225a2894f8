// Operands whose rows do not start at multiples of 16 bytes, as channels last of 162 or 27 channels, or planes of 7 x 7
// pixels, for pointwise_gemm.cu (UNALIGNED).
//
// A stage has a row's chunks from the last multiple of 16 bytes before its first element on, and zeros beyond the row's
// end. mma.sync's operands are loaded from there into registers word by word, so nothing is moved: where a row starts
// in its first chunk depends on its number modulo 8 and on its image alone, as tiles start at multiples of 8.
#pragma once

#include "ptx/mma.cuh"

namespace convgrad {

// kRows rows of kWide elements each: rows of the operand (K-major), or elements of K (kMn).
template <class T, bool kMn, int kRows, int kWide>
struct UnalignedRows {
  static constexpr int kElements = 16 / sizeof(T), kChunks = kWide / kElements + 1;
  static constexpr u32 kPitch = kChunks * 16, kBytes = kRows * kPitch;
  static_assert(kRows % 8 == 0 && kWide % 16 == 0, "whole pairs of fragments");

  // By kThreads threads, by cp.async: rows and elements from `row` and `first` on, of those below `rows` and `wide`, of
  // an image that starts at element `image` of the operand.
  template <int kThreads>
  __device__ __forceinline__ static void load(u32 to, const T* operand, i64 image, int pitch, int row, int rows,
                                              int first, int wide, int thread) {
    const int beyond = static_cast<int>(image) & kElements - 1, rows_left = rows - row, left = wide - first;
    const T* const tile = operand + (image - beyond) + static_cast<i64>(row) * pitch + first;
#pragma unroll 4
    for (int i = thread; i < kRows * kChunks; i += kThreads) {
      const int in = i / kChunks, chunk = i % kChunks, start = in * pitch + beyond;
      const int from = (start & ~(kElements - 1)) + chunk * kElements;
      const int count = in < rows_left ? min(max(start + left - from, 0), kElements) : 0;
      cp_async<16>(to + i * 16, count > 0 ? tile + from : operand, count * static_cast<int>(sizeof(T)));
    }
  }
  // The offset of element `e` of row `row`, of an image that starts at element `image`.
  __device__ __forceinline__ static u32 at(int row, int e, int pitch, int image) {
    return row * kPitch + ((row * pitch + image & kElements - 1) + e) * static_cast<u32>(sizeof(T));
  }
};

// Two neighbouring elements, which may straddle words if kStraddles.
template <bool kStraddles>
__device__ __forceinline__ u32 two_elements(u32 from) {
  if constexpr (kStraddles) {
    unsigned short low, high;
    ld_shared(from, low);
    ld_shared(from + 2, high);
    return __byte_perm(low, high, 0x5410);
  } else {
    return ld_shared_u32(from);
  }
}

// A warpgroup's products: 64 * kParts rows, of which each warp has 16 of every 64, by 8 * kFragments columns, over
// kDepth elements of K. Of an MN-major operand, words hold two rows (columns), so the mma's order of 16 of them is
// 0, 2, ..., 14, 1, 3, ..., 15.
template <class T, class A, class B, bool kAMn, bool kBMn, bool kStraddles, int kParts, int kFragments, int kDepth>
struct UnalignedProducts {
  static_assert(kDepth % 16 == 0 && kFragments % 2 == 0, "whole products");
  u32 a_offset[2], b_offset[2];  // of this thread's words; MN-major: by parity of K

  __device__ __forceinline__ UnalignedProducts(int thread, int a_pitch, int a_image, int b_pitch, int b_image) {
    const int warp = thread / 32 % 4, g = thread % 32 / 4, t = thread % 4;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      a_offset[e] = kAMn ? A::at(2 * t + e, warp * 16 + 2 * g, a_pitch, a_image)
                         : A::at(g, 2 * t, a_pitch, a_image) + warp * 16 * A::kPitch;
      b_offset[e] = kBMn ? B::at(2 * t + e, 2 * g, b_pitch, b_image) : B::at(g, 2 * t, b_pitch, b_image);
    }
  }

  __device__ __forceinline__ void add(u32 a_at, u32 b_at, float (&sums)[kParts][kFragments][4]) const {
#pragma unroll
    for (u32 k = 0; k < kDepth; k += 16) {
      u32 a[kParts][4];
#pragma unroll
      for (u32 part = 0; part < kParts; ++part) {
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
          if constexpr (kAMn) {
            two_rows<A>(a_at + part * 128, a_offset, k + half * 8, a[part][half * 2], a[part][half * 2 + 1]);
          } else {
            const u32 from = a_at + a_offset[0] + part * 64 * A::kPitch + (k + half * 8) * 2;
            a[part][half * 2] = two_elements<kStraddles>(from);
            a[part][half * 2 + 1] = two_elements<kStraddles>(from + 8 * A::kPitch);
          }
        }
      }
#pragma unroll
      for (u32 f = 0; f < kFragments; f += 2) {
        u32 b[2][2];
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
          if constexpr (kBMn) {
            two_rows<B>(b_at + f * 16, b_offset, k + half * 8, b[0][half], b[1][half]);
          } else {
            const u32 from = b_at + b_offset[0] + f * 8 * B::kPitch + (k + half * 8) * 2;
            b[0][half] = two_elements<kStraddles>(from);
            b[1][half] = two_elements<kStraddles>(from + 8 * B::kPitch);
          }
        }
#pragma unroll
        for (u32 part = 0; part < kParts; ++part) {
#pragma unroll
          for (u32 i = 0; i < 2; ++i) mma<T>(sums[part][f + i], a[part], b[i][0], b[i][1]);
        }
      }
    }
  }

 private:
  // Two elements along K of each of two neighbouring rows (columns).
  template <class Side>
  __device__ __forceinline__ static void two_rows(u32 from, const u32 (&offset)[2], u32 k, u32& even, u32& odd) {
    const u32 first = two_elements<kStraddles>(from + offset[0] + k * Side::kPitch);
    const u32 second = two_elements<kStraddles>(from + offset[1] + k * Side::kPitch);
    even = __byte_perm(first, second, 0x5410), odd = __byte_perm(first, second, 0x7632);
  }
};

}  // namespace convgrad
