// A unit, which a warp of grouped_gather.cu computes at once: MF * 16 positions x PACK merges x NF * 8
// result channels, from a box of the source and the weights, both in shared memory.
//
// A step of the reduction is two chunks of one tap each, multiplied on tensor cores; with EXACT, for
// exact float32, it is one chunk multiplied by FMAs, and each lane has the same sums as with tensor
// cores. The weights' chunks are along the source's channels (ACROSS 0) or the result's (ACROSS 1).
#pragma once

#include "grouped/grouped_box.cuh"

namespace convgrad {

constexpr int kSize = static_cast<int>(sizeof(ELEMENT));
constexpr int kChunk = 16 / kSize;
constexpr int kColumns = PACK * NF * 8;  // result channels of a unit
// Rows of two chunks are contiguous, with the chunks of every other four rows swapped; longer rows are
// padded by a chunk. Both avoid bank conflicts.
constexpr bool kSwapped = kSize == 2 && kColumns == 16;
constexpr int kRowPitch = kColumns * kSize + (kSwapped ? 0 : 16);
constexpr int kRowsBytes = 16 * (kColumns + 4) * 4;  // a warp's unrounded sums

// On Blackwell registers suffice for only one with three times 8 columns, and before Hopper in float32
// with three or four times 8.
constexpr bool kOneStep = (kBlackwell && NF == 3) || (kAmpere && !ACROSS && kSize == 4 && NF >= 3);
constexpr int kStepsAtOnce = kOneStep ? 1 : kSize == 4 ? 2 : 3;

// Offsets of a chunk of the reduction: in the source's box, and in a merge's weights.
struct Step {
  int a, b;
};

// Addresses of a unit's operands for a lane.
struct Operands {
  const Step* all;
  int steps;
  int x_merge_bytes, merge_bytes, column_bytes;  // distances of merges, and of groups of 8 result channels
  int w_pitch;
  u32 weights;
  const char* base;  // half of shared memory
  int own_a, own_b;  // EXACT: start of this lane's group
};

#if EXACT
// Computes kRows * 16 positions; lane l has the address of row l % 16 of each 16 in the box.
template <int kRows>
__device__ __forceinline__ void multiply(float (&sum)[PACK][kRows][NF][4],
                                         const u32 (&from_a)[kRows], const Operands& from) {
  static_assert(PACK == 1, "a lane's columns are of one merge");
  const int lane = threadIdx.x & 31, pair = lane & 3;
  const u32 base_at = shared_address(from.base);
  const char* row[kRows][2];
#pragma unroll
  for (int f = 0; f < kRows; ++f) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      row[f][half] = from.base + (__shfl_sync(~0u, from_a[f], half * 8 + lane / 4) - base_at) +
                     from.own_a;
    }
  }
  const char* const weights = from.base + (from.weights - base_at) + from.own_b +
                              (ACROSS ? pair * 8 : pair * 2 * from.w_pitch);
#pragma unroll 1
  for (int step = 0; step < from.steps; ++step) {
    const Step at = from.all[step];
    float w[NF][2][4];
#pragma unroll
    for (int j = 0; j < NF; ++j) {
      const char* const here = weights + at.b + j * from.column_bytes;
      if constexpr (ACROSS) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float2 two = *reinterpret_cast<const float2*>(here + e * from.w_pitch);
          w[j][0][e] = two.x, w[j][1][e] = two.y;
        }
      } else {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const float4 four = *reinterpret_cast<const float4*>(here + k * from.w_pitch);
          w[j][k][0] = four.x, w[j][k][1] = four.y, w[j][k][2] = four.z, w[j][k][3] = four.w;
        }
      }
    }
#pragma unroll
    for (int f = 0; f < kRows; ++f) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float4 x = *reinterpret_cast<const float4*>(row[f][half] + at.a);
#pragma unroll
        for (int j = 0; j < NF; ++j) {
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            float& to = sum[0][f][j][half * 2 + k];
            to = fmaf(x.x, w[j][k][0], to);
            to = fmaf(x.y, w[j][k][1], to);
            to = fmaf(x.z, w[j][k][2], to);
            to = fmaf(x.w, w[j][k][3], to);
          }
        }
      }
    }
  }
}
#else
// Computes kRows * 16 positions; lane l has the address of row l % 16 of each 16 in the box.
template <int kRows>
__device__ __forceinline__ void multiply(float (&sum)[PACK][kRows][NF][4],
                                         const u32 (&from_a)[kRows], const Operands& from) {
  using T = ELEMENT;
  const int lane = threadIdx.x & 31;
  const u32 lane_b = from.weights + (lane & 7) * from.w_pitch +
                     (lane >> 4) * (PACK == 2 ? from.merge_bytes : from.column_bytes);
  const u32 word_b = from.weights + (lane & 3) * from.w_pitch + (lane >> 2) * 4;
  // Of a step's two chunks, lanes 16 to 31 read A's second, and lanes 8 to 15 and 24 to 31 B's second.
  const Step* const a_steps = from.all + (lane >> 4);
  const Step* const b_steps = from.all + (lane >> 3 & 1);
#pragma unroll(kStepsAtOnce)
  for (int step = 0; step < from.steps; ++step) {
    const int a_offset = a_steps[step * 2].a;
    u32 b[PACK * NF + 1][2];
    if constexpr (ACROSS && kSize == 4) {
      const int near = from.all[step * 2].b, far = from.all[step * 2 + 1].b;
#pragma unroll
      for (int s = 0; s < PACK; ++s) {
#pragma unroll
        for (int j = 0; j < NF; ++j) {
          const u32 at = word_b + s * from.merge_bytes + j * from.column_bytes;
          b[s * NF + j][0] = ld_shared_u32(at + near);
          b[s * NF + j][1] = ld_shared_u32(at + far);
        }
      }
    } else {
      const int b_offset = b_steps[step * 2].b;
#pragma unroll
      for (int j = 0; j < PACK * NF; j += 2) {
        u32 four[4];
        const u32 at = lane_b + b_offset + (PACK == 2 ? 0 : j * from.column_bytes);
        if constexpr (ACROSS) {
          ldmatrix_trans(four, at);
        } else {
          ldmatrix(four, at);
        }
        b[j][0] = four[0], b[j][1] = four[1], b[j + 1][0] = four[2], b[j + 1][1] = four[3];
      }
    }
    if constexpr (kSize == 4) {
#pragma unroll
      for (int j = 0; j < PACK * NF; ++j) b[j][0] = to_tf32(b[j][0]), b[j][1] = to_tf32(b[j][1]);
    }
#pragma unroll
    for (int f = 0; f < kRows; ++f) {
#pragma unroll
      for (int s = 0; s < PACK; ++s) {
        u32 a[4];
        ldmatrix(a, from_a[f] + a_offset + s * from.x_merge_bytes);
        if constexpr (kSize == 4) {
#pragma unroll
          for (int e = 0; e < 4; ++e) a[e] = to_tf32(a[e]);
        }
#pragma unroll
        for (int j = 0; j < NF; ++j) {
          mma<T>(sum[s][f][j], a, b[s * NF + j][0], b[s * NF + j][1]);
        }
      }
    }
  }
}

