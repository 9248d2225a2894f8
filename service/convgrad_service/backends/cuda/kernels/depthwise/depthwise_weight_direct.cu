// The gradient of a depthwise convolution's weight, on channels-last tensors of 16-bit types, computed
// in registers: shared memory is for the final sums only. Launched by
// depthwise_weight_direct.py.
//
// w[c, r, s] = sum over (n, p, q) of
//              x[n, p*STRIDE + r - pad, q*STRIDE + s - pad, c] * y[n, p, q, c],
// then alpha and beta*accumulate, and one rounding.
// Thread: VECTOR adjacent channels of a strip of COLUMNS columns of y. It walks down a chunk of rows,
// prefetches rows AHEAD rows before their use, and multiplies each row of x by the rows of y that meet
// it, which are in a ring of registers. It has KERNEL x KERNEL sums per channel.
// Unit: whole warps, whose threads have all channels of a tile, then adjacent strips. They are in the
// same row, so an address is the sum of a warp-uniform and a constant part.
// Block: `units` units, each with its own chunks, one after another.
// Grid: channel tiles, then `blocks` of each.
// Dynamic shared memory: the threads' sums, added in order.
// Deterministic: the last block of a channel tile to arrive adds the blocks' partial sums, in an order
// that depends on their number only.
// Preconditions: channels and strides in multiples of 8 elements; an image's extent and
// items below 2^31; `arrived` being 0, and partials if there is more than one block. INNER: units end
// where rows of y do, and padding is at most half a kernel. Padding is read as zeros.
#include "depthwise/depthwise_weight_args.cuh"
#include "core/opaque.cuh"
#include "core/vectors.cuh"
#include "depthwise/depthwise_weight_sum.cuh"

namespace convgrad {

struct DepthwiseWeightDirectArgs : DepthwiseWeightOperands {
  int vectors;     // vectors of channels in a tile
  int strips;      // strips of a unit
  int unit_warps;
  int units;       // of a block
  int groups;      // groups of strips in a row
  int chunks;      // chunks of rows in an image
  int rows;        // rows of a chunk
  Divider by_vectors, by_unit_warps, by_groups, by_chunks;
};

}  // namespace convgrad

using namespace convgrad;

namespace {

using T = ELEMENT;
using Raw = typename RawOf<2 * VECTOR>::type;

constexpr int kTaps = KERNEL * KERNEL;
constexpr int kSlots = (KERNEL + STRIDE - 1) / STRIDE;
constexpr int kRead = (COLUMNS - 1) * STRIDE + KERNEL;
// Columns of x that may be outside, at either end of a strip.
constexpr int kEdge = INNER ? (KERNEL - 1) / 2 : kRead;

constexpr int common_multiple(int a, int b) {
  int both = a;
  while (both % b != 0) both += a;
  return both;
}
// Rows of x after which the ring and the prefetched rows repeat.
constexpr int kTurn = common_multiple(kSlots * STRIDE, AHEAD);

struct ItemAt {
  int n, chunk, group;
};
__device__ __forceinline__ ItemAt item_at(const DepthwiseWeightDirectArgs& args, int item) {
  const int above = divide(item, args.by_groups), n = divide(above, args.by_chunks);
  return {n, above - n * args.chunks, item - above * args.groups};
}

__device__ __forceinline__ u32 read_only(const char* from, u32) {
  return __ldg(reinterpret_cast<const u32*>(from));
}
__device__ __forceinline__ uint2 read_only(const char* from, uint2) {
  return __ldg(reinterpret_cast<const uint2*>(from));
}

// Both elements of a word, opaque to the compiler, which would otherwise widen them for each use.
__device__ __forceinline__ float kept(u32 bits) {
  return __uint_as_float(static_cast<u32>(opaque_value(static_cast<int>(bits))));
}
__device__ __forceinline__ void widen_both(u32 word, bf16, float* wide) {
  wide[0] = kept(word << 16);
  wide[1] = kept(word & 0xffff0000u);
}
__device__ __forceinline__ void widen_both(u32 word, f16, float* wide) {
  wide[0] = kept(__float_as_uint(widen(f16{static_cast<unsigned short>(word)})));
  wide[1] = kept(__float_as_uint(widen(f16{static_cast<unsigned short>(word >> 16)})));
}
// The elements of a vector if mask is ~0, or zeros.
__device__ __forceinline__ void widen_all(u32 raw, u32 mask, float* wide) {
  widen_both(raw & mask, T{}, wide);
}
__device__ __forceinline__ void widen_all(uint2 raw, u32 mask, float* wide) {
  widen_both(raw.x & mask, T{}, wide);
  widen_both(raw.y & mask, T{}, wide + 2);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    depthwise_weight_direct(const __grid_constant__ DepthwiseWeightDirectArgs args) {
  extern __shared__ __align__(16) float shared[];
  __shared__ bool last;
  const int thread = threadIdx.x, threads = args.units * args.unit_warps * 32;
  // Tells the compiler that the value is uniform in a warp.
  const int warp = __shfl_sync(0xffffffffu, thread / 32, 0);
  const int unit = divide(warp, args.by_unit_warps), place = thread - unit * args.unit_warps * 32;
  const int channel_tile = blockIdx.x;
  const int block = blockIdx.y;
  const int tile_channels = args.vectors * VECTOR, first_channel = channel_tile * tile_channels;
  // Threads without a strip or channels compute too, but their sums are not used.
  const int own_strip = divide(place, args.by_vectors), strip = min(own_strip, args.strips - 1);
  const int own = (place - own_strip * args.vectors) * VECTOR;
  const int c = min(first_channel + own, args.channels - VECTOR);
  const int items = args.batch * args.chunks * args.groups;
  const int first_item = block * args.units + unit, item_step = args.blocks * args.units;

  float sums[KERNEL][KERNEL][VECTOR] = {};
#pragma unroll 1
  for (int item = first_item; item < items; item += item_step) {
    const ItemAt at = item_at(args, item);
    const int first_row = at.chunk * args.rows;
    const int rows = min(args.y_size[0] - first_row, args.rows);
    const int top = first_row * STRIDE - args.pad[0];
    const int steps = (rows - 1) * STRIDE + KERNEL;
    const int left_y = (at.group * args.strips + strip) * COLUMNS;
    const int left_x = left_y * STRIDE - args.pad[1];
    // Columns outside read the nearest column inside and are then set to zero.
    u32 from_x[kRead], from_y[COLUMNS], mask_x[kRead], mask_y[COLUMNS];
#pragma unroll
    for (int i = 0; i < kRead; ++i) {
      const int column = min(max(left_x + i, 0), args.x_size[1] - 1);
      from_x[i] = opaque_value((column * static_cast<int>(args.x_stride[2]) + c) * 2);
      mask_x[i] = column == left_x + i ? 0xffffffffu : 0;
    }
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) {
      const int column = min(left_y + i, args.y_size[1] - 1);
      from_y[i] = opaque_value((column * static_cast<int>(args.y_stride[2]) + c) * 2);
      mask_y[i] = column == left_y + i ? 0xffffffffu : 0;
    }

    Raw next_x[AHEAD][kRead], next_y[AHEAD][COLUMNS];
    const char* row_x = reinterpret_cast<const char*>(
        static_cast<const T*>(args.x) + at.n * args.x_stride[0] + top * args.x_stride[1]);
    const char* row_y = reinterpret_cast<const char*>(
        static_cast<const T*>(args.y) + at.n * args.y_stride[0] + first_row * args.y_stride[1]);
    // Rows outside are zeros.
    const auto fetch = [&](int step, int j) {
      const int h = top + step;
      if (h >= 0 && h < args.x_size[0]) {
#pragma unroll
        for (int i = 0; i < kRead; ++i) {
          next_x[j % AHEAD][i] = read_only(row_x + from_x[i], Raw{});
        }
      } else {
#pragma unroll
        for (int i = 0; i < kRead; ++i) next_x[j % AHEAD][i] = Raw{};
      }
      row_x += args.x_stride[1] * 2;
      if (j % STRIDE != 0) return;
      if (step < rows * STRIDE) {
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) {
          next_y[j % AHEAD][i] = read_only(row_y + from_y[i], Raw{});
        }
      } else {
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) next_y[j % AHEAD][i] = Raw{};
      }
      row_y += args.y_stride[1] * 2;
    };
#pragma unroll
    for (int step = 0; step < AHEAD; ++step) fetch(step, step);

