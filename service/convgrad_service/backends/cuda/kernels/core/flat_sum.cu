// Adds up the partial sums of a split reduction, in the order of the splits, and finishes them,
// where results lie as partial sums do. The host's side is conv/dense_weight.py.
//
// Block: 256 threads, four neighbouring results each, so that loads and stores are 16 bytes of
// partial sums; where there are many splits, they are divided among `slices` parts of the block, whose
// sums then go through shared memory, 4 KB. Deterministic: slices follow from the splits, and are
// added in order. Relies on its launcher for the grid, ceil(results / (1024 / slices)) blocks, and for
// a number of results that is a multiple of four.
// Index limits: 64-bit throughout.
#include "core/epilogue.cuh"
#include "core/vectors.cuh"

using namespace convgrad;

struct FlatSumArgs {
  const float* partials;  // [splits][results]
  void* result;
  const void* accumulate;  // like the result, or null
  i64 results;
  float alpha;
  float beta;
  int splits;
  int slices;  // a power of two
};

extern "C" __global__ void __launch_bounds__(256)
    flat_sum(const __grid_constant__ FlatSumArgs args) {
  using T = RESULT;
  constexpr int kThreads = 256;
  __shared__ float4 of_slices[kThreads];
  const int thread = threadIdx.x, lanes = kThreads / args.slices;
  const int lane = thread % lanes, slice = thread / lanes;
  const i64 index = (static_cast<i64>(blockIdx.x) * lanes + lane) * 4;
  const bool real = index < args.results;
  const int each = (args.splits + args.slices - 1) / args.slices;
  const int first = slice * each, last = min(first + each, args.splits);
  const float* part = args.partials + index + first * args.results;
  float sum[4] = {};
  auto add = [&](const float4& four) {
    sum[0] += four.x;
    sum[1] += four.y;
    sum[2] += four.z;
    sum[3] += four.w;
  };
#pragma unroll 8
  for (int split = first; split < last && real; ++split, part += args.results) {
    add(*reinterpret_cast<const float4*>(part));
  }
  if (args.slices > 1) {
    of_slices[thread] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    __syncthreads();
    for (int other = 1; other < args.slices && slice == 0; ++other) {
      add(of_slices[other * lanes + lane]);
    }
  }
  if (slice > 0 || !real) return;
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
