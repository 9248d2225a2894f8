// The gradient of a depthwise convolution's weight, of tensors with one to three spatial dimensions,
// channels last or, with VECTOR = 1, in any order, a row of taps at a time. Launched by
// depthwise_weight_rows.py.
//
// w[c, t, r, s] = sum over (n, z, p, q) of y[n, z, p, q, c] *
//                 x[n, z*sd + t*dd - pd, p*sh + r*dh - ph, q*STRIDE + s*dw - pw, c / multiplier],
// then alpha and beta*accumulate, and one rounding.
// A row of taps is (t, r) and KERNEL adjacent columns; longer rows are divided into parts. A thread has
// VECTOR adjacent channels and one row of taps. Of each of its items, strips of COLUMNS columns of y that
// are as far apart as the taps, it loads the columns of y and of x that meet, the next item's before it
// multiplies this one's.
// Block: `vectors` vectors of channels, then `tap_rows` rows of taps, then `slots` slots; with in_planes,
// the vectors come last. Slot i has every slots-th of the block's items from the i-th on. Threads with the
// same item and different rows of taps read y from L1.
// Grid: equal shares of the items, in a cluster if there are at most 8; tiles of channels; rows of taps.
// Shared memory: depthwise_weight_sum.cuh. Deterministic.
// Preconditions: strides and channels in multiples of VECTOR, `vectors` in multiples of 4, a plane's extent
// below 2^31 elements, items below 2^31, `arrived` being 0; VECTOR = 1 with a multiplier.
// Elements outside a tensor are read as zeros.
#include "core/architecture.cuh"
#include "depthwise/depthwise_weight_args.cuh"
#include "depthwise/depthwise_weight_sum.cuh"
#include "depthwise/depthwise_words.cuh"

namespace convgrad {

struct DepthwiseWeightRowsArgs : DepthwiseWeightVolume {
  int kernel_rows;  // of a plane
  int columns;      // of the kernel
  int spread;       // columns between taps, and between an item's columns
  int part;         // columns of a part of a row, at most KERNEL
  int parts;
  int all_tap_rows;
  int tap_rows;
  int slots;
  int strips;  // of a row of y
  int items;
  int share;  // items of a block
  Divider by_multiplier, by_spread, by_tap_rows, by_parts, by_kernel_rows, by_strips, by_rows, by_planes;
  // With VECTOR = 1: between channels of x and of y, and whether adjacent threads have adjacent items.
  i64 x_channel, y_channel;
  int in_planes;
  Divider by_places;
};

}  // namespace convgrad

using namespace convgrad;

namespace {

using T = ELEMENT;
using Raw = typename RawOf<sizeof(T) * VECTOR>::type;

constexpr int kRead = (COLUMNS - 1) * STRIDE + KERNEL;
constexpr int kSums = KERNEL * VECTOR;
// Blocks of an SM: on Blackwell registers suffice for one with long rows of taps.
constexpr int kBlocks = kBlackwell && KERNEL > 7 ? 1 : BLOCKS;

struct Operands {
  Raw x[kRead], y[COLUMNS];
};

// What a thread does with its items.
struct Lane {
  const DepthwiseWeightRowsArgs& args;
  int c, end;
  int top_d, top_h, left;  // position of the row of taps, relative to an output's window

  // Zeros where the item, or its part of x, does not exist.
  __device__ __forceinline__ void load(Operands& to, int item) const {
    const int line = divide(item, args.by_strips), strip = item - line * args.strips;
    const int plane = divide(line, args.by_rows), p = line - plane * args.y_size[1];
    const int n = divide(plane, args.by_planes), z = plane - n * args.y_size[0];
    const int d = z * args.stride[0] + top_d, h = p * args.stride[1] + top_h;
    const int spread = args.spread, group = divide(strip, args.by_spread);
    const int q = group * COLUMNS * spread + (strip - group * spread), from = q * STRIDE + left;
    const bool there = item < end && static_cast<u32>(d) < static_cast<u32>(args.x_size[0]) &&
                       static_cast<u32>(h) < static_cast<u32>(args.x_size[1]);
    const u32 columns_x = there ? args.x_size[2] : 0;
    const int columns_y = there ? args.y_size[2] : 0;
    const T* const x = static_cast<const T*>(args.x) + n * args.x_stride[0] + d * args.x_stride[1] +
                       h * args.x_stride[2] +
                       (from * static_cast<int>(args.x_stride[3]) +
                        channel_offset<VECTOR>(divide(c, args.by_multiplier), args.x_channel));
    const T* const y = static_cast<const T*>(args.y) + n * args.y_stride[0] + z * args.y_stride[1] +
                       p * args.y_stride[2] + (q * static_cast<int>(args.y_stride[3]) +
                                               channel_offset<VECTOR>(c, args.y_channel));
    const int pitch_x = spread * static_cast<int>(args.x_stride[3]);
    const int pitch_y = spread * static_cast<int>(args.y_stride[3]);
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) {
      load_ahead_if(q + i * spread < columns_y, y + i * pitch_y, to.y[i]);
    }
#pragma unroll
    for (int i = 0; i < kRead; ++i) {
      load_ahead_if(static_cast<u32>(from + i * spread) < columns_x, x + i * pitch_x, to.x[i]);
    }
  }
};

