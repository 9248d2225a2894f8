// Adds up the partial sums of a split reduction, in the order of the splits, and finishes them,
// where results lie as partial sums do. The host's side is dense_weight.py.
//
// Block: 128 threads, four neighbouring results each, so that loads and stores are 16 bytes of
// partial sums. Shared memory: none. Deterministic. Relies on its launcher for the grid,
// ceil(results / 512) blocks, and for a number of results that is a multiple of four.
// Index limits: 64-bit throughout.
#include "epilogue.cuh"
#include "vectors.cuh"

using namespace convgrad;

struct FlatSumArgs {
  const float* partials;  // [splits][results]
  void* result;
  const void* accumulate;  // like the result, or null
  i64 results;
  float alpha;
  float beta;
  int splits;
};

extern "C" __global__ void __launch_bounds__(128)
    flat_sum(const __grid_constant__ FlatSumArgs args) {
  using T = RESULT;
  const i64 index = (static_cast<i64>(blockIdx.x) * 128 + threadIdx.x) * 4;
  if (index >= args.results) return;
  const float* part = args.partials + index;
  float sum[4] = {};
#pragma unroll 8
  for (int split = 0; split < args.splits; ++split, part += args.results) {
    const float4 four = *reinterpret_cast<const float4*>(part);
    sum[0] += four.x;
    sum[1] += four.y;
    sum[2] += four.z;
    sum[3] += four.w;
  }
  auto old = Vector<T, 4>::zero();
  if (args.accumulate != nullptr) {
    old = Vector<T, 4>::load(static_cast<const T*>(args.accumulate) + index);
  }
  Vector<T, 4> done;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    float value = sum[e] * args.alpha;
    if (args.accumulate != nullptr) value += args.beta * widen(old.at[e]);
    done.at[e] = narrow<T>(value);
  }
  done.store(static_cast<T*>(args.result) + index);
}
