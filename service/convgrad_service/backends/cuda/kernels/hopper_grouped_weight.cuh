// The arguments of hopper_grouped_weight.cu, and the tiles of a block.
#pragma once

#include "divider.cuh"
#include "epilogue.cuh"
#include "hopper.cuh"

namespace convgrad {

struct HopperGroupedWeightArgs {
  TensorMap x_map;
  TensorMap y_map;
  // What the first copies are asked for with lies side by side.
  int tiles, more;  // of a share, and one more of so many, the first ones
  Divider by_columns, by_rows;
  int row_tiles, column_tiles;  // of an image
  int tile_rows, tile_columns, images;
  int pad[2];
  int stages;
  u32 y_at, stage_bytes, x_bytes, y_bytes;
  u32 x_gap;  // bytes behind a box of x that are zeros
  // Products of a tile: `outer` times `inner`, with so many bytes between them and between the eights
  // of columns of one product.
  int outer_rows, inner;
  u32 x_row, y_row;
  u32 x_image, y_image;
  u32 x_outer, y_outer, inner_bytes;
  u32 x_eight, y_eight;
  int x_size[2];
  int y_size[2];
  int batch;
  int channels;        // of all groups,
  int group_channels;  // and of one, on both sides
  int wide;            // w holds float32, whatever x and y do
  float alpha;
  float beta;
  const void* x;
  const void* y;
  float* partials;
  void* w;
  const void* accumulate;  // like w, or null
  u32* met;                // a zero for each slice, left as zeros
  i64 x_stride[3];         // N H W, in elements
  i64 y_stride[3];
  i64 w_stride[6];  // G K C T R S; accumulate's too
};

// A tile: its first image, row of x and column of y. Counts on without a division.
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

// A result by its definition, over the tiles of a block.
template <class T>
__device__ __forceinline__ float defined_over(const HopperGroupedWeightArgs& args, const Tiles& tiles,
                                              int c, int k, int tap) {
  const int r = tap / 3, s = tap - r * 3;
  const T* const x = static_cast<const T*>(args.x) + c;
  const T* const y = static_cast<const T*>(args.y) + k;
  float sum = 0;
  Tile tile(args, tiles.begin);
#pragma unroll 1
  for (int index = tiles.begin; index < tiles.end; ++index, tile.next()) {
#pragma unroll 1
    for (int n = tile.image(); n < min(tile.image() + args.images, args.batch); ++n) {
#pragma unroll 1
      for (int h = tile.h(); h < min(tile.h() + args.tile_rows, args.x_size[0]); ++h) {
        const int p = h + args.pad[0] - r;
        if (static_cast<u32>(p) >= static_cast<u32>(args.y_size[0])) continue;
        const T* const x_row = x + n * args.x_stride[0] + h * args.x_stride[1];
        const T* const y_row = y + n * args.y_stride[0] + p * args.y_stride[1];
#pragma unroll 1
        for (int q = tile.q(); q < min(tile.q() + args.tile_columns, args.y_size[1]); ++q) {
          const int w = q + s - args.pad[1];
          if (static_cast<u32>(w) >= static_cast<u32>(args.x_size[1])) continue;
          sum += widen(y_row[q * args.y_stride[2]]) * widen(x_row[w * args.x_stride[2]]);
        }
      }
    }
  }
  return sum;
}

}  // namespace convgrad
