// Second stage of split-K for a result with the partial sums' layout: reduces [splits][results] float32
// partial sums and applies the epilogue. Launched by conv/dense_weight.py.
//
// Grid: ceil(results / (1024 / slices)) blocks of 256 threads, four consecutive results per thread (16-byte
// loads of partial sums). With many splits, `slices` groups of threads reduce a range of splits each.
// Shared memory: 4 KB, for the slices' sums.
// Preconditions: results % 4 == 0.
// Determinism: `slices` depends on `splits` only; splits and slices are added in order.
// Limits: 64-bit indices throughout.
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
  __shared__ float4 slice_sums[kThreads];
  const int thread = threadIdx.x, lanes = kThreads / args.slices;
  const int lane = thread % lanes, slice = thread / lanes;
  const i64 index = (static_cast<i64>(blockIdx.x) * lanes + lane) * 4;
  const bool in_range = index < args.results;
  const int splits_per_slice = (args.splits + args.slices - 1) / args.slices;
  const int first = slice * splits_per_slice, last = min(first + splits_per_slice, args.splits);
  const float* part = args.partials + index + first * args.results;
  float sum[4] = {};
  auto add = [&](const float4& four) {
    sum[0] += four.x;
    sum[1] += four.y;
    sum[2] += four.z;
    sum[3] += four.w;
  };
#pragma unroll 8
  for (int split = first; split < last && in_range; ++split, part += args.results) {
    add(*reinterpret_cast<const float4*>(part));
  }
  if (args.slices > 1) {
    slice_sums[thread] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    __syncthreads();
    for (int other = 1; other < args.slices && slice == 0; ++other) {
      add(slice_sums[other * lanes + lane]);
    }
  }
  if (slice > 0 || !in_range) return;
  auto old = Vector<T, 4>::zero();
  if (args.accumulate != nullptr) {
    old = Vector<T, 4>::load(static_cast<const T*>(args.accumulate) + index);
  }
  Vector<T, 4> finished;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    float value = sum[e] * args.alpha;
    if (args.accumulate != nullptr) value += args.beta * widen(old.at[e]);
    finished.at[e] = narrow<T>(value);
  }
  finished.store(static_cast<T*>(args.result) + index);
}
