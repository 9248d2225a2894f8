// Batched transpose: copies from a source in which x is contiguous to a target in which y is,
// target[o, x, y] = source[o, y, x], through shared memory. Launched by transpose.py.
//
// Block: 256 threads copy a tile of 64 x 64, or 128 x 64 of 16 bits, by chunks of 16 bytes on both
// sides. Unaligned rows (planes of an odd number of pixels) are read (SOURCE_ANY) and written
// (TARGET_ANY) by the aligned chunks that contain them: in the source a part of a tile's first and
// last chunk is unused; in the target each row of a tile ends at a chunk boundary, for which the tile
// starts `lead` rows of y earlier. Static shared memory: the tile in 32-bit words, each of two elements
// adjacent along y if they have 16 bits, and without bank conflicts. From `y_limit` on, the source has
// no element and the target gets zero. With Y_AXES 2 y is two axes of the source, (outer, inner); both sides
// are aligned then.
// Grid: tiles of x (fastest), tiles of y, outer positions.
// Preconditions: buffers start at chunk boundaries.
// Deterministic. Index limits: offsets in 64 bits; blocks below 2^31.
#include "layout/transpose_args.cuh"

#ifndef Y_AXES
#define Y_AXES 1
#endif

using namespace convgrad;

namespace {

using T = ELEMENT;
constexpr int kTileX = sizeof(T) == 2 ? 128 : 64, kTileY = 64, kThreads = 256;
constexpr int kChunk = 16 / static_cast<int>(sizeof(T));
constexpr int kPair = kWordElements<T>;
using Word = WordOf<T>;
using Chunk = Vector<T, kChunk>;

// A tile of unaligned rows has room for the unused parts of its first and last chunks. In the target
// its rows end at sectors of 32 bytes, because a sector that two blocks write takes twice as long.
constexpr int kSector = 2 * kChunk;
constexpr int kBesideX = SOURCE_ANY ? kChunk : 0, kLead = TARGET_ANY ? kSector : 0;
constexpr int kAllX = kTileX + 2 * kBesideX, kAllY = kTileY + kLead;
// Chunks of adjacent rows, and of adjacent columns on the other side, are in 32 different banks. Or a
// warp reads four chunks of eight rows (kFour), whose elements are then stored without gaps.
constexpr bool kFour = SOURCE_ANY && kPair == 2;
constexpr int kRows = kAllY / kPair, kSkip = sizeof(T) == 8 || kFour ? 0 : 2;
constexpr int kRowSkip = kPair == 2 ? 0 : kSkip;
constexpr int kOfRow = kAllX + (kAllX - 1) / 32 * kSkip;
constexpr int kPitch = sizeof(T) == 4 ? kOfRow + 3 - (kOfRow & 3) : kOfRow | 1;
// One more word if the last rows are read together with the next.
constexpr int kWords = (kRows + TARGET_ANY) * kPitch + kRows / 32 * kRowSkip;
__device__ __forceinline__ int place(int row, int x) {
  x += kBesideX;
  return row * kPitch + x + (x >> 5) * kSkip + (row >> 5) * kRowSkip;
}
__device__ __forceinline__ T& element_at(Word* words, int y, int x) {
  return reinterpret_cast<T*>(words)[place(y / kPair, x) * kPair + y % kPair];
}

__device__ __forceinline__ Word joined(const T* first, const T* second, int e) {
  if constexpr (kPair == 2) {
    return first[e] | static_cast<u32>(second[e]) << 16;
  } else {
    return first[e];
  }
}

// Elements by which an address exceeds a multiple of kElements.
template <int kElements>
__device__ __forceinline__ int beyond(const T* at) {
  return static_cast<int>(reinterpret_cast<u64>(at) / sizeof(T)) & (kElements - 1);
}

// The distances of rows that are two axes of the source, in a tile whose first row is number `first`.
struct TwoAxes {
  const TransposeArgs& args;
  int first;
};
__device__ __forceinline__ i64 operator*(int y, const TwoAxes& axes) {
  const int row = axes.first + y, outer = divide(row, axes.args.by_inner);
  return outer * axes.args.y_outer + (row - outer * axes.args.y_inner) * axes.args.y_source;
}

// Loads rows [first, reals) of the tile, which start at chunk boundaries.
template <class Pitch>
__device__ __forceinline__ void load(Word* words, const T* source, Pitch pitch, int xs, int first,
                                     int reals) {
  constexpr int kChunks = kTileX / kChunk, kCount = (kRows * kChunks + kThreads - 1) / kThreads;
  Chunk chunks[kCount][2];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int at = threadIdx.x + i * kThreads, row = at / kChunks, x = at % kChunks * kChunk;
#pragma unroll
    for (int p = 0; p < kPair; ++p) {
      const int y = row * kPair + p;
      chunks[i][p] = y >= first && y < reals && x < xs ? Chunk::load(source + y * pitch + x)
                                                       : Chunk::zero();
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int at = threadIdx.x + i * kThreads, row = at / kChunks, x = at % kChunks * kChunk;
    if (kRows * kChunks % kThreads != 0 && row >= kRows) break;
    Word* const to = words + place(row, x);
#pragma unroll
    for (int e = 0; e < kChunk; ++e) {
      to[e] = joined(chunks[i][0].at, chunks[i][kPair - 1].at, e);
    }
  }
}

// `load` for unaligned rows; `end` is the end of the source.
__device__ __forceinline__ void load_any(Word* words, const T* source, const T* end, i64 pitch,
                                         int xs, int first, int reals) {
  // An unaligned row spans one more chunk; the last one is loaded by one thread per row.
  constexpr int kChunks = kTileX / kChunk, kCount = (kAllY * kChunks + kThreads - 1) / kThreads;
  Chunk chunks[kCount + 1];
  int starts[kCount + 1];
  auto at = [&](int i, int& y) {
    const int index = threadIdx.x + i * kThreads;
    y = threadIdx.x;
    if (i == kCount) return kTileX;
    y = kFour ? index / 4 % 8 + index / (8 * kChunks) * 8 : index / kChunks;
    return (kFour ? index % 4 + index / 32 % (kChunks / 4) * 4 : index % kChunks) * kChunk;
  };
#pragma unroll
  for (int i = 0; i <= kCount; ++i) {
    int y;
    const int aligned = at(i, y);
    const T* const row = source + y * pitch;
    const int x = starts[i] = aligned - beyond<kChunk>(row);
    chunks[i] = Chunk::zero();
    if (y < first || y >= reals || x >= xs) continue;
    if (row + x + kChunk <= end) {
      chunks[i] = Chunk::load(row + x);
    } else {
#pragma unroll
      for (int e = 0; e < kChunk; ++e) {
        if (row + x + e < end) chunks[i].at[e] = row[x + e];
      }
    }
  }
#pragma unroll
  for (int i = 0; i <= kCount; ++i) {
    int y;
    at(i, y);
    if (y >= kAllY) continue;
    T* const to = &element_at(words, y, starts[i]);
#pragma unroll
    for (int e = 0; e < kChunk; ++e) {
      (kSkip == 0 ? to[e * kPair] : element_at(words, y, starts[i] + e)) = chunks[i].at[e];
    }
  }
}

__device__ __forceinline__ void store(const Word* words, T* target, i64 pitch, int xs, int ys) {
  constexpr int kChunks = kTileY / kChunk, kCount = kTileX * kChunks / kThreads;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int at = threadIdx.x + i * kThreads, x = at / kChunks, y = at % kChunks * kChunk;
    Chunk chunk;
#pragma unroll
    for (int e = 0; e < kChunk; ++e) {
      const Word word = words[place((y + e) / kPair, x)];
      chunk.at[e] = static_cast<T>((y + e) % kPair == 0 ? word : word >> (kPair - 1) * 16);
    }
    if (x < xs && y < ys) chunk.store(target + x * pitch + y);
  }
}

