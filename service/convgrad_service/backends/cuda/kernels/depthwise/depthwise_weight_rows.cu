// The gradient of a depthwise convolution's weight, of tensors with one to three spatial dimensions,
// channels last or, with VECTOR = 1, in any order, a row of taps at a time. Launched by
// depthwise_weight_rows.py.
//
// w[c, t, r, s] = sum over (n, z, p, q) of y[n, z, p, q, c] *
//                 x[n, z*sd + t*dd - pd, p*sh + r*dh - ph, q*STRIDE + s*dw - pw, c / multiplier],
// then alpha and beta*accumulate, and one rounding.
// A row of taps is (t, r) and KERNEL adjacent columns; longer rows are divided into parts. A thread has
// VECTOR adjacent channels and ROWS adjacent rows of taps: one, or all of a square kernel. Of each of its items, strips of COLUMNS columns of y that
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
#include "core/opaque.cuh"
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
  int inner;  // items that are next to each other: of a row of y, or with down_first of a column
  int outer;  // rows of items in a plane, or columns
  int down_first;
  int items;
  int share;  // items of a block
  Divider by_multiplier, by_spread, by_tap_rows, by_parts, by_kernel_rows, by_inner, by_outer, by_planes;
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
constexpr int kSums = ROWS * KERNEL * VECTOR;
// Blocks of an SM: on Blackwell registers suffice for one with long rows of taps.
constexpr int kBlocks = kBlackwell && KERNEL > 7 ? 1 : BLOCKS;

// An item: its first elements of y and x, and where the latter is.
struct Item {
  const T *x, *y;
  int h, from, q;
  bool there;
};

// What a thread does with its items.
struct Lane {
  const DepthwiseWeightRowsArgs& args;
  int c, end;
  int top_d, top_h, left;  // position of the row of taps, relative to an output's window

  __device__ __forceinline__ Item item_at(int item) const {
    const int line = divide(item, args.by_inner), inner = item - line * args.inner;
    const int plane = divide(line, args.by_outer), outer = line - plane * args.outer;
    const int strip = args.down_first ? outer : inner, p = args.down_first ? inner : outer;
    const int n = divide(plane, args.by_planes), z = plane - n * args.y_size[0];
    const int d = z * args.stride[0] + top_d, h = p * args.stride[1] + top_h;
    const int spread = args.spread, group = divide(strip, args.by_spread);
    const int q = group * COLUMNS * spread + (strip - group * spread), from = q * STRIDE + left;
    const T* const x = static_cast<const T*>(args.x) + n * args.x_stride[0] + d * args.x_stride[1] +
                       h * args.x_stride[2] +
                       (from * static_cast<int>(args.x_stride[3]) +
                        channel_offset<VECTOR>(divide(c, args.by_multiplier), args.x_channel));
    const T* const y = static_cast<const T*>(args.y) + n * args.y_stride[0] + z * args.y_stride[1] +
                       p * args.y_stride[2] + (q * static_cast<int>(args.y_stride[3]) +
                                               channel_offset<VECTOR>(c, args.y_channel));
    // Of a single row of taps, y is not read either where x does not exist.
    const bool there = item < end && static_cast<u32>(d) < static_cast<u32>(args.x_size[0]) &&
                       (ROWS > 1 || static_cast<u32>(h) < static_cast<u32>(args.x_size[1]));
    return {x, y, h, from, q, there};
  }

  // Zeros where the item, or its part of x, does not exist; row `r` of the thread's rows of taps.
  __device__ __forceinline__ void load_x(Raw (&x)[kRead], const Item& item, int r) const {
    const int down = r * args.dilation[1];
    const int apart = args.spread * static_cast<int>(args.x_stride[3]);
    // Otherwise the addresses of all rows would be in registers.
    const int pitch = ROWS > 1 ? opaque_value(apart) : apart;
    const bool there =
        item.there &&
        (ROWS == 1 || static_cast<u32>(item.h + down) < static_cast<u32>(args.x_size[1]));
    const u32 columns = there ? args.x_size[2] : 0;
    const T* const row = item.x + down * args.x_stride[2];
#pragma unroll
    for (int i = 0; i < kRead; ++i) {
      load_ahead_if(static_cast<u32>(item.from + i * args.spread) < columns, row + i * pitch, x[i]);
    }
  }
  __device__ __forceinline__ void load_y(Raw (&y)[COLUMNS], const Item& item) const {
    const int pitch = args.spread * static_cast<int>(args.y_stride[3]);
    const int columns = item.there ? args.y_size[2] : 0;
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) {
      load_ahead_if(item.q + i * args.spread < columns, item.y + i * pitch, y[i]);
    }
  }
};

__device__ __forceinline__ void multiply(const Raw (&read_x)[kRead], const Raw (&read_y)[COLUMNS],
                                         float (&sums)[KERNEL][VECTOR]) {
  float y[COLUMNS][VECTOR];
#pragma unroll
  for (int i = 0; i < COLUMNS; ++i) widen_word<T>(read_y[i], y[i]);
#pragma unroll
  for (int i = 0; i < kRead; ++i) {
    float x[VECTOR];
    widen_word<T>(read_x[i], x);
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
  const int tap = above / kSums, own = above % kSums / VECTOR, column = own % KERNEL;
  const int c = (blockIdx.y * args.vectors + vector) * VECTOR + above % VECTOR;
  const int tap_row = (blockIdx.z * args.tap_rows + tap) * ROWS + own / KERNEL;
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
  const int tap_row = (blockIdx.z * args.tap_rows + tap) * ROWS;
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
  float sums[ROWS][KERNEL][VECTOR] = {};
  int item = block * args.share + slot;
  if (item < end) {
    Raw x[2][kRead], y[2][COLUMNS];
    Item now = lane.item_at(item);
    lane.load_y(y[0], now);
    lane.load_x(x[0], now, 0);
#pragma unroll 1
    while (item < end) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (half > 0 && item >= end) break;
        const Item next = lane.item_at(item += args.slots);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
          const int turn = (half * ROWS + r) % 2;
          if (r + 1 < ROWS) {
            lane.load_x(x[1 - turn], now, r + 1);
          } else {
            lane.load_y(y[1 - half], next);
            lane.load_x(x[1 - turn], next, 0);
          }
          multiply(x[turn], y[half], sums[r]);
        }
        now = next;
      }
    }
  }
  if (slot < args.slots) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      reinterpret_cast<float*>(all_sums)[(place * kSums + i) * args.vectors + vector] =
          sums[i / VECTOR / KERNEL][i / VECTOR % KERNEL][i % VECTOR];
    }
  }
  __syncthreads();
  const int column = blockIdx.z * gridDim.y + blockIdx.y;
  float4* const partials =
      reinterpret_cast<float4*>(args.partials) + static_cast<i64>(column) * blocks * quads;
  block_sums.finish(partials, args.arrived + column, last,
                    [&](int index, float sum) { put(args, index, sum); });
}
