// Second stage of split-K, the general form: reduces [splits][results] partial sums and applies the
// epilogue. Launched by split_sum.py.
//
// Grid: blocks of 256 threads, in SLICES slices, with as many consecutive results; results are indexed
// row-major by `extent`, six dimensions. A thread adds every SLICES-th split of one result.
// Shared memory: the slices' sums.
// Determinism: splits of a slice, then slices, are added in order.
// Limits: 64-bit indices throughout.
#include "core/epilogue.cuh"
#include "ptx/pdl.cuh"

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
  constexpr int kResults = 256 / SLICES;
  const int own = threadIdx.x % kResults, slice = threadIdx.x / kResults;
  const i64 index = static_cast<i64>(blockIdx.x) * kResults + own;
  // Where the result is: it is found while the partial sums are still being stored.
  i64 rest = index, to = 0, old = 0;
  for (int dim = 5; dim >= 0; --dim) {
    i64 at;
    rest = divide(rest, args.extent[dim], at);
    to += at * args.stride[dim];
    old += at * args.accumulate_stride[dim];
  }
  const i64 step = SLICES * args.results;
  const S* part = static_cast<const S*>(args.partials) + slice * args.results + index;
  S sum = 0;
  wait_on_dependent_grids();
  if (index < args.results) {
#pragma unroll 8
    for (int split = slice; split < args.splits; split += SLICES, part += step) sum += *part;
  }
  if constexpr (SLICES > 1) {
    __shared__ S sums[SLICES][kResults];
    sums[slice][own] = sum;
    __syncthreads();
    if (slice == 0) {
#pragma unroll
      for (int i = 1; i < SLICES; ++i) sum += sums[i][own];
    }
  }
  if (slice > 0 || index >= args.results) return;
  const T* accumulate = static_cast<const T*>(args.accumulate);
  if (accumulate != nullptr) accumulate += old;
  const T* const no_bias = nullptr;
  const S alpha = S(args.alpha), beta = S(args.beta);
  const ElementAccumulator<T> finished = finish<T, S>(sum, alpha, beta, accumulate, no_bias, kNone);
  static_cast<T*>(args.result)[to] = narrow<T>(finished);
}
