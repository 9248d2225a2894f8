// The arguments of grouped_weight.cu.
#pragma once

#include "core/divider.cuh"
#include "grouped/grouped_box.cuh"
#include "grouped/gw_result.cuh"
#include "ptx/tma.cuh"

namespace convgrad {

constexpr int kMaxPhases = 16;

struct Phase {
  int x0, y0, count;
};

struct GroupedWeightArgs {
  // What the first copies need is adjacent.
  TensorMap x_map;  // with COPY_ENGINE: channels, W, H, D, images
  TensorMap y_map;
  int boxes;  // boxes of a split,
  int more;   // one more for the first `more` ones
  Divider by_item_groups, by_tiles[3];  // D, H, W
  int item_groups;                      // of a slice
  int slice_channels[2];                // of x and y
  int tiles[4];                         // images, D, H, W; in the largest phase
  int tile[4];                          // pixels
  int x_step[3];                        // in units of the lattice, as x_tap
  int x_tap[3];
  int lattice[3];
  int y_step[3];
  int phases[3];
  Phase phase[kMaxPhases][3];
  int stages;
  int y_at, stage_bytes, box_bytes, sources_at, rows_at;  // in shared memory
  Divider by_x_merge, by_in_channels, by_kernel[2], by_tile[3];
  int kernel[3];
  int tap_planes;  // kernel[0] * kernel[1] if each block has one position of the first two, or 1
  int slice;       // merges in a block
  int merged;
  int groups;
  int batch;
  int x_extent[4];  // images, D, H, W
  int x_pitch, y_pitch;
  Divider by_items, by_column_blocks, by_row_blocks;
  int row_blocks;     // items of one merge: of MT * 16 rows,
  int column_blocks;  // by NF * 8 columns
  WeightResult result;
  // Without COPY_ENGINE.
  const void* x;
  const void* y;
  i64 x_group, y_group;  // strides of a group, in elements
  BoxStrides x_stride, y_stride;
  Box x_box, y_box;
  int x_size[3];
  int y_size[3];
  void* stamps;
};

}  // namespace convgrad
