// 3x3 windows that slide by one position, around it, channels first, by chunks of adjacent elements. Shared by
// window_chunks.cu and route_chunks.cu. Host side: window_chunks.py.
//
// Planes of x and y have the same size, so both are one run of elements. A block computes a tile of adjacent
// elements of it, of any number of planes, from shared memory with the same elements of x and a halo of more than a
// line on both sides. A thread computes chunks of 16 bytes of y, from the lines above, of and below a chunk. Where
// these start within chunks depends on the lines' length alone: there is code for each remainder.
// Preconditions: tensors aligned to 16 bytes; fewer than 2^31 elements; lines of at least a chunk less one element,
// planes of at least three lines.
#pragma once

#include "pool/windows.cuh"
#include "ptx/mma.cuh"

namespace convgrad {

struct ChunkArgs {
  const void* x;
  void* y;
  const void* indices;  // route_chunks.cu: of windows
  u64* bad;             // set if an index is not in its window, or null
  int wide_indices;     // of 64 bits, else of 32
  int elements;
  int columns, plane;  // elements of a line and of a plane
  int tile;            // elements of a block, in chunks for each thread
  int halo;            // elements on each side of a tile, in whole chunks, more than a line
  float divisor, reciprocal;
  Divider by_columns, by_plane;
};

// Elements in 16 bytes of them, and those of a line that a chunk's windows have: one more on both sides.
template <class T>
constexpr int kChunkOf = 16 / static_cast<int>(sizeof(T));
template <class T>
constexpr int kRunOf = kChunkOf<T> + 2;

// Words of three chunks, of which a run from element kFirst on is read.
template <class T, int kFirst>
struct RunWords {
  static constexpr int kPer = 4 / static_cast<int>(sizeof(T));
  u32 words[12];

  __device__ __forceinline__ void load(u32 from) {
#pragma unroll
    for (int c = 0; c < 3; ++c) {
      const int begin = max(kFirst / kPer, c * 4);
      const int end = min((kFirst + kRunOf<T> - 1) / kPer + 1, (c + 1) * 4);
      if (end - begin == 1) {
        ld_shared(from + begin * 4, words[begin]);
      } else if (end > begin) {
        uint4 chunk;
        ld_shared(from + c * 16, chunk);
        words[c * 4] = chunk.x, words[c * 4 + 1] = chunk.y, words[c * 4 + 2] = chunk.z, words[c * 4 + 3] = chunk.w;
      }
    }
  }
  // Bits of an element in a word, and the word.
  __device__ __forceinline__ u32 word(int j) const { return words[(kFirst + j) / kPer]; }
  __device__ __forceinline__ static constexpr int shift(int j) { return (kFirst + j) % kPer * 16; }
  __device__ __forceinline__ float element(int j) const {
    if constexpr (sizeof(T) == 4) {
      return __uint_as_float(word(j));
    } else {
      return widen(T{static_cast<unsigned short>(word(j) >> shift(j))});
    }
  }
};

// Bits from `begin` on; none beyond the 31st.
__device__ __forceinline__ u32 bits_from(int begin) { return ~0u << min(max(begin, 0), 31); }
__device__ __forceinline__ bool has(u32 bits, int at) { return (bits >> at & 1) != 0; }

// A chunk's place in its plane.
struct ChunkPlace {
  int at, column;

  __device__ __forceinline__ ChunkPlace(const ChunkArgs& args, int element) {
    at = element - divide(element, args.by_plane) * args.plane;
    column = at - divide(at, args.by_columns) * args.columns;
  }
  // The elements of a chunk, one bit each, at positions [begin, end) of this plane or the next one.
  __device__ __forceinline__ u32 within(const ChunkArgs& args, int begin, int end) const {
    return (bits_from(begin - at) & ~bits_from(end - at)) |
           (bits_from(begin + args.plane - at) & ~bits_from(end + args.plane - at));
  }
  __device__ __forceinline__ u32 first_line(const ChunkArgs& args) const { return within(args, 0, args.columns); }
  __device__ __forceinline__ u32 last_line(const ChunkArgs& args) const {
    return within(args, args.plane - args.columns, args.plane);
  }
  // Whether there may be elements of a plane's first or last `lines` lines.
  __device__ __forceinline__ bool is_edge(const ChunkArgs& args, int lines, int chunk) const {
    return at < lines * args.columns || at + chunk > args.plane - lines * args.columns;
  }
  // Bit e + 1: whether element e is the first of a line, for -1 <= e <= chunk + 1.
  __device__ __forceinline__ u32 starts(const ChunkArgs& args, int chunk) const {
    const int next = args.columns - column;
    u32 found = (column <= 1 ? 2u >> column : 0) | 2u << min(next, 30);
    if (args.columns <= chunk) found |= 2u << min(next + args.columns, 30);
    return found;
  }
};

// Copies the elements of a block's tile and halo, as far as they exist, to `to`.
template <class T, int kThreads>
__device__ __forceinline__ void load_tile(const ChunkArgs& args, int tile, u32 to) {
  constexpr int kChunk = kChunkOf<T>;
  const char* const x = static_cast<const char*>(args.x) + static_cast<i64>(tile - args.halo) * static_cast<int>(sizeof(T));
  const int chunks = (args.tile + 2 * args.halo) / kChunk;
#pragma unroll 4
  for (int c = static_cast<int>(threadIdx.x); c < chunks; c += kThreads) {
    const int at = tile - args.halo + c * kChunk, left = args.elements - at;
    if (at >= 0 && left > 0) {
      cp_async<16>(to + c * 16, x + static_cast<i64>(c) * 16, min(left, kChunk) * static_cast<int>(sizeof(T)));
    }
  }
  cp_async_commit();
}

// Stores results from element `first` on, as far as they exist.
template <class T>
__device__ __forceinline__ void store_chunk(const ChunkArgs& args, int first, const Vector<T, kChunkOf<T>>& y) {
  y.store_part(static_cast<T*>(args.y) + first, first + kChunkOf<T> <= args.elements,
               [&](int e) { return first + e < args.elements; });
}

}  // namespace convgrad
