// Copies a box of elements from one order in memory to another.
//
// Block: 256 threads, one element each; the box's last axis runs along neighbouring threads. Shared
// memory: none. Deterministic. Where a bound says that the source has no element, the target gets
// zero (`pads`) or is left alone.
// Relies on its launcher for the grid: ceil(elements / 256) blocks.
// Index limits: 64-bit throughout.
#include "elements.cuh"

using namespace convgrad;

struct StridedCopyArgs {
  const void* source;
  void* target;
  i64 elements;
  i64 extent[8];  // leading ones where there are fewer axes
  i64 source_stride[8];
  i64 target_stride[8];
  i64 limit[2];  // at[outer] * extent[inner] + at[inner] must stay below it
  int outer[2];  // negative where there is no bound
  int inner[2];
  int pads;
};

extern "C" __global__ void __launch_bounds__(256)
    strided_copy(const __grid_constant__ StridedCopyArgs args) {
  using T = ELEMENT;
  const i64 index = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x;
  if (index >= args.elements) return;
  i64 rest = index, from = 0, to = 0;
  i64 counted[2] = {0, 0};
#pragma unroll
  for (int axis = 7; axis >= 0; --axis) {
    i64 at;
    rest = divide(rest, args.extent[axis], at);
    from += at * args.source_stride[axis];
    to += at * args.target_stride[axis];
#pragma unroll
    for (int bound = 0; bound < 2; ++bound) {
      if (axis == args.inner[bound]) counted[bound] += at;
      if (axis == args.outer[bound]) counted[bound] += at * args.extent[args.inner[bound]];
    }
  }
  bool real = true;
#pragma unroll
  for (int bound = 0; bound < 2; ++bound) {
    real &= args.outer[bound] < 0 || counted[bound] < args.limit[bound];
  }
  T value = {};
  if (real) value = static_cast<const T*>(args.source)[from];
  if (real || args.pads) static_cast<T*>(args.target)[to] = value;
}
