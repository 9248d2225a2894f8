// Average pooling over 3x3 windows that slide by one position, around it, channels first (window_chunks.cuh).
// Launched by window_chunks.py.
//
// y[o] = (sum of x[i] over the window of o) / divisor, with SIZED by the window's size; with WEIGHTED the sum of
// x[i] / size(i), for gradients of windows that differ in size.
//
// A thread adds up the elements above, of and below its chunk, then adjacent sums; not those beyond the ends of a
// line. Warps without elements of a plane's first and last line skip what those need.
// Block: 256 threads. Grid: tiles. Dynamic shared memory: the tile of x, with its halo. Deterministic: the order of
// additions is the same for all elements.
#include "pool/window_chunks.cuh"

using namespace convgrad;

namespace {

using T = ELEMENT;
constexpr int kThreads = 256, kChunk = kChunkOf<T>, kRun = kRunOf<T>, kTile = kThreads * EACH * kChunk;

template <int kFirst>
__device__ __forceinline__ void load_run(u32 from, float (&run)[kRun]) {
  RunWords<T, kFirst> words;
  words.load(from);
#pragma unroll
  for (int j = 0; j < kRun; ++j) run[j] = words.element(j);
}

template <int kRest>
__device__ __forceinline__ void average(const ChunkArgs& args, u32 from, const ChunkPlace& place, bool edge, T (&y)[kChunk]) {
  // The elements above and below the chunk's start so far before and behind it.
  constexpr int kAbove = kChunk - 1 - kRest, kBelow = (kRest + kChunk - 1) % kChunk;
  const int lines = args.columns / kChunk;
  float above[kRun], own[kRun], below[kRun], sums[kRun];
  load_run<kAbove>(from - (lines + 1) * 16, above);
  load_run<kChunk - 1>(from - 16, own);
  load_run<kBelow>(from + (kRest == 0 ? lines - 1 : lines) * 16, below);
  const u32 starts = place.starts(args, kChunk);
  u32 first = 0, last = 0;  // elements in a plane's first and last lines
#if WEIGHTED
  float of_above = 1.0f / 3, of_own = 1.0f / 3, of_below = 1.0f / 3;
#endif
  if (edge) {
    first = place.first_line(args), last = place.last_line(args);
#if WEIGHTED
    const u32 second = place.within(args, args.columns, 2 * args.columns);
    const u32 before = place.within(args, args.plane - 2 * args.columns, args.plane - args.columns);
#endif
#pragma unroll
    for (int j = 0; j < kRun; ++j) {
      const int e = min(max(j - 1, 0), kChunk - 1);
#if WEIGHTED
      sums[j] = own[j] * (has(first | last, e) ? 0.5f : of_own);
      if (!has(first, e)) sums[j] = fmaf(above[j], has(second, e) ? 0.5f : of_above, sums[j]);
      if (!has(last, e)) sums[j] = fmaf(below[j], has(before, e) ? 0.5f : of_below, sums[j]);
#else
      sums[j] = own[j];
      if (!has(first, e)) sums[j] += above[j];
      if (!has(last, e)) sums[j] += below[j];
#endif
    }
  } else {
#pragma unroll
    for (int j = 0; j < kRun; ++j) {
#if WEIGHTED
      sums[j] = fmaf(below[j], of_below, fmaf(above[j], of_above, own[j] * of_own));
#else
      sums[j] = own[j] + above[j] + below[j];
#endif
    }
  }
#if WEIGHTED
#pragma unroll
  for (int j = 0; j < kRun; ++j) sums[j] *= has(starts | starts >> 1, j) ? 0.5f : 1.0f / 3;
#endif
#pragma unroll
  for (int e = 0; e < kChunk; ++e) {
    float sum = sums[e + 1];
    if (!has(starts, e + 1)) sum += sums[e];
    if (!has(starts, e + 2)) sum += sums[e + 2];
#if SIZED
    const bool ends = has(starts | starts >> 1, e + 1), few = has(first | last, e);
    const float by = ends ? (few ? 4.0f : 6.0f) : (few ? 6.0f : 9.0f);
    const float reciprocal = ends ? (few ? 1.0f / 4 : 1.0f / 6) : (few ? 1.0f / 6 : 1.0f / 9);
#else
    const float by = args.divisor, reciprocal = args.reciprocal;
#endif
    // A sum of negative zeros is zero.
    y[e] = narrow<T>(sizeof(T) == 2 ? fmaf(sum, reciprocal, 0.0f) : divided<T>(sum + 0.0f, by, reciprocal));
  }
}

#if OVERLAPPED
// Waits until at most `pending` of this thread's groups of copies are pending.
__device__ __forceinline__ void wait_for_copies(int pending) {
  if (pending >= 3) return cp_async_wait<3>();
  if (pending == 2) return cp_async_wait<2>();
  if (pending == 1) return cp_async_wait<1>();
  cp_async_wait<0>();
}
#endif

// `rest`: the elements of a line beyond whole chunks.
template <int kRest>
__device__ __forceinline__ void average_tile(const ChunkArgs& args, int rest, u32 copy, int tile) {
  if constexpr (kRest + 1 < kChunk) {
    if (rest != kRest) return average_tile<kRest + 1>(args, rest, copy, tile);
  }
#pragma unroll 1
  for (int i = 0; i < EACH; ++i) {
#if OVERLAPPED
    wait_for_copies(EACH - 1 - i);
    __syncthreads();
#endif
    const int at = static_cast<int>(i * kThreads + threadIdx.x) * kChunk, first = tile + at;
    const ChunkPlace place(args, min(first, args.elements));
    const bool edge = place.is_edge(args, WEIGHTED ? 2 : 1, kChunk);
    Vector<T, kChunk> y;
    average<kRest>(args, copy + (args.halo + at) * static_cast<int>(sizeof(T)), place,
                   __ballot_sync(~0u, edge) != 0, y.at);
    T* const to = static_cast<T*>(args.y) + first;
    if (first + kChunk <= args.elements) {
      y.store(to);
      continue;
    }
#pragma unroll
    for (int e = 0; e < kChunk; ++e) {
      if (first + e < args.elements) to[e] = y.at[e];
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)
    window_chunks(const __grid_constant__ ChunkArgs args) {
  extern __shared__ __align__(16) unsigned char shared[];
  const u32 copy = shared_address(shared);
  const int thread = static_cast<int>(threadIdx.x), tile = static_cast<int>(blockIdx.x) * kTile;
  const int chunks = (kTile + 2 * args.halo) / kChunk, begin = tile - args.halo;
  const char* const x = static_cast<const char*>(args.x) + static_cast<i64>(begin) * static_cast<int>(sizeof(T));
#pragma unroll
  for (int i = 0; i <= EACH; ++i) {
    const int c = thread + i * kThreads, at = begin + c * kChunk, left = args.elements - at;
    if (c < chunks && at >= 0 && left > 0) {
      cp_async<16>(copy + c * 16, x + static_cast<i64>(c) * 16, min(left, kChunk) * static_cast<int>(sizeof(T)));
    }
    cp_async_commit();
  }
#if !OVERLAPPED
  cp_async_wait<0>();
  __syncthreads();
#endif
  average_tile<0>(args, args.columns % kChunk, copy, tile);
}
