// The epilogues of hopper_weight.cu: accumulators to partial sums or results, and partial sums (vectors
// of four as one thread held them) to results.
#pragma once

#include "conv/hopper_weight_units.cuh"

namespace convgrad {

// Transposes across four adjacent lanes: each passes a word of four rows and receives four words of one
// row.
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

// The tap and first channel of a block of columns of a warpgroup's product, from the tile's boxes.
template <int kProducts, int kBlocks>
__device__ __forceinline__ Box box_of(const WeightResult& of, const Box* boxes, int warpgroup,
                                      int product, int block) {
  const int index = product + (SPREAD ? warpgroup * kProducts : 0);
  // Read on demand, to save registers.
  const volatile Box& found = boxes[of.shared_taps > 1 ? index : index * kBlocks + block];
  Box box = {found.c, found.t, found.r, found.s, found.real};
  if (of.shared_taps > 1) box.s += block;
  box.real &= box.s < of.kernel[2];
  return box;
}

// Stores a thread's accumulators of a whole tile as results. `boxes` are the tile's, read from shared
// memory to save registers.
template <class E, int kRows, int kProducts, int kFragments>
__device__ __forceinline__ void put_whole(const HopperWeightArgs& args, const Unit& unit,
                                          int warpgroup, int thread, const Box* boxes,
                                          const float (&sum)[kRows][kProducts][kFragments][4]) {
  const WeightResult& of = args.result;
  // Plain results: eight contiguous channels per store (16-bit), or two (32-bit).
  constexpr int kBlocks = kFragments / kInBlock;
  thread = opaque_value(thread);  // delays the address arithmetic until registers are free
  const Own own(of, unit.tile, warpgroup, thread);
  const int lane = thread % 4;
#pragma unroll
  for (int j = 0; j < kProducts; ++j) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const Box box = box_of<kProducts, kBlocks>(of, boxes, warpgroup, j, block);
      const i64 first_row = result_at(of, own.group, own.k, box);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int k = own.k + i * 64 + half * 8;
          const i64 row = first_row + (i * 64 + half * 8) * of.w_stride[1];
          const int channels = box.real && k < of.out_channels ? of.in_channels - box.c : 0;
          if (sizeof(E) == 4 || of.wide) {
#pragma unroll
            for (int f = 0; f < kInBlock; ++f) {
              const float(&from)[4] = sum[i][j][block * kInBlock + f];
              const float first = from[half * 2], second = from[half * 2 + 1];
              if (f * 8 + own.column >= channels) continue;
              store_pair(static_cast<float*>(of.w) + row + f * 8 + own.column, first, second);
            }
          } else if constexpr (sizeof(E) == 2) {
#pragma unroll
            for (int f = 0; f < kInBlock; f += 4) {
              u32 words[4];
#pragma unroll
              for (int e = 0; e < 4; ++e) {
                const float(&from)[4] = sum[i][j][block * kInBlock + f + e];
                words[e] = narrow_x2<E>(from[half * 2], from[half * 2 + 1]);
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
}

// A thread's accumulators of a unit: 64-row blocks x products x fragments of 8 columns.
template <class E, int kRows, int kProducts, int kFragments>
__device__ __forceinline__ void store_accumulators(const HopperWeightArgs& args, const Unit& unit,
                                         int warpgroup, int thread, const Box* boxes,
                                         const float (&sum)[kRows][kProducts][kFragments][4]) {
  const WeightResult& of = args.result;
  if (unit.whole) {
    put_whole<E, kRows, kProducts, kFragments>(args, unit, warpgroup, thread, boxes, sum);
    return;
  }
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
}

// Finishes and stores vector `index` of a tile, in the order of the partial sums. `boxes` are the tile's.
template <int kRows, int kProducts, int kFragments>
__device__ __forceinline__ void finish_four(const HopperWeightArgs& args, const Place& place,
                                            int index, float4 sum, const Box* boxes) {
  const WeightResult& of = args.result;
  constexpr int kEach = kRows * kProducts * kFragments * 128;
  const int warpgroup = index / kEach, fragment = index % kEach / 128, owner = index % 128;
  const int f = fragment % kFragments, outer = fragment / kFragments, in_box = f / kInBlock;
  constexpr int kBlocks = kFragments / kInBlock;
  Box box = box_of<kProducts, kBlocks>(of, boxes, warpgroup, outer % kProducts, in_box);
  box.c += f % kInBlock * 8 + owner % 4 * 2;
  if (!box.real || box.c >= of.in_channels) return;
  const bool both = box.c + 1 < of.in_channels;
  const int rows = (place.row * (SPREAD ? 1 : WARPGROUPS) + (SPREAD ? 0 : warpgroup)) * kRows;
  const int k = (rows + outer / kProducts) * 64 + owner / 32 * 16 + owner % 32 / 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float first = half == 0 ? sum.x : sum.z, second = half == 0 ? sum.y : sum.w;
    if (k + half * 8 >= of.out_channels) continue;
    const i64 at = result_at(of, place.group, k + half * 8, box);
    if (sizeof(T) == 4 || of.wide) {
      put_two<float>(of, at, first, second, both);
    } else {
      put_two<T>(of, at, first, second, both);
    }
  }
}

// The same, not inlined, as it rarely runs.
template <int kRows, int kProducts, int kFragments>
__device__ __noinline__ void finish_seldom(const HopperWeightArgs& args, int row, int column,
                                           int group, int index, float4 sum, const Box* boxes) {
  finish_four<kRows, kProducts, kFragments>(args, {row, column, group}, index, sum, boxes);
}

// Finishes and stores four vectors of adjacent fragments, the first of them vector `index`. Plain
// results are stored eight channels of a row per lane in 16 bits, two in float32.
template <int kRows, int kProducts, int kFragments, class E = T>
__device__ __forceinline__ void finish_quad(const HopperWeightArgs& args, const Place& place,
                                            int index, const float4 (&sum)[4], const Box* boxes) {
  const WeightResult& of = args.result;
  if (of.eights && (sizeof(E) == 4 || !of.wide)) {
    constexpr int kEach = kRows * kProducts * kFragments * 128, kBlocks = kFragments / kInBlock;
    const int warpgroup = index / kEach, fragment = index % kEach / 128, owner = index % 128;
    const int f = fragment % kFragments, outer = fragment / kFragments, lane = owner % 4;
    Box box = box_of<kProducts, kBlocks>(of, boxes, warpgroup, outer % kProducts, f / kInBlock);
    const int rows = (place.row * (SPREAD ? 1 : WARPGROUPS) + (SPREAD ? 0 : warpgroup)) * kRows;
    const int k = (rows + outer / kProducts) * 64 + owner / 32 * 16 + owner % 32 / 4;
    box.c += f % kInBlock * 8;
    if constexpr (sizeof(E) == 2) box.c += lane * 8;
    E* const to = static_cast<E*>(of.w) + result_at(of, place.group, k, box);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int channels = box.real && k + half * 8 < of.out_channels ? of.in_channels - box.c : 0;
      u32 words[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float first = half == 0 ? sum[e].x : sum[e].z;
        const float second = half == 0 ? sum[e].y : sum[e].w;
        if constexpr (sizeof(E) == 4) {
          if (e * 8 < channels) store_pair(to + half * 8 * of.w_stride[1] + e * 8 + lane * 2, first, second);
        } else {
          words[e] = narrow_x2<E>(first, second);
        }
      }
      if constexpr (sizeof(E) == 2) {
        turn_words(words, lane);
        store_if(channels > 0, to + half * 8 * of.w_stride[1], make_uint4(words[0], words[1], words[2], words[3]));
      }
    }
    return;
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    finish_seldom<kRows, kProducts, kFragments>(args, place.row, place.column, place.group,
                                                index + e * 128, sum[e], boxes);
  }
}

}  // namespace convgrad
