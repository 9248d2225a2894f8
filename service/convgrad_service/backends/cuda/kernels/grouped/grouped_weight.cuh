// The arguments of grouped_weight.cu, and the tables of a block.
#pragma once

#include "grouped/grouped_box.cuh"
#include "grouped/weight_boxes.cuh"
#include "grouped/weight_sums.cuh"
#include "ptx/tma.cuh"

namespace convgrad {

using Sums = SumShape<FRAGMENTS, NF, WARPS>;
constexpr int kSummers = Sums::kSummers, kRows = Sums::kRows, kColumns = Sums::kColumns;

struct GroupedWeightArgs {
  TensorMap x_map;  // with COPY_ENGINE: channels, W, H, D, images
  TensorMap y_map;
  Divider by_item_groups;
  int item_groups;        // of a slice
  int slice_channels[2];  // of x and y
  int stages;
  u32 stage_bytes, y_at, box_bytes, sources_at, rows_at;  // in shared memory
  int sub_boxes, sub_next;  // of x, along W: their number and the distance of their first positions
  u32 sub_bytes;
  BoxWalk walk;
  u32 x_swizzle, y_swizzle;  // bits of an address that others are XORed to, or 0
  u32 received_at;
  int in_cluster;  // whether the splits of a slice are a cluster
  Divider by_sub_step, by_x_merge, by_in_channels, by_kernel[2], by_tile[3];
  int tile[4];      // pixels: images, D, H, W
  int kernel[3];    // of a block: one along D and H where it has one position
  int x_step[3];    // in x's box
  int x_tap[3];     // along W in columns, of which a sub-box has every `sub_step`-th
  int sub_step;
  int x_extent[4];  // images, D, H, W
  int x_pitch, y_pitch;
  int slice;   // merges in a block
  int merged;  // groups in a merge
  int merge_channels[2];  // of x and y, with padding
  int padded;  // merges are no whole chunks in memory
  int groups;
  int batch;
  Divider by_items, by_column_blocks, by_row_blocks;
  int row_blocks;     // items of one merge: of FRAGMENTS * 16 rows,
  int column_blocks;  // by NF * 8 columns
  WeightResult result;
  // Without COPY_ENGINE.
  const void* x;
  const void* y;
  i64 x_group, y_group;  // strides of a group, in elements
  BoxStrides x_stride, y_stride;
  Box x_box, y_box;
  int x_size[3], y_size[3];
  int lattice[3], y_step[3];  // distance of positions
};

// Where the copy engine puts the 16 bytes that an unswizzled box has at this address.
__device__ __forceinline__ u32 swizzled(u32 address, u32 bits) { return address ^ (address >> 3 & bits); }

// kSummers threads: offsets in x's box of pixels at the first tap, and rows.
template <int kSize>
__device__ __forceinline__ void fill_tables(const GroupedWeightArgs& args, int pixels, int* source_at,
                                            Row* row_at) {
  const int x_merge = args.merge_channels[0];
  const int rows = args.kernel[0] * args.kernel[1] * args.kernel[2] * x_merge;
#pragma unroll 1
  for (int i = threadIdx.x; i < args.row_blocks * kRows; i += kSummers) {
    const int tap = divide(i, args.by_x_merge), channel = i - tap * x_merge;
    const int above = divide(tap, args.by_kernel[1]), s = tap - above * args.kernel[2];
    const int t = divide(above, args.by_kernel[0]), r = above - t * args.kernel[1];
    const int own = divide(channel, args.by_in_channels), c = channel - own * args.result.in_channels;
    const i64(&stride)[6] = args.result.w_stride;
    Row row = {0, -1, 0};
    if (i < rows) {
      const int column = s * args.x_tap[2], shift = divide(column, args.by_sub_step);
      row.x = ((t * args.x_tap[0] * args.x_extent[2] + r * args.x_tap[1]) * args.x_extent[3] + shift) *
                  args.x_pitch +
              (column - shift * args.sub_step) * args.sub_bytes + channel * kSize;
      row.own = own < args.merged ? own : -1;
      row.w = own * (stride[0] - args.result.out_channels * stride[1]) + c * stride[2] + t * stride[3] +
              r * stride[4] + s * stride[5];
    }
    row_at[i] = row;
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < pixels; i += kSummers) {
    const int above = divide(i, args.by_tile[2]), planes = divide(above, args.by_tile[1]);
    const int n = divide(planes, args.by_tile[0]), d = planes - n * args.tile[1];
    const int w = i - above * args.tile[3], h = above - planes * args.tile[2];
    const int row = (n * args.x_extent[1] + d * args.x_step[0]) * args.x_extent[2] + h * args.x_step[1];
    const bool is_there = n < args.tile[0];
    source_at[i] = is_there ? (row * args.x_extent[3] + w * args.x_step[2]) * args.x_pitch : 0;
  }
}

}  // namespace convgrad
