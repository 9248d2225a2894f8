// Depthwise convolution, forward or the gradient of its input, on channels-last tensors.
//
// forward   y[n, p, q, c] = sum over (r, s) of x[n, p*STRIDE + r - pad, q*STRIDE + s - pad, c] * w[c, r, s]
// backward  y[n, u - pad, v - pad, c] = sum over u = p*STRIDE + r, v = q*STRIDE + s
//                                       of x[n, p, q, c] * w[c, r, s]
// then finish() of epilogue.cuh, and one rounding.
// A thread owns VECTOR neighbouring channels and a strip of COLUMNS columns (backward: COLUMNS *
// STRIDE), and walks down `rows` rows of the result. Each row of x is read once into registers,
// the next one ahead of its use, and added to every row of the result that it reaches; those that
// are open live in a ring of accumulators whose slots are known when compiling.
// Block: (lanes of channel vectors, workers); grid: (workers' items, tiles of channels), an item
// being a strip and chunk of one image. Shared memory: the tile's weights, KERNEL_H * KERNEL_W *
// lanes * VECTOR sums.
// Relies on its launcher for: aligned vectors, channels divisible by VECTOR, an image's extent
// below 2^31 elements. Deterministic: sums run in the order of rows, then taps.
// Padding enters as zeros; a sum that is not finite is computed again with the valid taps alone,
// since 0 * Inf is NaN.
#include "depthwise_args.cuh"

using namespace convgrad;

namespace {

using T = ELEMENT;
using S = Sum<T>;
using Channels = Vector<T, VECTOR>;

constexpr int kTaps = KERNEL_H * KERNEL_W;
// Taps kept in registers, where there are few enough.
constexpr bool kWeightsInRegisters = kTaps * VECTOR * sizeof(S) <= 200;

constexpr int kReachH = (KERNEL_H + STRIDE - 1) / STRIDE;
#if BACKWARD
constexpr int kReachW = (KERNEL_W + STRIDE - 1) / STRIDE;
constexpr int kOwn = COLUMNS * STRIDE;       // columns of the result
constexpr int kRead = COLUMNS + kReachW - 1;  // columns of x
constexpr int kSlots = kReachH * STRIDE;     // open rows of the result
constexpr int kTurn = kReachH;               // rows of x after which the slots repeat
#else
constexpr int kOwn = COLUMNS;
constexpr int kRead = (COLUMNS - 1) * STRIDE + KERNEL_W;
constexpr int kSlots = kReachH;
constexpr int kTurn = kReachH * STRIDE;
#endif

// A load from shared memory that the compiler leaves where it is: it would move all of them out of
// the loop, into registers that there are not.
__device__ __forceinline__ float reread(const float* from) {
  float value;
  asm volatile("ld.volatile.shared.f32 %0, [%1];"
               : "=f"(value)
               : "r"(static_cast<u32>(__cvta_generic_to_shared(from))));
  return value;
}
__device__ __forceinline__ double reread(const double* from) {
  double value;
  asm volatile("ld.volatile.shared.f64 %0, [%1];"
               : "=d"(value)
               : "r"(static_cast<u32>(__cvta_generic_to_shared(from))));
  return value;
}

// One result from its valid taps alone.
__device__ S exact(const DepthwiseArgs& args, int n, int c, int row, int column) {
  const T* const x = static_cast<const T*>(args.x) + n * args.x_stride[0] + c;
  const T* const w = static_cast<const T*>(args.w) + c * args.w_stride[0];
  S sum = 0;
  for (int r = 0; r < KERNEL_H; ++r) {
    for (int s = 0; s < KERNEL_W; ++s) {
#if BACKWARD
      const int u = row + args.pad[0] - r, v = column + args.pad[1] - s;
      if (u < 0 || v < 0 || u % STRIDE != 0 || v % STRIDE != 0) continue;
      const int h = u / STRIDE, k = v / STRIDE;
#else
      const int h = row * STRIDE + r - args.pad[0], k = column * STRIDE + s - args.pad[1];
#endif
      if (h < 0 || h >= args.x_size[0] || k < 0 || k >= args.x_size[1]) continue;
      sum += widen(x[h * args.x_stride[1] + k * args.x_stride[2]]) *
             widen(w[r * args.w_stride[1] + s * args.w_stride[2]]);
    }
  }
  return sum;
}

// The result of a sum.
__device__ __forceinline__ T finished(const DepthwiseArgs& args, S sum, int n, int c, int row,
                                      int column) {
#if EPILOGUE
  const T* accumulate = static_cast<const T*>(args.accumulate);
  if (accumulate != nullptr) {
    accumulate += n * args.accumulate_stride[0] + row * args.accumulate_stride[1] +
                  column * args.accumulate_stride[2] + c;
  }
  const T* bias = static_cast<const T*>(args.bias);
  if (bias != nullptr) bias += c;
  sum = finish<T, S>(sum, S(args.alpha), S(args.beta), accumulate, bias, args.activation);
#endif
  return narrow<T>(sum);
}

struct Walk {
  const DepthwiseArgs& args;
  const T* x;  // this image's and channels'
  const S* weights;  // in shared memory, this thread's channels
  int weight_pitch;
  int n, c;
  int first_column;  // of x
  unsigned long long inside;  // which of the columns read exist