    float ring[kSlots][COLUMNS][VECTOR] = {};
#pragma unroll 1
    for (int turn = 0; turn < steps; turn += kTurn) {
#pragma unroll
      for (int j = 0; j < kTurn; ++j) {
        const int step = turn + j;
        if (step >= steps) break;
        if (j % STRIDE == 0) {
#pragma unroll
          for (int i = 0; i < COLUMNS; ++i) {
            widen_all(next_y[j % AHEAD][i], INNER ? 0xffffffffu : mask_y[i],
                      ring[j / STRIDE % kSlots][i]);
          }
        }
        float row[kRead][VECTOR];
#pragma unroll
        for (int i = 0; i < kRead; ++i) {
          const bool edge = i < kEdge || i >= kRead - kEdge;
          widen_all(next_x[j % AHEAD][i], edge ? mask_x[i] : 0xffffffffu, row[i]);
        }
        fetch(step + AHEAD, j);
#pragma unroll
        for (int r = 0; r < KERNEL; ++r) {
          if (positive_mod(j - r, STRIDE) != 0) continue;
          const int slot = positive_mod(j - r, kTurn) / STRIDE % kSlots;
#pragma unroll
          for (int s = 0; s < KERNEL; ++s) {
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

  // Add the block's strips, then units, in order.
#pragma unroll
  for (int r = 0; r < KERNEL; ++r) {
#pragma unroll
    for (int s = 0; s < KERNEL; ++s) {
#pragma unroll
      for (int v = 0; v < VECTOR; ++v) {
        shared[((r * KERNEL + s) * VECTOR + v) * threads + thread] = sums[r][s][v];
      }
    }
  }
  __syncthreads();
  const int part = kTaps * tile_channels;
  const auto own_sum = [&](int i) {
    const int tap = i / tile_channels, channel = i - tap * tile_channels;
    const float* const from =
        shared + (tap * VECTOR + channel % VECTOR) * threads + channel / VECTOR;
    float sum = 0;
    for (int j = 0; j < args.units; ++j) {
      for (int k = 0; k < args.strips; ++k) {
        sum += from[j * args.unit_warps * 32 + k * args.vectors];
      }
    }
    return sum;
  };
  add_blocks(
      threads, args.partials + static_cast<i64>(channel_tile) * args.blocks * part,
      args.arrived + channel_tile, block, args.blocks, part, shared, last, own_sum,
      [&](int i, float sum) {
        const int tap = i / tile_channels, c = first_channel + i - tap * tile_channels;
        if (c < args.channels) put_gradient_as<T>(args, c, tap / KERNEL, tap % KERNEL, sum);
      });
}
