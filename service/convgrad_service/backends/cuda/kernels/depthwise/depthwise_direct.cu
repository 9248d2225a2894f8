// Depthwise convolution, forward or the gradient of its input, of channels-last tensors, without
// staging pixels in shared memory: for problems whose time is that of a few dependent loads.
//
// forward   y[n, p, q, c] = sum over (r, s) of
//                           x[n, p*STRIDE + r - pad, q*STRIDE + s - pad, c] * w[c, r, s]
// backward  y[n, u - pad, v - pad, c] = sum over u = p*STRIDE + r, v = q*STRIDE + s
//                                       of x[n, p, q, c] * w[c, r, s]
// rounded once. A thread has VECTOR adjacent channels of ROWS x COLUMNS results (backward: times
// STRIDE both ways). It loads the elements of x that they read, the first AHEAD rows before it waits
// for the weights.
// Block: `vectors` vectors of channels, then positions. Grid: tiles of channels, positions.
// Shared memory: the weights of the tile's channels as they are in memory. A thread's are an odd
// number of words apart where the number of taps is odd, so that their reads have no conflicts.
// Relies on its launcher for contiguous weights, aligned to 16 bytes as a tile's first ones are;
// strides and channels in multiples of VECTOR; at most 32 vectors; an image's extent below 2^31 elements; positions below
// 2^31. Deterministic: sums are in the order of x's rows, then columns. Padding is read as zeros. A
// dependent launch may start with this kernel (ptx/pdl.cuh).
#include "core/divider.cuh"
#include "depthwise/depthwise_words.cuh"
#include "ptx/pdl.cuh"

namespace convgrad {

struct DepthwiseDirectArgs {
  const void* x;    // the source: input, or grad_output
  const void* w;    // [channel][r][s]
  void* y;          // the result: output, or grad_input
  i64 x_stride[3];  // N H W, in elements; a pixel's channels are contiguous
  i64 y_stride[3];
  int channels;
  int x_size[2];
  int y_size[2];
  int pad[2];
  int base[2];    // backward: the first results, in units of STRIDE relative to -pad
  int positions;  // of all images
  int vectors;    // vectors of channels in a tile
  int across;     // positions of a row
  int down;       // rows of positions in an image
  Divider by_vectors, by_across, by_down;
};

}  // namespace convgrad

using namespace convgrad;

