// The arguments of hopper_grouped_weight.cu, and the boxes of a block.
#pragma once

#include "core/divider.cuh"
#include "grouped/gw_result.cuh"
#include "ptx/tma.cuh"

namespace convgrad {

constexpr int kMaxPhases = 16, kMaxSubBoxes = 8, kMaxTaps = 10;

// First positions of a phase in x and y, along D, H, W.
struct Phase {
  int x[3], y[3];
};

// A tap of a block: where its pixels start in x's box, in bytes, and its results in w, in elements.
struct Tap {
  i64 w;
  int x;
};

struct HopperGroupedWeightArgs {
  TensorMap x_map;
  TensorMap y_map;
  // What the first copies need is adjacent.
  int boxes, more;  // boxes of a split, and one more for the first `more` ones
  Divider by_tiles[3];
  int tiles[4];  // images, D, H, W; in a phase
  int tile_images;
  int x_next[3], y_next[3];  // distance of tiles
  Divider by_plane_rows;
  int plane_rows, plane_next[2];  // positions of taps along H, if a block has one; and their distances
  Divider by_slices[2];           // of y, and of x; in a group
  int slices[2];
  int stages;
  u32 stage_bytes, y_at, box_bytes;
  int sub_boxes, sub_next;  // of x, along W: their number and the distance of their first positions
  u32 sub_bytes;
  int phases;
  Phase first;
  // What products need: distances in bytes.
  int taps;
  u32 x_eight, y_eight;  // of the two eights of columns of a step
  int steps;             // of a box
  Divider by_steps[3];   // W, H, D
  int step_counts[3];
  u32 x_step[4], y_step[4];  // images, D, H, W
  u32 steps_at, rows_at, received_at;  // in shared memory
  int in_cluster;            // whether the splits of a slice are a cluster
  Tap tap[kMaxTaps];
  i64 plane_w[2];  // of positions of taps along D and H
  Divider by_channels;  // of a group in a slice
  int groups;
  int merged;  // groups in a slice, or 1
  WeightResult result;
  Phase phase[kMaxPhases];
  void* stamps;
};

// The boxes of a split, in turn: the image, and the first positions in x and y.
struct Boxes {
  const HopperGroupedWeightArgs& args;
  int phase = 0, n, d, h, w, plane[2];
  int image, x[3], y[3];

  __device__ __forceinline__ Boxes(const HopperGroupedWeightArgs& args, int index, int t, int r)
      : args(args), plane{t * args.plane_next[0], r * args.plane_next[1]} {
    if (args.phases > 1) {
      const int in_phase = args.tiles[0] * args.tiles[1] * args.tiles[2] * args.tiles[3];
      phase = index / in_phase;
      index -= phase * in_phase;
    }
    const int rows = divide(index, args.by_tiles[2]), planes = divide(rows, args.by_tiles[1]);
    w = index - rows * args.tiles[3];
    h = rows - planes * args.tiles[2];
    n = divide(planes, args.by_tiles[0]);
    d = planes - n * args.tiles[1];
    place();
  }
  __device__ __forceinline__ void place() {
    const Phase& of = phase == 0 ? args.first : args.phase[phase];
    const int at[3] = {d, h, w};
    image = n * args.tile_images;
#pragma unroll
    for (int dim = 0; dim < 3; ++dim) {
      x[dim] = of.x[dim] + (dim < 2 ? plane[dim] : 0) + at[dim] * args.x_next[dim];
      y[dim] = of.y[dim] + at[dim] * args.y_next[dim];
    }
  }
  __device__ __forceinline__ void next() {
    if (++w == args.tiles[3]) {
      w = 0;
      if (++h == args.tiles[2]) {
        h = 0;
        if (++d == args.tiles[1]) {
          d = 0;
          if (++n == args.tiles[0]) n = 0, ++phase;
        }
      }
    }
    place();
  }
};

}  // namespace convgrad
