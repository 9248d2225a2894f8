// Copies a box of elements between an order in which x runs side by side and one in which y does:
// target[o, x, y] = source[o, y, x], through shared memory. The host's side is transpose.py.
//
// Block: 256 threads move a tile of 64 x 64 through shared memory. On either side they move chunks:
// of 16 bytes, or of 8 from the source, where rows start and end at whole ones, else element by
// element. Static shared memory: the tile in words, of two neighbours along y where elements have 16
// bits, so that both sides go by words, and placed so that lanes do not meet in a bank. Where y
// reaches `y_limit`, the source has no element and the target gets zero.
// Relies on its launcher for the grid: tiles of x (fastest), tiles of y, outer positions.
// Deterministic. Index limits: offsets in 64 bits; blocks below 2^31.
#include "vectors.cuh"

using namespace convgrad;

struct TransposeArgs {
  const void* source;
  void* target;
  u32 extent[4];  // of the outer axes, leading ones where there are fewer
  i64 source_stride[4];
  i64 target_stride[4];
  i64 x_extent;
  i64 y_extent;
  i64 y_limit;
  i64 x_target;  // x's stride in the target; 1 in the source
  i64 y_source;  // y's stride in the source; 1 in the target
  int source_chunk;  // bytes
  int target_chunk;
};

namespace {

using T = ELEMENT;
constexpr int kTile = 64, kThreads = 256;
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

// Eight (or sixteen) chunks of a row and the rows beside them, and likewise on the other side, lie in
// 32 different banks.
constexpr int kSkip = sizeof(T) == 2 ? 4 : sizeof(T) == 4 ? 2 : 0;
constexpr int kPitch = kTile + kSkip + 1;
constexpr int kWords = kTile / kPair * kPitch + 2 * kSkip;
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
  constexpr int kChunks = kTile / V, kCount = kTile / kPair * kChunks / kThreads;
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
  constexpr int kChunks = kTile / V, kCount = kTile * kChunks / kThreads;
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
  // What is left of `rest` after one axis of so many positions.
  const auto next = [&](u32 extent) {
    if (extent == 1) return 0u;
    const u32 whole = rest / extent, at = rest - whole * extent;
    rest = whole;
    return at;
  };
  const i64 x0 = static_cast<i64>(next((args.x_extent + kTile - 1) / kTile)) * kTile;
  const i64 y0 = static_cast<i64>(next((args.y_extent + kTile - 1) / kTile)) * kTile;
  i64 from = 0, to = 0;
#pragma unroll
  for (int axis = 3; axis >= 0; --axis) {
    const i64 at = next(args.extent[axis]);
    from += at * args.source_stride[axis];
    to += at * args.target_stride[axis];
  }
  const T* const source = static_cast<const T*>(args.source) + from + y0 * args.y_source + x0;
  T* const target = static_cast<T*>(args.target) + to + x0 * args.x_target + y0;
  const int xs = min(static_cast<i64>(kTile), args.x_extent - x0);
  const int ys = min(static_cast<i64>(kTile), args.y_extent - y0);
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
