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
constexpr int kThreads = 256, kChunk = kChunkOf<T>, kRun = kRunOf<T>;

template <int kFirst>
__device__ __forceinline__ void load_run(u32 from, float (&run)[kRun]) {
  RunWords<T, kFirst> words;
  words.load(from);
#pragma unroll
  for (int j = 0; j < kRun; ++j) run[j] = words.element(j);
}

struct Divisor {
  float by, reciprocal;
};
constexpr Divisor kNine{9, 1.0f / 9}, kSix{6, 1.0f / 6}, kFour{4, 1.0f / 4};

template <int kRest>
__device__ __forceinline__ void average(const ChunkArgs& args, u32 from, const ChunkPlace& place, bool edge, T (&y)[kChunk]) {
  // The elements above and below the chunk's start so far before and behind it.
  constexpr int kAbove = kChunk - 1 - kRest, kBelow = (kRest + kChunk - 1) % kChunk;
  const int lines = args.columns / kChunk;
  float above[kRun], own[kRun], below[kRun], sums[kRun];
  load_run<kAbove>(from - (lines + 1) * 16, above);
  load_run<kChunk - 1>(from - 16, own);
  load_run<kBelow>(from + (kRest == 0 ? lines - 1 : lines) * 16, below);
  const u32 starts = place.starts(args, kChunk), ends = starts | starts >> 1;  // ends: first or last of a line
  [[maybe_unused]] Divisor divisors[kChunk];
  // An element's sum is the same, bit by bit, in either branch.
  if (edge) {
    const u32 first = place.first_line(args), last = place.last_line(args);
#if WEIGHTED
    const u32 second = place.within(args, args.columns, 2 * args.columns);
    const u32 before = place.within(args, args.plane - 2 * args.columns, args.plane - args.columns);
#endif
#pragma unroll
    for (int j = 0; j < kRun; ++j) {
      const int e = min(max(j - 1, 0), kChunk - 1);  // an element beside the chunk counts if it is in this one's line
#if WEIGHTED
      sums[j] = __fmul_rn(own[j], has(first | last, e) ? 1.0f / 2 : 1.0f / 3);
      if (!has(first, e)) sums[j] = fmaf(above[j], has(second, e) ? 1.0f / 2 : 1.0f / 3, sums[j]);
      if (!has(last, e)) sums[j] = fmaf(below[j], has(before, e) ? 1.0f / 2 : 1.0f / 3, sums[j]);
#else
      sums[j] = own[j];
      if (!has(first, e)) sums[j] += above[j];
      if (!has(last, e)) sums[j] += below[j];
#endif
    }
#if SIZED
#pragma unroll
    for (int e = 0; e < kChunk; ++e) {
      const Divisor of_end = has(first | last, e) ? kFour : kSix, of_inner = has(first | last, e) ? kSix : kNine;
      divisors[e] = has(ends, e + 1) ? of_end : of_inner;
    }
#endif
  } else {
#pragma unroll
    for (int j = 0; j < kRun; ++j) {
#if WEIGHTED
      sums[j] = fmaf(below[j], 1.0f / 3, fmaf(above[j], 1.0f / 3, __fmul_rn(own[j], 1.0f / 3)));
#else
      sums[j] = own[j] + above[j] + below[j];
#endif
    }
#if SIZED
#pragma unroll
    for (int e = 0; e < kChunk; ++e) divisors[e] = has(ends, e + 1) ? kSix : kNine;
#endif
  }
#if WEIGHTED
#pragma unroll
  for (int j = 0; j < kRun; ++j) sums[j] = __fmul_rn(sums[j], has(ends, j) ? 1.0f / 2 : 1.0f / 3);
#endif
#pragma unroll
  for (int e = 0; e < kChunk; ++e) {
    float sum = sums[e + 1];
    if (!has(starts, e + 1)) sum += sums[e];
    if (!has(starts, e + 2)) sum += sums[e + 2];
#if SIZED
    const Divisor& divisor = divisors[e];
#else
    const Divisor divisor{args.divisor, args.reciprocal};
#endif
    // A sum of negative zeros is zero.
    y[e] = narrow<T>(sizeof(T) == 2 ? fmaf(sum, divisor.reciprocal, 0.0f)
                                    : divided<T>(sum + 0.0f, divisor.by, divisor.reciprocal));
  }
}

// `rest`: the elements of a line beyond whole chunks.
template <int kRest>
__device__ __forceinline__ void average_tile(const ChunkArgs& args, int rest, u32 copy, int tile) {
  if constexpr (kRest + 1 < kChunk) {
    if (rest != kRest) return average_tile<kRest + 1>(args, rest, copy, tile);
  }
#pragma unroll 1
  for (int at = static_cast<int>(threadIdx.x) * kChunk; at < args.tile; at += kThreads * kChunk) {
    const int first = tile + at;
    const ChunkPlace place(args, min(first, args.elements));
    const bool edge = place.is_edge(args, WEIGHTED ? 2 : 1, kChunk);
    Vector<T, kChunk> y;
    average<kRest>(args, copy + (args.halo + at) * static_cast<int>(sizeof(T)), place,
                   __ballot_sync(~0u, edge) != 0, y.at);
    store_chunk(args, first, y);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)
    window_chunks(const __grid_constant__ ChunkArgs args) {
  extern __shared__ __align__(16) unsigned char shared[];
  const u32 copy = shared_address(shared);
  const int tile = static_cast<int>(blockIdx.x) * args.tile;
  load_tile<T, kThreads>(args, tile, copy);
  cp_async_wait<0>();
  __syncthreads();
  average_tile<0>(args, args.columns % kChunk, copy, tile);
}
