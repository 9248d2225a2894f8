// Spreads planes over larger ones: position x of the target along a dimension is position (x + pad) / step of the
// source if that is a whole one, else zero. Launched by zero_insertion.py.
//
// Block: 256 threads, one 16-byte chunk of the target each, which may span rows and planes. Shared memory: none.
// Grid: ceil(chunks / 256) blocks. Deterministic.
// Preconditions: both tensors are contiguous, planes (D H W) after one another; an aligned target.
// Index limits: elements of either tensor below 2^31.
#include "core/divider.cuh"
#include "core/vectors.cuh"
#include "ptx/pdl.cuh"

using namespace convgrad;

struct ZeroInsertionArgs {
  const void* source;
  void* target;
  int elements;    // of the target
  int size[3];     // D H W of the target
  int extent[3];   // of the source
  int step[3];
  int pad[3];
  Divider by[3];       // the sizes
  Divider by_step[3];
};

namespace {

// The position along a dimension of the source, or -1 for a zero.
__device__ __forceinline__ int spread(const ZeroInsertionArgs& args, int dim, int x) {
  const int from = x + args.pad[dim], at = divide(from, args.by_step[dim]);
  return at * args.step[dim] == from && at < args.extent[dim] ? at : -1;
}

// Where a row of the source starts, or -1 for zeros; `row` counts those of all planes of the target.
__device__ __forceinline__ int row_start(const ZeroInsertionArgs& args, int row) {
  const int slice = divide(row, args.by[1]), plane = divide(slice, args.by[0]);
  const int h = spread(args, 1, row - slice * args.size[1]), d = spread(args, 0, slice - plane * args.size[0]);
  if (h < 0 || d < 0) return -1;
  return ((plane * args.extent[0] + d) * args.extent[1] + h) * args.extent[2];
}

}  // namespace

extern "C" __global__ void __launch_bounds__(256)
    zero_insertion(const __grid_constant__ ZeroInsertionArgs args) {
  using T = ELEMENT;
  constexpr int kChunk = 16 / static_cast<int>(sizeof(T));
  launch_dependent_grids();
  wait_on_dependent_grids();
  const u32 first = (blockIdx.x * 256u + threadIdx.x) * kChunk;
  if (first >= args.elements) return;
  int row = divide(static_cast<int>(first), args.by[2]), x = first - row * args.size[2];
  int start = row_start(args, row);
  const T* const source = static_cast<const T*>(args.source);
  T* const target = static_cast<T*>(args.target) + first;
  auto chunk = Vector<T, kChunk>::zero();
#pragma unroll
  for (int e = 0; e < kChunk; ++e) {
    const int at = start < 0 ? -1 : spread(args, 2, x);
    if (at >= 0 && first + e < args.elements) chunk.at[e] = source[start + at];
    if (++x == args.size[2]) x = 0, start = row_start(args, ++row);
  }
  chunk.store_part(target, first + kChunk <= args.elements, [&](int e) { return first + e < args.elements; });
}
