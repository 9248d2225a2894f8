// The arguments of hopper_grouped_weight.cu, and the tiles of a block.
#pragma once

#include "core/divider.cuh"
#include "core/epilogue.cuh"
#include "ptx/tma.cuh"

namespace convgrad {

struct HopperGroupedWeightArgs {
  TensorMap x_map;
  TensorMap y_map;
  // The fields that the first copies need are adjacent.
  int tiles, more;  // tiles of a share, and one more for the first `more` shares
  Divider by_columns, by_rows;
  int row_tiles, column_tiles;  // in an image
  int tile_rows, tile_columns, images;
  int pad[2];
  int stages;
  u32 y_at, stage_bytes, x_bytes, y_bytes;
  u32 x_gap;  // zero bytes after a box of x
  // Products of a tile: `outer` times `inner`, with distances in bytes, also between the eights of
  // columns of one product.
  int outer_rows, inner;
  u32 x_row, y_row;
  u32 x_image, y_image;
  u32 x_outer, y_outer, inner_bytes;
  u32 x_eight, y_eight;
  int x_size[2];
  int batch;
  int channels;        // of all groups,
  int group_channels;  // and of one, on both sides
  int wide;            // w is float32 for any type of x and y
  float alpha;
  float beta;
  float* partials;
  void* w;
  const void* accumulate;  // like w, or null
  u32* met;                // one zero for each slice, left zero
  i64 w_stride[6];  // G K C T R S; accumulate's too
};

// A tile: its first image, row of x and column of y. Advances without division.
struct Tile {
  const HopperGroupedWeightArgs& args;
  int n, row, column;

  __device__ __forceinline__ Tile(const HopperGroupedWeightArgs& args, int index) : args(args) {
    const int above = divide(index, args.by_columns);
    column = index - above * args.column_tiles;
    n = divide(above, args.by_rows);
    row = above - n * args.row_tiles;
  }
  __device__ __forceinline__ int image() const { return n * args.images; }
  __device__ __forceinline__ int h() const { return row * args.tile_rows; }
  __device__ __forceinline__ int q() const { return column * args.tile_columns; }
  __device__ __forceinline__ void next() {
    if (++column < args.column_tiles) return;
    column = 0;
    if (++row < args.row_tiles) return;
    row = 0;
    ++n;
  }
};

// The tiles of a share.
struct Tiles {
  int begin, end;

  __device__ __forceinline__ Tiles(const HopperGroupedWeightArgs& args, int share) {
    begin = share * args.tiles + min(share, args.more);
    end = begin + args.tiles + (share < args.more);
  }
};

}  // namespace convgrad
