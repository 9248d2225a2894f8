// Copies a box of elements between any strides. Launched by strided_copy.py.
//
// Block: 256 threads, each of which copies one run of elements (a short last axis, or one element);
// adjacent threads have adjacent runs along the last remaining axis. Shared memory: none.
// Deterministic. Past a bound, where the source has no element, the target gets zero (`pads`) or is
// not written.
// Grid: ceil(runs / 256) blocks.
// Index limits: 64-bit throughout.
#include "core/elements.cuh"

using namespace convgrad;

struct StridedCopyArgs {
  const void* source;
  void* target;
  i64 runs;
  i64 extent[8];  // missing leading axes are 1
  i64 source_stride[8];
  i64 target_stride[8];
  i64 limit[2];  // at[outer] * extent[inner] + at[inner] must stay below it
  int outer[2];  // negative if there is no bound
  int inner[2];
  int pads;
  int run;  // elements; 1 if there are bounds
  i64 run_source, run_target;  // from one element to the next
};

extern "C" __global__ void __launch_bounds__(256)
    strided_copy(const __grid_constant__ StridedCopyArgs args) {
  using T = ELEMENT;
  const i64 index = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x;
  if (index >= args.runs) return;
  i64 rest = index, from = 0, to = 0;
  i64 counted[2] = {0, 0};
  const bool few = args.runs < (i64{1} << 32);
#pragma unroll
  for (int axis = 7; axis >= 0; --axis) {
    if (args.extent[axis] == 1) continue;
    i64 at;
    if (few) {
      const u32 whole = static_cast<u32>(rest), extent = static_cast<u32>(args.extent[axis]);
      const u32 above = whole / extent;
      at = whole - above * extent;
      rest = above;
    } else {
      rest = divide(rest, args.extent[axis], at);
    }
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
  for (int i = 0; i < args.run; ++i) {
    T value = {};
    if (real) value = static_cast<const T*>(args.source)[from];
    if (real || args.pads) static_cast<T*>(args.target)[to] = value;
    from += args.run_source;
    to += args.run_target;
  }
}