namespace {

using T = ELEMENT;
using Raw = typename RawOf<sizeof(T) * VECTOR>::type;

constexpr int kTaps = KERNEL_H * KERNEL_W;
constexpr int kReachH = (KERNEL_H + STRIDE - 1) / STRIDE, kReachW = (KERNEL_W + STRIDE - 1) / STRIDE;
#if BACKWARD
constexpr int kReadRows = ROWS + kReachH - 1, kReadColumns = COLUMNS + kReachW - 1;
constexpr int kOwnRows = ROWS * STRIDE, kOwnColumns = COLUMNS * STRIDE;
#else
constexpr int kReadRows = (ROWS - 1) * STRIDE + KERNEL_H;
constexpr int kReadColumns = (COLUMNS - 1) * STRIDE + KERNEL_W;
constexpr int kOwnRows = ROWS, kOwnColumns = COLUMNS;
#endif
constexpr int kMostVectors = 32;
constexpr int kRounds = (kMostVectors * kTaps + THREADS - 1) / THREADS;  // of loads of weights
constexpr int kAhead = AHEAD < kReadRows ? AHEAD : kReadRows;

// The tap, in one dimension, by which an element read contributes to a result.
constexpr int tap_of(int own, int read, int reach) {
#if BACKWARD
  return own + (reach - 1 - read) * STRIDE;
#else
  return read - own * STRIDE;
#endif
}

struct Weights {
  const unsigned char* own;
  // Of channel v at tap (r, s).
  __device__ __forceinline__ float at(int v, int r, int s) const {
    const int element = v * kTaps + r * KERNEL_W + s;
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
};

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    depthwise_direct(const __grid_constant__ DepthwiseDirectArgs args) {
  launch_dependent_grids();
  extern __shared__ __align__(16) unsigned char shared[];
  const int thread = threadIdx.x;
  const int first_channel = blockIdx.x * args.vectors * VECTOR;
  const int weights_of_tile =
      min(args.vectors, (args.channels - first_channel) / VECTOR) * kTaps;  // in words
  Raw own_weights[kRounds];
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int word = thread + i * THREADS;
    load_ahead_if(word < weights_of_tile,
                  static_cast<const Raw*>(args.w) + static_cast<i64>(blockIdx.x) * args.vectors * kTaps + word,
                  own_weights[i]);
  }
  const int place = divide(thread, args.by_vectors), vector = thread - place * args.vectors;
  const int c = first_channel + vector * VECTOR;
  const int position = blockIdx.y * divide(THREADS, args.by_vectors) + place;
  const bool active = position < args.positions && c < args.channels &&
                      place < divide(THREADS, args.by_vectors);
  const int line = divide(position, args.by_across), n = divide(line, args.by_down);
  const int first_row = (line - n * args.down) * ROWS;
  const int first_column = (position - line * args.across) * COLUMNS;
#if BACKWARD
  const int top = first_row + args.base[0] - (kReachH - 1);
  const int left = first_column + args.base[1] - (kReachW - 1);
  const int row = (first_row + args.base[0]) * STRIDE - args.pad[0];
  const int column = (first_column + args.base[1]) * STRIDE - args.pad[1];
#else
  const int top = first_row * STRIDE - args.pad[0], left = first_column * STRIDE - args.pad[1];
  const int row = first_row, column = first_column;
#endif
  const int pitch = static_cast<int>(args.x_stride[2]);
  const T* from = static_cast<const T*>(args.x) + (active ? n : 0) * args.x_stride[0] +
                  top * args.x_stride[1] + (left * pitch + c);
  Raw read[kReadRows][kReadColumns];
  const auto load = [&](int i) {
    const bool there = active && static_cast<u32>(top + i) < static_cast<u32>(args.x_size[0]);
    const u32 columns = there ? args.x_size[1] : 0;
#pragma unroll
    for (int j = 0; j < kReadColumns; ++j) {
      load_ahead_if(static_cast<u32>(left + j) < columns, from + j * pitch, read[i][j]);
    }
    from += args.x_stride[1];
  };
#pragma unroll
  for (int i = 0; i < kAhead; ++i) load(i);
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int word = thread + i * THREADS;
    if (word < args.vectors * kTaps) reinterpret_cast<Raw*>(shared)[word] = own_weights[i];
  }
  __syncthreads();
  const Weights weights{shared + vector * VECTOR * kTaps * static_cast<int>(sizeof(T))};

  float sums[kOwnRows][kOwnColumns][VECTOR] = {};
#pragma unroll
  for (int i = 0; i < kReadRows; ++i) {
    if (i + kAhead < kReadRows) load(i + kAhead);
    float wide[kReadColumns][VECTOR];
#pragma unroll
    for (int j = 0; j < kReadColumns; ++j) widen_word<T>(read[i][j], wide[j]);
#pragma unroll
    for (int a = 0; a < kOwnRows; ++a) {
      const int r = tap_of(a, i, kReachH);
      if (r < 0 || r >= KERNEL_H) continue;
#pragma unroll
      for (int j = 0; j < kReadColumns; ++j) {
#pragma unroll
        for (int b = 0; b < kOwnColumns; ++b) {
          const int s = tap_of(b, j, kReachW);
          if (s < 0 || s >= KERNEL_W) continue;
#pragma unroll
          for (int v = 0; v < VECTOR; ++v) sums[a][b][v] += wide[j][v] * weights.at(v, r, s);
        }
      }
    }
  }
  T* to = static_cast<T*>(args.y) + (active ? n : 0) * args.y_stride[0] + row * args.y_stride[1] +
          (column * static_cast<int>(args.y_stride[2]) + c);
#pragma unroll
  for (int a = 0; a < kOwnRows; ++a) {
    const bool there = active && static_cast<u32>(row + a) < static_cast<u32>(args.y_size[0]);
    const u32 columns = there ? args.y_size[1] : 0;
#pragma unroll
    for (int b = 0; b < kOwnColumns; ++b) {
      Vector<T, VECTOR> result;
#pragma unroll
      for (int v = 0; v < VECTOR; ++v) result.at[v] = narrow<T>(sums[a][b][v]);
      store_if(static_cast<u32>(column + b) < columns, to + b * static_cast<int>(args.y_stride[2]),
               result.raw);
    }
    to += args.y_stride[1];
  }
}