  __device__ __forceinline__ void load(Channels (&row)[kRead], int h, bool wanted) const {
    const bool there = wanted && h >= 0 && h < args.x_size[0];
    const int at = h * static_cast<int>(args.x_stride[1]) +
                   first_column * static_cast<int>(args.x_stride[2]);
#pragma unroll
    for (int i = 0; i < kRead; ++i) {
      row[i] = Channels::zero();
      if (there && ((inside >> i) & 1)) {
        row[i] = Channels::load(x + (at + i * static_cast<int>(args.x_stride[2])));
      }
    }
  }

  // Writes a row of sums; whether any was not finite.
  __device__ __forceinline__ bool put(const S (&sums)[kOwn][VECTOR], int row, int column) const {
    if (row < 0 || row >= args.y_size[0]) return false;
    T* const y = static_cast<T*>(args.y) + n * args.y_stride[0] + row * args.y_stride[1] + c +
                 column * args.y_stride[2];
    S probe = 0;  // NaN once any sum is not finite
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int at = column + i;
      Channels result;
#pragma unroll
      for (int v = 0; v < VECTOR; ++v) probe += sums[i][v] * S(0);
      if (at < 0 || at >= args.y_size[1]) continue;
#pragma unroll
      for (int v = 0; v < VECTOR; ++v) {
        result.at[v] = finished(args, sums[i][v], n, c + v, row, at);
      }
      result.store(y + i * static_cast<int>(args.y_stride[2]));
    }
    return probe != S(0);
  }

