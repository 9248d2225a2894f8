// What hopper_depthwise_weight.cu is made of: its argument, which stages a block takes, the copies.
#pragma once

#include "depthwise/depthwise_weight_args.cuh"
#include "ptx/tma.cuh"
#include "core/partial_sums.cuh"
#include "ptx/warpgroup.cuh"

namespace convgrad {

struct HopperDepthwiseWeightMaps {
  TensorMap x_map;     // a stage's rows
  TensorMap tail_map;  // the rows below them
  TensorMap y_map;
};

struct HopperDepthwiseWeightArgs : DepthwiseWeightOperands<HopperDepthwiseWeightMaps> {
  int pairs;       // of units of 8 columns of y, side by side in a stage
  int across;      // parts of a row, of so many pairs
  int down;        // stages of an image's part
  int stages;      // of all images
  int stage_rows;  // of y
  int x_columns;   // of a stage
  int slots;       // of the ring
  int x_bytes;     // of a stage's rows, rounded up to kAlign
  int tail_bytes;
  int slot_bytes;
  int blocks;       // of a tile of channels
  int last_blocks;  // of the last one
};

using T = ELEMENT;
using R = RESULT;

constexpr int kTaps = KERNEL * KERNEL;
constexpr int kTail = KERNEL - STRIDE;      // rows of x that the last stage has besides
constexpr int kRowBytes = CHANNELS * 2;     // of a pixel in shared memory
constexpr int kPairBytes = 16 * kRowBytes;  // twice what a swizzle repeats after
constexpr u32 kSwizzle = kRowBytes == 128 ? 0x70 : 0x30;
constexpr int kAlign = 1024;
constexpr int kMostSlots = 16;
constexpr int kMultiplying = WARPS * 32, kThreads = kMultiplying + 128;

// The stages of a block: neighbours, from one image to the next.
struct Stages {
  int tile, block, blocks, begin, end;

  __device__ __forceinline__ explicit Stages(const HopperDepthwiseWeightArgs& args) {
    const int tiles = (args.channels + CHANNELS - 1) / CHANNELS;
    tile = min(static_cast<int>(blockIdx.x) / args.blocks, tiles - 1);
    block = blockIdx.x - tile * args.blocks;
    blocks = tile == tiles - 1 ? args.last_blocks : args.blocks;
    const int each = args.stages / blocks, more = args.stages - each * blocks;
    begin = block * each + min(block, more);
    end = begin + each + (block < more ? 1 : 0);
  }
};

// One of them, and the way to the next.
struct StageAt {
  int index, n, part, row;  // of all; image, part of its rows, first row of y

  __device__ __forceinline__ StageAt(const HopperDepthwiseWeightArgs& args, int index)
      : index(index) {
    const int column = index / args.down;
    n = column / args.across, part = column - n * args.across;
    row = (index - column * args.down) * args.stage_rows;
  }
  __device__ __forceinline__ void next(const HopperDepthwiseWeightArgs& args) {
    ++index, row += args.stage_rows;
    if (row < args.y_size[0]) return;
    row = 0;
    if (++part == args.across) part = 0, ++n;
  }
  // Of y.
  __device__ __forceinline__ int rows(const HopperDepthwiseWeightArgs& args) const {
    return min(args.stage_rows, args.y_size[0] - row);
  }
  // Whether it is a block's first, or last, in this image.
  __device__ __forceinline__ bool first(const Stages& stages) const {
    return index == stages.begin || row == 0;
  }
  __device__ __forceinline__ bool last(const HopperDepthwiseWeightArgs& args,
                                       const Stages& stages) const {
    return index + 1 == stages.end || row + args.stage_rows >= args.y_size[0];
  }
};

// One thread brings a block's stages into the ring, whose barriers are at `full` and behind them.
__device__ __forceinline__ void copy_stages(const HopperDepthwiseWeightArgs& args,
                                            const Stages& stages, u32 ring, u32 full) {
  const u32 empty = full + kMostSlots * 8;
  const int c = stages.tile * CHANNELS;
  const int pixels = args.stage_rows * (STRIDE * args.x_columns + args.pairs * 16);
  int slot = 0;
  u32 parity = 1;
#pragma unroll 1
  for (StageAt at(args, stages.begin); at.index < stages.end; at.next(args)) {
    const u32 to = ring + slot * args.slot_bytes, barrier = full + slot * 8;
    const int column = at.part * args.pairs * 16, top = at.row * STRIDE - args.pad[0];
    const bool last = at.last(args, stages);
    wait_barrier(empty + slot * 8, parity);
    arrive_and_expect_tx(barrier,
                     (pixels + (last ? kTail * args.x_columns : 0)) * kRowBytes);
    const int left = column * STRIDE - args.pad[1];
    tma_load<4>(to, args.x_map, barrier, {c, left, top, at.n});
    if (last) {
      tma_load<4>(to + args.x_bytes, args.tail_map, barrier,
                   {c, left, top + at.rows(args) * STRIDE, at.n});
    }
    tma_load<4>(to + args.x_bytes + args.tail_bytes, args.y_map, barrier,
                 {c, column, at.row, at.n});
    if (++slot == args.slots) slot = 0, parity ^= 1;
  }
}

// The gradient of a tap.
__device__ __forceinline__ void put(const HopperDepthwiseWeightArgs& args, int c, int tap,
                                    float sum) {
  if (c < args.channels) put_gradient<R>(args, c, tap / KERNEL, tap % KERNEL, sum);
}

// What the tile's blocks have summed, [tap][channel] one after another, by all of one that multiply:
// every share-th by one thread, then the shares; in an order that depends on their number alone.
__device__ __forceinline__ void put_tile(const HopperDepthwiseWeightArgs& args,
                                         const Stages& stages, const float* partials,
                                         float* shares) {
  constexpr int quads = kTaps * CHANNELS / 4;
  constexpr int count = quads >= kMultiplying ? 1 : kMultiplying / quads;
  for (int i = threadIdx.x; i < quads * count; i += kMultiplying) {
    const float4* const from = reinterpret_cast<const float4*>(partials) + i % quads;
    reinterpret_cast<float4*>(shares)[i] =
        sum_of_every(from, i / quads, count, stages.blocks, quads);
  }
  wait_at(1, kMultiplying);
  for (int i = threadIdx.x; i < kTaps * CHANNELS; i += kMultiplying) {
    float sum = 0;
    for (int share = 0; share < count; ++share) sum += shares[share * quads * 4 + i];
    put(args, stages.tile * CHANNELS + i % CHANNELS, i / CHANNELS, sum);
  }
}

}  // namespace convgrad
