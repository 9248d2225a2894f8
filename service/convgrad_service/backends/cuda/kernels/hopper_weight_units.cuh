// What hopper_weight.cu and hopper_weight_split.cu share: their argument, how blocks walk over tiles
// and pixels, copies of boxes, and the way of finished sums. The host's side is hopper_weight.py.
// Macros: ELEMENT that x and y hold, PIXELS of a step, CHANNELS of a box of x, WARPGROUPS that have
// sums.
#pragma once

#include "hopper.cuh"
#include "hopper_weight.cuh"
#include "overlap.cuh"

#ifndef PLANES
#define PLANES 0
#endif

namespace convgrad {

using T = ELEMENT;
constexpr int kPixels = PIXELS, kInBlock = CHANNELS / 8, kMostStages = 16;

struct HopperWeightArgs {
  TensorMap x_map;
  TensorMap y_map;
  WeightResult result;
  WeightSource source;
  int dims;       // spatial, as the maps have them
  int halo;       // pixels by which a row of y is longer
  int box_bytes;  // from a box of x to the next
  int stages;
};

// What a block sums at a time: a tile over its share of the steps.
struct Unit {
  int tile, share, step, end;
  bool whole;
};

__device__ __forceinline__ int steps_of(const HopperWeightArgs& args) {
  const int row = args.source.y_size[2] + args.halo;
  const u32 pixels = args.source.batch * args.source.y_size[0] * args.source.y_size[1] * row;
  return (pixels + kPixels - 1) / kPixels;
}

// That of a block of a cluster, which has neighbouring tiles and one share.
__device__ __forceinline__ Unit unit_at(const WeightResult& of, int index, int steps, int cluster = 1,
                                        int block = 0) {
  const int whole = of.whole / cluster;
  if (index < whole) return {index * cluster + block, 0, 0, steps, true};
  const int parted = of.row_tiles * of.column_tiles / cluster - whole;
  const int share = (index - whole) / parted;
  return {(index - share * parted) * cluster + block, share,
          static_cast<int>(static_cast<i64>(steps) * share / of.shares),
          static_cast<int>(static_cast<i64>(steps) * (share + 1) / of.shares), false};
}

// That of a cluster whose blocks have shares of one tile, and the block's own part of its steps.
struct ClusterUnit {
  Unit all;
  int step, end;
};

__device__ __forceinline__ ClusterUnit cluster_unit_at(const WeightResult& of, int index, int steps,
                                                       int cluster, int block) {
  const int tiles = of.row_tiles * of.column_tiles, share = index / tiles;
  const i64 parts = static_cast<i64>(of.shares) * cluster, part = share * cluster;
  auto at = [&](i64 of_part) { return static_cast<int>(steps * of_part / parts); };
  return {{index - share * tiles, share, at(part), at(part + cluster), false},
          at(part + block),
          at(part + block + 1)};
}

struct Pixel {
  int n, d, h, w;
};

__device__ __forceinline__ Pixel pixel_at(const HopperWeightArgs& args, u32 index) {
  const u32 row = args.source.y_size[2] + args.halo;
  const u32 rest2 = index / row, rest1 = rest2 / args.source.y_size[1], n = rest1 / args.source.y_size[0];
  return {static_cast<int>(n), static_cast<int>(rest1 - n * args.source.y_size[0]),
          static_cast<int>(rest2 - rest1 * args.source.y_size[1]), static_cast<int>(index - rest2 * row)};
}

// The steps of a unit, one after another, without a division each.
struct Walk {
  Pixel at, by;

  __device__ __forceinline__ Walk(const HopperWeightArgs& args, int step)
      : at(pixel_at(args, step * kPixels)), by(pixel_at(args, kPixels)) {}

  __device__ __forceinline__ void next(const HopperWeightArgs& args) {
    at.w += by.w, at.h += by.h, at.d += by.d, at.n += by.n;
    if (at.w >= args.source.y_size[2] + args.halo) at.w -= args.source.y_size[2] + args.halo, ++at.h;
    if (at.h >= args.source.y_size[1]) at.h -= args.source.y_size[1], ++at.d;
    if (at.d >= args.source.y_size[0]) at.d -= args.source.y_size[0], ++at.n;
  }
};

// A box of x from the corners of windows on: its channels, and its tap's way from the corner.
struct alignas(16) Source {
  int c, d, h, w;
};

// To this block, or to all of a cluster.
template <int kCluster = 1>
__device__ __forceinline__ void load_box(const HopperWeightArgs& args, const TensorMap& map, u32 to,
                                         u32 full, const Pixel& at, const Source& from) {
  constexpr u32 kBlocks = (1 << kCluster) - 1;
  if constexpr (PLANES) {
    const int where[3] = {at.w, from.c, at.n};
    if constexpr (kCluster > 1) load_tile_to<3>(kBlocks, to, map, full, where);
    else load_tile<3>(to, map, full, where);
  } else if (args.dims == 2) {
    const int where[4] = {from.c, at.w, at.h, at.n}, by[2] = {from.w, from.h};
    if constexpr (kCluster > 1) load_pixels_to<4>(kBlocks, to, map, full, where, by);
    else load_pixels<4>(to, map, full, where, by);
  } else if (args.dims == 3) {
    const int where[5] = {from.c, at.w, at.h, at.d, at.n}, by[3] = {from.w, from.h, from.d};
    if constexpr (kCluster > 1) load_pixels_to<5>(kBlocks, to, map, full, where, by);
    else load_pixels<5>(to, map, full, where, by);
  } else {
    const int where[3] = {from.c, at.w, at.n}, by[1] = {from.w};
    if constexpr (kCluster > 1) load_pixels_to<3>(kBlocks, to, map, full, where, by);
    else load_pixels<3>(to, map, full, where, by);
  }
}

// That of one of a tile's columns' boxes.
__device__ __forceinline__ Source source_of(const HopperWeightArgs& args, int column_tile, int i) {
  const Box box = box_at(args.result, column_tile * args.result.boxes + i);
  return {box.c, box.t * args.source.dilation[0], box.r * args.source.dilation[1], box.s * args.source.dilation[2]};
}

// The corner of a pixel's window.
__device__ __forceinline__ Pixel corner_of(const HopperWeightArgs& args, const Pixel& at) {
  return {at.n, at.d * args.source.stride[0] - args.source.pad[0], at.h * args.source.stride[1] - args.source.pad[1],
          at.w * args.source.stride[2] - args.source.pad[2]};
}

// Gives four neighbouring lanes, which have each a word of four rows, a row of four words each.
__device__ __forceinline__ void turn_words(u32 (&words)[4], int lane) {
#pragma unroll
  for (int way = 1; way < 4; way *= 2) {
    const bool odd = (lane & way) != 0;
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const int low = way == 1 ? pair * 2 : pair, high = low + way;
      const u32 other = __shfl_xor_sync(~0u, odd ? words[low] : words[high], way);
      words[low] = odd ? other : words[low];
      words[high] = odd ? words[high] : other;
    }
  }
}

