// transpose.cu for a short y whose rows are contiguous in the target, such as the taps of a weight or
// small images: target[o, x * y_extent + y] = source[o, y, x]. The inverse of transpose_planes.cu. Launched by
// transpose.py.
//
// Block: 256 threads copy `rows` positions of x, that is whole rows of y, which are contiguous in the
// target, by chunks of 16 bytes, or by elements on a side that is not aligned. Static shared memory:
// 16 KB of the target, with a free word after the rows of each chunk of the source to avoid bank
// conflicts between lanes, which load adjacent chunks.
// Grid: runs of rows (fastest), outer positions.
// Preconditions: `rows` is a multiple of a chunk that fits; the source has no missing elements.
// Deterministic. Index limits: offsets in 64 bits; blocks below 2^31.
#include "layout/transpose_args.cuh"

using namespace convgrad;

namespace {

using T = ELEMENT;
constexpr int kThreads = 256, kChunk = 16 / static_cast<int>(sizeof(T));
constexpr int kElements = 16384 / static_cast<int>(sizeof(T));
constexpr int kFree = sizeof(T) < 4 ? 4 / static_cast<int>(sizeof(T)) : 1;
constexpr int kPair = kWordElements<T>;
using Word = WordOf<T>;
using Chunk = Vector<T, kChunk>;

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    transpose_runs(const __grid_constant__ TransposeArgs args) {
  // Each free word follows at least one chunk of rows of at least one element.
  alignas(16) __shared__ T elements[kElements + kElements / kChunk * kFree];
  begin_copy(args);
  const int ys = args.y_extent, rows = args.rows;
  u32 rest = blockIdx.x;
  const i64 x0 = static_cast<i64>(take(rest, (args.x_extent + rows - 1) / rows)) * rows;
  i64 from = 0, to = 0;
  outer_offsets(args, rest, from, to);
  const T* const source = static_cast<const T*>(args.source) + from + x0;
  T* const target = static_cast<T*>(args.target) + to + x0 * ys;
  const int xs = min(static_cast<i64>(rows), args.x_extent - x0);
  const int chunks = (xs + kChunk - 1) / kChunk, count = chunks * ys;

  const int group = kChunk * ys;  // elements in the rows of a chunk
#pragma unroll 4
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const int y = i / chunks, at = i - y * chunks, x = at * kChunk;
    const T* const here = source + y * args.y_source + x;
    Chunk chunk = Chunk::zero();
    if (args.source_chunk == 16) {
      chunk = Chunk::load(here);
    } else {
#pragma unroll
      for (int e = 0; e < kChunk; ++e) {
        if (x + e < xs) chunk.at[e] = here[e];
      }
    }
    T* const own = elements + at * (group + kFree) + y;
#pragma unroll
    for (int e = 0; e < kChunk; ++e) own[e * ys] = chunk.at[e];
  }
  __syncthreads();
  const WordPlace place(group / kPair);
  const Word* const words = reinterpret_cast<const Word*>(elements);
#pragma unroll 8
  for (int i = threadIdx.x; i * kPair < xs * ys; i += kThreads) {
    const Word word = words[place(i)];
    const int first = i * kPair;
    if (args.target_chunk == 16 && first + kPair <= xs * ys) {
      reinterpret_cast<Word*>(target)[i] = word;
    } else {
#pragma unroll
      for (int e = 0; e < kPair; ++e) {
        if (first + e < xs * ys) target[first + e] = static_cast<T>(word >> e * 16);
      }
    }
  }
  end_copy(args);
}
