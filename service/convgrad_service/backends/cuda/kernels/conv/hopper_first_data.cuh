// Kernel parameters, work of a block, constants and weight layout of hopper_first_data.cu.
// Macros: ELEMENT, SPLIT, ROWS, EIGHTS, TAPS (0: as many as args.taps), STEPS, STAGES.
//
// Positions of x along W form groups of `stride`. Group i reads the positions of y from i + first_tap, at
// the same steps as every other group. Then
//   x[h][i, (b, c)] = sum over h's kernel rows r, taps t along D, steps s and k of
//                     y[z(t), p][i + first_tap + s, k] * v[t, r][s, k, (b, c)]
// with v[t, r][s, k, (b, c)] = w[k, c, t, r, b + pad - (first_tap + s)*stride], zero outside the kernel, is
// a GEMM with M = groups i, N = stride*C columns, K = taps along D x steps x channels of y.
#pragma once

#include "core/divider.cuh"
#include "core/epilogue.cuh"
#include "core/split_floats.cuh"
#include "ptx/load_store.cuh"
#include "ptx/tma.cuh"

namespace convgrad {

struct HopperFirstDataArgs {
  TensorMap y_map;  // K W H D N
  const void* w;
  void* x;
  const void* accumulate;  // like x, or null
  const void* bias;        // one per channel of x, or null
  i64 x_stride[6];         // N G C D H W, in elements
  i64 w_stride[6];         // G K C T R S
  float alpha;
  float beta;
  int activation;
  int plain;  // no epilogue: 1, or kInTwos
  int channels;
  int y_channels;
  int x_size[3];
  int y_size[3];
  int kernel[3];
  int stride[3];
  int pad[3];
  int first_tap;
  int warpgroups;
  int positions;     // positions of y that a block's groups read
  int row_segments;  // row segments along H
  int segment_rows;  // rows of y that a segment advances by
  int segments;      // along W
  u32 sub_bytes;     // 128 bytes of each position of a stage, in whole swizzle atoms
  int row_step;      // between a block's kernel rows, from blockIdx.y: 1, or the stride
  int taps;          // steps along W
  u32 w_bytes;       // bytes of the weights' bulk copy; 0 if read from global memory
  Divider by_taps;
};

constexpr int kInTwos = 3;  // columns are contiguous in x, and pairs at even offsets

__device__ __forceinline__ int floor_div(int a, int b) { return a >= 0 ? a / b : -((b - 1 - a) / b); }

// What a block computes: one plane (n, d) of x, a segment of its rows and one of its groups.
struct Share {
  int n, d, segment;
  int tap, plane, planes;  // taps along D: the j-th is tap + j*stride, in plane `plane` - j of y
  int finish0, finish1;    // after row p of y, rows p*stride - pad + [0, stride) of x are complete
  int p0;                  // the first row of y that contributes to them
  int real0, real1;        // the range of rows that exist

