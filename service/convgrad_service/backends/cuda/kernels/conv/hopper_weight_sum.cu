// Second stage of hopper_weight.cu's split-K: reduces its partial sums in the order of the shares and applies
// the epilogue. Launched by hopper_weight.py.
//
// Block: 256 threads, for consecutive vectors of one tile (blockIdx.y), one box of its columns and one
//   warpgroup's 64 rows. A vector is four consecutive partial sums as one thread of hopper_weight.cu held
//   them; a thread reduces four vectors, to keep enough loads in flight. The shares are divided among `slices`
//   groups of threads.
// Shared memory: 16 KB, for the slices' sums.
// Preconditions: `slices` is a power of two, at most 8, and such that a block's vectors are in one box.
// Determinism: `slices` depends on the problem only; shares and slices are added in order.
// Limits: 64-bit indices throughout.
#include "conv/hopper_weight.cuh"
#include "ptx/pdl.cuh"

using namespace convgrad;

struct WeightSumArgs {
  WeightResult result;
  int slices;
};

extern "C" __global__ void __launch_bounds__(256, 3)
    hopper_weight_sum(const __grid_constant__ WeightSumArgs args) {
  constexpr int kThreads = 256, kEach = 4;
  __shared__ float4 of_slices[kEach][kThreads];
  const WeightResult& of = args.result;
  const int thread = threadIdx.x, lanes = kThreads / args.slices;
  const int lane = thread & (lanes - 1), slice = thread / lanes;

  // The box: within a warpgroup's rows, products, and column blocks of a product.
  const int box_vectors = of.channels / 8 * 128, blocks = box_vectors / (lanes * kEach);
  const int in_tile = blockIdx.x / blocks, part = blockIdx.x - in_tile * blocks;
  const int beside = of.fragments * 8 / of.channels;
  const int outer = in_tile / beside, block = in_tile - outer * beside;
  const int row_of = outer / of.products, product = outer - row_of * of.products;
  const int warpgroup = row_of / of.rows, row = row_of - warpgroup * of.rows;
  const Own own(of, of.whole + blockIdx.y, warpgroup, 0);
  const Box box = own.box(of, product, block);
  const int tiles = of.row_tiles * of.column_tiles - of.whole;
  const int vectors = of.warpgroups * of.rows * of.products * of.fragments * 128;
  const int first_vector = part * lanes * kEach + lane;

  const int each = (of.shares + args.slices - 1) / args.slices;
  const int first = slice * each, last = box.real ? min(first + each, of.shares) : 0;
  const i64 share_size = static_cast<i64>(tiles) * vectors;
  const float4* from = reinterpret_cast<const float4*>(of.partials) + first * share_size +
                       static_cast<i64>(blockIdx.y) * vectors + in_tile * box_vectors +
                       first_vector;
  wait_on_dependent_grids();
  float sum[kEach][4] = {};
  auto add = [&](int v, const float4& four) {
    sum[v][0] += four.x;
    sum[v][1] += four.y;
    sum[v][2] += four.z;
    sum[v][3] += four.w;
  };
#pragma unroll 4
  for (int share = first; share < last; ++share, from += share_size) {
#pragma unroll
    for (int v = 0; v < kEach; ++v) add(v, from[v * lanes]);
  }
  if (args.slices > 1) {
#pragma unroll
    for (int v = 0; v < kEach; ++v) {
      of_slices[v][thread] = make_float4(sum[v][0], sum[v][1], sum[v][2], sum[v][3]);
    }
    __syncthreads();
    for (int other = 1; other < args.slices && slice == 0; ++other) {
#pragma unroll
      for (int v = 0; v < kEach; ++v) add(v, of_slices[v][other * lanes + lane]);
    }
  }
  if (slice > 0 || !box.real) return;

  // Offset of a result: vector v, the upper or lower of its rows, its first or second channel.
  const i64 rows_apart = 8 * of.w_stride[1];
  auto place = [&](int v, Box& at) {
    const int index = first_vector + v * lanes, owner = index & 127;
    at.c += index / 128 * 8 + owner % 4 * 2;
    return own.k + row * 64 + owner / 32 * 16 + owner % 32 / 4;
  };
#pragma unroll
  for (int v = 0; v < kEach; ++v) {
    Box at = box;
    const int k = place(v, at);
    if (at.c >= of.in_channels) continue;
    const bool both = at.c + 1 < of.in_channels;
    const i64 to = result_at(of, own.group, k, at);
    if (k < of.out_channels) put_two<RESULT>(of, to, sum[v][0], sum[v][1], both);
    if (k + 8 < of.out_channels) {
      put_two<RESULT>(of, to + rows_apart, sum[v][2], sum[v][3], both);
    }
  }
}
