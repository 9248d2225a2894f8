// Boxes of positions of channels-last tensors in shared memory, for the grouped tensor-core kernels.
//
// A box is [images][D][H][W] positions of 16-byte chunks of channels, `pitch` bytes apart. The pitch is
// an odd number of chunks, so that eight adjacent positions of one chunk, which ldmatrix reads, have no
// bank conflicts. Missing positions are zeros. Merges of groups start at whole chunks; where
// they are none in memory, they are copied in smaller pieces, and zeros fill them up.
#pragma once

#include "core/architecture.cuh"
#include "core/epilogue.cuh"
#include "core/fragments.cuh"
#include "ptx/load_store.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared_element.cuh"

namespace convgrad {

struct Box {
  int extent[4];  // images, D, H, W
  int pitch;      // in bytes
  int pieces;     // of a position
  int piece;      // bytes: 16, 8, 4 or 2
  int merge_pieces, merge_bytes;      // pieces of a merge, and its bytes in the box
  int columns_at_once, rows_at_once;  // columns and rows that a block's threads copy at once, a piece of a position each
};

// A tensor's strides of N and of D, H, W, in bytes.
struct BoxStrides {
  i64 image;
  int spatial[3];
};

// a / b for 0 <= a < 2^20 and 0 < b, faster than a division: (a + 1/2) / b is at least 1 / (2b) from an
// integer, which exceeds the error of two roundings.
__device__ __forceinline__ int quick_divide(int a, int b) {
  return static_cast<int>(__fdividef(static_cast<float>(a) + 0.5f, static_cast<float>(b)));
}

// A position in a box as digits (images, D, H, W). Divides once and then advances by `by`.
struct Walk {
  int n, d, h, w;
  int step_n, step_d, step_h, step_w;

  __device__ __forceinline__ Walk(const int (&radix)[4], int first, int by) {
    split(radix, first, n, d, h, w);
    split(radix, by, step_n, step_d, step_h, step_w);
  }
  // By one, from a number that may be too large for quick_divide.
  __device__ __forceinline__ Walk(const int (&radix)[4], u32 first)
      : step_n(0), step_d(0), step_h(0), step_w(1) {
    if (first < (1u << 20)) {
      split(radix, first, n, d, h, w);
    } else {
      divide(radix, first, n, d, h, w);
    }
  }
  __device__ __forceinline__ static void divide(const int (&radix)[4], u32 number, int& n, int& d,
                                                int& h, int& w) {
    const u32 rows = number / static_cast<u32>(radix[3]);
    const u32 planes = rows / static_cast<u32>(radix[2]);
    n = planes / static_cast<u32>(radix[1]);
    d = planes - n * radix[1];
    h = rows - planes * radix[2];
    w = number - rows * radix[3];
  }
  __device__ __forceinline__ static void split(const int (&radix)[4], int number, int& n, int& d,
                                               int& h, int& w) {
    const int rows = quick_divide(number, radix[3]);
    const int planes = quick_divide(rows, radix[2]);
    n = quick_divide(planes, radix[1]);
    d = planes - n * radix[1];
    h = rows - planes * radix[2];
    w = number - rows * radix[3];
  }
  __device__ __forceinline__ void next(const int (&radix)[4]) {
    w += step_w;
    h += step_h;
    d += step_d;
    n += step_n;
    if (w >= radix[3]) w -= radix[3], ++h;
    if (h >= radix[2]) h -= radix[2], ++d;
    if (d >= radix[1]) d -= radix[1], ++n;
  }
};

// Copies a piece to shared memory; zeros if it is not there. Pieces of two bytes are not copied
// asynchronously.
__device__ __forceinline__ void copy_piece(u32 to, const char* from, const char* any, bool is_there, int bytes) {
  const char* const source = is_there ? from : any;
  if (bytes == 16) {
    cp_async<16>(to, source, is_there ? 16 : 0);
  } else if (bytes == 8) {
    cp_async<8>(to, source, is_there ? 8 : 0);
  } else if (bytes == 4) {
    cp_async<4>(to, source, is_there ? 4 : 0);
  } else {
    unsigned short raw;
    load_if(is_there, from, raw);
    store_element(to, raw);
  }
}

// Fills a padded box, whose copies leave its padding alone, with zeros.
template <int kThreads>
__device__ __forceinline__ void clear(char* box, int bytes) {
#pragma unroll 1
  for (int i = threadIdx.x * 16; i < bytes; i += kThreads * 16) {
    *reinterpret_cast<uint4*>(box + i) = make_uint4(0, 0, 0, 0);
  }
}

// One thread's part of copying boxes of one shape: a piece of every columns_at_once-th column and
// every rows_at_once-th row. What is common to all boxes is computed once.
struct Copier {
  const char* lane;  // address of this thread's piece, column and row of a box that starts at 0
  u32 to;            // the same in shared memory, from the start of the box
  int column, row;

