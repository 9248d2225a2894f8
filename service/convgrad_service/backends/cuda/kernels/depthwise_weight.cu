// The gradient of a depthwise convolution's weight, on channels-last tensors.
//
// w[c, r, s] = sum over (n, p, q) of
//              x[n, p*STRIDE + r - pad, q*STRIDE + s - pad, c] * y[n, p, q, c],
// then alpha and beta*accumulate, and one rounding.
// Blocks and threads: depthwise_args.cuh; kernels of more than KERNEL_H rows are cut into groups of
// so many. A block takes tiles of y, with the x that they meet, one after another; a thread walks
// down the rows of x in its segment and multiplies each by the rows of y that meet it, which wait
// in a ring of registers, and keeps KERNEL_H x KERNEL_W sums.
// Grid: (blocks * channel tiles, 1, groups of kernel rows).
// Shared memory: two tiles of x and y, then the units' sums, added up in order; the last block of a
// channel tile to arrive adds the blocks' partial sums up, in order. Deterministic.
// Relies on its launcher for: 16-byte chunks of channels, aligned; an image's extent below 2^31
// elements; `arrived` being 0, and partials with more than one block.
// Padding enters as zeros; a sum that is not finite is computed again from the pairs that exist,
// since 0 * Inf is NaN.
#include "depthwise_args.cuh"

using namespace convgrad;

