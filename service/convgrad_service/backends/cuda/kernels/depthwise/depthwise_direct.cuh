// Parts of depthwise_direct.cu: its argument, and the main loop with ROWS > 0. Made for the same preprocessor's
// names. Host side: depthwise_direct.py.
#pragma once

#include "core/divider.cuh"
#include "depthwise/depthwise_activation.cuh"
#include "depthwise/depthwise_words.cuh"

namespace convgrad {

struct DepthwiseDirectArgs {
  const void* x;    // the source: input, or grad_output
  const void* w;    // [channel][t][r][s]
  void* y;                 // the result: output, or grad_input
  const void* accumulate;  // like y, with its strides, or null
  const void* bias;        // one for each channel, or null
  i64 x_stride[4];         // N D H W, in elements
  i64 y_stride[4];
  float alpha;
  float beta;
  int activation;
  int finishes;  // whether a result is anything but its sum
  int channels;  // of the result
  int x_size[3];
  int y_size[3];
  int kernel[3];
  int stride[3];
  int dilation[3];
  int pad[3];     // as the kernel is read, in the dimensions that are flipped
  int backward;
  int flipped;    // every `period` weights are read in reverse
  int period;
  int spread;     // columns between taps, and between a thread's results
  int part;       // columns of a part of a row of taps, at most KERNEL
  int parts;
  int base[2];    // backward: the first results of H and W, in units of STRIDE relative to -pad
  int positions;  // of all images
  int vectors;    // vectors of channels in a tile
  int places;     // positions of a block
  int inner;      // positions of a row, or with down_first of a column
  int outer;      // rows or columns of positions in a plane
  Divider by_vectors, by_inner, by_outer, by_planes, by_stride[3], by_period, by_spread, by_multiplier;
  // With VECTOR = 1: between channels of x and of y, and whether adjacent threads have adjacent positions.
  i64 x_channel, y_channel;
  int in_planes;
  Divider by_places;
  int down_first;  // adjacent positions are in a column
  int staged;      // results of adjacent threads are not adjacent, but will be stored so
  int transposed;  // planes of taps are in memory with H and W exchanged
  Divider by_rows, by_plane;  // of taps
};

using T = ELEMENT;
using Raw = typename RawOf<sizeof(T) * VECTOR>::type;

#if STRIDE == 0
constexpr int kReadColumns = COLUMNS * KERNEL, kOwnColumns = COLUMNS;
#else
constexpr int kReach = (KERNEL + STRIDE - 1) / STRIDE;
#if BACKWARD
constexpr int kReadColumns = COLUMNS + kReach - 1, kOwnColumns = COLUMNS * STRIDE;
#else
constexpr int kReadColumns = (COLUMNS - 1) * STRIDE + KERNEL, kOwnColumns = COLUMNS;
#endif
#endif

// A thread's position: an image, a plane of results, the first row and column (backward, in units of
// STRIDE, relative to `base`; with ROWS = 0 the row itself, with STRIDE = 0 the column).
struct Place {
  int n, z, row, column;
};

#if STRIDE > 0
// The tap, in one dimension, by which an element read contributes to a result.
constexpr int tap_of(int own, int read, int reach) {
#if BACKWARD
  return own + (reach - 1 - read) * STRIDE;
#else
  return read - own * STRIDE;
#endif
}
#endif

#if ROWS > 0

constexpr int kTaps = KERNEL_H * KERNEL, kReachH = (KERNEL_H + STRIDE - 1) / STRIDE;
#if BACKWARD
constexpr int kReadRows = ROWS + kReachH - 1, kOwnRows = ROWS * STRIDE;
#else
constexpr int kReadRows = (ROWS - 1) * STRIDE + KERNEL_H, kOwnRows = ROWS;
#endif
constexpr int kAhead = AHEAD < kReadRows ? AHEAD : kReadRows;
constexpr int kMostVectors = 32;
// Words of weights that a thread loads before x.
constexpr int kEarly = (kMostVectors * kTaps + THREADS - 1) / THREADS;

class Mainloop {
 public:
  __device__ __forceinline__ Mainloop(const DepthwiseDirectArgs& args, const Place& at, int c,
                                      bool active)
      : args_(args), pitch_(static_cast<int>(args.x_stride[3])), active_(active) {
#if BACKWARD
    top_ = at.row + args.base[0] - (kReachH - 1), left_ = at.column + args.base[1] - (kReach - 1);
#else
    top_ = at.row * STRIDE - args.pad[1], left_ = at.column * STRIDE - args.pad[2];
#endif
    from_ = static_cast<const T*>(args.x) + at.n * args.x_stride[0] + at.z * args.x_stride[1] +
            top_ * args.x_stride[2] +
            (left_ * pitch_ + channel_offset<VECTOR>(divide(c, args.by_multiplier), args.x_channel));
  }

