// What hopper_grouped.cu is given, and results that are not finite.
// The host's side is hopper_grouped.py.
#pragma once

#include "accesses.cuh"
#include "hopper.cuh"

namespace convgrad {

struct HopperGroupedArgs {
  TensorMap x_map;  // C W H N
  TensorMap y_map;
  const void* x;    // the source: input, or grad_output
  const void* w;
  i64 x_stride[3];  // N H W, in elements
  i64 w_group;      // from one group's weights to the next one's; from 16 channels on they follow
  int w_stride[4];  // out channel, in channel (of the convolution), R S
  int w_pairs;      // weights of neighbouring in channels are side by side, and aligned
  int groups;
  int batch;
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

// A result by its definition, in order, over what is inside.
template <class T, int kChannels, bool kAcross>
__device__ float grouped_sum(const HopperGroupedArgs& args, const GroupedUnit& at, int row,
                             int column, int channel) {
  const int group = channel / kChannels, own = channel % kChannels;
  const T* const x = static_cast<const T*>(args.x) + at.image * args.x_stride[0] + group * kChannels;
  const T* const w = static_cast<const T*>(args.w) + group * args.w_group +
                     own * args.w_stride[kAcross ? 1 : 0];
  const int w_step = args.w_stride[kAcross ? 0 : 1];
  float sum = 0;
#pragma unroll 1
  for (int r = 0; r < 3; ++r) {
    const int h = row + args.first[0] + r;
    if (static_cast<u32>(h) >= static_cast<u32>(args.x_size[0])) continue;
#pragma unroll 1
    for (int s = 0; s < 3; ++s) {
      const int v = column + args.first[1] + s;
      if (static_cast<u32>(v) >= static_cast<u32>(args.x_size[1])) continue;
      const T* const pixel = x + (h * args.x_stride[1] + v * args.x_stride[2]);
      const T* const tap = w + (kAcross ? 2 - r : r) * args.w_stride[2] +
                           (kAcross ? 2 - s : s) * args.w_stride[3];
#pragma unroll 1
      for (int c = 0; c < kChannels; ++c) sum = fmaf(widen(pixel[c]), widen(tap[c * w_step]), sum);
    }
  }
  return sum;
}

// Warp: takes again what is not finite among so many rows of a team's results, which begin at `first`
// in shared memory with the first team's: 128 bytes a pixel, its chunks swizzled.
template <class T, int kChannels, bool kAcross>
__device__ __noinline__ void take_again(const HopperGroupedArgs& args, int unit, int team, int row,
                                        int rows, char* first, int slice, int channel,
                                        int channels) {
  __syncwarp();
  GroupedUnit at = unit_at(args, unit);
  const int columns = min(args.piece[1], args.y_size[1] - at.column), own = columns * channels;
  at.image += team * args.images;
  first += team * args.result_team;
  for (int n = 0; n < args.images && at.image < args.batch; ++n, ++at.image) {
    for (int i = threadIdx.x & 31; i < rows * own; i += 32) {
      const int down = i / own, column = (i - down * own) / channels;
      const int own_channel = channel + i % channels, all = slice * 64 + own_channel;
      if (all >= args.groups * kChannels) continue;
      char* const pixel = first + n * args.result_half + down * args.result_row + column * 128;
      T* const result = reinterpret_cast<T*>(pixel + ((own_channel / 8 ^ (column & 7)) << 4)) +
                        own_channel % 8;
      if (is_finite(widen(*result))) continue;
      *result = narrow<T>(grouped_sum<T, kChannels, kAcross>(args, at, at.row + row + down,
                                                             at.column + column, all));
    }
  }
}

}  // namespace convgrad
