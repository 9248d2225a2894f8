// Second stage of split-K, the general form: reduces [splits][results] partial sums in the order of the
// splits and applies the epilogue. Launched by split_sum.py.
//
// Grid: ceil(results / 256) blocks of 256 threads, one result each; results are indexed row-major by
// `extent`, six dimensions.
// Shared memory: none.
// Determinism: splits are added in order.
// Limits: 64-bit indices throughout.
#include "core/epilogue.cuh"

using namespace convgrad;

struct SplitSumArgs {
  const void* partials;  // [splits][results], of the accumulator type
  void* result;
  const void* accumulate;  // like the result, or null
  i64 extent[6];
  i64 stride[6];  // of the result, in elements
  i64 accumulate_stride[6];
  i64 results;
  double alpha;
  double beta;
  int splits;
};

extern "C" __global__ void __launch_bounds__(256)
    split_sum(const __grid_constant__ SplitSumArgs args) {
  using S = SUM;
  using T = RESULT;
  const i64 index = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x;
  if (index >= args.results) return;
  const S* part = static_cast<const S*>(args.partials) + index;
  S sum = 0;
#pragma unroll 8
  for (int split = 0; split < args.splits; ++split) sum += part[split * args.results];
  i64 rest = index, to = 0, old = 0;
  for (int dim = 5; dim >= 0; --dim) {
    i64 at;
    rest = divide(rest, args.extent[dim], at);
    to += at * args.stride[dim];
    old += at * args.accumulate_stride[dim];
  }
  const ElementAccumulator<T> finished = finish_at<T>(args, sum, old);
  static_cast<T*>(args.result)[to] = narrow<T>(finished);
}
