// Copies rows to rows without gaps, which need not be whole 16-byte chunks. Launched by transpose.py.
//
// Block: 256 threads, one 16-byte chunk of the target each. Shared memory: none. Deterministic.
// Grid: ceil(chunks / 256) blocks. Preconditions: an aligned target.
// Index limits: 64-bit throughout; blocks below 2^31.
#include "ptx/pdl.cuh"
#include "core/vectors.cuh"

using namespace convgrad;

struct RowPackArgs {
  const void* source;
  void* target;
  i64 elements;  // of the target
  i64 width;     // elements of a row
  i64 pitch;     // of the source
  int follows;   // the previous kernel writes the source
};

extern "C" __global__ void __launch_bounds__(256)
    row_pack(const __grid_constant__ RowPackArgs args) {
  using T = ELEMENT;
  constexpr int kChunk = 16 / static_cast<int>(sizeof(T));
  launch_dependent_grids();
  if (args.follows) wait_on_dependent_grids();
  const i64 first = (static_cast<i64>(blockIdx.x) * 256 + threadIdx.x) * kChunk;
  if (first >= args.elements) return;
  i64 column;
  const i64 row = divide(first, args.width, column);
  const T* source = static_cast<const T*>(args.source) + row * args.pitch;
  T* const target = static_cast<T*>(args.target) + first;
  auto chunk = Vector<T, kChunk>::zero();
  const bool whole = first + kChunk <= args.elements;
#pragma unroll
  for (int e = 0; e < kChunk; ++e) {
    if (whole || first + e < args.elements) chunk.at[e] = source[column];
    if (++column == args.width) column = 0, source += args.pitch;
  }
  chunk.store_part(target, whole, [&](int e) { return first + e < args.elements; });
  // A kernel that waits for this one then also waits for the previous one.
  if (!args.follows) wait_on_dependent_grids();
}
