// What fused_separable.py passes, and where a tile's pixels are. Sizes in fused_separable.py.
#pragma once

#include "core/divider.cuh"
#include "core/epilogue.cuh"

namespace convgrad {

struct FusedArgs {
  const void* x;      // N D H W, channels side by side in whole 16-byte chunks
  const void* w0;     // one channel after another, its taps side by side
  const void* bias0;  // one for each channel, or null
  const void* w1;     // rows of channels, in whole 16-byte chunks
  const void* bias1;  // one for each output channel, or null
  void* y;            // channels side by side
  i64 x_stride[4];    // N D H W, in elements
  i64 y_stride[4];
  i64 w1_stride;  // from one output channel's row to the next
  int channels;
  int outputs;
  int chunks;  // of 64 channels
  int passes;  // over the chunks, for a block: so many times kOutputs of its output channels
  int stages;  // in the ring of w1's tiles; all of a block's tiles, where `resident`
  int resident;
  int slots;  // in the ring of the intermediate's chunks
  int lanes;  // log2 of the 16-byte vectors of a chunk
  int tiles;
  int pixels;       // of the whole output: below 2^31
  int rows;
  int tile_width;   // of a tile's rows, a power of two from 4 on; 0 where tiles are runs of pixels
  int tile_height;
  int tiles_across;
  int tiles_down;
  int activation0;
  int activation1;
  int wide_stores;  // the outputs are stored in aligned groups of 4, or of 2
  Divider by_width, by_strips;  // of a tile's rows after the first, and their strips
  Divider by_height, by_depth;  // output[1], output[0]
  Divider by_plane, by_across;  // tiles of a plane, and of a row of them
  int kernel[3];
  int stride[3];
  int dilation[3];
  int pad[3];
  int input[3];
  int output[3];
};

// Up to kStripPixels neighbouring outputs of one row, and where the first tap of the first one is.
struct Strip {
  u32 at;              // its element, modulo 2^32: it may lie outside of the input
  u32 columns;         // which columns from it on are inside the input, a bit each
  u32 rows;            // which rows of taps are, in the plane of the first tap
  short pixel, count;  // in the tile
};
// Its position along each dimension.
struct Corner {
  int d, h, w;
};
constexpr int kStripPixels = STRIP;

// The rows of a tile. Pixel m of the tile is in the first of them for m < first, elsewhere in row
// 1 + (m - first) / width. Rows after the first start at column `later`.
struct Rows {
  int row;  // of all rows of the output, over the batch
  int column, first, width, later;
  int count;  // pixels that there are, up to the tile's last row
  int end;    // the row after the last one
  int reach;  // the column after the last one
};

__device__ __forceinline__ Rows rows_of(const FusedArgs& args, int tile, int pixels) {
  const int across = args.output[2], down = args.output[1];
  Rows rows;
  rows.reach = across;
  if (args.tile_width == 0) {
    const int start = tile * pixels;
    rows.count = args.pixels - start < pixels ? args.pixels - start : pixels;
    rows.row = divide(start, args.by_width);
    rows.column = start - rows.row * across;
    rows.first = across - rows.column < rows.count ? across - rows.column : rows.count;
    rows.width = across;
    rows.later = 0;
    rows.end = args.rows;
    return rows;
  }
  const int plane = divide(tile, args.by_plane);
  const int place = tile - plane * args.tiles_across * args.tiles_down;
  const int above = divide(place, args.by_across);
  const int top = above * args.tile_height;
  rows.row = plane * down + top;
  rows.column = rows.later = (place - above * args.tiles_across) * args.tile_width;
  rows.first = rows.width = args.tile_width;
  rows.count = pixels;
  rows.end = rows.row + min(down - top, args.tile_height);
  return rows;
}

struct Spot {
  int n, d, h;
};
__device__ __forceinline__ Spot spot_of(const FusedArgs& args, int row) {
  const int plane = divide(row, args.by_height);
  Spot spot;
  spot.h = row - plane * args.output[1];
  spot.n = divide(plane, args.by_depth);
  spot.d = plane - spot.n * args.output[0];
  return spot;
}

// Bits `from` to `to` - 1 of those from 0 to 31.
__device__ __forceinline__ u32 bits_between(int from, int to) {
  from = max(from, 0);
  to = min(to, 32);
  if (from >= to) return 0;
  return (to == 32 ? ~0u : (1u << to) - 1) & ~0u << from;
}

// Strip `index` of a tile; its count is 0 where there is none.
__device__ __forceinline__ Strip strip_of(const FusedArgs& args, const Rows& rows, int index,
                                          Corner& corner) {
  const int before = (rows.first + kStripPixels - 1) / kStripPixels;
  const int each = (rows.width + kStripPixels - 1) / kStripPixels;
  int row = rows.row, column = rows.column, pixel = 0, width = rows.first;
  if (index >= before) {
    const int further = divide(index - before, args.by_strips);
    index -= before + further * each;
    row += 1 + further;
    column = rows.later;
    pixel = rows.first + further * rows.width;
    width = rows.width;
  }
  const int skip = index * kStripPixels;
  pixel += skip;
  column += skip;
  int count = kStripPixels;
  count = min(count, min(width - skip, min(rows.count - pixel, rows.reach - column)));
  Strip strip = {};
  strip.pixel = static_cast<short>(pixel);
  strip.count = static_cast<short>(row < rows.end && count > 0 ? count : 0);
  if (strip.count == 0) return strip;
  const Spot spot = spot_of(args, row);
  corner.d = spot.d * args.stride[0] - args.pad[0];
  corner.h = spot.h * args.stride[1] - args.pad[1];
  corner.w = column * args.stride[2] - args.pad[2];
  strip.at = static_cast<u32>(spot.n * args.x_stride[0] + corner.d * args.x_stride[1] +
                              corner.h * args.x_stride[2] + corner.w * args.x_stride[3]);
  strip.columns = bits_between(-corner.w, args.input[2] - corner.w);
#pragma unroll 1
  for (int r = 0; r < args.kernel[1] && r < 32; ++r) {
    const int h = corner.h + r * args.dilation[1];
    strip.rows |= static_cast<u32>(h >= 0 && h < args.input[1]) << r;
  }
  return strip;
}
__device__ __forceinline__ int strips_in(const FusedArgs& args, const Rows& rows) {
  const int before = (rows.first + kStripPixels - 1) / kStripPixels;
  const int each = (rows.width + kStripPixels - 1) / kStripPixels;
  return before + divide(rows.count - rows.first + rows.width - 1, args.by_width) * each;
}

// Where pixel m of a tile is in y, or -1 where there is none.
__device__ __forceinline__ i64 output_at(const FusedArgs& args, const Rows& rows, int m) {
  if (m >= rows.count) return -1;
  int row = rows.row, column = rows.column + m;
  if (m >= rows.first) {
    const int further = divide(m - rows.first, args.by_width);
    row += 1 + further;
    column = rows.later + m - rows.first - further * rows.width;
  }
  if (row >= rows.end || column >= rows.reach) return -1;
  const Spot spot = spot_of(args, row);
  return spot.n * args.y_stride[0] + spot.d * args.y_stride[1] + spot.h * args.y_stride[2] +
         column * args.y_stride[3];
}

}  // namespace convgrad
