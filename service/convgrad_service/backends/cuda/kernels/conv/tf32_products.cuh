// Products of float32 operands as TF32 of which one or both lie M- or N-major in shared memory, where wgmma reads TF32
// with K contiguous only. Operands in registers may lie anyhow, so nothing is transposed: an A that is M-major is loaded
// into wgmma's registers (Tf32Rows), as the weights in gradients of the input, channels last; if B is N-major too, as in
// weight gradients of channels last, where K is pixels, both are loaded into those of mma.sync (Tf32Products).
//
// An operand is boxes of rows of up to 128 bytes, a row for each element of K, whose 16-byte chunks are swizzled as the
// copy engine does.
//
// Tf32Products: within eight elements the order of K is free if it is the same for both operands: the first half of
// an mma's K are even elements, the second odd ones, so that what a warp reads at once lies in different banks (of rows
// of 128 bytes).
#pragma once

#include "ptx/load_store.cuh"
#include "ptx/mma.cuh"
#include "ptx/warpgroup.cuh"

namespace convgrad {

// 64 rows of A over eight elements of K, in the registers of a warpgroup's wgmma, from boxes of kDepth elements of K.
// Rows are permuted: a lane has pairs of neighbours, and what half a warp reads at once lies in different banks.
template <int kDepth>
struct Tf32Rows {
  u32 offset[2];  // of this lane's pairs, by half of K

  __device__ __forceinline__ explicit Tf32Rows(int thread) {
    const u32 warp = thread / 32 % 4, k = thread % 4, in_box = row(warp, thread % 32 / 4) % 32;
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
      const u32 line = k + half * 4;
      offset[half] = warp / 2 * (kDepth * 128) + line * 128 + (in_box / 4 ^ line) * 16 + in_box % 4 * 4;
    }
  }
  // Of the 64, that of a warp's lanes 4 * group to 4 * group + 3 whose other row is the next.
  __device__ __forceinline__ static int row(int warp, int group) {
    return warp / 2 * 32 + (warp % 2 * 2 + group / 2 % 2 * 4 + group / 4) * 4 + group % 2 * 2;
  }
  // From the box of the first 32 rows on.
  __device__ __forceinline__ void load(u32 from, u32 (&to)[4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint2 pair;
      ld_shared(from + offset[half], pair);
      to[half * 2] = pair.x, to[half * 2 + 1] = pair.y;
    }
  }
  // Once no wgmma reads `to` any more. An instruction that changes nothing, as bits that TF32 has not are zeros: the
  // compiler would make all wgmmas wait for each other if what is loaded while they run were their registers.
  __device__ __forceinline__ static void give(u32 (&to)[4], const u32 (&loaded)[4]) {
    fence_registers(to);
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = loaded[i] & 0xffffe000;
    fence_registers(to);
  }
};

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
