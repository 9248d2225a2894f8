// The epilogue of hopper_halo.cu. A warp has 16 of a tile's channels, and of each position a fragment
// column.
#pragma once

#include "ptx/load_store.cuh"
#include "core/epilogue.cuh"
#include "conv/hopper_halo_planes.cuh"

namespace convgrad {

// The coordinates of tile `tile`.
struct HaloTile {
  int channel_tile, n;
  int m[3];  // first position along D, H, W

  __device__ __forceinline__ HaloTile(const HopperHaloArgs& args, int tile) {
    u32 rest = tile, next = rest / args.channel_tiles;
    channel_tile = rest - next * args.channel_tiles;
#pragma unroll
    for (int dim = 2; dim >= 0; --dim) {
      rest = next;
      next = rest / args.tiles[dim];
      m[dim] = (rest - next * args.tiles[dim]) * args.tile[dim];
    }
    n = next;
  }
};

// The results of a warp's columns.
struct HaloResults {
  const HopperHaloArgs& args;
  int n, channel, m[3];  // the warp's first channel, the tile's first position
  int first_column;
  int rows, width;  // the tile's positions inside the result
  i64 at;  // offset of the first channel at the tile's first position
  int row_step, step;  // strides between rows and between positions of a row

  __device__ __forceinline__ HaloResults(const HopperHaloArgs& args, const HaloTile& tile)
      : args(args), n(tile.n) {
    const int warp = threadIdx.x / 32, group = warp / 4;
    int row = warp % 4 * 16;
#pragma unroll
    for (int dim = 0; dim < 3; ++dim) m[dim] = tile.m[dim];
    if (args.row_channels == 32) {
      m[0] += row / 32 ^ args.deeper_first;
      row %= 32;
    }
    channel = tile.channel_tile * args.row_channels + row;
    first_column = group * COLUMNS;
    rows = min(args.tile[1], args.size[1] - m[1]);
    width = min(args.tile[2], args.size[2] - m[2]);
    row_step = static_cast<int>(args.y_stride[4]);
    step = static_cast<int>(args.y_stride[5]);
    at = n * args.y_stride[0] + channel * args.y_stride[2];
#pragma unroll
    for (int dim = 0; dim < 3; ++dim) at += m[dim] * args.y_stride[3 + dim];
  }
  // Whether there are any results.
  __device__ __forceinline__ bool some() const {
    return channel < args.out_channels && m[0] < args.size[0];
  }
  // Row and position of a column, from the tile's first position; returns whether it has a result.
  __device__ __forceinline__ bool position(int column, int& h, int& w) const {
    const u32 flat = first_column + column;
    h = row_of(args, flat);
    w = flat - h * args.row_pixels;
    return h < rows && w < width;
  }
  // From `at` on.
  __device__ __forceinline__ int offset(int h, int w) const { return h * row_step + w * step; }
};

// General epilogue of one result.
template <class T>
__device__ __forceinline__ void put_any(const HaloResults& to, int row, int column, float sum) {
  const HopperHaloArgs& args = to.args;
  int h, w;
  const bool there = to.position(column, h, w) && to.channel + row < args.out_channels;
  if (!there) return;
  const i64 at = to.at + row * args.y_stride[2] + to.offset(h, w);
  const T* const accumulate = static_cast<const T*>(args.accumulate);
  const T* const bias = static_cast<const T*>(args.bias);
  static_cast<T*>(args.y)[at] = narrow<T>(
      finish(sum, args.alpha, args.beta, accumulate == nullptr ? nullptr : accumulate + at,
             bias == nullptr ? nullptr : bias + to.channel + row, args.activation));
}

// Stores all of a warpgroup's results; overwrites the accumulators. `staging` is the warp's, used by
// chunks only.
template <class T, int kFragments>
__device__ __forceinline__ void put_results(HaloResults& to, float (&sum)[kFragments][4],
                                            u32 staging) {
  const HopperHaloArgs& args = to.args;
  if (!to.some()) return;
  const int lane = threadIdx.x & 31, quarter = lane & 3;
  if (args.plain && args.planes == 8) {
    put_chunks<T>(to, sum, staging);
    return;
  }
  if (args.plain && args.planes) {
    put_pairs<T>(to, sum);
    return;
  }
  if (args.plain && args.wide_stores) {
    // A lane stores four channels of a column.
    const int first = (quarter & 1) * 8 + (quarter >> 1) * 4;
    if (to.channel + first >= args.out_channels) to.width = 0;
    char* const y = static_cast<char*>(args.y) + (to.at + first) * 2;
    const int row_bytes = to.row_step * 2, bytes = to.step * 2;
#pragma unroll
    for (int j = 0; j < kFragments; ++j) {
      const u32 low = movmatrix_trans(narrow_x2<T>(sum[j][0], sum[j][1]));
      const u32 high = movmatrix_trans(narrow_x2<T>(sum[j][2], sum[j][3]));
      const u32 other = __shfl_xor_sync(0xffffffff, quarter & 1 ? low : high, 1);
      const uint2 four = quarter & 1 ? make_uint2(other, high) : make_uint2(low, other);
      int h, w;
      const bool there = to.position(j * 8 + lane / 4, h, w);
      store_if(there, y + (h * row_bytes + w * bytes), four);
    }
    return;
  }
  constexpr int kBatch = kFragments % 5 == 0 ? 5 : kFragments % 3 == 0 ? 3 : 2;
  static_assert(kFragments % kBatch == 0, "whole batches");
  // Shifts the next batch into place: registers cannot be indexed at run time.
#pragma unroll 1
  for (int j = 0; j < kFragments; j += kBatch) {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
#pragma unroll 1
      for (int e = 0; e < 4; ++e) {
        const float value = e < 2 ? (e == 0 ? sum[b][0] : sum[b][1])
                                  : (e == 2 ? sum[b][2] : sum[b][3]);
        put_any<T>(to, lane / 4 + e / 2 * 8, (j + b) * 8 + quarter * 2 + e % 2, value);
      }
    }
#pragma unroll
    for (int i = 0; i + kBatch < kFragments; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[i][e] = sum[i + kBatch][e];
    }
  }
}

}  // namespace convgrad
