// hopper_gather.cu's tile: its shape, a stage's layout, the load of a k-tile's pixels and the wgmmas of a k-tile. Shared by
// the persistent kernel and by SINGLE.
#pragma once

#include "conv/hopper_gather.cuh"
#include "ptx/warpgroup.cuh"

namespace convgrad {
namespace {

using T = ELEMENT;
constexpr int kRowBytes = 128, kTileK = kRowBytes / static_cast<int>(sizeof(T));
constexpr int kMmaK = 32 / static_cast<int>(sizeof(T));  // of one wgmma
constexpr int kMmasK = kTileK / kMmaK;
// Weights are loaded in boxes of 64 channels; the last one may be partly unused.
constexpr int kBoxColumns = 64, kBoxes = (BN + kBoxColumns - 1) / kBoxColumns;
// With TAPS > 1 a stage has the pixels for all taps of a kernel row, at most eight more than the tile's.
constexpr u32 kABytes = (BM + (TAPS > 1 ? 8 : 0)) * kRowBytes, kBBytes = kBoxes * kBoxColumns * kRowBytes;
constexpr u32 kStageBytes = kABytes + TAPS * kBBytes;
constexpr u32 kWeightBytes = TAPS * (ACROSS ? kBBytes : BN * kRowBytes);
// Warpgroups that share a tile; with PINGPONG each has its own.
constexpr int kWarpgroupsPerTile = PINGPONG ? 1 : CONSUMERS;
constexpr int kWarpgroupRows = BM / kWarpgroupsPerTile;  // pixels per warpgroup
constexpr int kMmasM = kWarpgroupRows / 64, kFragmentsN = BN / 8;
// Distance between boxes of N-major weights.
constexpr int kBoxBytes = kTileK * kRowBytes;
constexpr Major kWeights = ACROSS ? kMajorMn : kMajorK;
constexpr int kArgumentWords = (sizeof(HopperGatherArgs) - sizeof(TensorMap) * (MAPS + 1)) / 4 - 1;
using Accumulators = float[kMmasM][kFragmentsN][4];  // of a warpgroup

// One thread: loads a k-tile's pixels from `at` (D H W N) on, of `channel`s on, displaced by (dd, dh, dw). kDims: of the
// tensor map; kImages: N is its fastest spatial dimension.
template <int kDims, bool kImages>
__device__ __forceinline__ void load_im2col(u32 to, u32 barrier, const TensorMap& map, const int (&at)[4],
                                            int channel, int dd, int dh, int dw) {
  const int n = at[3], d = at[0], h = at[1], w = at[2];
  // The slowest dimension has no im2col offset: its displacement is added to the coordinate.
  if constexpr (kDims == 3 && !kImages) tma_load_im2col<3>(to, map, barrier, {channel, w, n}, {dw});
  if constexpr (kDims == 4 && !kImages) tma_load_im2col<4>(to, map, barrier, {channel, w, h, n}, {dw, dh});
  if constexpr (kDims == 5 && !kImages) tma_load_im2col<5>(to, map, barrier, {channel, w, h, d, n}, {dw, dh, dd});
  if constexpr (kDims == 3 && kImages) tma_load_im2col<3>(to, map, barrier, {channel, n, w + dw}, {0});
  if constexpr (kDims == 4 && kImages) tma_load_im2col<4>(to, map, barrier, {channel, n, w, h + dh}, {0, dw});
  if constexpr (kDims == 5 && kImages) tma_load_im2col<5>(to, map, barrier, {channel, n, w, h, d + dd}, {0, dw, dh});
}

// Issues the first kMmas wgmmas along K of one k-tile, of one tap.
template <int kMmas>
__device__ __forceinline__ void issue_k_tile(Accumulators& accum, u32 rows, u32 weights, int add) {
  auto one = [&](int i, int adds) {
    const u64 b =
        ACROSS ? advance_descriptor(mn_major_descriptor<128>(weights, kBoxBytes), i * kMmaK * kRowBytes)
               : advance_descriptor(k_major_descriptor<128>(weights), i * 32);
#pragma unroll
    for (int part = 0; part < kMmasM; ++part) {
      const u64 a = advance_descriptor(k_major_descriptor<128>(rows + part * 64 * kRowBytes), i * 32);
      wgmma<T, kMajorK, kWeights>(accum[part], a, b, adds);
    }
  };
#pragma unroll
  for (int i = 0; i < kMmas; ++i) one(i, i > 0 ? 1 : add);
}

}  // namespace
}  // namespace convgrad
