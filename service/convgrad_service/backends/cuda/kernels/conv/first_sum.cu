// Second stage of split-K for few results and many splits: reduces partial sums and applies the epilogue.
// Launched by first_sum.py.
//
// Grid: ceil(results / 32) blocks of WARPS warps: 32 consecutive results; each warp adds every WARPS-th split.
// Shared memory: the warps' sums.
// Determinism: splits of a warp, then warps, are added in order.
// Limits: results below 2^31; 64-bit offsets.
#include "core/epilogue.cuh"
#include "ptx/pdl.cuh"

using namespace convgrad;

struct FirstSumArgs {
  const float* partials;   // [splits][results], results in the order of extent
  void* result;
  const void* accumulate;  // like the result, or null
  i64 stride[5];           // of the result
  int extent[5];
  int results;
  int splits;
  float alpha;
  float beta;
};

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    first_sum(const __grid_constant__ FirstSumArgs args) {
  using T = RESULT;
  __shared__ float sums[WARPS][32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int index = blockIdx.x * 32 + lane;
  float sum = 0;
  wait_on_dependent_grids();
  if (index < args.results) {
    const float* part = args.partials + static_cast<i64>(warp) * args.results + index;
    const i64 step = static_cast<i64>(WARPS) * args.results;
#pragma unroll 16
    for (int split = warp; split < args.splits; split += WARPS, part += step) sum += *part;
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || index >= args.results) return;
#pragma unroll
  for (int i = 1; i < WARPS; ++i) sum += sums[i][lane];
  i64 at = 0;
  int rest = index;
#pragma unroll
  for (int dim = 4; dim >= 0; --dim) {
    const int outer = rest / args.extent[dim];
    at += (rest - outer * args.extent[dim]) * args.stride[dim];
    rest = outer;
  }
  static_cast<T*>(args.result)[at] = narrow<T>(finish_at<T>(args, sum, at));
}
