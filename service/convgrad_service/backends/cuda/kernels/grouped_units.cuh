// What a warp of grouped_gather.cu computes at once: MF * 16 positions x PACK merges x NF * 8 result
// channels, from a box of the source and the weights, both in shared memory.
//
// A step of the reduction is two chunks, of one tap each, and their products run on tensor cores; or,
// where float32 is to be exact (EXACT), it is one chunk and they are FMAs, each lane having the sums
// that it would have there. The weights' chunks run along the source's
// channels (ACROSS 0) or along the result's (ACROSS 1).
#pragma once

#include "grouped_box.cuh"

namespace convgrad {

constexpr int kSize = static_cast<int>(sizeof(ELEMENT));
constexpr int kChunk = 16 / kSize;
constexpr int kColumns = PACK * NF * 8;  // result channels of a unit
constexpr int kRowPitch = kColumns * kSize + 16;
constexpr int kRowsBytes = 16 * (kColumns + 4) * 4;  // of a warp: its sums as they are

// Where a chunk of the reduction lies: in the source's box, and in a merge's weights.
struct Step {
  int a, b;
};

// Where a lane finds a unit's operands. With STEPS, a merge of the source is one chunk and the
// steps' offsets stay in registers.
struct Operands {
  const Step* all;
  int steps;
  int x_merge_bytes, merge_bytes, column_bytes;  // from one merge, or 8 result channels, to the next
  int w_pitch;
  u32 weights;
  const char* base;  // of shared memory
  int own_a, own_b;  // EXACT: where this lane's group begins
  int a[STEPS + 1], b[STEPS + 1];

  __device__ __forceinline__ Operands(const char* base, const Step* all, int steps,
                                      int x_merge_bytes, int merge_bytes, int column_bytes,
                                      int w_pitch)
      : all(all),
        steps(steps),
        x_merge_bytes(x_merge_bytes),
        merge_bytes(merge_bytes),
        column_bytes(column_bytes),
        w_pitch(w_pitch),
        weights(0),
        base(base),
        own_a(0),
        own_b(0) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) a[step] = a_at(step), b[step] = b_at(step);
  }
  // In a step's two chunks, lanes 16 to 31 read A's second one, lanes 8 to 15 and 24 to 31 B's.
  __device__ __forceinline__ int a_at(int step) const {
    return all[step * 2 + ((threadIdx.x & 31) >> 4)].a;
  }
  __device__ __forceinline__ int b_at(int step) const {
    return all[step * 2 + (threadIdx.x >> 3 & 1)].b;
  }
};

#if EXACT
// Sums of kRows * 16 positions; lane l has the address of the (l % 16)-th row of each 16 in the box.
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
// Sums of kRows * 16 positions; lane l has the address of the (l % 16)-th row of each 16 in the box.
template <int kRows>
__device__ __forceinline__ void multiply(float (&sum)[PACK][kRows][NF][4],
                                         const u32 (&from_a)[kRows], const Operands& from) {
  using T = ELEMENT;
  const int lane = threadIdx.x & 31;
  const u32 lane_b = from.weights + (lane & 7) * from.w_pitch +
                     (lane >> 4) * (PACK == 2 ? from.merge_bytes : from.column_bytes);
  const u32 word_b = from.weights + (lane & 3) * from.w_pitch + (lane >> 2) * 4;
  // One fragment at a time is not where time goes.
  constexpr int kKept = kRows > 1 ? STEPS : 0;
#pragma unroll(kKept ? kKept : 3)
  for (int step = 0; step < (kKept ? kKept : from.steps); ++step) {
    const int a_offset = kKept ? from.a[step < kKept ? step : 0] : from.a_at(step);
    u32 b[PACK * NF + 1][2];
    if constexpr (ACROSS && kSize == 4) {
      const int near = from.all[step * 2].b, far = from.all[step * 2 + 1].b;
#pragma unroll
      for (int s = 0; s < PACK; ++s) {
#pragma unroll
        for (int j = 0; j < NF; ++j) {
          const u32 at = word_b + s * from.merge_bytes + j * from.column_bytes;
          b[s * NF + j][0] = load_word(at + near);
          b[s * NF + j][1] = load_word(at + far);
        }
      }
    } else {
      const int b_offset = kKept ? from.b[step < kKept ? step : 0] : from.b_at(step);
#pragma unroll
      for (int j = 0; j < PACK * NF; j += 2) {
        u32 four[4];
        const u32 at = lane_b + b_offset + (PACK == 2 ? 0 : j * from.column_bytes);
        if constexpr (ACROSS) {
          load_matrices_transposed(four, at);
        } else {
          load_matrices(four, at);
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
        load_matrices(a, from_a[f] + a_offset + s * (STEPS ? 16 : from.x_merge_bytes));
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

// A fragment's sums, as they are or rounded, to a warp's rows.
template <int kRows, class To>
__device__ __forceinline__ void put(const float (&sum)[PACK][kRows][NF][4], int f, To* to,
                                    int pitch) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int s = 0; s < PACK; ++s) {
#pragma unroll
    for (int j = 0; j < NF; ++j) {
      To* const at = to + lane / 4 * pitch + (s * NF + j) * 8 + lane % 4 * 2;
      store_pair(at, sum[s][f][j][0], sum[s][f][j][1]);
      store_pair(at + 8 * pitch, sum[s][f][j][2], sum[s][f][j][3]);
    }
  }
}

}  // namespace convgrad
