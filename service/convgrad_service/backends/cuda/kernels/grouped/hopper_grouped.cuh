// The argument of hopper_grouped.cu, and its units. Host side: hopper_grouped.py.
#pragma once

#include "ptx/load_store.cuh"
#include "ptx/tma.cuh"

namespace convgrad {

struct HopperGroupedArgs {
  TensorMap x_map;  // C W H N
  TensorMap y_map;
  const void* w;
  i64 w_group;      // distance of groups in the weights
  int w_stride[4];  // out channel, in channel (of the convolution), R S
  int w_pairs;      // adjacent input channels of the weights are contiguous and aligned
  int groups;
  int x_size[2];  // H W
  int y_size[2];
  int first[2];  // source position of the first result's first tap
  // Units: pieces of images, by images, rows and columns of results.
  int units;
  int images;  // images of a team of warps: 1, or 2 of 8 columns
  int piece[2];
  int pieces[2];
  // The source's ring, of boxes of rows; and the ring of results.
  int row_pixels;  // pixels of a row in a box
  int box_rows, stages, stage_bytes;
  int slot_rows, slots, slot_bytes;
  int result_row;  // bytes between rows of results
  int source_half, result_half;  // bytes from the first 8 positions of a product to the others
  int source_team, result_team;  // bytes between the images of teams
  int slots_at, weights_at, barriers_at;  // in shared memory
  int zeroes;  // the pixel right of the source is the next row's first one, which must be zeroed
  int backward;  // whether it is a gradient of the input
};

// A unit: the start and the number of its rows of results, and the valid rows of the source that they
// meet.
struct GroupedUnit {
  int image, row, column, rows;
  int source_row, source_rows;
};
__device__ __forceinline__ GroupedUnit unit_at(const HopperGroupedArgs& args, int unit) {
  GroupedUnit at = {unit, 0, 0};
  if (args.pieces[1] > 1) {
    at.image = unit / args.pieces[1];
    at.column = (unit - at.image * args.pieces[1]) * args.piece[1];
  }
  if (args.pieces[0] > 1) {
    const int piece = at.image;
    at.image = piece / args.pieces[0];
    at.row = (piece - at.image * args.pieces[0]) * args.piece[0];
  }
  at.image *= args.images * TEAMS;
  at.rows = min(args.piece[0], args.y_size[0] - at.row);
  const int from = at.row + args.first[0];
  at.source_row = max(from, 0);
  at.source_rows = max(min(from + at.rows + 2, args.x_size[0]) - at.source_row, 0);
  return at;
}

}  // namespace convgrad
