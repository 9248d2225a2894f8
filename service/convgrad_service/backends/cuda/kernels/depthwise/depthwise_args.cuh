// Depthwise convolutions of channels-last tensors: one input channel, one output channel a group.
// The host's side is depthwise.py and depthwise_weight.py.
//
// A warp owns LANES * VECTOR neighbouring channels of 32 / LANES strips of COLUMNS columns, side by
// side, and walks down a chunk of rows. It brings each row into shared memory of its own with
// asynchronous copies of PIECE bytes, zeros where there are no pixels, some rows ahead of their use;
// so warps wait for nothing but their own copies, and read pixels at addresses known when compiling.
// Pixels and channels are multiples of PIECE: 16, or 4 for any even number of channels in 16 bits and
// any number in float32. Of one row of taps, as 1D works have, the rows are the images.
// PLANES: kernels with an extent along D; an item is a plane of the result.
#pragma once

#include "core/epilogue.cuh"
#include "core/opaque.cuh"
#include "ptx/mma.cuh"
#include "core/vectors.cuh"

namespace convgrad {

// An image's items: `groups` groups of strips side by side, in `chunks` of `rows` rows.
struct Tiling {
  int groups;
  int chunks;
  int rows;
  int channel_tiles;
};

// Planes along D, of the input and the output, and the kernel's; backward has no dilation there.
struct Planes {
  int x, y;  // of the tensors of these names in the arguments
  int kernel, stride, dilation, pad;
  i64 x_stride, y_stride, accumulate_stride;  // from plane to plane, in elements
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
  int columns;   // of the kernel's taps: at most KERNEL_W, so many columns apart
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
  int kernel_rows;  // of all planes
  int columns;      // as above
  int dilation;
  Tiling tiling;
  Planes planes;
};

// Until all groups of copies but the last kLater are there, for the whole warp.
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

// Bits, one for each of so many.
template <bool kMoreThan32>
struct BitsOf {
  using type = u32;
};
template <>
struct BitsOf<true> {
  using type = u64;
};

// A lane's part in copying rows of kColumns pixels of kChannels channels, one after another.
template <class T, int kChannels, int kColumns>
struct RowCopier {
  static constexpr int kElements = kColumns * kChannels;
  static constexpr int kChunk = PIECE / sizeof(T);
  static constexpr int kChunks = kElements / kChunk;
  static constexpr int kCopies = (kChunks + 31) / 32;
  // Small pieces are many, so a lane has one address, and a distance between its columns.
  static constexpr bool kMany = PIECE < 16;
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

  // Rows from `row` on, which may be outside as may the first column, `left`; `channel` is the
  // first. `to` is where the first stage is.
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
    target = opaque_value(shared_address(to) + lane * PIECE);
    has_last = opaque_value(kChunks % 32 == 0 || lane + 32 * (kCopies - 1) < kChunks);
  }

  // The next row, `offset_bytes` from the first stage on.
  __device__ __forceinline__ void copy(int offset_bytes) { copy(offset_bytes, pitch, 1); }
  // This one, and on by so many elements and rows.
  __device__ __forceinline__ void copy(int offset_bytes, i64 step, int rows_on) {
    const bool exists = static_cast<u32>(row) < static_cast<u32>(rows);
    const T* from = next[0];
    // The compiler would keep all of many conditions and distances.
    const Bits here = kMany ? kept_bits(exists ? inside : 0) : inside;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      if (i + 1 < kCopies || has_last) {
        cp_async<PIECE>(target + offset_bytes + i * 32 * PIECE, kMany ? from : next[kMany ? 0 : i],
                          (kMany || exists) && ((here >> i) & 1) ? PIECE : 0);
      }
      if constexpr (kMany) from = opaque_pointer(from + apart);
      if (!kMany || i == 0) next[kMany ? 0 : i] += step;
    }
    row += rows_on;
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
