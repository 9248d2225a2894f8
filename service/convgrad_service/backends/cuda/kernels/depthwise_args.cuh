// Depthwise convolutions of channels-last tensors: one input channel, one output channel a group.
// The host's side is depthwise.py and depthwise_weight.py.
//
// A warp owns LANES * VECTOR neighbouring channels of 32 / LANES strips of COLUMNS columns, side by
// side, and walks down a chunk of rows. It brings each row into shared memory of its own with
// asynchronous 16-byte copies, zeros where there are no pixels, some rows ahead of their use; so
// warps wait for nothing but their own copies, and read pixels at addresses known when compiling.
#pragma once

#include "epilogue.cuh"
#include "kept.cuh"
#include "tensor_core.cuh"
#include "vectors.cuh"

namespace convgrad {

// An image's items: `groups` groups of strips side by side, in `chunks` of `rows` rows.
struct Tiling {
  int groups;
  int chunks;
  int rows;
  int channel_tiles;
};

struct DepthwiseArgs {
  const void* x;           // the source: input, or grad_output
  const void* w;
  void* y;                 // the result: output, or grad_input
  const void* accumulate;  // like y, or null
  const void* bias;        // one for each channel, or null
  i64 x_stride[3];         // N H W, in elements; a pixel's channels lie side by side
  i64 w_stride[3];         // C R S
  i64 y_stride[3];
  i64 accumulate_stride[3];
  double alpha;
  double beta;
  int batch;
  int channels;
  int x_size[2];
  int y_size[2];
  int pad[2];
  int activation;
  Tiling tiling;
};

struct DepthwiseWeightArgs {
  const void* x;           // the input
  const void* y;           // grad_output
  void* w;                 // grad_weight
  const void* accumulate;  // like w, or null
  void* partials;          // [group of kernel rows][tile of channels][block][tap][channel]
  unsigned* arrived;       // one for each group and tile, 0 before and after
  i64 x_stride[3];         // N H W
  i64 y_stride[3];
  i64 w_stride[3];  // C R S
  i64 accumulate_stride[3];
  double alpha;
  double beta;
  int batch;
  int channels;
  int x_size[2];
  int y_size[2];
  int pad[2];
  int kernel_rows;
  Tiling tiling;
};

constexpr int kChunkBytes = 16;

// Until all groups of copies but the last kLater are there, for the whole warp.
template <int kLater>
__device__ __forceinline__ void wait_for_copies() {
  wait_copies<kLater>();
  __syncwarp();
}

// A lane's part in copying rows of kColumns pixels of kChannels channels, one after another.
template <class T, int kChannels, int kColumns>
struct RowCopier {
  static constexpr int kElements = kColumns * kChannels;
  static constexpr int kChunk = kChunkBytes / sizeof(T);
  static constexpr int kChunks = kElements / kChunk;
  static constexpr int kCopies = (kChunks + 31) / 32;

  const T* next[kCopies];
  i64 pitch;
  int row, rows;
  u32 inside, target;
  int has_last;  // whether this lane has a chunk in the last round

  // Rows from `row` on, which may be outside as may the first column, `left`; `channel` is the
  // first. `to` is where the first stage is.
  __device__ __forceinline__ RowCopier(T* to, const T* image, const i64 (&stride)[3], int row,
                                       int rows, int left, int columns, int channel, int channels,
                                       int lane)
      : pitch(stride[1]), row(row), rows(rows), inside(0) {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int chunk = lane + 32 * i;
      const int column = left + chunk * kChunk / kChannels;
      const int c = channel + chunk * kChunk % kChannels;
      const bool there = chunk < kChunks && column >= 0 && column < columns && c < channels;
      next[i] = kept_pointer(image + (row * stride[1] + (there ? column * stride[2] + c : 0)));
      inside |= static_cast<u32>(there) << i;
    }
    inside = kept_value(inside);
    target = kept_value(shared_address(to) + lane * kChunkBytes);
    has_last = kept_value(kChunks % 32 == 0 || lane + 32 * (kCopies - 1) < kChunks);
  }

  // The next row, `offset_bytes` from the first stage on.
  __device__ __forceinline__ void copy(int offset_bytes) {
    const bool exists = static_cast<u32>(row) < static_cast<u32>(rows);
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      if (i + 1 < kCopies || has_last) {
        copy_async<kChunkBytes>(target + offset_bytes + i * 32 * kChunkBytes, next[i],
                                exists && ((inside >> i) & 1) ? kChunkBytes : 0);
      }
      next[i] += pitch;
    }
    ++row;
  }
};

// Which item of a channel tile: image, group of strips, chunk of rows.
struct ItemAt {
  int n, group, chunk;
};

__device__ __forceinline__ ItemAt item_at(const Tiling& tiling, int item) {
  const int above = item / tiling.groups, n = above / tiling.chunks;
  return {n, item - above * tiling.groups, above - n * tiling.chunks};
}

}  // namespace convgrad
