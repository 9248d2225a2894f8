// What hopper_depthwise.cu is made of: its argument, which stages a block takes, the copying both
// ways, exact results.
#pragma once

#include "elements.cuh"
#include "hopper.cuh"
#include "warpgroup.cuh"

namespace convgrad {

struct HopperDepthwiseArgs {
  TensorMap x_map;     // a stage's rows of the source
  TensorMap head_map;  // the rows above them
  TensorMap y_map;     // the result of a stage
  const void* x;       // the source: grad_output, or the input
  const void* w;
  void* y;            // the result: grad_input, or the output
  i64 x_stride[3];    // N H W, in elements; a pixel's channels lie side by side
  i64 w_stride[3];    // C R S
  i64 y_stride[3];
  int batch;
  int channels;
  int x_size[2];
  int y_size[2];
  int pad[2];         // y's row h meets x's row (h + pad - r) / STRIDE
  int lowest[2];      // of such rows, less h / STRIDE
  int flipped;        // whether w is read from its last row and column on
  int pairs;          // of 8 columns of x, side by side in a stage
  int across;         // parts of a row, of so many pairs
  int down;           // stages of an image's part
  int stages;         // of all images
  int stage_rows;     // of x
  int x_columns;      // of a stage
  int slots;          // of the ring
  int x_bytes;        // of a stage's rows, rounded up to kAlign
  int slot_bytes;
  int result_bytes;   // of a stage's result
  int blocks;         // of a tile of channels
  int last_blocks;    // of the last one
};

using T = ELEMENT;

constexpr int kMet = (KERNEL + STRIDE - 1) / STRIDE;  // rows of x that a row of y meets, and columns
constexpr int kHead = kMet - 1;
constexpr int kRowBytes = CHANNELS * 2;     // of a pixel in shared memory
constexpr int kPairBytes = 16 * kRowBytes;  // twice what a swizzle repeats after
constexpr u32 kSwizzle = kRowBytes == 128 ? 0x70 : 0x30;
constexpr int kAlign = 1024;
constexpr int kMostSlots = 16, kResults = 3;
constexpr int kMultiplying = WARPS * 32, kThreads = kMultiplying + 128;

// The stages of a block: neighbours, from one image to the next.
struct Stages {
  int tile, begin, end;

  __device__ __forceinline__ explicit Stages(const HopperDepthwiseArgs& args) {
    const int tiles = (args.channels + CHANNELS - 1) / CHANNELS;
    tile = min(static_cast<int>(blockIdx.x) / args.blocks, tiles - 1);
    const int block = blockIdx.x - tile * args.blocks;
    const int blocks = tile == tiles - 1 ? args.last_blocks : args.blocks;
    const int each = args.stages / blocks, more = args.stages - each * blocks;
    begin = block * each + min(block, more);
    end = begin + each + (block < more ? 1 : 0);
  }
};

// One of them, and the way to the next.
struct StageAt {
  int index, n, part, row;  // of all; image, part of its rows, first row of y / STRIDE
  int all;                  // such rows

  __device__ __forceinline__ StageAt(const HopperDepthwiseArgs& args, int index)
      : index(index), all((args.y_size[0] + STRIDE - 1) / STRIDE) {
    const int column = index / args.down;
    n = column / args.across, part = column - n * args.across;
    row = (index - column * args.down) * args.stage_rows;
  }
  __device__ __forceinline__ void next(const HopperDepthwiseArgs& args) {
    ++index, row += args.stage_rows;
    if (row < all) return;
    row = 0;
    if (++part == args.across) part = 0, ++n;
  }
  __device__ __forceinline__ int rows(const HopperDepthwiseArgs& args) const {
    return min(args.stage_rows, all - row);
  }
  // Whether it is a block's first in this image.
  __device__ __forceinline__ bool first(const Stages& stages) const {
    return index == stages.begin || row == 0;
  }
};

// The rings' barriers.
struct Barriers {
  u32 at;

