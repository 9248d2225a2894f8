// The gradient of a depthwise convolution's weight, on channels-last tensors.
//
// w[c, r, s] = sum over (n, p, q) of x[n, p*STRIDE + r - pad, q*STRIDE + s - pad, c] * y[n, p, q, c],
// then alpha and beta*accumulate, and one rounding.
// A thread owns VECTOR neighbouring channels and all KERNEL_H x KERNEL_W taps (kernels of more rows
// are cut into groups of KERNEL_H: blockIdx.z). It takes items, each a strip of COLUMNS columns and
// a chunk of rows of one image, walks down the rows of x, and multiplies each by the rows of y that
// meet it, which wait in a ring of registers.
// Block: (lanes of channel vectors, workers), grid: (blocks, tiles of channels, groups of rows).
// A block adds its workers up through shared memory, in order; the last block of a tile to arrive
// adds the blocks' partial sums up, in order. Deterministic.
// Relies on its launcher for: aligned vectors, channels divisible by VECTOR, an image's extent
// below 2^31 elements, `arrived` being 0, and partials with more than one block.
// Padding enters as zeros; a sum that is not finite is computed again from the pairs that exist,
// since 0 * Inf is NaN.
#include "depthwise_args.cuh"

using namespace convgrad;

namespace {

using T = ELEMENT;
using R = RESULT;
using S = Sum<T>;
using Channels = Vector<T, VECTOR>;

constexpr int kTaps = KERNEL_H * KERNEL_W;
constexpr int kSlots = (KERNEL_H + STRIDE - 1) / STRIDE;
constexpr int kTurn = kSlots * STRIDE;
constexpr int kRead = (COLUMNS - 1) * STRIDE + KERNEL_W;

// One thread's sum for one tap and channel, over its items, from the pairs that exist.
__device__ __noinline__ S exact(const DepthwiseWeightArgs& args, int c, int r, int s) {
  const T* const x = static_cast<const T*>(args.x) + c;
  const T* const y = static_cast<const T*>(args.y) + c;
  const u32 per_image = args.strips * args.chunks, items = per_image * args.batch;
  S sum = 0;
  for (u32 item = blockIdx.x * blockDim.y + threadIdx.y; item < items;
       item += gridDim.x * blockDim.y) {
    const int n = item / per_image, rest = item % per_image;
    const int first = rest / args.strips * args.rows, left = rest % args.strips * COLUMNS;
    for (int p = first; p < min(first + args.rows, args.y_size[0]); ++p) {
      for (int q = left; q < min(left + COLUMNS, args.y_size[1]); ++q) {
        const int h = p * STRIDE + r - args.pad[0], k = q * STRIDE + s - args.pad[1];
        if (h < 0 || h >= args.x_size[0] || k < 0 || k >= args.x_size[1]) continue;
        sum += widen(x[n * args.x_stride[0] + h * args.x_stride[1] + k * args.x_stride[2]]) *
               widen(y[n * args.y_stride[0] + p * args.y_stride[1] + q * args.y_stride[2]]);
      }
    }
  }
  return sum;
}

template <int kCount>
__device__ __forceinline__ void load(Channels (&row)[kCount], const T* from, int pitch,
                                     unsigned long long inside, bool there) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    row[i] = Channels::zero();
    if (there && ((inside >> i) & 1)) row[i] = Channels::load(from + i * pitch);
  }
}

__device__ __forceinline__ unsigned long long columns_inside(int first, int count, int size) {
  unsigned long long inside = 0;
  for (int i = 0; i < count; ++i) {
    if (first + i >= 0 && first + i < size) inside |= 1ull << i;
  }
  return inside;
}

