// Shared by hopper_first_taps.cu and hopper_first_split.cu: kernel parameters, the work and steps
// of a block, and the producer of rows of x. The epilogue is in hopper_first_sums.cuh.
#pragma once

#include "core/pipeline_state.cuh"
#include "ptx/tma.cuh"

namespace convgrad {

struct HopperFirstTapsArgs {
  TensorMap x_map;  // a part of a row, parts, H, N
  TensorMap y_map;  // K, W, H, N
  const void* x;
  const void* y;
  float* partials;
  i64 x_stride[2];  // N H, in elements
  i64 y_stride[3];  // N H W
  int channels, y_channels;
  int x_size[2];
  int y_size[2];
  int kernel[2];
  int stride[2];
  int pad[2];
  int odd;                // elements before a window's first, so that it starts at an even one
  int window;             // elements of a window, an even number
  int tiles, groups;      // 64-row tiles of M in a block; and groups of that many tiles
  int parts;              // warpgroups that share a tile
  int segment, segments;  // columns of y (a multiple of 16), and segments of a row
  int lines, more;        // rows of y of a share; the first `more` shares have one more
  int added;              // rows of x that a step adds
  int before;             // steps of a walk before its first row of y
  int y_stages, x_stages;
  int part;   // elements of a part of x's row
  u32 x_row;  // bytes of a row of x
  u32 x_stage, y_stage;
  u32 made_at;  // float32: offset of y's bfloat16 parts
  u32 raws_at;
};

// The offset of a column's window in a row of x, in elements.
__device__ __forceinline__ int window_of(const HopperFirstTapsArgs& args, int q) {
  return (q * args.stride[1] - args.pad[1]) * args.channels - args.odd;
}

// A block's work: a group of 64-row tiles, channels of y, and rows `line` to `end` of y.
struct BlockAt {
  int first_tile, first_channel, share, line, end;

  __device__ __forceinline__ BlockAt(const HopperFirstTapsArgs& args, int channels) {
    const int channel_block = blockIdx.x / args.groups;
    first_tile = (blockIdx.x - channel_block * args.groups) * args.tiles;
    first_channel = channel_block * channels;
    share = blockIdx.y;
    line = share * args.lines + min(share, args.more);
    end = line + args.lines + (share < args.more);
  }
};

// The coordinates of a step. All warp roles iterate over the same steps. Divisions are needed only
// at the start of a walk down an image. T is the type of x.
template <class T>
struct StepsOf {
  const HopperFirstTapsArgs& args;
  int line, end;      // range of rows of y, numbered over images and segments
  int n, segment, p;  // coordinates of the row of y
  int left;           // steps of this walk before its next row of y
  int part;           // part of a row of x where the first window starts; may be negative
  u32 lead;           // bytes of that part before the window

  __device__ __forceinline__ StepsOf(const HopperFirstTapsArgs& args, int line, int end)
      : args(args), line(line), end(end), left(args.before) {
    const int walk = line / args.y_size[0];
    p = line - walk * args.y_size[0];
    n = walk / args.segments;
    segment = walk - n * args.segments;
    begin();
  }
  __device__ __forceinline__ void begin() {
    const int from = window_of(args, segment * args.segment);
    part = (from >= 0 ? from : from - args.part + 1) / args.part;
    lead = (from - part * args.part) * static_cast<int>(sizeof(T));
  }
  __device__ __forceinline__ bool there() const { return line < end; }
  __device__ __forceinline__ bool begins() const { return left == args.before && left > 0; }
  __device__ __forceinline__ bool multiplies() const { return left == 0; }
  // The first row of x that the step adds.
  __device__ __forceinline__ int row() const {
    return (p - left) * args.stride[0] - args.pad[0] + args.kernel[0] - args.added;
  }
  __device__ __forceinline__ void next() {
    if (left > 0) {
      --left;
      return;
    }
    ++line;
    if (++p < args.y_size[0]) return;
    p = 0, left = args.before;
    if (++segment == args.segments) segment = 0, ++n;
    if (args.segments > 1) begin();
  }
};

// The producer of the rows of x that each step adds. The pipeline's mbarriers are at `full` and
// `empty`.
template <class T>
__device__ __forceinline__ void copy_rows_of_x(const HopperFirstTapsArgs& args, const BlockAt& block,
                                               u32 ring, u32 full, u32 empty) {
  PipelineState state;
  for (StepsOf<T> step(args, block.line, block.end); step.there(); step.next()) {
    const u32 barrier = full + state.index * 8;
    mbarrier_wait(empty + state.index * 8, state.parity ^ 1);
    mbarrier_arrive_expect_tx(barrier, args.added * args.x_row);
    const int corner[4] = {0, step.part, step.row(), step.n};
    tma_load(ring + args.raws_at + state.index * args.x_stage, args.x_map, barrier, corner);
    state.advance(args.x_stages);
  }
}

}  // namespace convgrad
