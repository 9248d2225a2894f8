// Gradient of a bias: sums each channel of y over the batch and all positions. Launched by channel_sums.py.
//
// y is viewed as units x columns of VECTOR contiguous elements. CHANNELS 1: a vector is VECTOR channels of one
// pixel, a unit is a pixel. CHANNELS 0: a vector is VECTOR pixels of one channel; a column is a channel, a
// unit such a vector.
//
// Grid: x = splits * column tiles, tiles fastest.
// Block: 256 threads, `width` columns x height = 256 / width rows, each with every height-th unit of one split;
//   the rows are reduced in a fixed tree. With several splits each block writes partial sums
//   [split][channel], and the last block of a column tile to arrive reduces them in the order of the splits.
// Shared memory: 8 KiB.
// Preconditions: `width` * VECTOR (CHANNELS 0: `width`) at most 256; vectors aligned to their size; `arrived`,
//   one word per column tile, is zero and is left zero.
// Determinism: the order of additions does not depend on which block arrives last.
// Limits: columns and splits below 2^31; 64-bit units and offsets.
#include "core/vectors.cuh"

using namespace convgrad;

struct ChannelSumsArgs {
  const void* y;
  void* partials;
  void* result;
  u32* arrived;
  i64 column_stride;  // in elements, as all strides
  i64 group_stride;   // of `group_columns` columns
  i64 unit_stride;
  i64 span_stride;  // of `span_units` units
  i64 span_units;
  i64 units;
  i64 split_units;
  int columns;
  int group_columns;
  int width;
  int column_tiles;
  int splits;
  int channels;
  int wide_result;  // the result has the type of sums
};

namespace {

constexpr int kThreads = 256, kUnroll = 4;
// Sums per column.
constexpr int kSums = CHANNELS ? VECTOR : 1;

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    channel_sums(const __grid_constant__ ChannelSumsArgs args) {
  using T = ELEMENT;
  using S = ElementAccumulator<T>;
  __shared__ S sums[kThreads * kSums];
  __shared__ bool last;
  const int height = kThreads / args.width;
  const int row = threadIdx.x / args.width, lane = threadIdx.x - row * args.width;
  const int split = blockIdx.x / args.column_tiles;
  const int tile = blockIdx.x - split * args.column_tiles;
  const int column = tile * args.width + lane;
  const bool real = row < height && column < args.columns;

  S sum[VECTOR] = {};
  if (real) {
    const int group = column / args.group_columns;
    const T* const y = static_cast<const T*>(args.y) + group * args.group_stride +
                       (column - group * args.group_columns) * args.column_stride;
    const i64 begin = split * args.split_units;
    const i64 end = min(begin + args.split_units, args.units);
#pragma unroll 1
    for (i64 unit = begin + row; unit < end; unit += kUnroll * height) {
      Vector<T, VECTOR> found[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        found[i] = Vector<T, VECTOR>::zero();
        const i64 own = unit + i * height;
        if (own >= end) continue;
        i64 within = own, span = 0;
        if (args.span_units != args.units) span = divide(own, args.span_units, within);
        found[i] = Vector<T, VECTOR>::load(y + span * args.span_stride + within * args.unit_stride);
      }
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) sum[e] += widen(found[i].at[e]);
      }
    }
  }
  if (!CHANNELS) {
#pragma unroll
    for (int e = 1; e < VECTOR; ++e) sum[0] += sum[e];
  }

  const int line = args.width * kSums;
  if (row < height) {
#pragma unroll
    for (int e = 0; e < kSums; ++e) sums[row * line + lane * kSums + e] = sum[e];
  }
  for (int rows = height; rows > 1;) {
    const int half = (rows + 1) / 2;
    __syncthreads();
    if (row + half < rows) {
#pragma unroll
      for (int e = 0; e < kSums; ++e) {
        sums[row * line + lane * kSums + e] += sums[(row + half) * line + lane * kSums + e];
      }
    }
    rows = half;
  }
  __syncthreads();

  // From here on, a thread has one channel.
  const int first = tile * line, count = min(line, args.channels - first);
  const int own = static_cast<int>(threadIdx.x);
  auto store = [&](S sum) {
    if (args.wide_result) {
      static_cast<S*>(args.result)[first + own] = sum;
    } else {
      static_cast<T*>(args.result)[first + own] = narrow<T>(sum);
    }
  };
  if (args.splits == 1) {
    if (own < count) store(sums[own]);
    return;
  }
  S* const partials = static_cast<S*>(args.partials) + first;
  if (own < count) partials[static_cast<i64>(split) * args.channels + own] = sums[own];
  __threadfence();
  __syncthreads();
  if (own == 0) last = atomicAdd(args.arrived + tile, 1u) == static_cast<u32>(args.splits - 1);
  __syncthreads();
  if (!last) return;
  __threadfence();
  // If there are more threads than channels, several threads divide a channel's splits.
  const int parts = kThreads / count, part = own / count, channel = own - part * count;
  if (part < parts) {
    const int share = (args.splits + parts - 1) / parts, stop = min((part + 1) * share, args.splits);
    S total = 0;
#pragma unroll 8
    for (int i = part * share; i < stop; ++i) {
      total += __ldcg(partials + static_cast<i64>(i) * args.channels + channel);
    }
    sums[own] = total;
  }
  __syncthreads();
  if (own < count) {
    S total = sums[own];
    for (int i = 1; i < parts; ++i) total += sums[i * count + own];
    store(total);
  }
  if (own == 0) args.arrived[tile] = 0;
}
