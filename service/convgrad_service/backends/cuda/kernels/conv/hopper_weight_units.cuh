// Kernel parameters of hopper_weight.cu, its work units and its loads. Launched by
// hopper_weight.py. Macros: ELEMENT, the operands' type; PIXELS of a k-tile; CHANNELS of a box of x;
// WARPGROUPS, the consumers; PARTS of an element.
#pragma once

#include "ptx/tma.cuh"
#include "conv/hopper_weight.cuh"
#include "core/opaque.cuh"
#include "ptx/pdl.cuh"

#ifndef PLANES
#define PLANES 0
#endif
#ifndef PARTS
#define PARTS 1
#endif

namespace convgrad {

using T = ELEMENT;
constexpr int kPixels = PIXELS, kInBlock = CHANNELS / 8, kMaxStages = 16;
// Whether products are mma.sync's, of float32 with channels contiguous.
constexpr bool kMmaSync = sizeof(T) == 4 && !PLANES;
// Channels of a box of y: 128 bytes, or the 64 rows of a K-major operand.
constexpr int kYChannels = kMmaSync ? 32 : 64;

struct HopperWeightArgs {
  TensorMap x_map[PARTS];
  TensorMap y_map[PARTS];
  WeightResult result;
  WeightSource source;
  int dims;       // spatial dimensions of the tensor maps
  int halo;       // zero pixels appended to a row of y
  int box_bytes;  // distance between boxes of x
  int stages;
  int stage_bytes;
  int step_bytes;  // transaction bytes of a stage
  Divider by_size[3];  // planes, rows, and pixels of a row with its halo
  u32* met;           // a zero word per split tile, by which its blocks rendezvous; or null
  int slices;         // parts of a block that divide the shares in that reduction
  const float* unscale;  // the factor of the sums of three parts' products
  int x_group, y_group;  // channels from one group's first to the next one's
};

// A work unit: a tile, with `steps` of its k-tiles: `first` and each `stride`th from there on. So the
// blocks of one tile read neighbouring pixels at any time, and taps that are far apart meet in L2.
struct Unit {
  int tile, share, first, stride, steps;
  bool whole;
};

// Pixels of a row of y with its halo. With PLANES a row has those of all images, (w, n), n the fastest.
__device__ __forceinline__ int row_of(const HopperWeightArgs& args) {
  return args.source.y_size[2] * (PLANES ? args.source.batch : 1) + args.halo;
}

__device__ __forceinline__ int steps_of(const HopperWeightArgs& args) {
  const int row = row_of(args);
  const u32 pixels = (PLANES ? 1 : args.source.batch) * args.source.y_size[0] * args.source.y_size[1] * row;
  return (pixels + kPixels - 1) / kPixels;
}

// The number of k-tiles of a part: `share_steps` or one more.
__device__ __forceinline__ int part_steps(const WeightResult& of, int steps, int parts, int part) {
  return of.share_steps + (part < steps - of.share_steps * parts);
}

// The unit of a block in a cluster whose blocks have adjacent tiles and the same share.
__device__ __forceinline__ Unit unit_at(const WeightResult& of, int index, int steps, int cluster = 1,
                                        int block = 0) {
  const int whole = of.whole / cluster;
  if (index < whole) return {index * cluster + block, 0, 0, 1, steps, true};
  const int parted = of.row_tiles * of.column_tiles / cluster - whole;
  const int share = divide(index - whole, of.by_parted);
  return {(index - share * parted) * cluster + block, share, share, of.shares,
          part_steps(of, steps, of.shares, share), false};
}

// The unit of block `block` of a cluster that splits a share of a tile: number `load_rank` of `copying`
// adjacent ones.
__device__ __forceinline__ Unit cluster_unit_at(const WeightResult& of, int index, int steps,
                                                int cluster, int block, int copying, int load_rank) {
  const int groups = of.row_tiles * of.column_tiles / copying, share = divide(index, of.by_parted);
  const int parts = of.shares * cluster, part = share * cluster + block;
  return {(index - share * groups) * copying + load_rank, share, part, parts,
          part_steps(of, steps, parts, part), false};
}

struct Pixel {
  int n, d, h, w;
};

__device__ __forceinline__ Pixel pixel_at(const HopperWeightArgs& args, int index) {
  const int(&size)[3] = args.source.y_size;
  const int rest2 = divide(index, args.by_size[2]), rest1 = divide(rest2, args.by_size[1]);
  const int n = divide(rest1, args.by_size[0]);
  return {n, rest1 - n * size[0], rest2 - rest1 * size[1], index - rest2 * row_of(args)};
}

// Iterates over a unit's k-tiles without divisions.
struct Walk {
  Pixel at, by;

