// Second stage of split-K for few results and many splits: reduces [splits][results] float32 partial sums
// and applies the epilogue. Launched by lane_sum.py.
//
// Grid: ceil(results * lanes / 1024) blocks of 256 threads: `lanes` (a power of two) threads for each four
// consecutive results. Lane l adds splits l, l + lanes, ...; a tree reduction then adds the lanes.
// Shared memory: 4 KB, four sums per thread.
// Preconditions: results % 4 == 0.
// Determinism: the order of additions depends on `splits` and `lanes` only.
// Limits: 64-bit indices throughout.
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

// Adds the element offsets of result `index` in the result and in `accumulate`.
__device__ __forceinline__ void result_offsets(const LaneSumArgs& args, i64 index, i64& to, i64& old) {
  const bool fits_u32 = args.results < (i64{1} << 32);
#pragma unroll 1
  for (int dim = 5; dim >= 0; --dim) {
    i64 at;
    if (fits_u32) {
      const u32 index32 = static_cast<u32>(index), quotient = index32 / static_cast<u32>(args.extent[dim]);
      at = index32 - quotient * static_cast<u32>(args.extent[dim]);
      index = quotient;
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
  __shared__ float4 lane_sums[256];
  const int thread = threadIdx.x, quads = 256 / args.lanes;
  // Consecutive threads read consecutive results.
  const int lane = thread / quads, quad = thread - lane * quads;
  const i64 index = (static_cast<i64>(blockIdx.x) * quads + quad) * 4;
  float4 sum = make_float4(0, 0, 0, 0);
  wait_on_dependent_grids();
  if (index < args.results) {
    const float* part = args.partials + lane * args.results + index;
#pragma unroll 4
    for (int split = lane; split < args.splits; split += args.lanes) {
      const float4 other = *reinterpret_cast<const float4*>(part);
      sum.x += other.x;
      sum.y += other.y;
      sum.z += other.z;
      sum.w += other.w;
      part += args.lanes * args.results;
    }
  }
  lane_sums[thread] = sum;
  for (int half = args.lanes / 2; half > 0; half /= 2) {
    __syncthreads();
    if (lane < half) {
      const float4 other = lane_sums[thread + half * quads];
      sum.x += other.x;
      sum.y += other.y;
      sum.z += other.z;
      sum.w += other.w;
      lane_sums[thread] = sum;
    }
  }
  if (lane != 0 || index >= args.results) return;
  // Four consecutive results usually differ in the last coordinate only.
  const bool same_row = args.extent[5] % 4 == 0;
  const float value[4] = {sum.x, sum.y, sum.z, sum.w};
  i64 to = 0, old = 0;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if (same_row && e > 0) {
      to += args.stride[5];
      old += args.accumulate_stride[5];
    } else {
      to = old = 0;
      result_offsets(args, index + e, to, old);
    }
    const T* accumulate = static_cast<const T*>(args.accumulate);
    if (accumulate != nullptr) accumulate += old;
    const T* const no_bias = nullptr;
    const float finished =
        finish<T, float>(value[e], args.alpha, args.beta, accumulate, no_bias, kNone);
    static_cast<T*>(args.result)[to] = narrow<T>(finished);
  }
}