// A thread's sums of a unit: ROWS times 64 rows, products beside each other, fragments of 8 columns.
template <class E, int kRows, int kProducts, int kFragments>
__device__ __forceinline__ void put_sums(const HopperWeightArgs& args, const Unit& unit,
                                         int warpgroup, int thread,
                                         const float (&sum)[kRows][kProducts][kFragments][4]) {
  const WeightResult& of = args.result;
  if (!unit.whole) {
    const int parted = of.row_tiles * of.column_tiles - of.whole;
    constexpr int kEach = kRows * kProducts * kFragments;
    const i64 first = (static_cast<i64>(unit.share) * parted + (unit.tile - of.whole)) *
                          WARPGROUPS + warpgroup;
    float4* const to = reinterpret_cast<float4*>(of.partials) + first * (kEach * 128) + thread;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kProducts; ++j) {
#pragma unroll
        for (int f = 0; f < kFragments; ++f) {
          const float(&from)[4] = sum[i][j][f];
          to[((i * kProducts + j) * kFragments + f) * 128] =
              make_float4(from[0], from[1], from[2], from[3]);
        }
      }
    }
    return;
  }
  // The sum itself: of 16 bits eight neighbouring channels a store, of 32 bits two.
  constexpr int kBlocks = kFragments / kInBlock;
  const Own own(of, unit.tile, warpgroup, thread);
  const int lane = thread % 4;
  float odd = 0;
#pragma unroll
  for (int j = 0; j < kProducts; ++j) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const Box box = own.box(of, j, block);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int k = own.k + i * 64 + half * 8;
          const i64 row = result_at(of, k, box);
          const int channels = box.real && k < of.out_channels ? of.in_channels - box.c : 0;
          if (sizeof(E) == 4 || of.wide) {
#pragma unroll
            for (int f = 0; f < kInBlock; ++f) {
              const float(&from)[4] = sum[i][j][block * kInBlock + f];
              const float first = from[half * 2], second = from[half * 2 + 1];
              if (f * 8 + own.column >= channels) continue;
              odd = fmaf(first, 0.0f, fmaf(second, 0.0f, odd));
              put_pair(static_cast<float*>(of.w) + row + f * 8 + own.column, first, second);
            }
          } else if constexpr (sizeof(E) == 2) {
#pragma unroll
            for (int f = 0; f < kInBlock; f += 4) {
              u32 words[4];
#pragma unroll
              for (int e = 0; e < 4; ++e) {
                const float(&from)[4] = sum[i][j][block * kInBlock + f + e];
                const float first = from[half * 2], second = from[half * 2 + 1];
                odd = fmaf(first, 0.0f, fmaf(second, 0.0f, odd));
                words[e] = narrow_two<E>(first, second);
              }
              turn_words(words, lane);
              store_if((f + lane) * 8 < channels,
                       static_cast<E*>(of.w) + row + (f + lane) * 8,
                       make_uint4(words[0], words[1], words[2], words[3]));
            }
          }
        }
      }
    }
  }
  // Neighbours have stored some of this thread's results.
  __syncwarp();
  if (odd == 0) return;
#pragma unroll 1
  for (int i = 0; i < kRows * kProducts * kFragments * 4; ++i) {
    const int f = i / 4 % kFragments, outer = i / 4 / kFragments;
    Box box = own.box(of, outer % kProducts, f / kInBlock);
    const int k = own.k + outer / kProducts * 64 + i / 2 % 2 * 8;
    box.c += f % kInBlock * 8 + own.column + i % 2;
    if (!box.real || k >= of.out_channels || box.c >= of.in_channels) continue;
    const float again = defined_sum<E>(args.source, k, box);
    if (sizeof(E) == 4 || of.wide) {
      static_cast<float*>(of.w)[result_at(of, k, box)] = again;
    } else if constexpr (sizeof(E) == 2) {
      static_cast<E*>(of.w)[result_at(of, k, box)] = narrow<E>(again);
    }
  }
}

}  // namespace convgrad
