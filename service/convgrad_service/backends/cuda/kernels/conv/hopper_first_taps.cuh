// Kernel parameters of hopper_first_taps.cu, the work and steps of a block, the producer of rows of x,
// and the epilogue: accumulators through shared memory to the block's part of `partials`.
#pragma once

#include "core/bits16.cuh"
#include "core/pipeline_state.cuh"
#include "ptx/tma.cuh"

namespace convgrad {

struct HopperFirstTapsArgs {
  TensorMap x_map;  // a part of a row, parts, H, D, N
  TensorMap y_map;  // K, W, H, D, N
  float* partials;
  int channels, y_channels;
  int y_size[3];
  int kernel[3];
  int stride[3];
  int pad[3];
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
  u32 raws_at;  // offset of rows of x
  int bfloat16;  // the type of 16-bit elements: float16 if 0
};

// The offset of a column's window in a row of x, in elements.
__device__ __forceinline__ int window_of(const HopperFirstTapsArgs& args, int q) {
  return (q * args.stride[2] - args.pad[2]) * args.channels - args.odd;
}

// A block's work: a group of 64-row tiles of a tap along D, channels of y, and rows `line` to `end` of y.
struct BlockAt {
  int first_tile, tap, first_channel, share, line, end;

  __device__ __forceinline__ BlockAt(const HopperFirstTapsArgs& args, int channels) {
    const int taps = blockIdx.x / args.groups, channel_block = taps / args.kernel[0];
    first_tile = (blockIdx.x - taps * args.groups) * args.tiles;
    tap = taps - channel_block * args.kernel[0];
    first_channel = channel_block * channels;
    share = blockIdx.y;
    line = share * args.lines + min(share, args.more);
    end = line + args.lines + (share < args.more);
  }
};

// The coordinates of a step. All warp roles iterate over the same steps. Divisions are needed only
// at the start of a walk down an image.
struct Steps {
  const HopperFirstTapsArgs& args;
  int tap;               // along D
  int line, end;         // range of rows of y, numbered over images, planes and segments
  int n, z, segment, p;  // coordinates of the row of y
  int left;           // steps of this walk before its next row of y
  int part;           // part of a row of x where the first window starts; may be negative
  u32 lead;           // bytes of that part before the window

  __device__ __forceinline__ Steps(const HopperFirstTapsArgs& args, const BlockAt& block)
      : args(args), tap(block.tap), line(block.line), end(block.end), left(args.before) {
    const int walk = line / args.y_size[1], outer = walk / args.segments;
    p = line - walk * args.y_size[1];
    segment = walk - outer * args.segments;
    n = outer / args.y_size[0];
    z = outer - n * args.y_size[0];
    begin();
  }
  __device__ __forceinline__ void begin() {
    const int from = window_of(args, segment * args.segment);
    part = (from >= 0 ? from : from - args.part + 1) / args.part;
    lead = (from - part * args.part) * static_cast<int>(sizeof(Bits16));
  }
  __device__ __forceinline__ bool there() const { return line < end; }
  __device__ __forceinline__ bool begins() const { return left == args.before && left > 0; }
  __device__ __forceinline__ bool multiplies() const { return left == 0; }
  // The first row of x that the step adds.
  __device__ __forceinline__ int row() const {
    return (p - left) * args.stride[1] - args.pad[1] + args.kernel[1] - args.added;
  }
  __device__ __forceinline__ int plane() const { return z * args.stride[0] - args.pad[0] + tap; }
  __device__ __forceinline__ void next() {
    if (left > 0) {
      --left;
      return;
    }
    ++line;
    if (++p < args.y_size[1]) return;
    p = 0, left = args.before;
    if (++segment == args.segments) {
      segment = 0;
      if (++z == args.y_size[0]) z = 0, ++n;
    }
    if (args.segments > 1) begin();
  }
};

// The producer of the rows of x that each step adds. The pipeline's mbarriers are at `full` and
// `empty`.
__device__ __forceinline__ void copy_rows_of_x(const HopperFirstTapsArgs& args, const BlockAt& block,
                                               u32 ring, u32 full, u32 empty) {
  PipelineState state;
  for (Steps step(args, block); step.there(); step.next()) {
    const u32 barrier = full + state.index * 8;
    mbarrier_wait(empty + state.index * 8, state.parity ^ 1);
    mbarrier_arrive_expect_tx(barrier, args.added * args.x_row);
    const int corner[5] = {0, step.part, step.row(), step.plane(), step.n};
    tma_load(ring + args.raws_at + state.index * args.x_stage, args.x_map, barrier, corner);
    state.advance(args.x_stages);
  }
}

// Where a lane reads its two consecutive elements of windows: `place`, the first one's row of M.
struct Own {
  int lag;  // how many steps before a row of y their row of x was loaded
  u32 at;   // their offset in the rows of that step

  __device__ __forceinline__ Own(const HopperFirstTapsArgs& args, int place, int step_bytes) {
    const int row = min(place / args.window, args.kernel[1] - 1);
    const int before_last = args.kernel[1] - 1 - row;
    lag = before_last / args.added;
    at = (args.added - 1 - (before_last - lag * args.added)) * args.x_row +
         place % args.window * static_cast<int>(sizeof(Bits16)) + (threadIdx.x & 3) * 2 * step_bytes;
  }
};

// Stores a lane's accumulators to shared memory if `first`, else adds them. Rows are channels,
// `pitch` apart; a lane has two consecutive elements of a window.
template <int kFragments>
__device__ __forceinline__ void leave_sums(float* to, const float (&sum)[kFragments][4], int pitch,
                                           bool first) {
#pragma unroll
  for (int i = 0; i < 2 * kFragments; ++i) {
    float* const two = to + (i / 2 * 8 + i % 2) * pitch;
    const float2 old = first ? make_float2(0, 0) : *reinterpret_cast<float2*>(two);
    *reinterpret_cast<float2*>(two) = make_float2(old.x + sum[i / 2][i % 2], old.y + sum[i / 2][2 + i % 2]);
  }
}

// Writes the block's partial sums by `warps` consumer warps: each warp takes whole channels, and
// its lanes consecutive elements.
template <int kChannels>
__device__ __forceinline__ void put_partials(const HopperFirstTapsArgs& args, const BlockAt& block,
                                             const float* sums, int pitch, int warp, int warps,
                                             int lane) {
  const int columns = args.kernel[2] * args.channels, plane = args.kernel[1] * columns;
  const int all = args.kernel[0] * plane;
  float* const partials =
      args.partials + static_cast<i64>(block.share) * args.y_channels * all + block.tap * plane;
  const int channels = min(kChannels, args.y_channels - block.first_channel);
#pragma unroll 1
  for (int rest = lane; rest < args.tiles * 64; rest += 32) {
    const int place = block.first_tile * 64 + rest, row = place / args.window;
    const int column = place - row * args.window - args.odd;
    if (row >= args.kernel[1] || column < 0 || column >= columns) continue;
    const float* const from = sums + rest;
    float* const to =
        partials + static_cast<i64>(block.first_channel) * all + row * columns + column;
#pragma unroll 4
    for (int channel = warp; channel < channels; channel += warps) {
      to[channel * all] = from[channel * pitch];
    }
  }
}

}  // namespace convgrad
