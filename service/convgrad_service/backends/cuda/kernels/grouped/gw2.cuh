// The arguments of grouped_weight.cu.
#pragma once

#include "grouped/grouped_box.cuh"

namespace convgrad {

constexpr int kMaxPhases = 16;

struct Phase {
  int x0, y0, count;
};

struct GroupedWeightArgs {
  // What the first copies need is adjacent.
  const void* x;
  const void* y;
  i64 x_group, y_group;  // strides of a group, in elements
  BoxStrides x_stride, y_stride;
  Box x_box, y_box;
  int slice;  // merges in a block
  int merged;
  int groups;
  int in_channels;   // in a group
  int out_channels;  // in a group
  int boxes;         // boxes of a split,
  int more;          // one more for the first `more` ones
  int item_groups;   // of a slice
  int tap_planes;    // kernel[0] * kernel[1] if each block has one position of the first two, or 1
  int stages;
  int y_at, stage_bytes, sources_at;  // in shared memory
  int batch;
  int kernel[3];
  int tile[4];   // pixels: images, D, H, W
  int tiles[4];  // in the largest phase
  int x_size[3];
  int y_size[3];
  int x_step[3];  // in units of the lattice, as x_tap
  int x_tap[3];
  int lattice[3];
  int y_step[3];
  int phases[3];
  Phase phase[kMaxPhases][3];
  int row_blocks;     // items of one merge: of MT * 16 rows,
  int column_blocks;  // by NF * 8 columns
  int items;          // of a block
  int wide;           // w is float32 for any type of x and y
  int quads;          // four adjacent channels of w are results of one group and one aligned vector
  float alpha;
  float beta;
  float* partials;
  void* w;
  const void* accumulate;  // like w, or null
  u32* met;                // zeros, one for the blocks of each x and y; left zero
  i64 w_stride[6];         // G K C T R S
  void* stamps;
};

}  // namespace convgrad
