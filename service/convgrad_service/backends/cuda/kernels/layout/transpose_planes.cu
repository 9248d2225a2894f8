// transpose.cu for a short x whose rows are contiguous, such as the taps of a weight or small images:
// target[o, x, y] = source[o, y * x_extent + x]. Launched by transpose.py.
//
// Block: 256 threads copy `rows` positions of y, that is whole rows of x, which are contiguous in the
// source, by chunks of 16 bytes, or by elements on a side that is not aligned. Static shared memory:
// 16 KB of the source, with a free word after the rows of each chunk of the target to avoid bank
// conflicts between lanes, which store adjacent chunks. From `y_limit` on, the source has no element
// and the target gets zero.
// Grid: runs of rows (fastest), outer positions.
// Preconditions: `rows` is a multiple of a chunk that fits.
// Deterministic. Index limits: offsets in 64 bits; blocks below 2^31.
#include "layout/transpose_args.cuh"

using namespace convgrad;

namespace {

using T = ELEMENT;
constexpr int kThreads = 256, kChunk = 16 / static_cast<int>(sizeof(T));
constexpr int kElements = 16384 / static_cast<int>(sizeof(T));
constexpr int kFree = sizeof(T) < 4 ? 4 / static_cast<int>(sizeof(T)) : 1;
using Chunk = Vector<T, kChunk>;

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    transpose_planes(const __grid_constant__ TransposeArgs args) {
  // Each free word follows at least one chunk of rows of at least one element.
  __shared__ T elements[kElements + kElements / kChunk * kFree];
  begin_copy(args);
  const int xs = args.x_extent, rows = args.rows, chunks = rows / kChunk;
  u32 rest = blockIdx.x;
  const i64 y0 = static_cast<i64>(take(rest, (args.y_extent + rows - 1) / rows)) * rows;
  i64 from = 0, to = 0;
  outer_offsets(args, rest, from, to);
  const T* const source = static_cast<const T*>(args.source) + from + y0 * xs;
  T* const target = static_cast<T*>(args.target) + to + y0;
  const int ys = min(static_cast<i64>(rows), args.y_extent - y0);
  const int reals = max(min(static_cast<i64>(ys), args.y_limit - y0), i64(0)) * xs;

  const int group = kChunk * xs;  // elements in the rows of a chunk
#pragma unroll 4
  for (int i = threadIdx.x; i < chunks * xs; i += kThreads) {
    const int first = i * kChunk, at = first + first / group * kFree;
    Chunk chunk = Chunk::zero();
    if (args.source_chunk == 16 && first + kChunk <= reals) {
      chunk = Chunk::load(source + first);
    } else {
#pragma unroll
      for (int e = 0; e < kChunk; ++e) {
        if (first + e < reals) chunk.at[e] = source[first + e];
      }
    }
#pragma unroll
    for (int e = 0; e < kChunk; ++e) elements[at + e] = chunk.at[e];
  }
  __syncthreads();
#pragma unroll 4
  for (int i = threadIdx.x; i < chunks * xs; i += kThreads) {
    const int x = i / chunks, at = i - x * chunks, y = at * kChunk;
    const T* const own = elements + at * (group + kFree) + x;
    Chunk chunk;
#pragma unroll
    for (int e = 0; e < kChunk; ++e) chunk.at[e] = own[e * xs];
    T* const here = target + x * args.x_target + y;
    if (args.target_chunk == 16) {
      if (y < ys) chunk.store(here);
    } else {
#pragma unroll
      for (int e = 0; e < kChunk; ++e) {
        if (y + e < ys) here[e] = chunk.at[e];
      }
    }
  }
  end_copy(args);
}
