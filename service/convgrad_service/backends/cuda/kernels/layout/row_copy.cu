// Copies contiguous rows to runs of the target: each row to a run of its own, followed by zeros if that
// is longer, or rows without gaps to one run. Launched by transpose.py.
//
// Block: 256 threads, one 16-byte chunk of a run each. Shared memory: none. Deterministic.
// Grid: ceil(runs * chunks / 256) blocks.
// Preconditions: runs start at whole, aligned chunks.
// Index limits: 64-bit throughout; blocks below 2^31.
#include "ptx/pdl.cuh"
#include "core/vectors.cuh"

using namespace convgrad;

struct RowCopyArgs {
  const void* source;
  void* target;
  i64 extent[6];  // of the axes above runs; missing leading ones are 1
  i64 source_stride[6];
  i64 target_stride[6];
  i64 chunks;  // of one run, and of all runs
  i64 all_chunks;
  i64 run;    // elements of a run
  i64 reals;  // of those, the ones that the source has
  i64 width;  // elements of a row
  i64 pitch;  // distance of the rows of a run in the source
  int follows;  // the previous kernel writes the source
};

extern "C" __global__ void __launch_bounds__(256)
    row_copy(const __grid_constant__ RowCopyArgs args) {
  using T = ELEMENT;
  constexpr int kChunk = 16 / static_cast<int>(sizeof(T));
  launch_dependent_grids();
  if (args.follows) wait_on_dependent_grids();
  const i64 index = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x;
  if (index >= args.all_chunks) return;
  i64 first, from = 0, to = 0;
  i64 rest = divide(index, args.chunks, first);
  first *= kChunk;
#pragma unroll
  for (int axis = 5; axis >= 0; --axis) {
    if (args.extent[axis] == 1) continue;
    i64 at;
    rest = divide(rest, args.extent[axis], at);
    from += at * args.source_stride[axis];
    to += at * args.target_stride[axis];
  }
  i64 column = first;
  if (args.width < args.run) from += divide(first, args.width, column) * args.pitch;
  const T* source = static_cast<const T*>(args.source) + from;
  T* const target = static_cast<T*>(args.target) + to + first;
  auto chunk = Vector<T, kChunk>::zero();
#pragma unroll
  for (int e = 0; e < kChunk; ++e) {
    if (first + e < args.reals) chunk.at[e] = source[column];
    if (++column == args.width) column = 0, source += args.pitch;
  }
  if (first + kChunk <= args.run) {
    chunk.store(target);
  } else {
#pragma unroll
    for (int e = 0; e < kChunk; ++e) {
      if (first + e < args.run) target[e] = chunk.at[e];
    }
  }
  // A kernel that waits for this one then also waits for the previous one.
  if (!args.follows) wait_on_dependent_grids();
}
