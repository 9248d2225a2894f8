// The argument of transpose.cu, transpose_planes.cu and transpose_runs.cu. Host side:
// transpose.py.
#pragma once

#include "ptx/pdl.cuh"
#include "core/divider.cuh"
#include "core/vectors.cuh"

namespace convgrad {

struct TransposeArgs {
  const void* source;
  void* target;
  u32 extent[4];  // of the outer axes; missing leading ones are 1
  i64 source_stride[4];
  i64 target_stride[4];
  i64 x_extent;
  i64 y_extent;
  i64 y_limit;
  i64 x_target;  // x's stride in the target; 1 in the source
  i64 y_source;  // y's stride in the source; 1 in the target
  i64 elements;  // of the source, up to the last valid one
  int source_chunk;  // 16 where each row (of transpose_planes: each run) starts at whole ones, or 0
  int target_chunk;
  int rows;     // of y that a block of transpose_planes moves, or of x one of transpose_runs
  int follows;  // the previous kernel writes the source
  // Of y with Y_AXES 2: the extent of the inner axis, whose stride is `y_source`, and the outer one's stride.
  int y_inner;
  i64 y_outer;
  Divider by_inner;
};

// Programmatic dependent launch: before a kernel's first load and after its last store. A kernel that
// does not read what the previous one writes overlaps it but ends after it, so that a kernel that
// waits for this one waits for both.
__device__ __forceinline__ void begin_copy(const TransposeArgs& args) {
  launch_dependent_grids();
  if (args.follows) wait_on_dependent_grids();
}
__device__ __forceinline__ void end_copy(const TransposeArgs& args) {
  if (!args.follows) wait_on_dependent_grids();
}

// Divides `rest` by the extent of an axis; returns the remainder, the position along it.
__device__ __forceinline__ u32 take(u32& rest, u32 extent) {
  if (extent == 1) return 0;
  const u32 whole = rest / extent, at = rest - whole * extent;
  rest = whole;
  return at;
}

// Offsets in source and target of outer position `rest`.
__device__ __forceinline__ void outer_offsets(const TransposeArgs& args, u32 rest, i64& from,
                                              i64& to) {
#pragma unroll
  for (int axis = 3; axis >= 0; --axis) {
    const i64 at = take(rest, args.extent[axis]);
    from += at * args.source_stride[axis];
    to += at * args.target_stride[axis];
  }
}

// What kernels keep of elements in shared memory: words of two 16-bit elements, else elements.
template <class Element>
constexpr int kWordElements = sizeof(Element) == 2 ? 2 : 1;
template <class Element>
using WordOf = Conditional<sizeof(Element) == 2, u32, Element>::type;

// The layout in shared memory of a run of rows, with one free word after each group of words: the index of word i.
struct WordPlace {
  u32 factor;  // divides numbers below 2^16 by the group

  __device__ __forceinline__ explicit WordPlace(u32 group) : factor(0xffffffffu / group + 1) {}
  __device__ __forceinline__ int operator()(u32 i) const { return i + __umulhi(i, factor); }
};

}  // namespace convgrad
