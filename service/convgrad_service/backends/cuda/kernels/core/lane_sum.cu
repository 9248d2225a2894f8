// Adds up the partial sums of a split reduction, several at a time, and finishes them. The host's
// side is lane_sum.py.
//
// Block: 256 threads: `lanes` (a power of two) for each four neighbouring results. Lane l adds up
// splits l, l + lanes, ..., then half of the lanes add the other half's sums to theirs, and so on.
// Shared memory: a sum of four results for each thread. Deterministic: one order of additions for a
// number of splits. Relies on its launcher for the grid: ceil(results * lanes / 1024) blocks.
// Index limits: 64-bit throughout.
#include "core/epilogue.cuh"
#include "ptx/pdl.cuh"

using namespace convgrad;

struct LaneSumArgs {
  const float* partials;  // [splits][results], and a multiple of four results
  void* result;
  const void* accumulate;  // like the result, or null
  i64 extent[6];           // of the results, in the order of the partial sums
  i64 stride[6];           // of the result, in elements
  i64 accumulate_stride[6];
  i64 results;
  float alpha;
  float beta;
  int splits;
  int lanes;
};

// Adds to the offsets of a result, and of what is accumulated there, what its digits make.
__device__ __forceinline__ void place_of(const LaneSumArgs& args, i64 index, i64& to, i64& old) {
  const bool few = args.results < (i64{1} << 32);
#pragma unroll 1
  for (int dim = 5; dim >= 0; --dim) {
    i64 at;
    if (few) {
      const u32 whole = static_cast<u32>(index), above = whole / static_cast<u32>(args.extent[dim]);
      at = whole - above * static_cast<u32>(args.extent[dim]);
      index = above;
    } else {
      index = divide(index, args.extent[dim], at);
    }
    to += at * args.stride[dim];
    old += at * args.accumulate_stride[dim];
  }
}

extern "C" __global__ void __launch_bounds__(256)
    lane_sum(const __grid_constant__ LaneSumArgs args) {
  using T = RESULT;
  __shared__ float4 slab[256];
  const int thread = threadIdx.x, fours = 256 / args.lanes;
  // Neighbouring threads read neighbouring results.
  const int lane = thread / fours, four = thread - lane * fours;
  const i64 index = (static_cast<i64>(blockIdx.x) * fours + four) * 4;
  float4 sum = make_float4(0, 0, 0, 0);
  wait_on_dependent_grids();
  if (index < args.results) {
    const float* part = args.partials + lane * args.results + index;
#pragma unroll 4
    for (int split = lane; split < args.splits; split += args.lanes) {
      const float4 more = *reinterpret_cast<const float4*>(part);
      sum.x += more.x;
      sum.y += more.y;
      sum.z += more.z;
      sum.w += more.w;
      part += args.lanes * args.results;
    }
  }
  slab[thread] = sum;
  for (int others = args.lanes / 2; others > 0; others /= 2) {
    __syncthreads();
    if (lane < others) {
      const float4 more = slab[thread + others * fours];
      sum.x += more.x;
      sum.y += more.y;
      sum.z += more.z;
      sum.w += more.w;
      slab[thread] = sum;
    }
  }
  if (lane != 0 || index >= args.results) return;
  // Four neighbours mostly differ in the last digit alone.
  const bool together = args.extent[5] % 4 == 0;
  const float value[4] = {sum.x, sum.y, sum.z, sum.w};
  i64 to = 0, old = 0;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if (together && e > 0) {
      to += args.stride[5];
      old += args.accumulate_stride[5];
    } else {
      to = old = 0;
      place_of(args, index + e, to, old);
    }
    const T* accumulate = static_cast<const T*>(args.accumulate);
    if (accumulate != nullptr) accumulate += old;
    const T* const no_bias = nullptr;
    const float done =
        finish<T, float>(value[e], args.alpha, args.beta, accumulate, no_bias, kNone);
    static_cast<T*>(args.result)[to] = narrow<T>(done);
  }
}