  __device__ __forceinline__ explicit Share(const HopperFirstDataArgs& args) {
    u32 block = blockIdx.x;
    segment = block % args.segments;
    block /= args.segments;
    const int row_segment = block % args.row_segments;
    block /= args.row_segments;
    d = block % args.x_size[0];
    n = block / args.x_size[0];
    plane = floor_div(d + args.pad[0], args.stride[0]);
    tap = d + args.pad[0] - plane * args.stride[0];
    planes = tap < args.kernel[0] ? (args.kernel[0] - 1 - tap) / args.stride[0] + 1 : 0;
    const int beyond = max(0, plane - (args.y_size[0] - 1));
    tap += beyond * args.stride[0];
    plane -= beyond;
    planes = max(0, min(planes - beyond, plane + 1));
    const int stride = args.stride[1];
    finish0 = floor_div(args.pad[1], stride) + row_segment * args.segment_rows;
    finish1 = min(finish0 + args.segment_rows - 1,
                  floor_div(args.x_size[1] - 1 + args.pad[1], stride));
    p0 = finish0 - (args.kernel[1] - 1) / stride;
    real0 = max(0, p0);
    real1 = planes > 0 ? min(args.y_size[1] - 1, finish1) : -1;
  }
};

// Stores one result of group `group` in row h, with an epilogue.
template <class T>
__device__ inline void put_one(const HopperFirstDataArgs& args, const Share& share, int h, int group,
                               int column, float value) {
  const int b = column / args.channels, c = column - b * args.channels;
  const int w_at = group * args.stride[2] + b;
  if (b >= args.stride[2] || w_at >= args.x_size[2]) return;
  const i64 at = share.n * args.x_stride[0] + share.d * args.x_stride[3] + h * args.x_stride[4] +
                 w_at * args.x_stride[5] + c * args.x_stride[2];
  static_cast<T*>(args.x)[at] = narrow<T>(finish_at<T>(args, value, at, c));
}

using FirstElement = ELEMENT;
constexpr bool kWide = sizeof(FirstElement) == 4, kSplit = SPLIT;
// 8-column fragments of a kernel row, and of all.
constexpr int kEights = EIGHTS, kAll = ROWS * kEights;
// Whether there are registers to store results while the next row's wgmmas run.
constexpr bool kLater = kEights == 1;
constexpr int kMostFinished = 2;  // in that case, the most rows of x that a row of y completes
constexpr int kColumns = kAll * 8, kRowColumns = kEights * 8;
constexpr int kSubChannels = kWide ? 32 : 64;
constexpr int kSubs = (16 * STEPS + kSubChannels - 1) / kSubChannels;  // rows of 128 bytes per position of y,
constexpr int kWeightSubs = kSplit ? (STEPS + 3) / 4 : kSubs;          // and per column of the weights
constexpr int kParts = kSplit ? 3 : 1;
constexpr int kProducts = kWide && !kSplit ? 2 * STEPS : STEPS;  // wgmmas per step along W
constexpr u32 kRowBytes = 128, kSubBytes = kColumns * kRowBytes, kTapBytes = kWeightSubs * kSubBytes;
constexpr int kFree = STAGES - 2;  // stages free for y while the others hold the weights as loaded
constexpr int kWeightsLaid = 1;    // a named barrier
constexpr int kLoaders = kSplit ? 128 : 32;  // producer threads; a warpgroup, to release registers
// Two warpgroups, unless accumulators of two such blocks would not fit into the registers.
constexpr int kMostThreads = (kEights == 1 ? 256 : 128) + kLoaders;

// The swizzled offset of a 16-byte chunk of a row.
__device__ __forceinline__ u32 chunk_at(u32 row, u32 chunk) {
  return row * kRowBytes + (chunk ^ (row & 7)) * 16;
}

// K is permuted so that a lane's part of A is four contiguous channels of y, which it loads at
// once: the pairs of both halves of K.
__device__ __forceinline__ constexpr int channel_of(int place) {
  return place / 2 % 4 * 4 + place / 8 * 2 + place % 2;
}
// The row of eight that a lane has, permuted to avoid bank conflicts.
__device__ __forceinline__ constexpr int row_of(int of_eight) {
  return kSplit ? of_eight / 2 + of_eight % 2 * 4 : of_eight;
}

// Rounds and stores two consecutive elements, or one.
template <class E>
__device__ __forceinline__ void put_two(bool wanted, E* to, float first, float second) {
  store_if(wanted, to, narrow_x2<E>(first, second));
}
__device__ __forceinline__ void put_two(bool wanted, float* to, float first, float second) {
  store_if(wanted, to, make_uint2(__float_as_uint(first), __float_as_uint(second)));
}
template <class E>
__device__ __forceinline__ void put_one(bool wanted, E* to, float value) {
  store_if(wanted, to, narrow<E>(value).bits);
}
__device__ __forceinline__ void put_one(bool wanted, float* to, float value) {
  store_if(wanted, to, __float_as_uint(value));
}

// Packs a chunk of a weight operand, or of its three scaled parts.
template <class E>
__device__ __forceinline__ void pack(const E (&values)[8], u32 (&words)[1][4], float) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    words[0][e] = values[2 * e].bits | static_cast<u32>(values[2 * e + 1].bits) << 16;
  }
}
__device__ __forceinline__ void pack(const float (&values)[4], u32 (&words)[1][4], float) {
#pragma unroll
  for (int e = 0; e < 4; ++e) words[0][e] = to_tf32(__float_as_uint(values[e]));
}
__device__ __forceinline__ void pack(const float (&values)[8], u32 (&words)[3][4], float by) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    u32 parts[3];
    split_x2(values[2 * e] * by, values[2 * e + 1] * by, parts);
#pragma unroll
    for (int part = 0; part < 3; ++part) words[part][e] = parts[part];
  }
}

// Writes the B operands to shared memory, by parts, taps along D and steps along W: columns are kernel rows
// x (b, c), padded to 8. Weights to be split are multiplied by `by`. Returns the extremes of the weights
// that this thread read.
__device__ __forceinline__ Extremes lay_weights(const HopperFirstDataArgs& args, const FirstElement* w,
                                                char* to, int thread, int threads, float by = 1) {
  Extremes seen = Extremes::none();
  constexpr int kOfChunk = kWide && !kSplit ? 4 : 8;
  constexpr int kChunks = 16 * STEPS / kOfChunk;
  const int taps = args.kernel[0] * args.taps;
#pragma unroll 2
  for (int i = thread; i < taps * kChunks * kColumns; i += threads) {
    const int column = i % kColumns, chunk = i / kColumns % kChunks, tap = i / kColumns / kChunks;
    const int t = divide(tap, args.by_taps);
    const int r = blockIdx.y + column / kRowColumns * args.row_step, rest = column % kRowColumns;
    const int b = rest / args.channels, c = rest - b * args.channels;
    const int s = b + args.pad[2] - (args.first_tap + tap - t * args.taps) * args.stride[2];
    const bool there = r < args.kernel[1] && b < args.stride[2] && s >= 0 && s < args.kernel[2];
    const FirstElement* const from = w + c * args.w_stride[2] + t * args.w_stride[3] +
                                     r * args.w_stride[4] + s * args.w_stride[5];
    FirstElement values[kOfChunk] = {};
#pragma unroll
    for (int e = 0; e < kOfChunk; ++e) {
      const int place = chunk * kOfChunk + e;
      const int k = kSplit ? place / 16 * 16 + channel_of(place % 16) : place;
      if (there && k < args.y_channels) values[e] = from[k * args.w_stride[1]];
    }
    if constexpr (kSplit) {
#pragma unroll
      for (int e = 0; e < kOfChunk; ++e) seen.add(__float_as_uint(widen(values[e])));
    }
    u32 words[kParts][4];
    pack(values, words, by);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      *reinterpret_cast<uint4*>(to + (part * taps + tap) * kTapBytes + chunk / 8 * kSubBytes +
                                chunk_at(column, chunk % 8)) =
          make_uint4(words[part][0], words[part][1], words[part][2], words[part][3]);
    }
  }
  return seen;
}

}  // namespace convgrad