  __device__ __forceinline__ u32 full(int slot) const { return at + slot * 8; }
  __device__ __forceinline__ u32 empty(int slot) const { return at + (kMostSlots + slot) * 8; }
  __device__ __forceinline__ u32 written(int result) const {
    return at + (2 * kMostSlots + result) * 8;
  }
  __device__ __forceinline__ u32 stored(int result) const {
    return at + (2 * kMostSlots + kResults + result) * 8;
  }
};
constexpr int kBarriers = 2 * (kMostSlots + kResults);

// One thread brings a block's stages into the ring.
__device__ __forceinline__ void copy_stages(const HopperDepthwiseArgs& args, const Stages& stages,
                                            u32 ring, const Barriers& barriers) {
  const int c = stages.tile * CHANNELS;
  int slot = 0;
  u32 parity = 1;
#pragma unroll 1
  for (StageAt at(args, stages.begin); at.index < stages.end; at.next(args)) {
    const u32 to = ring + slot * args.slot_bytes, full = barriers.full(slot);
    const int left = at.part * args.pairs * 16 + args.lowest[1], top = at.row + args.lowest[0];
    const bool first = at.first(stages);
    wait_for(barriers.empty(slot), parity);
    arrive_expecting(full, (args.stage_rows + (first ? kHead : 0)) * args.x_columns * kRowBytes);
    if (first) load_tile<4>(to + args.x_bytes, args.head_map, full, {c, left, top, at.n});
    load_tile<4>(to, args.x_map, full, {c, left, top + kHead, at.n});
    if (++slot == args.slots) slot = 0, parity ^= 1;
  }
}

// Another one takes the results away.
__device__ __forceinline__ void store_stages(const HopperDepthwiseArgs& args, const Stages& stages,
                                             u32 results, const Barriers& barriers) {
  int result = 0, before = kResults - 1;
  u32 parity = 0;
#pragma unroll 1
  for (StageAt at(args, stages.begin); at.index < stages.end; at.next(args)) {
    wait_for(barriers.written(result), parity);
    store_tile<4>(args.y_map, results + result * args.result_bytes,
                  {stages.tile * CHANNELS, at.part * args.pairs * 16 * STRIDE, at.row * STRIDE,
                   at.n});
    commit_stores();
    wait_stores_read<1>();
    if (at.index > stages.begin) arrive(barriers.stored(before));
    before = result;
    if (++result == kResults) result = 0, parity ^= 1;
  }
  wait_stores<0>();
}

// The place of a tap in w.
__device__ __forceinline__ i64 tap_at(const HopperDepthwiseArgs& args, int c, int r, int s) {
  if (args.flipped) r = KERNEL - 1 - r, s = KERNEL - 1 - s;
  return c * args.w_stride[0] + r * args.w_stride[1] + s * args.w_stride[2];
}

// One result from its valid taps alone.
__device__ __noinline__ float exact(const HopperDepthwiseArgs& args, int n, int c, int row,
                                    int column) {
  const T* const x = static_cast<const T*>(args.x) + n * args.x_stride[0] + c;
  float sum = 0;
  for (int r = 0; r < KERNEL; ++r) {
    for (int s = 0; s < KERNEL; ++s) {
      const int u = row + args.pad[0] - r, v = column + args.pad[1] - s;
      if (u < 0 || v < 0 || u % STRIDE != 0 || v % STRIDE != 0) continue;
      const int h = u / STRIDE, k = v / STRIDE;
      if (h >= args.x_size[0] || k >= args.x_size[1]) continue;
      sum += widen(x[h * args.x_stride[1] + k * args.x_stride[2]]) *
             widen(static_cast<const T*>(args.w)[tap_at(args, c, r, s)]);
    }
  }
  return sum;
}

// Of a block's results that are stored, those that are not finite again.
__device__ __forceinline__ void mend(const HopperDepthwiseArgs& args, const Stages& stages) {
  const int first_channel = stages.tile * CHANNELS;
  const int channels = min(args.channels - first_channel, CHANNELS);
#pragma unroll 1
  for (StageAt at(args, stages.begin); at.index < stages.end; at.next(args)) {
    const int left = at.part * args.pairs * 16 * STRIDE, top = at.row * STRIDE;
    const int columns = min(args.pairs * 16 * STRIDE, args.y_size[1] - left);
    const int rows = min(at.rows(args) * STRIDE, args.y_size[0] - top);
#pragma unroll 1
    for (int i = threadIdx.x; i < rows * columns * channels; i += kMultiplying) {
      const int pixel = i / channels, c = first_channel + i - pixel * channels;
      const int row = top + pixel / columns, column = left + pixel % columns;
      T* const to = static_cast<T*>(args.y) + at.n * args.y_stride[0] + row * args.y_stride[1] +
                    column * args.y_stride[2] + c;
      if (!is_finite(widen(*to))) *to = narrow<T>(exact(args, at.n, c, row, column));
    }
  }
}

}  // namespace convgrad
