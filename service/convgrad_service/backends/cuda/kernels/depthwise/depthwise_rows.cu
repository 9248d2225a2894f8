// Depthwise convolution, forward or the gradient of its input, of channels-last tensors with one to
// three spatial dimensions, a row of taps at a time and without staging pixels in shared memory.
//
// forward   y[n, z, p, q, c] = sum over (t, r, s) of w[c, t, r, s] *
//           x[n, z*sd + t*dd - pd, p*sh + r*dh - ph, q*STRIDE + s - pw, c]
// backward  y[n, i, j, k, c] = sum over (t, r, s) and (z, p, q) with i = z*sd + t*dd - pd, ... of
//           w[c, t, r, s] * x[n, z, p, q, c]
// rounded once. A row of taps is (t, r) and KERNEL adjacent columns; longer rows are divided into parts.
// A thread has VECTOR adjacent channels of COLUMNS results of a row (backward: times STRIDE). For each
// row of taps it loads the elements of x that its results read, AHEAD rows before they are used: so a
// small problem takes little longer than a load does.
// Block: `vectors` vectors of channels, then positions. Grid: tiles of channels, positions.
// Shared memory: the weights of the tile's channels as they are in memory. A thread's are an odd number
// of words apart where the number of taps is odd, so that reads have no conflicts.
// Deterministic: sums are in the order of t, r and parts, then of x's columns (backward: t and r).
// Relies on its launcher for contiguous weights; strides and channels in multiples of VECTOR; an
// image's extent below 2^31 elements; positions below 2^31; backward: no dimension D or H that is both
// strided and dilated, parts in multiples of STRIDE. Padding is read as zeros. A dependent launch may
// start with this kernel (ptx/pdl.cuh).
#include "core/divider.cuh"
#include "depthwise/depthwise_words.cuh"
#include "ptx/pdl.cuh"

namespace convgrad {

struct DepthwiseRowsArgs {
  const void* x;    // the source: input, or grad_output
  const void* w;    // [channel][t][r][s]
  void* y;          // the result: output, or grad_input
  i64 x_stride[4];  // N D H W, in elements; a pixel's channels are contiguous
  i64 y_stride[4];
  int channels;
  int x_size[3];
  int y_size[3];
  int kernel[3];
  int stride[2];  // D H
  int dilation[2];
  int pad[3];
  int part;   // columns of a part of a row of taps, at most KERNEL
  int parts;
  int base;       // backward: the first results of a row, in units of STRIDE relative to -pad
  int positions;  // of all images
  int vectors;    // vectors of channels in a tile
  int places;     // positions of a block
  int across;     // positions of a row
  Divider by_vectors, by_across, by_rows, by_planes, by_stride[2];
};

}  // namespace convgrad

using namespace convgrad;