__device__ __forceinline__ void multiply(const Operands& operands, float (&sums)[KERNEL][VECTOR]) {
  float y[COLUMNS][VECTOR];
#pragma unroll
  for (int i = 0; i < COLUMNS; ++i) widen_word<T>(operands.y[i], y[i]);
#pragma unroll
  for (int i = 0; i < kRead; ++i) {
    float x[VECTOR];
    widen_word<T>(operands.x[i], x);
#pragma unroll
    for (int s = 0; s < KERNEL; ++s) {
      const int at = i - s;
      if (at < 0 || at % STRIDE != 0 || at / STRIDE >= COLUMNS) continue;
#pragma unroll
      for (int v = 0; v < VECTOR; ++v) sums[s][v] += x[v] * y[at / STRIDE][v];
    }
  }
}

// Stores a block's sum number `index` as the gradient of its channel and tap.
__device__ __forceinline__ void put(const DepthwiseWeightRowsArgs& args, int index, float sum) {
  const int above = divide(index, args.by_vectors), vector = index - above * args.vectors;
  const int tap = above / kSums, column = above % kSums / VECTOR;
  const int c = (blockIdx.y * args.vectors + vector) * VECTOR + above % VECTOR;
  const int tap_row = blockIdx.z * args.tap_rows + tap;
  const int row = divide(tap_row, args.by_parts);
  const int s = (tap_row - row * args.parts) * args.part + column;
  if (c >= args.channels || tap_row >= args.all_tap_rows || column >= args.part ||
      s >= args.columns) {
    return;
  }
  put_gradient_as<T>(args, c, row, s, sum);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, kBlocks)
    depthwise_weight_rows(const __grid_constant__ DepthwiseWeightRowsArgs args) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ u64 barrier;
  __shared__ bool last;
  const int thread = threadIdx.x, blocks = gridDim.x, block = blockIdx.x;
  const int sums_of_slot = args.tap_rows * kSums * args.vectors, quads = sums_of_slot / 4;
  float4* const all_sums = reinterpret_cast<float4*>(shared);
  const BlockSums<THREADS> block_sums(all_sums, all_sums + args.slots * quads, &barrier, args.slots,
                                      quads, block, blocks);
  block_sums.begin();

  const PlaceVector own(thread, args.slots * args.tap_rows, args.vectors, args.by_vectors,
                        VECTOR == 1 && args.in_planes, args.by_places);
  const int place = own.place, vector = own.vector;
  const int slot = divide(place, args.by_tap_rows), tap = place - slot * args.tap_rows;
  const int tap_row = blockIdx.z * args.tap_rows + tap;
  const int c = (blockIdx.y * args.vectors + vector) * VECTOR;
  const int row = divide(tap_row, args.by_parts);
  const int t = divide(row, args.by_kernel_rows), r = row - t * args.kernel_rows;
  const bool active = slot < args.slots && c < args.channels && tap_row < args.all_tap_rows;
  const int end = active ? min(args.items, (block + 1) * args.share) : 0;
  const Lane lane{args,
                  c,
                  end,
                  t * args.dilation[0] - args.pad[0],
                  r * args.dilation[1] - args.pad[1],
                  (tap_row - row * args.parts) * args.part * args.spread - args.pad[2]};
  float sums[KERNEL][VECTOR] = {};
  int item = block * args.share + slot;
  if (item < end) {
    Operands even, odd;
    lane.load(even, item);
#pragma unroll 1
    for (; item < end; item += 2 * args.slots) {
      lane.load(odd, item + args.slots);
      multiply(even, sums);
      if (item + args.slots >= end) break;
      lane.load(even, item + 2 * args.slots);
      multiply(odd, sums);
    }
  }
  if (slot < args.slots) {
#pragma unroll
    for (int s = 0; s < KERNEL; ++s) {
#pragma unroll
      for (int v = 0; v < VECTOR; ++v) {
        reinterpret_cast<float*>(all_sums)[(place * kSums + s * VECTOR + v) * args.vectors + vector] =
            sums[s][v];
      }
    }
  }
  __syncthreads();
  const int column = blockIdx.z * gridDim.y + blockIdx.y;
  float4* const partials =
      reinterpret_cast<float4*>(args.partials) + static_cast<i64>(column) * blocks * quads;
  block_sums.finish(partials, args.arrived + column, last,
                    [&](int index, float sum) { put(args, index, sum); });
}