  // Rows of results, each from its valid taps alone.
  __device__ void put_exact(int first_row, int rows, int column) const {
    T* const y = static_cast<T*>(args.y) + n * args.y_stride[0] + c;
    for (int row = max(first_row, 0); row < min(first_row + rows, args.y_size[0]); ++row) {
      for (int at = max(column, 0); at < min(column + kOwn, args.y_size[1]); ++at) {
        for (int v = 0; v < VECTOR; ++v) {
          y[row * args.y_stride[1] + at * args.y_stride[2] + v] =
              finished(args, exact(args, n, c + v, row, at), n, c + v, row, at);
        }
      }
    }
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(128, BLOCKS)
    depthwise(const __grid_constant__ DepthwiseArgs args) {
  extern __shared__ __align__(16) unsigned char shared[];
  S* const weights = reinterpret_cast<S*>(shared);
  const int tile_channels = blockDim.x * VECTOR;
  const int tile = blockIdx.y * tile_channels;
  for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < tile_channels * kTaps;
       i += blockDim.x * blockDim.y) {
    const int channel = i / kTaps, tap = i % kTaps;
    S weight = 0;
    if (tile + channel < args.channels) {
      weight = widen(static_cast<const T*>(args.w)[(tile + channel) * args.w_stride[0] +
                                                   (tap / KERNEL_W) * args.w_stride[1] +
                                                   (tap % KERNEL_W) * args.w_stride[2]]);
    }
    weights[tap * tile_channels + channel] = weight;
  }
  __syncthreads();

  const int c = tile + threadIdx.x * VECTOR;
  u32 item = blockIdx.x * blockDim.y + threadIdx.y;
  const u32 per_image = args.strips * args.chunks;
  const int n = item / per_image;
  item -= n * per_image;
  const int chunk = item / args.strips, strip = item - chunk * args.strips;
  if (n >= args.batch || c >= args.channels) return;

#if BACKWARD
  // In units of STRIDE rows and columns, from the last multiple of STRIDE up to pad.
  const int first = (args.pad[0] >= 0 ? args.pad[0] / STRIDE
                                      : -((-args.pad[0] + STRIDE - 1) / STRIDE)) +
                    chunk * args.rows;
  const int left = (args.pad[1] >= 0 ? args.pad[1] / STRIDE
                                     : -((-args.pad[1] + STRIDE - 1) / STRIDE)) +
                   strip * COLUMNS;
  const int top = first - (kReachH - 1);
  const int steps = args.rows + kReachH - 1;
  const int first_column = left - (kReachW - 1);
  const int column = left * STRIDE - args.pad[1];
#else
  const int first = chunk * args.rows;
  const int top = first * STRIDE - args.pad[0];
  const int rows = min(args.rows, args.y_size[0] - first);
  const int steps = (rows - 1) * STRIDE + KERNEL_H;
  const int column = strip * COLUMNS;
  const int first_column = column * STRIDE - args.pad[1];
#endif
  Walk walk = {args,
               static_cast<const T*>(args.x) + n * args.x_stride[0] + c,
               weights + threadIdx.x * VECTOR,
               tile_channels,
               n,
               c,
               first_column,
               0};
#pragma unroll
  for (int i = 0; i < kRead; ++i) {
    const int at = first_column + i;
    if (at >= 0 && at < args.x_size[1]) walk.inside |= 1ull << i;
  }

  S kept[kWeightsInRegisters ? kTaps : 1][VECTOR];
  if constexpr (kWeightsInRegisters) {
#pragma unroll
    for (int tap = 0; tap < kTaps; ++tap) {
#pragma unroll
      for (int v = 0; v < VECTOR; ++v) {
        kept[tap][v] = walk.weights[tap * tile_channels + v];
      }
    }
  }
  S sums[kSlots][kOwn][VECTOR] = {};
  bool odd = false;  // some sum was not finite
  Channels next[kRead];
  walk.load(next, top, true);
  for (int turn = 0; turn < steps; turn += kTurn) {
#pragma unroll
    for (int j = 0; j < kTurn; ++j) {
      const int step = turn + j;
      if (step < steps) {
        S row[kRead][VECTOR];
#pragma unroll
        for (int i = 0; i < kRead; ++i) {
#pragma unroll
          for (int v = 0; v < VECTOR; ++v) row[i][v] = widen(next[i].at[v]);
        }
        walk.load(next, top + step + 1, step + 1 < steps);
#pragma unroll
        for (int r = 0; r < KERNEL_H; ++r) {
#if BACKWARD
          constexpr bool reached = true;
          const int slot = (j * STRIDE + r) % kSlots;
#else
          const bool reached = positive_mod(j - r, STRIDE) == 0;
          const int slot = positive_mod(positive_mod(j - r, kTurn) / STRIDE, kSlots);
#endif
          if (!reached) continue;
#pragma unroll
          for (int s = 0; s < KERNEL_W; ++s) {
            S weight[VECTOR];
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) {
              if constexpr (kWeightsInRegisters) {
                weight[v] = kept[r * KERNEL_W + s][v];
              } else {
                weight[v] = reread(walk.weights + (r * KERNEL_W + s) * walk.weight_pitch + v);
              }
            }
#if BACKWARD
#pragma unroll
            for (int i = 0; i < kRead; ++i) {
              const int to = (i - (kReachW - 1)) * STRIDE + s;
              if (to < 0 || to >= kOwn) continue;
#pragma unroll
              for (int v = 0; v < VECTOR; ++v) sums[slot][to][v] += row[i][v] * weight[v];
            }
#else
#pragma unroll
            for (int i = 0; i < kOwn; ++i) {
#pragma unroll
              for (int v = 0; v < VECTOR; ++v) {
                sums[slot][i][v] += row[i * STRIDE + s][v] * weight[v];
              }
            }
#endif
          }
        }
        // What no later row of x reaches is done.
#if BACKWARD
#pragma unroll
        for (int a = 0; a < STRIDE; ++a) {
          const int slot = (j * STRIDE + a) % kSlots;
          if (step >= kReachH - 1) {
            odd |= walk.put(sums[slot], (top + step) * STRIDE + a - args.pad[0], column);
          }
#else
        if (positive_mod(j - (KERNEL_H - 1), STRIDE) == 0) {
          const int slot = positive_mod(j - (KERNEL_H - 1), kTurn) / STRIDE;
          if (step >= KERNEL_H - 1) {
            odd |= walk.put(sums[slot], first + (step - (KERNEL_H - 1)) / STRIDE, column);
          }
#endif
#pragma unroll
          for (int i = 0; i < kOwn; ++i) {
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) sums[slot][i][v] = 0;
          }
        }
      }
    }
  }
#if BACKWARD
  if (odd) walk.put_exact(first * STRIDE - args.pad[0], args.rows * STRIDE, column);
#else
  if (odd) walk.put_exact(first, rows, column);
#endif
}