__device__ void put(const DepthwiseWeightArgs& args, int c, int r, int s, S sum) {
  const R* accumulate = static_cast<const R*>(args.accumulate);
  if (accumulate != nullptr) {
    accumulate += c * args.accumulate_stride[0] + r * args.accumulate_stride[1] +
                  s * args.accumulate_stride[2];
  }
  const R* const no_bias = nullptr;
  sum = finish<R, S>(sum, S(args.alpha), S(args.beta), accumulate, no_bias, kNone);
  static_cast<R*>(args.w)[c * args.w_stride[0] + r * args.w_stride[1] + s * args.w_stride[2]] =
      narrow<R>(sum);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(128, BLOCKS)
    depthwise_weight(const __grid_constant__ DepthwiseWeightArgs args) {
  __shared__ S workers[KERNEL_W * VECTOR * 128];
  __shared__ bool last;
  const int tile_channels = blockDim.x * VECTOR;
  const int tile = blockIdx.y * tile_channels;
  const int c = tile + threadIdx.x * VECTOR;
  const int first_tap_row = blockIdx.z * KERNEL_H;
  const u32 per_image = args.strips * args.chunks, items = per_image * args.batch;
  const int x_pitch = static_cast<int>(args.x_stride[2]);
  const int y_pitch = static_cast<int>(args.y_stride[2]);
  S sums[KERNEL_H][KERNEL_W][VECTOR] = {};

  if (c < args.channels) {
    for (u32 item = blockIdx.x * blockDim.y + threadIdx.y; item < items;
         item += gridDim.x * blockDim.y) {
      const int n = item / per_image, rest = item - n * per_image;
      const int chunk = rest / args.strips, left = (rest - chunk * args.strips) * COLUMNS;
      const int first = chunk * args.rows;
      const int rows = min(args.rows, args.y_size[0] - first);
      const int steps = (rows - 1) * STRIDE + KERNEL_H;
      const int top = first * STRIDE - args.pad[0] + first_tap_row;
      const int x_left = left * STRIDE - args.pad[1];
      const T* const x = static_cast<const T*>(args.x) + n * args.x_stride[0] + c +
                         x_left * args.x_stride[2];
      const T* const y = static_cast<const T*>(args.y) + n * args.y_stride[0] + c +
                         first * args.y_stride[1] + left * args.y_stride[2];
      const unsigned long long x_inside = columns_inside(x_left, kRead, args.x_size[1]);
      const unsigned long long y_inside = columns_inside(left, COLUMNS, args.y_size[1]);
      S ring[kSlots][COLUMNS][VECTOR] = {};
      Channels next_x[kRead], next_y[COLUMNS];
      const auto load_x = [&](int step) {
        const int h = top + step;
        load(next_x, x + h * static_cast<int>(args.x_stride[1]), x_pitch, x_inside,
             step < steps && h >= 0 && h < args.x_size[0]);
      };
      const auto load_y = [&](int row) {
        load(next_y, y + row * static_cast<int>(args.y_stride[1]), y_pitch, y_inside, row < rows);
      };
      load_x(0);
      load_y(0);
      for (int turn = 0; turn < steps; turn += kTurn) {
#pragma unroll
        for (int j = 0; j < kTurn; ++j) {
          const int step = turn + j;
          if (step < steps) {
            if (j % STRIDE == 0) {
#pragma unroll
              for (int i = 0; i < COLUMNS; ++i) {
#pragma unroll
                for (int v = 0; v < VECTOR; ++v) ring[j / STRIDE][i][v] = widen(next_y[i].at[v]);
              }
              load_y(step / STRIDE + 1);
            }
            S row[kRead][VECTOR];
#pragma unroll
            for (int i = 0; i < kRead; ++i) {
#pragma unroll
              for (int v = 0; v < VECTOR; ++v) row[i][v] = widen(next_x[i].at[v]);
            }
            load_x(step + 1);
#pragma unroll
            for (int r = 0; r < KERNEL_H; ++r) {
              if (positive_mod(j - r, STRIDE) != 0) continue;
              const int slot = positive_mod(j - r, kTurn) / STRIDE;
#pragma unroll
              for (int s = 0; s < KERNEL_W; ++s) {
#pragma unroll
                for (int i = 0; i < COLUMNS; ++i) {
#pragma unroll
                  for (int v = 0; v < VECTOR; ++v) {
                    sums[r][s][v] += row[i * STRIDE + s][v] * ring[slot][i][v];
                  }
                }
              }
            }
          }
        }
      }
    }
#pragma unroll
    for (int r = 0; r < KERNEL_H; ++r) {
#pragma unroll
      for (int s = 0; s < KERNEL_W; ++s) {
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) {
          if (!is_finite(sums[r][s][v])) {
            sums[r][s][v] = exact(args, c + v, first_tap_row + r, s);
          }
        }
      }
    }
  }

  // The block's workers, in order.
  const int threads = blockDim.x * blockDim.y;
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  const i64 part = static_cast<i64>(kTaps) * tile_channels;
  S* const partials = static_cast<S*>(args.partials) +
                      (static_cast<i64>(blockIdx.z) * gridDim.y + blockIdx.y) * gridDim.x * part;
  const bool alone = gridDim.x == 1;
#pragma unroll
  for (int r = 0; r < KERNEL_H; ++r) {
    __syncthreads();
#pragma unroll
    for (int s = 0; s < KERNEL_W; ++s) {
#pragma unroll
      for (int v = 0; v < VECTOR; ++v) {
        workers[(s * blockDim.y + threadIdx.y) * tile_channels + threadIdx.x * VECTOR + v] =
            sums[r][s][v];
      }
    }
    __syncthreads();
    for (int i = thread; i < KERNEL_W * tile_channels; i += threads) {
      const int s = i / tile_channels, channel = i - s * tile_channels;
      S sum = 0;
      for (int worker = 0; worker < blockDim.y; ++worker) {
        sum += workers[(s * blockDim.y + worker) * tile_channels + channel];
      }
      if (!alone) {
        partials[blockIdx.x * part + r * KERNEL_W * tile_channels + i] = sum;
      } else if (first_tap_row + r < args.kernel_rows && tile + channel < args.channels) {
        put(args, tile + channel, first_tap_row + r, s, sum);
      }
    }
  }
  if (alone) return;

  // The tile's blocks, in order, by the last of them.
  __threadfence();
  __syncthreads();
  if (thread == 0) {
    unsigned* const arrived = args.arrived + blockIdx.z * gridDim.y + blockIdx.y;
    last = atomicInc(arrived, gridDim.x - 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  for (int i = thread; i < part; i += threads) {
    const int tap = i / tile_channels, channel = i - tap * tile_channels;
    const int r = first_tap_row + tap / KERNEL_W, s = tap % KERNEL_W;
    S sum = 0;
#pragma unroll 16
    for (int block = 0; block < gridDim.x; ++block) sum += __ldcg(partials + block * part + i);
    if (r < args.kernel_rows && tile + channel < args.channels) {
      put(args, tile + channel, r, s, sum);
    }
  }
}
