// The gradient of max pooling over 3x3 windows that slide by one position, around it, from the indices of the maxima,
// channels first (window_chunks.cuh). Launched by window_chunks.py.
//
// y[i] = sum of x[o] over the windows o around i whose index is i. An index outside its window sets bad[0] unless
// `bad` is null.
//
// A block turns the indices of its tile and halo into taps: an element of shared memory for each window, whose bit
// 3 * r + s is set if the index is in line r and column s of the window. A tap is never beyond the ends of a line or a
// plane, so the windows around a position need no other condition than their taps' bits.
// Block: 256 threads. Grid: tiles. Dynamic shared memory: taps, then x, both with a halo. Deterministic: sums are in
// the order of windows. Memory-safe for any index: indices are compared, never dereferenced.
#include "pool/window_chunks.cuh"

using namespace convgrad;

namespace {

using T = ELEMENT;
constexpr int kThreads = 256, kChunk = kChunkOf<T>;
constexpr u32 kLine = 7, kColumn = 1 | 1 << 3 | 1 << 6, kAll = (1 << 9) - 1;
union Taps {
  uint4 raw;
  typename RawOf<sizeof(T)>::type at[kChunk];
};

// Indices of a chunk of windows, `left` of which exist; those of more than 31 bits are negative.
__device__ __forceinline__ void load_indices(const ChunkArgs& args, int first, int left, int (&found)[kChunk]) {
  if (left < kChunk) {
#pragma unroll
    for (int e = 0; e < kChunk; ++e) {
      found[e] = -1;
      if (e >= left) continue;
      Indices<1> one;
      one.load(args.indices, first + e, args.wide_indices);
      found[e] = one.at(0, args.wide_indices);
    }
    return;
  }
  Indices<kChunk> all;
  all.load(args.indices, first, args.wide_indices);
#pragma unroll
  for (int e = 0; e < kChunk; ++e) found[e] = all.at(e, args.wide_indices);
}

// The taps of the chunk of windows from `first` on.
__device__ __forceinline__ Taps taps_of(const ChunkArgs& args, int first, bool& bad) {
  const int left = args.elements - first, columns = args.columns;
  int indices[kChunk];
  load_indices(args, first, left, indices);
  const ChunkPlace place(args, first);
  const u32 starts = place.starts(args, kChunk);
  u32 top = 0, bottom = 0;
  if (place.is_edge(args, 1, kChunk)) top = place.first_line(args), bottom = place.last_line(args);
  Taps taps;
#pragma unroll
  for (int e = 0; e < kChunk; ++e) {
    u32 allowed = kAll;
    if (has(starts, e + 1)) allowed &= ~kColumn;
    if (has(starts, e + 2)) allowed &= ~(kColumn << 2);
    if (has(top, e)) allowed &= ~kLine;
    if (has(bottom, e)) allowed &= ~(kLine << 6);
    const int at = place.at + e - (place.at + e < args.plane ? 0 : args.plane);
    const int far = static_cast<int>(static_cast<u32>(indices[e]) - static_cast<u32>(at - columns - 1));
    const int lines = (far >= columns) + (far >= 2 * columns), column = far - lines * columns;
    const bool inside = indices[e] >= 0 && static_cast<u32>(column) < 3;
    const u32 tap = inside ? (1u << (3 * lines + column)) & allowed : 0;
    bad |= tap == 0 && e < left;
    taps.at[e] = static_cast<decltype(taps.at[0] + 0)>(tap);
  }
  return taps;
}

// Adds the elements of windows that have a tap at the results of a chunk; `line` is that of the results in windows.
template <int kFirst>
__device__ __forceinline__ void add_line(u32 taps_from, u32 x_from, int line, float (&sums)[kChunk]) {
  RunWords<T, kFirst> taps, x;
  taps.load(taps_from);
  x.load(x_from);
#pragma unroll
  for (int j = 0; j < kRunOf<T>; ++j) {
    const float value = x.element(j);
#pragma unroll
    for (int column = 0; column < 3; ++column) {
      // The window of element j - 1 has this result in its column.
      const int e = j - 2 + column;
      if (e < 0 || e >= kChunk) continue;
      if ((taps.word(j) & 1u << (3 * line + column + taps.shift(j))) != 0) sums[e] += value;
    }
  }
}

// `rest`: the elements of a line beyond whole chunks.
template <int kRest>
__device__ __forceinline__ void route_tile(const ChunkArgs& args, int rest, u32 taps, u32 x, int tile) {
  if constexpr (kRest + 1 < kChunk) {
    if (rest != kRest) return route_tile<kRest + 1>(args, rest, taps, x, tile);
  }
  // The elements above and below a chunk's start are so far before and behind it.
  constexpr int kAbove = kChunk - 1 - kRest, kBelow = (kRest + kChunk - 1) % kChunk;
  const int lines = args.columns / kChunk, above = -(lines + 1) * 16, below = (lines - (kRest == 0)) * 16;
#pragma unroll 1
  for (int at = static_cast<int>(threadIdx.x) * kChunk; at < args.tile; at += kThreads * kChunk) {
    const int first = tile + at;
    if (first >= args.elements) return;
    const int from = (args.halo + at) * static_cast<int>(sizeof(T));
    float sums[kChunk] = {};
    add_line<kAbove>(taps + from + above, x + from + above, 2, sums);
    add_line<kChunk - 1>(taps + from - 16, x + from - 16, 1, sums);
    add_line<kBelow>(taps + from + below, x + from + below, 0, sums);
    Vector<T, kChunk> y;
#pragma unroll
    for (int e = 0; e < kChunk; ++e) y.at[e] = narrow<T>(sums[e]);
    store_chunk(args, first, y);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)
    route_chunks(const __grid_constant__ ChunkArgs args) {
  extern __shared__ __align__(16) unsigned char shared[];
  const int tile = static_cast<int>(blockIdx.x) * args.tile, chunks = (args.tile + 2 * args.halo) / kChunk;
  const u32 taps = shared_address(shared), x = taps + chunks * 16;
  load_tile<T, kThreads>(args, tile, x);
  bool bad = false;
#pragma unroll 1
  for (int c = static_cast<int>(threadIdx.x); c < chunks; c += kThreads) {
    const int at = tile - args.halo + c * kChunk;
    Taps own;
    own.raw = {};
    if (at >= 0 && at < args.elements) own = taps_of(args, at, bad);
    reinterpret_cast<uint4*>(shared)[c] = own.raw;
  }
  if (bad && args.bad != nullptr) *args.bad = 1;
  cp_async_wait<0>();
  __syncthreads();
  route_tile<0>(args, args.columns % kChunk, taps, x, tile);
}