namespace {

using T = ELEMENT;
using R = RESULT;
using S = Sum<T>;
using Channels = Vector<T, VECTOR>;

constexpr int kChannels = LANES * VECTOR;
constexpr int kTaps = KERNEL_H * KERNEL_W;
constexpr int kSlots = (KERNEL_H + STRIDE - 1) / STRIDE;
constexpr int kTurn = kSlots * STRIDE;
constexpr int kRead = (COLUMNS - 1) * STRIDE + KERNEL_W;

// One thread's sum for one tap and channel, over its tiles, from the pairs that exist.
__device__ __noinline__ S exact(const DepthwiseWeightArgs& args, int c, int r, int s) {
  const T* const x = static_cast<const T*>(args.x) + c;
  const T* const y = static_cast<const T*>(args.y) + c;
  const Tiling& tiling = args.tiling;
  const Share share = share_of(tiling, args.batch);
  const int unit = threadIdx.x / LANES;
  S sum = 0;
  for (int tile = share.block; tile < share.tiles; tile += share.blocks) {
    const TileAt at = tile_at(tiling, share, tile);
    const int n = at.n;
    const int first = (at.h * tiling.segments + unit / tiling.strips) * tiling.rows;
    const int left = (at.w * tiling.strips + unit % tiling.strips) * COLUMNS;
    for (int p = first; p < min(first + tiling.rows, args.y_size[0]); ++p) {
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

extern "C" __global__ void __launch_bounds__(MAX_THREADS, BLOCKS)
    depthwise_weight(const __grid_constant__ DepthwiseWeightArgs args) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ bool last;
  const Tiling& tiling = args.tiling;
  const Share share = share_of(tiling, args.batch);
  const int channel_tile = share.channel_tile;
  const int first_channel = channel_tile * kChannels;
  const int thread = threadIdx.x, threads = blockDim.x;
  const int lane = thread % LANES, unit = thread / LANES, units = threads / LANES;
  const int strip = unit % tiling.strips, segment = unit / tiling.strips;
  const int c = first_channel + lane * VECTOR;
  const int first_tap_row = blockIdx.z * KERNEL_H;

  const int y_rows = tiling.segments * tiling.rows, y_columns = tiling.strips * COLUMNS;
  const int x_rows = (y_rows - 1) * STRIDE + KERNEL_H;
  const int x_columns = (y_columns - 1) * STRIDE + KERNEL_W;
  const int x_pitch = x_columns * kChannels, y_pitch = y_columns * kChannels;
  const int x_elements = x_rows * x_pitch, place_elements = x_elements + y_rows * y_pitch;
  T* const places = reinterpret_cast<T*>(shared);
  const int steps = (tiling.rows - 1) * STRIDE + KERNEL_H;
  const int x_own = segment * tiling.rows * STRIDE * x_pitch +
                    strip * COLUMNS * STRIDE * kChannels + lane * VECTOR;
  const int y_own =
      x_elements + segment * tiling.rows * y_pitch + strip * COLUMNS * kChannels + lane * VECTOR;

  const auto fetch = [&](int tile, int place) {
    if (tile < share.tiles) {
      const TileAt at = tile_at(tiling, share, tile);
      const int first_row = at.h * y_rows, first_column = at.w * y_columns;
      T* const to = places + place * place_elements;
      copy_box<T, kChannels>(to, static_cast<const T*>(args.x) + at.n * args.x_stride[0],
                             args.x_stride, args.x_size,
                             first_row * STRIDE - args.pad[0] + first_tap_row,
                             first_column * STRIDE - args.pad[1], x_rows, x_columns, first_channel,
                             args.channels, thread, threads);
      copy_box<T, kChannels>(to + x_elements,
                             static_cast<const T*>(args.y) + at.n * args.y_stride[0],
                             args.y_stride, args.y_size, first_row, first_column, y_rows, y_columns,
                             first_channel, args.channels, thread, threads);
    }
    end_copies();
  };

  S sums[KERNEL_H][KERNEL_W][VECTOR] = {};
  fetch(share.block, 0);
  int place = 0;
  for (int tile = share.block; tile < share.tiles; tile += share.blocks, place ^= 1) {
    fetch(tile + share.blocks, place ^ 1);
    wait_for_copies();
    const TileAt at = tile_at(tiling, share, tile);
    const int own_top = at.h * y_rows * STRIDE - args.pad[0] + first_tap_row +
                        segment * tiling.rows * STRIDE;
    const T* x_from = places + place * place_elements + x_own;
    const T* y_from = places + place * place_elements + y_own;
    S ring[kSlots][COLUMNS][VECTOR] = {};
    for (int turn = 0; turn < steps; turn += kTurn) {
#pragma unroll
      for (int j = 0; j < kTurn; ++j) {
        const int step = turn + j;
        if (step < steps) {
          if (j % STRIDE == 0) {
            const bool more = step <= (tiling.rows - 1) * STRIDE;
#pragma unroll
            for (int i = 0; i < COLUMNS; ++i) {
              Channels read = Channels::zero();
              if (more) read = Channels::load(y_from + i * kChannels);
#pragma unroll
              for (int v = 0; v < VECTOR; ++v) ring[j / STRIDE][i][v] = widen(read.at[v]);
            }
            y_from += y_pitch;
          }
          const int h = own_top + step;
          if (h >= 0 && h < args.x_size[0]) {
            S row[kRead][VECTOR];
#pragma unroll
            for (int i = 0; i < kRead; ++i) {
              const Channels read = Channels::load(x_from + i * kChannels);
#pragma unroll
              for (int v = 0; v < VECTOR; ++v) row[i][v] = widen(read.at[v]);
            }
#pragma unroll
            for (int r = 0; r < KERNEL_H; ++r) {
              if (positive_mod(j - r, STRIDE) != 0) continue;
              const int slot = positive_mod(j - r, kTurn) / STRIDE;
              if (step < r || step - r > (tiling.rows - 1) * STRIDE) continue;
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
          x_from += x_pitch;
        }
      }
    }
    __syncthreads();  // before this place is written again
  }
  bool odd = false;
#pragma unroll
  for (int r = 0; r < KERNEL_H; ++r) {
#pragma unroll
    for (int s = 0; s < KERNEL_W; ++s) {
#pragma unroll
      for (int v = 0; v < VECTOR; ++v) odd |= !is_finite(sums[r][s][v]);
    }
  }

  // The block's units, in order.
  S* const units_sums = reinterpret_cast<S*>(shared);
#pragma unroll
  for (int r = 0; r < KERNEL_H; ++r) {
#pragma unroll
    for (int s = 0; s < KERNEL_W; ++s) {
#pragma unroll
      for (int v = 0; v < VECTOR; ++v) {
        units_sums[((r * KERNEL_W + s) * units + unit) * kChannels + lane * VECTOR + v] =
            sums[r][s][v];
      }
    }
  }
  if (odd && c < args.channels) {
    for (int i = 0; i < kTaps * VECTOR; ++i) {
      const int tap = i / VECTOR, v = i % VECTOR;
      S& sum = units_sums[(tap * units + unit) * kChannels + lane * VECTOR + v];
      if (!is_finite(sum)) sum = exact(args, c + v, first_tap_row + tap / KERNEL_W, tap % KERNEL_W);
    }
  }
  __syncthreads();
  constexpr int kPart = kTaps * kChannels;
  S* const partials =
      static_cast<S*>(args.partials) +
      (static_cast<i64>(blockIdx.z) * tiling.channel_tiles + channel_tile) * share.blocks * kPart;
  const bool alone = share.blocks == 1;
  for (int i = thread; i < kPart; i += threads) {
    const int tap = i / kChannels, channel = i % kChannels;
    S sum = 0;
    for (int other = 0; other < units; ++other) {
      sum += units_sums[(tap * units + other) * kChannels + channel];
    }
    const int r = first_tap_row + tap / KERNEL_W, s = tap % KERNEL_W;
    if (!alone) {
      partials[static_cast<i64>(share.block) * kPart + i] = sum;
    } else if (r < args.kernel_rows && first_channel + channel < args.channels) {
      put(args, first_channel + channel, r, s, sum);
    }
  }
  if (alone) return;

  // The channel tile's blocks, in order, by the last of them.
  __threadfence();
  __syncthreads();
  if (thread == 0) {
    unsigned* const arrived = args.arrived + blockIdx.z * tiling.channel_tiles + channel_tile;
    last = atomicInc(arrived, share.blocks - 1) == share.blocks - 1;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  for (int i = thread; i < kPart; i += threads) {
    const int tap = i / kChannels, channel = i % kChannels;
    const int r = first_tap_row + tap / KERNEL_W, s = tap % KERNEL_W;
    S sum = 0;
#pragma unroll 16
    for (int block = 0; block < share.blocks; ++block) {
      sum += __ldcg(partials + static_cast<i64>(block) * kPart + i);
    }
    if (r < args.kernel_rows && first_channel + channel < args.channels) {
      put(args, first_channel + channel, r, s, sum);
    }
  }
}
