// Depthwise convolutions of channels-last tensors: one input channel, one output channel a group.
// The host's side is depthwise.py and depthwise_weight.py.
//
// A block owns LANES * VECTOR neighbouring channels and takes tiles of pixels, one after another. It
// brings them into shared memory with asynchronous 16-byte copies, zeros where there are no pixels,
// the next one while it computes (two places). Its threads are LANES channel vectors by units; a unit is a strip of COLUMNS columns in a segment of rows, so
// that a thread reads each pixel of its strip from shared memory at an address known when compiling
// but for the row's.
#pragma once

#include "epilogue.cuh"
#include "vectors.cuh"

namespace convgrad {

// How a tile is cut: `strips` side by side, `segments` of `rows` rows one below the other.
struct Tiling {
  int strips;
  int segments;
  int rows;
  int tiles_w;
  int tiles_h;
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

__device__ __forceinline__ void copy_chunk(void* to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                   static_cast<u32>(__cvta_generic_to_shared(to))),
               "l"(from), "r"(there ? kChunkBytes : 0)
               : "memory");
}

__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until all groups of copies but the last are there, for the whole block.
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group 1;" ::: "memory");
  __syncthreads();
}

// Which tiles a block takes, of its channel tile; those of one image follow one another.
struct Share {
  int channel_tile, block, blocks, of_image, tiles;
};

__device__ __forceinline__ Share share_of(const Tiling& tiling, int batch) {
  const int of_image = tiling.tiles_h * tiling.tiles_w;
  return {static_cast<int>(blockIdx.x % tiling.channel_tiles),
          static_cast<int>(blockIdx.x / tiling.channel_tiles),
          static_cast<int>(gridDim.x / tiling.channel_tiles), of_image, of_image * batch};
}

struct TileAt {
  int n, h, w;
};

__device__ __forceinline__ TileAt tile_at(const Tiling& tiling, const Share& share, int tile) {
  const int n = tile / share.of_image, rest = tile - n * share.of_image;
  const int w = rest / tiling.tiles_h;
  return {n, rest - w * tiling.tiles_h, w};
}

// A box of pixels, `channels` of each from `first_channel` on, into shared memory.
// `image` is at the first pixel of the whole image; `top` and `left` may be outside.
template <class T, int kChannels>
__device__ __forceinline__ void copy_box(T* to, const T* image, const i64 (&stride)[3],
                                         const int (&size)[2], int top, int left, int rows,
                                         int columns, int first_channel, int channels, int thread,
                                         int threads) {
  constexpr int kChunk = kChunkBytes / sizeof(T);
  constexpr int kChunks = kChannels / kChunk;
  const int chunk = thread % kChunks;
  const int channel = first_channel + chunk * kChunk;
  const bool has_channel = channel < channels;
  const int pixels = threads / kChunks;  // of one round
  const int row_step = pixels / columns, column_step = pixels - row_step * columns;
  int row = thread / kChunks / columns, column = thread / kChunks - row * columns;
  T* target = to + (row * columns + column) * kChannels + chunk * kChunk;
  while (row < rows) {
    const int h = top + row, w = left + column;
    const bool there =
        has_channel && h >= 0 && h < size[0] && w >= 0 && w < size[1];
    const int offset = there ? h * static_cast<int>(stride[1]) + w * static_cast<int>(stride[2]) +
                                   channel
                             : 0;
    copy_chunk(target, image + offset, there);
    target += pixels * kChannels;
    row += row_step;
    column += column_step;
    if (column >= columns) {
      column -= columns;
      ++row;
    }
  }
}

}  // namespace convgrad
