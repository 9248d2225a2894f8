// Copies contiguous rows to rows of another pitch, followed by zeros if the target's rows are longer.
// Launched by transpose.py.
//
// Block: 256 threads, one 16-byte chunk of the target each. Shared memory: none. Deterministic.
// Grid: ceil(rows * chunks / 256) blocks.
// Preconditions: target rows are whole, aligned chunks.
// Index limits: 64-bit throughout; blocks below 2^31.
#include "ptx/pdl.cuh"
#include "core/vectors.cuh"

using namespace convgrad;

struct RowCopyArgs {
  const void* source;
  void* target;
  i64 extent[6];  // of the axes above rows; missing leading ones are 1
  i64 source_stride[6];
  i64 target_stride[6];
  i64 chunks;  // of one row, and of all rows
  i64 all_chunks;
  i64 elements;  // in a row of the source
  int follows;   // the previous kernel writes the source
};

extern "C" __global__ void __launch_bounds__(256)
    row_copy(const __grid_constant__ RowCopyArgs args) {
  using T = ELEMENT;
  constexpr int kChunk = 16 / static_cast<int>(sizeof(T));
  launch_dependent_grids();
  if (args.follows) wait_on_dependent_grids();
  const i64 index = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x;
  if (index >= args.all_chunks) return;
  i64 column, from = 0, to = 0;
  i64 rest = divide(index, args.chunks, column);
  column *= kChunk;
#pragma unroll
  for (int axis = 5; axis >= 0; --axis) {
    if (args.extent[axis] == 1) continue;
    i64 at;
    rest = divide(rest, args.extent[axis], at);
    from += at * args.source_stride[axis];
    to += at * args.target_stride[axis];
  }
  const T* const source = static_cast<const T*>(args.source) + from + column;
  auto chunk = Vector<T, kChunk>::zero();
#pragma unroll
  for (int e = 0; e < kChunk; ++e) {
    if (column + e < args.elements) chunk.at[e] = source[e];
  }
  chunk.store(static_cast<T*>(args.target) + to + column);
  // A kernel that waits for this one then also waits for the previous one.
  if (!args.follows) wait_on_dependent_grids();
}