// Stores unaligned rows: `before` positions of y precede the tile's first row, and `left` follow.
__device__ __forceinline__ void store_any(Word* words, T* target, i64 pitch, int xs, i64 before,
                                          i64 left) {
  constexpr int kChunks = kTileY / kChunk, kCount = kTileX * kChunks / kThreads;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int at = threadIdx.x + i * kThreads, x = at / kChunks;
    T* const row = target + x * pitch;
    const int y = at % kChunks * kChunk - beyond<kSector>(row);
    Chunk chunk;
    if constexpr (kPair == 2) {
      // Words of two elements: unchanged, or composed of halves of two words.
      const Word* const from = words + place((y + kLead) / kPair, x);
      const u32 halves = (y + kLead) % kPair == 0 ? 0x3210 : 0x5432;
      u32 word[kChunk / 2 + 1];
#pragma unroll
      for (int e = 0; e <= kChunk / 2; ++e) word[e] = from[e * kPitch];
#pragma unroll
      for (int e = 0; e < kChunk / 2; ++e) {
        const u32 both = __byte_perm(word[e], word[e + 1], halves);
        chunk.at[2 * e] = static_cast<T>(both), chunk.at[2 * e + 1] = static_cast<T>(both >> 16);
      }
    } else {
#pragma unroll
      for (int e = 0; e < kChunk; ++e) chunk.at[e] = element_at(words, y + kLead + e, x);
    }
    if (x >= xs) continue;
    if (y >= -before && y + kChunk <= left) {
      chunk.store(row + y);
    } else {
#pragma unroll
      for (int e = 0; e < kChunk; ++e) {
        if (y + e >= -before && y + e < left) row[y + e] = chunk.at[e];
      }
    }
  }
}

}  // namespace

