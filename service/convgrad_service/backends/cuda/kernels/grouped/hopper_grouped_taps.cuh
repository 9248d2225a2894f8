// The arguments of hopper_grouped_taps.cu, and the tables of a block.
#pragma once

#include "grouped/weight_boxes.cuh"
#include "grouped/weight_sums.cuh"
#include "ptx/tma.cuh"

namespace convgrad {

// Rows of sums are those of M, for each of the ROWS taps along H.
using Sums = SumShape<PAIRS * ROWS, NF, WARPS>;
constexpr int kSummers = Sums::kSummers, kRows = Sums::kRows, kColumns = Sums::kColumns;

constexpr int kMaxTaps = 10;

// A tap of a block: where its pixels start in x's box, in bytes, and its results in w, in elements.
struct Tap {
  i64 w;
  int x;
};

struct HopperGroupedTapsArgs {
  TensorMap x_map;
  TensorMap y_map;
  // What the first copies need is adjacent.
  Divider by_slices[2];           // of y, and of x; in a group
  int slices[2];
  int stages;
  u32 stage_bytes, y_at, box_bytes;
  int sub_boxes, sub_next;  // of x, along W: their number and the distance of their first positions
  u32 sub_bytes;
  BoxWalk walk;
  // What products need: distances in bytes.
  int taps;
  u32 x_eight, y_eight;  // of the two eights of columns of a step
  u32 y_tap;             // of the rows of y that a row of x meets, or else of its channels
  int steps;             // of a box
  Divider by_steps[3];   // W, H, D
  int step_counts[3];
  u32 x_step[4], y_step[4];  // images, D, H, W
  u32 steps_at, rows_at, received_at;  // in shared memory
  int in_cluster;            // whether the splits of a slice are a cluster
  Tap tap[kMaxTaps];
  Divider by_channels;  // of a group in a slice
  int groups;
  int merged;  // groups in a slice, or 1
  WeightResult result;
};

constexpr int kWidth = 32;  // channels of x

// A step's offsets in a box, in units of descriptors.
struct Step {
  u32 x, y;
};

// The channels of a block: of a slice with whole groups, or of a part of one group.
struct Slice {
  int index, first_group, x, y;  // x and y: channels of the group

  __device__ __forceinline__ Slice(const HopperGroupedTapsArgs& args) {
    const int above = divide(blockIdx.y, args.by_slices[0]);
    index = divide(above, args.by_slices[1]);
    y = (static_cast<int>(blockIdx.y) - above * args.slices[0]) * kColumns;
    x = (above - index * args.slices[1]) * kWidth;
    first_group = index * args.merged;
  }
};

__device__ __forceinline__ void fill_tables(const HopperGroupedTapsArgs& args, const Slice& slice,
                                            Step* step_at, Row* row_at) {
#pragma unroll 1
  for (int i = threadIdx.x; i < args.steps; i += kSummers) {
    const int rows = divide(i, args.by_steps[0]), planes = divide(rows, args.by_steps[1]);
    const int n = divide(planes, args.by_steps[2]), d = planes - n * args.step_counts[2];
    const int w = i - rows * args.step_counts[0], h = rows - planes * args.step_counts[1];
    const u32 x = n * args.x_step[0] + d * args.x_step[1] + h * args.x_step[2] + w * args.x_step[3];
    const u32 y = n * args.y_step[0] + d * args.y_step[1] + h * args.y_step[2] + w * args.y_step[3];
    step_at[i] = {x >> 4, y >> 4};
  }
  // Rows of the warps' items, four times ROWS taps along H and PAIRS fragments: two taps, two halves of
  // the channels.
#pragma unroll 1
  for (int i = threadIdx.x; i < 4 * kRows; i += kSummers) {
    const int item = i / kRows, within = i - item * kRows;
    const int row = within / (16 * PAIRS), pair = within / 16 - row * PAIRS;
    const int tap = pair * 2 + item / 2, channel = item % 2 * 16 + within % 16;
    const int own = divide(channel, args.by_channels);
    Row to = {0, -1, 0};
    if (tap < args.taps && slice.first_group + own < args.groups) {
      to.own = own;
      // The last of the rows of y that a row of x meets does so at the first tap.
      to.w = own * (args.result.w_stride[0] - args.result.out_channels * args.result.w_stride[1]) +
             (channel - own * args.result.in_channels) * args.result.w_stride[2] +
             (ROWS - 1 - row) * args.result.w_stride[4] + args.tap[tap].w;
    }
    row_at[i] = to;
  }
}

}  // namespace convgrad