  // Computed here, as the kernel parameters would be read again for each k-tile.
  __device__ __forceinline__ Walk(const HopperWeightArgs& args, int first, int stride)
      : at(pixel_at(args, first * kPixels)), by(pixel_at(args, stride * kPixels)) {}

  __device__ __forceinline__ void next(const HopperWeightArgs& args) {
    at.w += by.w, at.h += by.h, at.d += by.d, at.n += by.n;
    if (at.w >= row_of(args)) at.w -= row_of(args), ++at.h;
    if (at.h >= args.source.y_size[1]) at.h -= args.source.y_size[1], ++at.d;
    if (at.d >= args.source.y_size[0]) at.d -= args.source.y_size[0], ++at.n;
  }
};

// A box of x: its channels and its tap's offset from the windows' corners.
struct alignas(16) Source {
  int c, d, h, w;
};

// Loads to this block, or to kCluster blocks of the cluster by multicast.
template <int kCluster = 1>
__device__ __forceinline__ void load_box(const HopperWeightArgs& args, const TensorMap& map, u32 to,
                                         u32 full, const Pixel& at, const Source& from,
                                         int first_block = 0) {
  const u32 blocks = ((1u << kCluster) - 1) << first_block;
  if constexpr (PLANES) {
    const int where[4] = {at.w + from.w, from.c, at.h + from.h, at.d + from.d};
    tma_load_multicast<4, (kCluster > 1)>(blocks, to, map, full, where);
  } else if (args.dims == 2) {
    const int where[4] = {from.c, at.w, at.h, at.n}, by[2] = {from.w, from.h};
    tma_load_im2col_multicast<4, (kCluster > 1)>(blocks, to, map, full, where, by);
  } else if (args.dims == 3) {
    const int where[5] = {from.c, at.w, at.h, at.d, at.n}, by[3] = {from.w, from.h, from.d};
    tma_load_im2col_multicast<5, (kCluster > 1)>(blocks, to, map, full, where, by);
  } else {
    const int where[3] = {from.c, at.w, at.n}, by[1] = {from.w};
    tma_load_im2col_multicast<3, (kCluster > 1)>(blocks, to, map, full, where, by);
  }
}

// The box of one of a tile's column blocks.
__device__ __forceinline__ Source source_of(const HopperWeightArgs& args, const Place& place, int i) {
  const Box box = box_at(args.result, place.column * args.result.boxes + i);
  if constexpr (PLANES) {
    // Positions with different remainders by the stride are in different rows.
    const int stride = args.source.stride[2], tap = box.s * args.source.dilation[2] - args.source.pad[2];
    const int by = tap / stride - (tap % stride < 0);
    return {place.group * args.x_group + box.c, box.t * args.source.dilation[0],
            box.r * args.source.dilation[1] + tap - by * stride,
            by * args.source.batch};
  }
  return {place.group * args.x_group + box.c, box.t * args.source.dilation[0], box.r * args.source.dilation[1],
          box.s * args.source.dilation[2]};
}

// The corner of a pixel's window in the input.
__device__ __forceinline__ Pixel corner_of(const HopperWeightArgs& args, const Pixel& at) {
  if constexpr (PLANES) {
    return {at.n, at.d * args.source.stride[0] - args.source.pad[0],
            at.h * args.source.stride[1] - args.source.pad[1], at.w};
  }
  return {at.n, at.d * args.source.stride[0] - args.source.pad[0], at.h * args.source.stride[1] - args.source.pad[1],
          at.w * args.source.stride[2] - args.source.pad[2]};
}

}  // namespace convgrad
