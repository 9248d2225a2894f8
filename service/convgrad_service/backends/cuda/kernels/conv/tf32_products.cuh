// Products of float32 operands as TF32 by mma.sync, of operands that lie M- and N-major in shared memory: wgmma
// multiplies TF32 with K contiguous only, and in weight gradients of channels last K is pixels. mma.sync's operands
// are in registers, which are loaded one element at a time, so nothing is transposed.
//
// An operand is boxes of rows of up to 128 bytes, a row for each element of K, whose 16-byte chunks are swizzled as the
// copy engine does. Within eight elements the order of K is free if it is the same for both operands: the first half of
// an mma's K are even elements, the second odd ones, so that what a warp reads at once lies in different banks (of rows
// of 128 bytes).
#pragma once

#include "ptx/mma.cuh"

namespace convgrad {

// A warpgroup's products: 64 * kRows rows, of which each warp has 16 of every 64, by 8 * kFragments columns, over kDepth
// elements of K. Rows of A's boxes have 128 bytes, those of B's kColumnBytes.
template <int kRows, int kFragments, int kDepth, int kColumnBytes = 128>
struct Tf32Products {
  static constexpr u32 kMmaDepth = 8, kRowBytes = 128, kInBox = kColumnBytes / 32;
  static constexpr u32 kABox = kDepth * kRowBytes, kBBox = kDepth * kColumnBytes;
  // This thread's offsets in eight elements of K: by half of an mma's K, of rows g and g + 8 of A's 64, and of the
  // fragments of a box of B.
  u32 a_offset[2][2], b_offset[2][kInBox];

  __device__ __forceinline__ explicit Tf32Products(int thread) {
    const u32 warp = thread / 32 % 4, g = thread % 32 / 4, t = thread % 4;
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
      const u32 k = 2 * t + half;
#pragma unroll
      for (u32 j = 0; j < kInBox; ++j) b_offset[half][j] = at<kColumnBytes>(k, j * 8 + g);
#pragma unroll
      for (u32 j = 0; j < 2; ++j) a_offset[half][j] = at<kRowBytes>(k, (warp % 2 * 2 + j) * 8 + g) + warp / 2 * kABox;
    }
  }
  // The offset of element k of a column in a box.
  template <u32 kBytes>
  __device__ __forceinline__ static u32 at(u32 k, u32 column) {
    return k * kBytes + (column / 4 ^ (k * kBytes / 128 & (kBytes / 16 - 1))) * 16 + column % 4 * 4;
  }

  // sum(i, f) += the products of 64 rows i and fragment f, of the boxes from these addresses on.
  template <class Sum>
  __device__ __forceinline__ void add(u32 a_at, u32 b_at, const Sum& sum) const {
#pragma unroll
    for (u32 k = 0; k < kDepth / kMmaDepth; ++k) {
      u32 a[kRows][4];
#pragma unroll
      for (u32 i = 0; i < kRows; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          a[i][e] = ld_shared_u32(a_at + a_offset[e / 2][e % 2] + i * 2 * kABox + k * (kMmaDepth * kRowBytes));
        }
      }
#pragma unroll
      for (u32 f = 0; f < kFragments; ++f) {
        const u32 box = b_at + f / kInBox * kBBox + k * (kMmaDepth * kColumnBytes);
        const u32 first = ld_shared_u32(box + b_offset[0][f % kInBox]);
        const u32 second = ld_shared_u32(box + b_offset[1][f % kInBox]);
#pragma unroll
        for (u32 i = 0; i < kRows; ++i) mma<float>(sum(i, f), a[i], first, second);
      }
    }
  }
};

}  // namespace convgrad
