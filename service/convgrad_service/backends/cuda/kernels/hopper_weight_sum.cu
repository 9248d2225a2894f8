// Adds up the partial sums of hopper_weight.cu, in the order of its shares, and finishes them.
// The host's side is hopper_weight.py.
//
// Block: 256 threads for a part of the sums of one tile, blockIdx.y. A thread adds four sums at a
// time, which are side by side among partial sums as one thread had them; the shares are divided
// among `slices` parts of the block, whose sums go through shared memory, 4 KB.
// Relies on its launcher for the grid, and for slices that divide 256.
// Deterministic: slices follow from the shares, and are added in order.
// Index limits: 64-bit throughout.
#include "hopper.cuh"
#include "hopper_weight.cuh"

using namespace convgrad;

struct WeightSumArgs {
  WeightResult result;
  int slices;
};

extern "C" __global__ void __launch_bounds__(256)
    hopper_weight_sum(const __grid_constant__ WeightSumArgs args) {
  constexpr int kThreads = 256;
  __shared__ float4 of_slices[kThreads];
  const WeightResult& of = args.result;
  const int thread = threadIdx.x, lanes = kThreads / args.slices;
  const int lane = thread % lanes, slice = thread / lanes;
  const int fragments = of.rows * of.products * of.fragments;
  const int vectors = of.warpgroups * fragments * 128;
  const int tiles = of.row_tiles * of.column_tiles - of.whole;
  const int index = blockIdx.x * lanes + lane;
  const bool real = index < vectors;
  const int each = (of.shares + args.slices - 1) / args.slices;
  const int first = slice * each, last = min(first + each, of.shares);
  const i64 share_size = static_cast<i64>(tiles) * vectors;
  const float4* part = reinterpret_cast<const float4*>(of.partials) + first * share_size +
                       static_cast<i64>(blockIdx.y) * vectors + index;
  wait_for_previous();
  float sum[4] = {};
  auto add = [&](const float4& four) {
    sum[0] += four.x;
    sum[1] += four.y;
    sum[2] += four.z;
    sum[3] += four.w;
  };
#pragma unroll 8
  for (int share = first; share < last && real; ++share, part += share_size) add(*part);
  if (args.slices > 1) {
    of_slices[thread] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    __syncthreads();
    for (int other = 1; other < args.slices && slice == 0; ++other) {
      add(of_slices[other * lanes + lane]);
    }
  }
  if (slice > 0 || !real) return;

  const int owner = index % 128, rest = index / 128, warpgroup = rest / fragments;
  const int fragment = rest - warpgroup * fragments, outer = fragment / of.fragments;
  const int in_product = fragment - outer * of.fragments, row = outer / of.products;
  const int in_box = of.channels / 8, block = in_product / in_box;
  const Own own(of, of.whole + blockIdx.y, warpgroup, owner);
  Box box = own.box(of, outer - row * of.products, block);
  box.c += (in_product - block * in_box) * 8 + own.column;
  if (!box.real || box.c >= of.in_channels) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int k = own.k + row * 64 + half * 8;
    if (k >= of.out_channels) continue;
    put_two<RESULT>(of, result_at(of, k, box), sum[half * 2], sum[half * 2 + 1],
                    box.c + 1 < of.in_channels);
  }
}