#endif

#if WINDOWS
// Addresses of rows and taps of windows for a lane.
struct Windows {
  int planes;                   // taps along D
  int plane, plane_tap;         // bytes between planes, in the box and in the weights
  int first_plane;              // offset of the first plane in the box
  int row;                      // bytes between rows of the box
  int pair, third;              // this lane's part of two taps of two rows, of one tap of four rows
  int tap, next_tap;            // this lane's first tap in the weights, and the one four taps later
};

// Computes kWindows windows of 4 x 8 positions, each of two fragments of two rows, from the boxes'
// corners `corner`. A window's six rows are loaded once, 8 positions per matrix, and multiplied from
// registers by the 3 x 3 taps of 8 channels: two taps of a row in one product, the third in one of
// half the depth.
template <int kWindows>
__device__ __forceinline__ void multiply_windows(float (&sum)[PACK][kWindows * 2][NF][4],
                                                 const u32 (&corner)[kWindows],
                                                 const Operands& from, const Windows& of) {
  using T = ELEMENT;
  static_assert(NF == 1, "8 channels on both sides");
#pragma unroll 1
  for (int plane = 0; plane < of.planes; ++plane) {
    const int a_plane = of.first_plane + plane * of.plane, b_plane = plane * of.plane_tap;
#pragma unroll
    for (int s = 0; s < PACK; ++s) {
      u32 b[9], near[4], far[4], last_tap[1];
      const u32 b_at = from.weights + s * from.merge_bytes + b_plane + of.tap;
      if constexpr (ACROSS) {
        ldmatrix_trans(near, b_at);
        ldmatrix_trans(far, b_at + of.next_tap);
        ldmatrix_trans(last_tap, b_at + 2 * of.next_tap);
      } else {
        ldmatrix(near, b_at);
        ldmatrix(far, b_at + of.next_tap);
        ldmatrix(last_tap, b_at + 2 * of.next_tap);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) b[e] = near[e], b[4 + e] = far[e];
      b[8] = last_tap[0];
#pragma unroll
      for (int v = 0; v < kWindows; ++v) {
        const u32 a_at = corner[v] + a_plane + s * 16;
        u32 pair[3][4], third[4], last[2];
#pragma unroll
        for (int i = 0; i < 3; ++i) ldmatrix(pair[i], a_at + of.pair + i * 2 * of.row);
        ldmatrix(third, a_at + of.third);
        ldmatrix(last, a_at + of.third + 4 * of.row);
        const u32 thirds[6] = {third[0], third[1], third[2], third[3], last[0], last[1]};
#pragma unroll
        for (int r = 0; r < 3; ++r) {
#pragma unroll
          for (int q = 0; q < 2; ++q) {
            const int top = q * 2 + r, bottom = top + 1;
            const u32 two[4] = {pair[top / 2][top % 2 * 2], pair[bottom / 2][bottom % 2 * 2],
                                pair[top / 2][top % 2 * 2 + 1],
                                pair[bottom / 2][bottom % 2 * 2 + 1]};
            const u32 one[2] = {thirds[top], thirds[bottom]};
            float(&to)[4] = sum[s][v * 2 + q][0];
            mma<T>(to, two, b[r * 3], b[r * 3 + 1]);
            mma<T>(to, one, b[r * 3 + 2]);
          }
        }
      }
    }
  }
}
#endif

// Stores a fragment's sums, unrounded or rounded, to a warp's rows.
template <int kRows, class To>
__device__ __forceinline__ void put(const float (&sum)[PACK][kRows][NF][4], int f, To* to,
                                    int pitch) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int s = 0; s < PACK; ++s) {
#pragma unroll
    for (int j = 0; j < NF; ++j) {
      const int swap = kSwapped && sizeof(To) == 2 ? lane >> 4 : 0;
      To* const at = to + lane / 4 * pitch + ((s * NF + j) ^ swap) * 8 + lane % 4 * 2;
      store_pair(at, sum[s][f][j][0], sum[s][f][j][1]);
      store_pair(at + 8 * pitch, sum[s][f][j][2], sum[s][f][j][3]);
    }
  }
}

}  // namespace convgrad
