// What hopper_grouped.cu is given, the weights that its warps keep, and results that are not finite.
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
  i64 w_group;      // from one group's weights to the next one's
  int w_stride[4];  // out channel, in channel (of the convolution), R S
  int w_pairs;      // weights of neighbouring in channels are side by side, and aligned
  int groups;
  int x_size[2];  // H W
  int y_size[2];
  int first[2];  // where in the source the first result's first tap is
  // Units: pieces of images, so many rows and columns of results each.
  int units;
  int piece[2];
  int pieces[2];
  // The source's ring: boxes of so many pairs of rows; and that of results.
  int row_pixels;  // of a row in a box
  int box_pairs, stages, stage_bytes;
  int slot_pairs, slots, slot_bytes;
  int box_bytes;
  int slots_at, barriers_at;  // in shared memory
  int zeroes;  // what is right of the source is the next row's first pixel
};

// A unit: where its results begin, and how many pairs of rows there are.
struct GroupedUnit {
  int image, row, column, pairs;
};
__device__ __forceinline__ GroupedUnit unit_at(const HopperGroupedArgs& args, int unit) {
  GroupedUnit at = {unit, 0, 0, 0};
  if (args.pieces[1] > 1) {
    at.image = unit / args.pieces[1];
    at.column = (unit - at.image * args.pieces[1]) * args.piece[1];
  }
  if (args.pieces[0] > 1) {
    const int piece = at.image;
    at.image = piece / args.pieces[0];
    at.row = (piece - at.image * args.pieces[0]) * args.piece[0];
  }
  at.pairs = (min(args.piece[0], args.y_size[0] - at.row) + 1) / 2;
  return at;
}

// Weights of an out channel and two neighbouring in channels, counted from the first of all.
template <class T, int kChannels>
__device__ __forceinline__ u32 two_weights(const HopperGroupedArgs& args, int out, int in, int tap) {
  const int group = out / kChannels;
  const bool there = group == in / kChannels && group < args.groups;
  const T* const from = static_cast<const T*>(args.w) + group * args.w_group +
                        (out % kChannels * args.w_stride[0] + in % kChannels * args.w_stride[1] + tap);
  u32 both;
  if (args.w_pairs) {
    load_if(there, from, both);
  } else {
    unsigned short first, second;
    load_if(there, from, first);
    load_if(there, from + args.w_stride[1], second);
    both = first | static_cast<u32>(second) << 16;
  }
  return both;
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

// Warp: takes again what is not finite among the results of two rows, `first` the place of the
// first one's first pixel in shared memory and `pitch` the pixels of a row there. 128 bytes a pixel,
// its chunks swizzled.
template <class T, int kChannels, bool kAcross>
__device__ __noinline__ void take_again(const HopperGroupedArgs& args, GroupedUnit at,
                                        int pair, char* first, int pitch, int slice, int channel,
                                        int channels) {
  __syncwarp();
  const int columns = min(args.piece[1], args.y_size[1] - at.column);
  const int rows = min(2, args.y_size[0] - (at.row + pair * 2));
  for (int i = threadIdx.x & 31; i < rows * columns * channels; i += 32) {
    const int pixel = i / channels, own = channel + i - pixel * channels;
    const int row = pixel / columns, column = pixel - row * columns;
    const int all = slice * 64 + own;
    if (all >= args.groups * kChannels) continue;
    const int place = row * pitch + column;
    T* const result = reinterpret_cast<T*>(first + place * 128 + ((own / 8 ^ (place & 7)) << 4)) + own % 8;
    if (is_finite(widen(*result))) continue;
    *result = narrow<T>(grouped_sum<T, kChannels, kAcross>(args, at, at.row + pair * 2 + row,
                                                           at.column + column, all));
  }
}

}  // namespace convgrad