  __device__ __forceinline__ void load_first() {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load(i);
  }

  __device__ __forceinline__ void run(const unsigned char* weights, int taps,
                                      float (&sums)[kOwnRows][kOwnColumns][VECTOR]) {
    if constexpr (KERNEL_H == 1) {
      run_line(reinterpret_cast<const T*>(weights), taps, sums);
      return;
    }
#pragma unroll
    for (int i = 0; i < kReadRows; ++i) {
      if (i + kAhead < kReadRows) load(i + kAhead);
      float wide[kReadColumns][VECTOR];
#pragma unroll
      for (int j = 0; j < kReadColumns; ++j) widen_word<T>(read_[i][j], wide[j]);
#pragma unroll
      for (int a = 0; a < kOwnRows; ++a) {
        const int r = tap_of(a, i, kReachH);
        if (r < 0 || r >= KERNEL_H) continue;
#pragma unroll
        for (int j = 0; j < kReadColumns; ++j) {
#pragma unroll
          for (int b = 0; b < kOwnColumns; ++b) {
            const int s = tap_of(b, j, kReach);
            if (s < 0 || s >= KERNEL) continue;
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) {
              sums[a][b][v] += wide[j][v] * weight(weights, v * kTaps + r * KERNEL + s);
            }
          }
        }
      }
    }
  }

 private:
  __device__ __forceinline__ void load(int i) {
    const bool there = active_ && static_cast<u32>(top_ + i) < static_cast<u32>(args_.x_size[1]);
    const u32 columns = there ? args_.x_size[2] : 0;
#pragma unroll
    for (int j = 0; j < kReadColumns; ++j) {
      load_ahead_if(static_cast<u32>(left_ + j) < columns, from_ + j * pitch_, read_[i][j]);
    }
    from_ += args_.x_stride[2];
  }
  // The first of a thread's rows of results is the only one that a row of taps contributes to.
  __device__ __forceinline__ void run_line(const T* weights, int taps,
                                           float (&sums)[kOwnRows][kOwnColumns][VECTOR]) {
    float wide[kReadColumns][VECTOR];
#pragma unroll
    for (int j = 0; j < kReadColumns; ++j) widen_word<T>(read_[0][j], wide[j]);
#pragma unroll
    for (int s = 0; s < KERNEL; ++s) {
      if (s >= taps) break;
#pragma unroll
      for (int v = 0; v < VECTOR; ++v) {
        const float weight = widen(weights[v * taps + s]);
#pragma unroll
        for (int j = 0; j < kReadColumns; ++j) {
#pragma unroll
          for (int b = 0; b < kOwnColumns; ++b) {
            if (tap_of(b, j, kReach) == s) sums[0][b][v] += wide[j][v] * weight;
          }
        }
      }
    }
  }
  // Loads a word of two weights once.
  __device__ __forceinline__ static float weight(const unsigned char* own, int element) {
    if constexpr (sizeof(T) == 4) {
      return reinterpret_cast<const float*>(own)[element];
    } else if constexpr (VECTOR == 1) {
      return widen(reinterpret_cast<const T*>(own)[element]);
    } else {
      float both[2];
      widen_word<T>(reinterpret_cast<const u32*>(own)[element / 2], both);
      return both[element % 2];
    }
  }

  const DepthwiseDirectArgs& args_;
  const T* from_;
  int top_, left_;
  const int pitch_;
  const bool active_;
  Raw read_[kReadRows][kReadColumns];
};

#endif

}  // namespace convgrad
