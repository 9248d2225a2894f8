// Copies a box of elements between an order in which x runs side by side and one in which y does:
// target[o, x, y] = source[o, y, x], through shared memory. The host's side is transpose.py.
//
// Block: 256 threads move a tile of 64 x 64, or 128 x 64 of 16 bits, through shared memory. On either side they move chunks:
// of 16 bytes, or of 8 from the source, where rows start and end at whole ones, else element by
// element. Static shared memory: the tile in words, of two neighbours along y where elements have 16
// bits, so that both sides go by words, and placed so that lanes do not meet in a bank. Where y
// reaches `y_limit`, the source has no element and the target gets zero.
// Relies on its launcher for the grid: tiles of x (fastest), tiles of y, outer positions.
// Deterministic. Index limits: offsets in 64 bits; blocks below 2^31.
#include "transpose_args.cuh"

using namespace convgrad;

namespace {

using T = ELEMENT;
constexpr int kTileX = sizeof(T) == 2 ? 128 : 64, kTileY = 64, kThreads = 256;
constexpr int kPair = sizeof(T) == 2 ? 2 : 1;  // elements of a word
template <class Element>
struct WordOf {
  using type = Element;
};
template <>
struct WordOf<unsigned short> {
  using type = u32;
};
using Word = WordOf<T>::type;

// Chunks of rows side by side, and of columns on the other side, lie in 32 different banks.
constexpr int kRows = kTileY / kPair, kSkip = sizeof(T) == 8 ? 0 : 2;
constexpr int kPitch = kTileX + kTileX / 32 * kSkip + (sizeof(T) == 4 ? -1 : 1);
constexpr int kWords = kRows * kPitch + (kTileX + kRows) / 32 * kSkip;
__device__ __forceinline__ int place(int row, int x) {
  return row * kPitch + x + ((x >> 5) + (row >> 5)) * kSkip;
}

__device__ __forceinline__ Word joined(const T* first, const T* second, int e) {
  if constexpr (kPair == 2) {
    return first[e] | static_cast<u32>(second[e]) << 16;
  } else {
    return first[e];
  }
}

// In chunks of V elements. Only the first `reals` rows are there.
template <int V>
__device__ __forceinline__ void load(Word* words, const T* source, i64 pitch, int xs, int reals) {
  constexpr int kChunks = kTileX / V, kCount = kRows * kChunks / kThreads;
  Vector<T, V> chunks[kCount][2];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int at = threadIdx.x + i * kThreads, row = at / kChunks, x = at % kChunks * V;
#pragma unroll
    for (int p = 0; p < kPair; ++p) {
      const int y = row * kPair + p;
      chunks[i][p] = y < reals && x < xs ? Vector<T, V>::load(source + y * pitch + x)
                                         : Vector<T, V>::zero();
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int at = threadIdx.x + i * kThreads, row = at / kChunks, x = at % kChunks * V;
#pragma unroll
    for (int e = 0; e < V; ++e) {
      words[place(row, x + e)] = joined(chunks[i][0].at, chunks[i][kPair - 1].at, e);
    }
  }
}

template <int V>
__device__ __forceinline__ void store(const Word* words, T* target, i64 pitch, int xs, int ys) {
  constexpr int kChunks = kTileY / V, kCount = kTileX * kChunks / kThreads;
#pragma unroll 8
  for (int i = 0; i < kCount; ++i) {
    const int at = threadIdx.x + i * kThreads, x = at / kChunks, y = at % kChunks * V;
    Vector<T, V> chunk;
#pragma unroll
    for (int e = 0; e < V; ++e) {
      const Word word = words[place((y + e) / kPair, x)];
      chunk.at[e] = static_cast<T>((y + e) % kPair == 0 ? word : word >> (kPair - 1) * 16);
    }
    if (x < xs && y < ys) chunk.store(target + x * pitch + y);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    transpose(const __grid_constant__ TransposeArgs args) {
  __shared__ Word words[kWords];
  u32 rest = blockIdx.x;
  const i64 x0 = static_cast<i64>(take(rest, (args.x_extent + kTileX - 1) / kTileX)) * kTileX;
  const i64 y0 = static_cast<i64>(take(rest, (args.y_extent + kTileY - 1) / kTileY)) * kTileY;
  i64 from = 0, to = 0;
  outer_offsets(args, rest, from, to);
  const T* const source = static_cast<const T*>(args.source) + from + y0 * args.y_source + x0;
  T* const target = static_cast<T*>(args.target) + to + x0 * args.x_target + y0;
  const int xs = min(static_cast<i64>(kTileX), args.x_extent - x0);
  const int ys = min(static_cast<i64>(kTileY), args.y_extent - y0);
  const int reals = min(static_cast<i64>(ys), args.y_limit - y0);

  if (args.source_chunk == 16) {
    load<16 / sizeof(T)>(words, source, args.y_source, xs, reals);
  } else if (args.source_chunk == 8) {
    load<8 / sizeof(T)>(words, source, args.y_source, xs, reals);
  } else {
    load<1>(words, source, args.y_source, xs, reals);
  }
  __syncthreads();
  if (args.target_chunk == 16) {
    store<16 / sizeof(T)>(words, target, args.x_target, xs, ys);
  } else {
    store<1>(words, target, args.x_target, xs, ys);
  }
}
