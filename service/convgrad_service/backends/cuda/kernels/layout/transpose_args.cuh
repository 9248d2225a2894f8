// What transpose.cu, transpose_planes.cu and transpose_runs.cu are given. The host's side is
// transpose.py.
#pragma once

#include "ptx/pdl.cuh"
#include "core/vectors.cuh"

namespace convgrad {

struct TransposeArgs {
  const void* source;
  void* target;
  u32 extent[4];  // of the outer axes, leading ones where there are fewer
  i64 source_stride[4];
  i64 target_stride[4];
  i64 x_extent;
  i64 y_extent;
  i64 y_limit;
  i64 x_target;  // x's stride in the target; 1 in the source
  i64 y_source;  // y's stride in the source; 1 in the target
  i64 elements;  // of the source, up to the last one that is there
  int source_chunk;  // 16 where each row (of transpose_planes: each run) starts at whole ones, or 0
  int target_chunk;
  int rows;     // of y that a block of transpose_planes moves, or of x one of transpose_runs
  int follows;  // the source is what the kernel before this one writes
};

// Before a kernel's first load and after its last store. One that does not read what the kernel
// before it writes runs beside it, and ends after it: who waits for this one waits for both.
__device__ __forceinline__ void begin_copy(const TransposeArgs& args) {
  launch_dependent_grids();
  if (args.follows) wait_on_dependent_grids();
}
__device__ __forceinline__ void end_copy(const TransposeArgs& args) {
  if (!args.follows) wait_on_dependent_grids();
}

// What is left of `rest` after one axis of so many positions: the position.
__device__ __forceinline__ u32 take(u32& rest, u32 extent) {
  if (extent == 1) return 0;
  const u32 whole = rest / extent, at = rest - whole * extent;
  rest = whole;
  return at;
}

// How far into the source and the target `rest` outer positions are.
__device__ __forceinline__ void outer_offsets(const TransposeArgs& args, u32 rest, i64& from,
                                              i64& to) {
#pragma unroll
  for (int axis = 3; axis >= 0; --axis) {
    const i64 at = take(rest, args.extent[axis]);
    from += at * args.source_stride[axis];
    to += at * args.target_stride[axis];
  }
}

// A run of rows goes by words, of two elements of 16 bits, and has a word left free after each group of
// so many: where in shared memory its word number i is.
template <class Element>
struct RunWord {
  using type = Element;
};
template <>
struct RunWord<unsigned short> {
  using type = u32;
};
struct WordPlace {
  u32 factor;  // for dividing numbers below 2^16 by the group

  __device__ __forceinline__ explicit WordPlace(u32 group) : factor(0xffffffffu / group + 1) {}
  __device__ __forceinline__ int operator()(u32 i) const { return i + __umulhi(i, factor); }
};

}  // namespace convgrad
