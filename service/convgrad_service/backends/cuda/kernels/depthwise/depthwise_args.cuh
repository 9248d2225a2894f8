// Depthwise convolutions of channels-last tensors: one input channel, one output channel per group.
// The host's side is depthwise.py and depthwise_weight.py.
//
// A warp owns LANES * VECTOR adjacent channels of 32 / LANES adjacent strips of COLUMNS columns, and
// walks down a chunk of rows. It copies each row into its own shared memory with asynchronous copies
// of PIECE bytes, zeros for missing pixels, some rows ahead of their use. So warps wait only for their
// own copies, and read pixels at compile-time offsets. Pixels and channels are multiples of PIECE: 16
// bytes, or 4 for an even number of 16-bit channels or any number of float32 ones. With one row of
// taps, as in 1D, rows are images.
// PLANES: kernels with an extent along D; an item is a plane of the result.
#pragma once

#include "core/epilogue.cuh"
#include "core/opaque.cuh"
#include "ptx/mma.cuh"
#include "core/vectors.cuh"

namespace convgrad {

// An image's items: `groups` groups of adjacent strips, in `chunks` of `rows` rows.
struct Tiling {
  int groups;
  int chunks;
  int rows;
  int channel_tiles;
};

// Planes along D of input, output and kernel; backward has no dilation along D.
struct Planes {
  int x, y;  // for the tensors x and y of the arguments
  int kernel, stride, dilation, pad;
  i64 x_stride, y_stride, accumulate_stride;  // between planes, in elements
};

struct DepthwiseArgs {
  const void* x;           // the source: input, or grad_output
  const void* w;
  void* y;                 // the result: output, or grad_input
  const void* accumulate;  // like y, or null
  const void* bias;        // one for each channel, or null
  i64 x_stride[3];         // N H W, in elements; a pixel's channels are contiguous
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
  int columns;   // columns of taps, at most KERNEL_W, and their distance
  int dilation;
  int activation;
  Tiling tiling;
  Planes planes;
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
  int kernel_rows;  // rows over all planes
  int columns;      // as above
  int dilation;
  Tiling tiling;
  Planes planes;
};

// Waits, for the whole warp, until all groups of copies but the last kLater are complete.
template <int kLater>
__device__ __forceinline__ void wait_for_copies() {
  cp_async_wait<kLater>();
  __syncwarp();
}

__device__ __forceinline__ u32 kept_bits(u32 bits) {
  asm volatile("" : "+r"(bits));
  return bits;
}
__device__ __forceinline__ u64 kept_bits(u64 bits) {
  asm volatile("" : "+l"(bits));
  return bits;
}

// A mask with one bit for each item.
template <bool kMoreThan32>
struct BitsOf {
  using type = u32;
};
template <>
struct BitsOf<true> {
  using type = u64;
};

// A lane's part of copying rows of kColumns adjacent pixels of kChannels channels, kPiece bytes at a
// time.
template <class T, int kPiece, int kChannels, int kColumns>
struct RowCopier {
  static constexpr int kElements = kColumns * kChannels;
  static constexpr int kChunk = kPiece / sizeof(T);
  static constexpr int kChunks = kElements / kChunk;
  static constexpr int kCopies = (kChunks + 31) / 32;
  // With many small pieces, a lane has one address and a distance between its columns.
  static constexpr bool kMany = kPiece < 16;
  static constexpr int kColumnsApart = 32 * kChunk / kChannels;
  static_assert(!kMany || 32 * kChunk % kChannels == 0, "a lane keeps to its channels");

  const T* next[kMany ? 1 : kCopies];
  i64 pitch, apart;
  int row, rows;
  using Bits = typename BitsOf<(kCopies > 32)>::type;
  static_assert(kCopies <= 64, "a bit for each");
  Bits inside;
  u32 target;
  int has_last;  // whether this lane has a chunk in the last round

  // Rows start at `row` and columns at `left`, which may be outside; `channel` is the
  // first one. `to` is the address of the first stage.
  __device__ __forceinline__ RowCopier(T* to, const T* image, const i64 (&stride)[3], int row,
                                       int rows, int left, int columns, int channel, int channels,
                                       int lane)
      : pitch(stride[1]), apart(kColumnsApart * stride[2]), row(row), rows(rows), inside(0) {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int chunk = lane + 32 * i;
      const int column = left + chunk * kChunk / kChannels;
      const int c = channel + chunk * kChunk % kChannels;
      const bool there = chunk < kChunks && column >= 0 && column < columns && c < channels;
      if constexpr (!kMany) {
        next[i] = opaque_pointer(image + (row * stride[1] + (there ? column * stride[2] + c : 0)));
      } else if (i == 0) {
        next[0] = opaque_pointer(image + (row * stride[1] + column * stride[2] + c));
      }
      inside |= static_cast<Bits>(there) << i;
    }
    if constexpr (kCopies <= 32) inside = opaque_value(inside);
    target = opaque_value(shared_address(to) + lane * kPiece);
    has_last = opaque_value(kChunks % 32 == 0 || lane + 32 * (kCopies - 1) < kChunks);
  }

  // Copies the next row to `offset_bytes` after the first stage.
  __device__ __forceinline__ void copy(int offset_bytes) { copy(offset_bytes, pitch, 1); }
  // Returns the current value and advances by elements and rows.
  __device__ __forceinline__ void copy(int offset_bytes, i64 step, int rows_on) {
    const bool exists = static_cast<u32>(row) < static_cast<u32>(rows);
    const T* from = next[0];
    // Otherwise the compiler would keep many conditions and distances in registers.
    const Bits here = kMany ? kept_bits(exists ? inside : 0) : inside;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      if (i + 1 < kCopies || has_last) {
        cp_async<kPiece>(target + offset_bytes + i * 32 * kPiece, kMany ? from : next[kMany ? 0 : i],
                          (kMany || exists) && ((here >> i) & 1) ? kPiece : 0);
      }
      if constexpr (kMany) from = opaque_pointer(from + apart);
      if (!kMany || i == 0) next[kMany ? 0 : i] += step;
    }
    row += rows_on;
  }
};

// An item of a channel tile: image, group of strips, chunk of rows.
struct ItemAt {
  int n, group, chunk;
};

__device__ __forceinline__ ItemAt item_at(const Tiling& tiling, int item) {
  const int above = item / tiling.groups, n = above / tiling.chunks;
  return {n, item - above * tiling.groups, above - n * tiling.chunks};
}

}  // namespace convgrad