  // `tensor` has `real_bytes` bytes of channels.
  __device__ __forceinline__ Copier(const Box& box, const char* tensor, const BoxStrides& stride,
                                    const int (&step)[3], int real_bytes) {
    const int thread = threadIdx.x;
    const int position = quick_divide(thread, box.pieces);
    const int piece = thread - position * box.pieces, merge = quick_divide(piece, box.merge_pieces);
    row = quick_divide(position, box.columns_at_once);
    column = position - row * box.columns_at_once;
    // This thread copies nothing; what is beyond the last channel is multiplied for no result.
    if (row >= box.rows_at_once || piece * box.piece >= real_bytes) row = box.extent[2];
    lane = tensor + piece * box.piece + static_cast<i64>(row * step[1]) * stride.spatial[1] +
           static_cast<i64>(column * step[2]) * stride.spatial[2];
    to = (row * box.extent[3] + column) * box.pitch + merge * box.merge_bytes +
         (piece - merge * box.merge_pieces) * box.piece;
  }

  // Starts the copies of the box from image `image` and position `from` on, with a distance of
  // `step` between positions.
  __device__ __forceinline__ void copy(u32 box_at, const Box& box, const BoxStrides& stride,
                                       int image, int batch, const int (&from)[3],
                                       const int (&step)[3], const int (&size)[3]) const {
    const int row_pitch = box.extent[3] * box.pitch;
    const i64 next_row = static_cast<i64>(box.rows_at_once * step[1]) * stride.spatial[1];
    const i64 next_plane = static_cast<i64>(step[0]) * stride.spatial[0];
    const char* first = lane + image * stride.image +
                        static_cast<i64>(from[0]) * stride.spatial[0] +
                        static_cast<i64>(from[1]) * stride.spatial[1] +
                        static_cast<i64>(from[2]) * stride.spatial[2];
    const int first_h = from[1] + row * step[1], next_h = box.rows_at_once * step[1];
    u32 column_to = box_at + to;
#pragma unroll 1
    for (int w = column; w < box.extent[3]; w += box.columns_at_once) {
      const bool wide = static_cast<u32>(from[2] + w * step[2]) < static_cast<u32>(size[2]);
      const char* of_image = first;
      u32 plane_to = column_to;
#pragma unroll 1
      for (int n = 0; n < box.extent[0]; ++n, of_image += stride.image) {
        const bool exists = wide && image + n < batch;
        const char* plane = of_image;
        int d = from[0];
#pragma unroll 1
        for (int i = 0; i < box.extent[1]; ++i) {
          const bool there = exists && static_cast<u32>(d) < static_cast<u32>(size[0]);
          const char* at = plane;
          u32 target = plane_to;
          int h = first_h;
#pragma unroll 2
          for (int j = row; j < box.extent[2]; j += box.rows_at_once) {
            const bool inside = there && static_cast<u32>(h) < static_cast<u32>(size[1]);
            copy_piece(target, at, lane, inside, box.piece);
            at += next_row;
            target += box.rows_at_once * row_pitch;
            h += next_h;
          }
          plane += next_plane;
          plane_to += box.extent[2] * row_pitch;
          d += step[0];
        }
      }
      first += static_cast<i64>(box.columns_at_once * step[2]) * stride.spatial[2];
      column_to += box.columns_at_once * box.pitch;
    }
  }
};

// Copies a chunk of weights to shared memory, with zeros for channels of other groups: `from` points
// to the group's channel 0, the chunk starts at `channel`. `vector` is the number of channels in one
// copy, 1 if they are not contiguous.
template <class T>
__device__ __forceinline__ void copy_weights(char* to, const T* from, int channel, int channels,
                                             int vector, int stride) {
  constexpr int kCount = 16 / sizeof(T);
  const u32 limit = channels, at = shared_address(to);
  if (vector == kCount) {
    const bool there = static_cast<u32>(channel) < limit;
    cp_async<16>(at, there ? from + channel : from, there ? 16 : 0);
  } else if (vector * 2 == kCount) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int c = channel + i * (kCount / 2);
      const bool there = static_cast<u32>(c) < limit;
      cp_async<8>(at + i * 8, there ? from + c : from, there ? 8 : 0);
    }
  } else {
    union {
      uint4 raw;
      T element[kCount];
    } chunk;
    chunk.raw = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      if (static_cast<u32>(channel + e) < limit) chunk.element[e] = from[(channel + e) * stride];
    }
    *reinterpret_cast<uint4*>(to) = chunk.raw;
  }
}

// Stores a chunk of adjacent results, of which `left` exist, in pieces of 16, 8, 4 or 2 bytes.
template <class T>
__device__ __forceinline__ void store_chunk(T* to, const char* from, int left, int piece) {
  constexpr int kCount = 16 / sizeof(T);
  if (piece == 16) {
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    return;
  }
  const int bytes = min(left, kCount) * static_cast<int>(sizeof(T));
  char* const at = reinterpret_cast<char*>(to);
  if (piece >= 4) {
#pragma unroll 1
    for (int i = 0; i < bytes; i += 4) *reinterpret_cast<u32*>(at + i) = *reinterpret_cast<const u32*>(from + i);
  } else {
    using Half = unsigned short;
#pragma unroll 1
    for (int i = 0; i < bytes; i += 2) *reinterpret_cast<Half*>(at + i) = *reinterpret_cast<const Half*>(from + i);
  }
}

}  // namespace convgrad