namespace {

using T = ELEMENT;
using Raw = typename RawOf<sizeof(T) * VECTOR>::type;

constexpr int kReach = (KERNEL + STRIDE - 1) / STRIDE;
#if BACKWARD
constexpr int kRead = COLUMNS + kReach - 1, kOwn = COLUMNS * STRIDE;
#else
constexpr int kRead = (COLUMNS - 1) * STRIDE + KERNEL, kOwn = COLUMNS;
#endif
// Words of weights that a thread loads before x.
constexpr int kEarly = 4;

// The tap by which the element read contributes to a result.
constexpr int tap_of(int own, int read) {
#if BACKWARD
  return own + (kReach - 1 - read) * STRIDE;
#else
  return read - own * STRIDE;
#endif
}

// The taps of one dimension that contribute to a result, and the positions of x that they read.
struct Taps {
  int tap, step, count, at, at_step;
  __device__ __forceinline__ Taps(const DepthwiseRowsArgs& args, int dim, int result) {
#if BACKWARD
    const int from = result + args.pad[dim];
    const int quotient = divide(from, args.by_stride[dim]);
    tap = from - quotient * args.stride[dim], step = args.stride[dim];
    count = divide(args.kernel[dim] - tap + step - 1, args.by_stride[dim]);
    at = quotient, at_step = -args.dilation[dim];
#else
    tap = 0, step = 1, count = args.kernel[dim];
    at = result * args.stride[dim] - args.pad[dim], at_step = args.dilation[dim];
#endif
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    depthwise_rows(const __grid_constant__ DepthwiseRowsArgs args) {
  launch_dependent_grids();
  extern __shared__ __align__(16) unsigned char shared[];
  const int thread = threadIdx.x;
  const int first_channel = blockIdx.x * args.vectors * VECTOR;
  const int taps = args.kernel[0] * args.kernel[1] * args.kernel[2];
  const int words = min(args.vectors, (args.channels - first_channel) / VECTOR) * taps;
  const Raw* const weights_of_tile = static_cast<const Raw*>(args.w) + first_channel / VECTOR * taps;
  Raw early[kEarly];
#pragma unroll
  for (int i = 0; i < kEarly; ++i) {
    const int word = thread + i * THREADS;
    load_ahead_if(word < words, weights_of_tile + word, early[i]);
  }
  const int place = divide(thread, args.by_vectors), vector = thread - place * args.vectors;
  const int c = first_channel + vector * VECTOR, position = blockIdx.y * args.places + place;
  const bool active = place < args.places && position < args.positions && c < args.channels;
  const int line = divide(position, args.by_across), group = position - line * args.across;
  const int plane = divide(line, args.by_rows), row = line - plane * args.y_size[1];
  const int n = divide(plane, args.by_planes), z = plane - n * args.y_size[0];
  const Taps down(args, 1, row), deep(args, 0, z);
#if BACKWARD
  const int unit = group * COLUMNS + args.base;
  const int left = unit - (kReach - 1), column = unit * STRIDE - args.pad[2];
#else
  const int column = group * COLUMNS, left = column * STRIDE - args.pad[2];
#endif
  const int steps = active ? deep.count * down.count * args.parts : 0;

  // The next row of taps to load.
  const T* const image = static_cast<const T*>(args.x) + (active ? n : 0) * args.x_stride[0] + c;
  const int pitch = static_cast<int>(args.x_stride[3]);
  int part = 0, r = 0, t = 0;
  Raw read[AHEAD][kRead];
  int first_tap[AHEAD], count[AHEAD];  // the taps that read a row
  const auto load = [&](Raw(&to)[kRead], int& tap, int& count_of, bool wanted) {
    const int d = deep.at + t * deep.at_step, h = down.at + r * down.at_step;
    const int first = part * args.part;
    count_of = min(args.part, args.kernel[2] - first);
    tap = ((deep.tap + t * deep.step) * args.kernel[1] + down.tap + r * down.step) * args.kernel[2] +
          first;
#if BACKWARD
    const int from = left - first / STRIDE;
#else
    const int from = left + first;
#endif
    const bool there = wanted && static_cast<u32>(d) < static_cast<u32>(args.x_size[0]) &&
                       static_cast<u32>(h) < static_cast<u32>(args.x_size[1]);
    const u32 columns = there ? args.x_size[2] : 0;
    const T* const line_of_x = image + (d * static_cast<int>(args.x_stride[1]) +
                                        h * static_cast<int>(args.x_stride[2]) + from * pitch);
#pragma unroll
    for (int i = 0; i < kRead; ++i) {
      load_ahead_if(static_cast<u32>(from + i) < columns, line_of_x + i * pitch, to[i]);
    }
    if (++part == args.parts) {
      part = 0;
      if (++r == down.count) r = 0, ++t;
    }
  };
#pragma unroll
  for (int i = 0; i < AHEAD; ++i) load(read[i], first_tap[i], count[i], i < steps);
  Raw* const all_weights = reinterpret_cast<Raw*>(shared);
#pragma unroll
  for (int i = 0; i < kEarly; ++i) {
    const int word = thread + i * THREADS;
    if (word < words) all_weights[word] = early[i];
  }
#pragma unroll 4
  for (int word = thread + kEarly * THREADS; word < words; word += THREADS) {
    all_weights[word] = weights_of_tile[word];
  }
  __syncthreads();
  const T* const weights = reinterpret_cast<const T*>(shared) + vector * VECTOR * taps;

  float sums[kOwn][VECTOR] = {};
#pragma unroll 1
  for (int step = 0; step < steps; step += AHEAD) {
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      if (step + i >= steps) break;
      float wide[kRead][VECTOR];
#pragma unroll
      for (int j = 0; j < kRead; ++j) widen_word<T>(read[i][j], wide[j]);
      const T* const own = weights + first_tap[i];
      const int own_taps = count[i];
      if (step + AHEAD < steps) load(read[i], first_tap[i], count[i], step + AHEAD + i < steps);
#pragma unroll
      for (int s = 0; s < KERNEL; ++s) {
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) {
          const float weight = s < own_taps ? widen(own[v * taps + s]) : 0.0f;
#pragma unroll
          for (int j = 0; j < kRead; ++j) {
#pragma unroll
            for (int b = 0; b < kOwn; ++b) {
              if (tap_of(b, j) == s) sums[b][v] += wide[j][v] * weight;
            }
          }
        }
      }
    }
  }
  if (!active) return;
  T* const to = static_cast<T*>(args.y) + n * args.y_stride[0] +
                (z * static_cast<int>(args.y_stride[1]) + row * static_cast<int>(args.y_stride[2]) +
                 column * static_cast<int>(args.y_stride[3]) + c);
#pragma unroll
  for (int b = 0; b < kOwn; ++b) {
    Vector<T, VECTOR> result;
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) result.at[v] = narrow<T>(sums[b][v]);
    store_if(static_cast<u32>(column + b) < static_cast<u32>(args.y_size[2]),
             to + b * static_cast<int>(args.y_stride[3]), result.raw);
  }
}