// On this architecture, unaligned rows of 2-byte elements need more registers.
#if __CUDA_ARCH__ == 1200
constexpr int kBlocks = SOURCE_ANY && sizeof(T) == 2 ? BLOCKS - 1 : BLOCKS;
#else
constexpr int kBlocks = BLOCKS;
#endif

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
    transpose(const __grid_constant__ TransposeArgs args) {
  __shared__ Word words[kWords];
  begin_copy(args);
  u32 rest = blockIdx.x;
  const i64 x0 = static_cast<i64>(take(rest, (args.x_extent + kTileX - 1) / kTileX)) * kTileX;
  const u32 y_tiles = (args.y_extent + kLead + kTileY - 1) / kTileY;
  const i64 y0 = static_cast<i64>(take(rest, y_tiles)) * kTileY;
  i64 from = 0, to = 0;
  outer_offsets(args, rest, from, to);
  const T* const whole = static_cast<const T*>(args.source);
  const T* const source = whole + from + (y0 - kLead) * args.y_source + x0;
  T* const target = static_cast<T*>(args.target) + to + x0 * args.x_target + y0;
  const int xs = min(static_cast<i64>(kTileX), args.x_extent - x0);
  const i64 left = args.y_extent - y0;
  const int reals = min(static_cast<i64>(kAllY), min(args.y_extent, args.y_limit) - y0 + kLead);
  const int first = y0 == 0 ? kLead : 0;

  if constexpr (SOURCE_ANY) {
    load_any(words, source, whole + args.elements, args.y_source, xs, first, reals);
  } else if constexpr (Y_AXES > 1) {
    load(words, whole + from + x0, TwoAxes{args, static_cast<int>(y0)}, xs, first, reals);
  } else {
    load(words, source, args.y_source, xs, first, reals);
  }
  __syncthreads();
  if constexpr (TARGET_ANY) {
    store_any(words, target, args.x_target, xs, y0, left);
  } else {
    store(words, target, args.x_target, xs, min(static_cast<i64>(kTileY), left));
  }
  end_copy(args);
}
