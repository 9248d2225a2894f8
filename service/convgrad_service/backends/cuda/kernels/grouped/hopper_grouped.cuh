// What hopper_grouped.cu is given, and the units that its images are cut into.
// The host's side is hopper_grouped.py.
#pragma once

#include "ptx/load_store.cuh"
#include "ptx/tma.cuh"

namespace convgrad {

struct HopperGroupedArgs {
  TensorMap x_map;  // C W H N
  TensorMap y_map;
  const void* w;
  i64 w_group;      // from one group's weights to the next one's; from 16 channels on they follow
  int w_stride[4];  // out channel, in channel (of the convolution), R S
  int w_pairs;      // weights of neighbouring in channels are side by side, and aligned
  int groups;
  int x_size[2];  // H W
  int y_size[2];
  int first[2];  // where in the source the first result's first tap is
  // Units: pieces of images, so many images, rows and columns of results each.
  int units;
  int images;  // of a team of warps: 1, or 2 of 8 columns
  int piece[2];
  int pieces[2];
  // The source's ring: boxes of so many rows; and that of results.
  int row_pixels;  // of a row in a box
  int box_rows, stages, stage_bytes;
  int slot_rows, slots, slot_bytes;
  int result_row;  // bytes from a row of results to the next one
  int source_half, result_half;  // bytes from the first 8 positions of a product to the others
  int source_team, result_team;  // and from one team's images to the next one's
  int slots_at, weights_at, barriers_at;  // in shared memory
  int zeroes;  // what is right of the source is the next row's first pixel
};

// A unit: where its results begin, and how many rows there are; the rows of the source that they
// meet, those that there are.
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
