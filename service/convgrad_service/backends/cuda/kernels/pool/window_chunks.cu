// Average pooling over 3x3 windows that slide by one position, around it, channels first. Launched by
// window_chunks.py.
//
// y[o] = (sum of x[i] over the window of o) / divisor, with SIZED by the window's size; with WEIGHTED the sum of
// x[i] / size(i), for gradients of windows that differ in size.
//
// Planes of x and y have the same size, so both are one run of elements. A block computes a tile of adjacent
// elements of it, of any number of planes, from a copy of the same elements of x and of a halo of more than a line
// on both sides. A thread computes chunks of 16 bytes of y: it reads the lines above, of and below a chunk as
// chunks, adds them up, then adds adjacent sums. Where the elements that it needs start within a chunk depends on
// the lines' length alone: there is a loop for each remainder. Sums beyond the ends of a line are not added. Warps
// without elements of a plane's first and last line skip what those need.
// Block: 256 threads. Grid: tiles. Dynamic shared memory: the copy. Deterministic: the order of additions is the
// same for all elements.
// Preconditions: tensors aligned to 16 bytes; fewer than 2^31 elements; lines of at least a chunk less one element,
// planes of at least three lines.
#include "pool/windows.cuh"
#include "ptx/mma.cuh"

namespace convgrad {

struct ChunkArgs {
  const void* x;
  void* y;
  int elements;
  int columns, plane;  // elements of a line and of a plane
  int halo;            // elements on each side of a tile, in whole chunks, more than a line
  float divisor, reciprocal;
  Divider by_columns, by_plane;
};

}  // namespace convgrad

using namespace convgrad;

namespace {

using T = ELEMENT;
constexpr int kThreads = 256, kChunk = 16 / sizeof(T), kTile = kThreads * EACH * kChunk;
// Of a line: a chunk and an element on both sides, in words of three chunks.
constexpr int kRun = kChunk + 2, kChunkWords = 4, kPer = kChunk / kChunkWords;

__device__ __forceinline__ float element_of(u32 word, int at) {
  if constexpr (sizeof(T) == 4) {
    return __uint_as_float(word);
  } else {
    return widen(T{static_cast<unsigned short>(at == 0 ? word : word >> 16)});
  }
}

// The elements from `kFirst` of the chunk at `from` on.
template <int kFirst>
__device__ __forceinline__ void load_run(u32 from, float (&run)[kRun]) {
  u32 words[3 * kChunkWords];
#pragma unroll
  for (int c = 0; c < 3; ++c) {
    const int begin = max(kFirst / kPer, c * kChunkWords);
    const int end = min((kFirst + kRun - 1) / kPer + 1, (c + 1) * kChunkWords);
    if (end - begin == 1) {
      ld_shared(from + begin * 4, words[begin]);
    } else if (end > begin) {
      uint4 chunk;
      ld_shared(from + c * 16, chunk);
      words[c * kChunkWords] = chunk.x, words[c * kChunkWords + 1] = chunk.y;
      words[c * kChunkWords + 2] = chunk.z, words[c * kChunkWords + 3] = chunk.w;
    }
  }
#pragma unroll
  for (int j = 0; j < kRun; ++j) run[j] = element_of(words[(kFirst + j) / kPer], (kFirst + j) % kPer);
}

// Bits from `begin` on; none beyond the 31st.
__device__ __forceinline__ u32 bits_from(int begin) { return ~0u << min(max(begin, 0), 31); }
__device__ __forceinline__ bool has(u32 bits, int at) { return (bits >> at & 1) != 0; }

// A chunk's place in its plane.
struct Place {
  int at, column;

  // The elements of the chunk, one bit each, at positions [begin, end) of this plane or the next one.
  __device__ __forceinline__ u32 within(const ChunkArgs& args, int begin, int end) const {
    return (bits_from(begin - at) & ~bits_from(end - at)) |
           (bits_from(begin + args.plane - at) & ~bits_from(end + args.plane - at));
  }
};

template <int kRest>
__device__ __forceinline__ void average(const ChunkArgs& args, u32 from, const Place& place, bool edge, T (&y)[kChunk]) {
  // The elements above and below the chunk's start so far before and behind it.
  constexpr int kAbove = kChunk - 1 - kRest, kBelow = (kRest + kChunk - 1) % kChunk;
  const int lines = args.columns / kChunk;
  float above[kRun], own[kRun], below[kRun], sums[kRun];
  load_run<kAbove>(from - (lines + 1) * 16, above);
  load_run<kChunk - 1>(from - 16, own);
  load_run<kBelow>(from + (kRest == 0 ? lines - 1 : lines) * 16, below);
  // Bit e + 1: whether element e is the first of a line.
  const int next = args.columns - place.column;
  u32 starts = place.column <= 1 ? 2u >> place.column : 0;
  starts |= 2u << min(next, 30);
  if (args.columns <= kChunk) starts |= 2u << min(next + args.columns, 30);
  u32 first = 0, last = 0;  // elements in a plane's first and last lines
#if WEIGHTED
  float of_above = 1.0f / 3, of_own = 1.0f / 3, of_below = 1.0f / 3;
#endif
  if (edge) {
    first = place.within(args, 0, args.columns), last = place.within(args, args.plane - args.columns, args.plane);
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
    const int plane = divide(min(first, args.elements), args.by_plane);
    Place place;
    place.at = min(first, args.elements) - plane * args.plane;
    place.column = place.at - divide(place.at, args.by_columns) * args.columns;
    constexpr int kLines = WEIGHTED ? 2 : 1;
    const int inner = kLines * args.columns;
    const bool edge = place.at < inner || place.at > args.plane - inner - kChunk;
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
