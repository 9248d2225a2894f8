// wgrad of a dense convolution on Hopper, as an implicit GEMM of a single wave of tiles (TMA im2col, wgmma):
// one tile per cluster. Launched by hopper_weight_single.py. Needs sm_90a.
//
// M = channels of grad_output (y), N = column boxes (64 input channels of a tap; taps are the faster index),
// K = pixels of y in k-tiles of 64:
//   w[k, c, r] = sum over pixels (n, o) of y[n, k, o] * x[n, c, o*stride + r*dilation - pad].
// Both operands are MN-major, as in global memory.
// Grid: blocks of a cluster, column tiles, row tiles. A tile is BM x BN.
// Block: CONSUMERS warpgroups of BM / CONSUMERS rows each and two producer warps, one for y, one for x.
// Cluster: its blocks take k-tiles in turns and reduce through distributed shared memory (SplitKReduce).
// Shared memory (dynamic): 1,024 bytes of alignment; `stages` stages of BM / 64 boxes of y and BN / 64 of x;
//   partial sums; mbarriers.
// Preconditions: channels that TMA can read (rows of whole 16 bytes). Positions outside x are zeros.
// Determinism: one order of additions per result and cluster size.
// Limits: pixels below 2^31; 64-bit offsets.
#include "conv/hopper_weight_single.cuh"
#include "core/fragments.cuh"
#include "core/opaque.cuh"
#include "core/pipeline_state.cuh"
#include "core/result_run.cuh"
#include "core/split_k_reduce.cuh"
#include "ptx/warpgroup.cuh"

using namespace convgrad;

namespace {

using T = ELEMENT;
constexpr int kPixels = 64, kBoxChannels = 64, kRowBytes = 128, kMmaK = 16;
constexpr u32 kBoxBytes = kPixels * kRowBytes;
constexpr int kYBoxes = BM / kBoxChannels, kXBoxes = BN / kBoxChannels;
constexpr u32 kYBytes = kYBoxes * kBoxBytes, kXBytes = kXBoxes * kBoxBytes, kStageBytes = kYBytes + kXBytes;
constexpr int kRowBlocks = kYBoxes / CONSUMERS, kFragments = BN / 8;
constexpr int kConsumers = CONSUMERS * 128, kThreads = kConsumers + 64;
constexpr int kArgumentWords = (sizeof(HopperWeightSingleArgs) - sizeof(TensorMap) * 2) / 4 - 1;
static_assert(sizeof(T) == 2 && BM % (64 * CONSUMERS) == 0 && BN % 64 == 0, "whole boxes of 16-bit elements");
using Accumulators = float[kRowBlocks][kFragments][4];
using Reduce = SplitKReduce<kRowBlocks * kFragments, CONSUMERS * 4>;

struct SharedLayout {
  u32 ring, barriers;
  int stages;

  __device__ __forceinline__ u32 stage(int i) const { return ring + i * kStageBytes; }
  __device__ __forceinline__ u32 full_barrier(int i) const { return barriers + i * 8; }
  __device__ __forceinline__ u32 empty_barrier(int i) const { return barriers + (stages + i) * 8; }
  __device__ __forceinline__ u32 reduce_barrier() const { return barriers + 2 * stages * 8; }
};

// The number of this block's k-tiles.
__device__ __forceinline__ int steps_of(const HopperWeightSingleArgs& args, int rank) {
  return static_cast<u32>(args.steps - rank + args.cluster - 1) / static_cast<u32>(args.cluster);
}

// Loads 64 channels from `c` on of the 64 pixels from `at` on, moved by (d, h, w).
template <int kDims>
__device__ __forceinline__ void load_box(u32 to, u32 barrier, const TensorMap& map, const Pixel& at, int c, int d,
                                         int h, int w) {
  if constexpr (kDims == 1) tma_load_im2col<3>(to, map, barrier, {c, at.w, at.n}, {w});
  if constexpr (kDims == 2) tma_load_im2col<4>(to, map, barrier, {c, at.w, at.h, at.n}, {w, h});
  if constexpr (kDims == 3) tma_load_im2col<5>(to, map, barrier, {c, at.w, at.h, at.d, at.n}, {w, h, d});
}

// One thread: loads the boxes of y (kOfY) or of x of all k-tiles.
template <int kDims, bool kOfY>
__device__ __forceinline__ void produce(const HopperWeightSingleArgs& args, const SharedLayout& smem, int rank) {
  constexpr int kBoxes = kOfY ? kYBoxes : kXBoxes;
  ColumnBox boxes[kBoxes];
#pragma unroll
  for (int i = 0; i < kBoxes; ++i) {
    boxes[i] = {};
    if (kOfY) {
      boxes[i].c = blockIdx.z * BM + i * kBoxChannels;
    } else {
      boxes[i] = column_box(args, blockIdx.y * kXBoxes + i);
      boxes[i].t *= args.dilation[0], boxes[i].r *= args.dilation[1], boxes[i].s *= args.dilation[2];
    }
  }
  const int stride[3] = {args.stride[0], args.stride[1], args.stride[2]},
            pad[3] = {args.pad[0], args.pad[1], args.pad[2]};
  Walk walk(args, rank * kPixels, args.cluster * kPixels);
  PipelineState state{0, 1};
  wait_on_dependent_grids();
  const int steps = steps_of(args, rank);
#pragma unroll 1
  for (int i = 0; i < steps; ++i) {
    Pixel at = walk.at;
    if (!kOfY) at = {at.n, at.d * stride[0] - pad[0], at.h * stride[1] - pad[1], at.w * stride[2] - pad[2]};
    walk.next();
    const u32 barrier = smem.full_barrier(state.index), to = smem.stage(state.index) + (kOfY ? 0 : kYBytes);
    mbarrier_wait(smem.empty_barrier(state.index), state.parity);
    mbarrier_arrive_expect_tx(barrier, kOfY ? kYBytes : kXBytes);
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      load_box<kDims>(to + box * kBoxBytes, barrier, kOfY ? args.y_map : args.x_map, at, boxes[box].c, boxes[box].t,
                      boxes[box].r, boxes[box].s);
    }
    state.advance(smem.stages);
  }
}

template <bool kOfY>
__device__ __forceinline__ void produce_dims(const HopperWeightSingleArgs& args, const SharedLayout& smem, int rank) {
  if (args.dims == 2) {
    produce<2, kOfY>(args, smem, rank);
  } else if (args.dims == 3) {
    produce<3, kOfY>(args, smem, rank);
  } else {
    produce<1, kOfY>(args, smem, rank);
  }
}

// This warpgroup's accumulators over `steps` k-tiles.
__device__ __forceinline__ void mainloop(const SharedLayout& smem, int steps, Accumulators& accum) {
  const int first = CONSUMERS == 1 ? 0 : static_cast<int>(threadIdx.x / 128) * kRowBlocks, lane = threadIdx.x & 31;
  PipelineState state;
  int previous = -1;  // the stage that wgmmas in flight read
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    mbarrier_wait(smem.full_barrier(state.index), state.parity);
    const u64 a = mn_major_descriptor<128>(smem.stage(state.index) + first * kBoxBytes);
    const u64 b = mn_major_descriptor<128>(smem.stage(state.index) + kYBytes, kBoxBytes);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kPixels / kMmaK; ++i) {
#pragma unroll
      for (int row = 0; row < kRowBlocks; ++row) {
        wgmma<T, kMajorMn, kMajorMn>(accum[row], advance_descriptor(a, row * kBoxBytes + i * kMmaK * kRowBytes),
                                     advance_descriptor(b, i * kMmaK * kRowBytes), i > 0 || step > 0);
      }
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (previous >= 0 && lane == 0) mbarrier_arrive(smem.empty_barrier(previous));
    previous = state.index;
    state.advance(smem.stages);
  }
  wgmma_wait<0>();
  fence_accumulators(accum);
}

// Finishes and stores the fragments that this block owns.
__device__ __forceinline__ void store_owned(const HopperWeightSingleArgs& args, const Reduce& reduce) {
  const int warp = threadIdx.x / 32, first_row = blockIdx.z * BM + warp / 4 * (kRowBlocks * 64) + warp % 4 * 16;
#pragma unroll 1
  for (int i = threadIdx.x & 31; i < reduce.fragment_count() * 8; i += 32) {
    const int row = i & 7, fragment = i >> 3, f = reduce.first_fragment() + fragment, column = f % kFragments * 8;
    float sums[2][8];
    reduce.load_rows(fragment, row, sums);
    const ColumnBox box = column_box(args, blockIdx.y * kXBoxes + column / kBoxChannels);
    const int c = box.c + column % kBoxChannels, left = args.in_channels - c;
    if (left <= 0) continue;
    const i64 at = c * args.w_stride[2] + box.t * args.w_stride[3] + box.r * args.w_stride[4] + box.s * args.w_stride[5];
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const int k = first_row + f / kFragments * 64 + row + half * 8;
      float one[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) one[e] = half == 0 ? sums[0][e] : sums[1][e];
      if (k < args.out_channels) store_run<T, 8>(args, at + k * args.w_stride[1], args.w_stride[2], left, 0, one);
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, CONSUMERS == 1 ? 2 : 1)
    hopper_weight_single(const __grid_constant__ HopperWeightSingleArgs args) {
  extern __shared__ uint4 shared[];
  const int warp = threadIdx.x / 32;
  // Each warp prefetches a part of the kernel parameters into the constant cache.
  const int prefetched = reinterpret_cast<const int*>(&args.dims)[min(warp * 16, kArgumentWords)];
  const u32 padding = -shared_address(shared) & 1023;
  SharedLayout smem = {shared_address(shared) + padding, 0, args.stages};
  const u32 reduce_at = smem.stage(args.stages);
  smem.barriers = reduce_at + args.reduce_bytes;
  const int rank = cluster_rank();
  if (warp == CONSUMERS * 4 + 1 && elect_one()) prefetch_tensor_map(args.x_map), prefetch_tensor_map(args.y_map);
  if (warp == CONSUMERS * 4 && elect_one()) {
    for (int i = 0; i < smem.stages; ++i) {
      mbarrier_init(smem.full_barrier(i), 2);
      mbarrier_init(smem.empty_barrier(i), CONSUMERS * 4);
    }
    fence_mbarrier_init();
    fence_proxy_async();
  }
  const Reduce reduce(reinterpret_cast<char*>(shared) + padding + (reduce_at - smem.ring), smem.reduce_barrier(), rank,
                      args.cluster, args.owned);
  if (threadIdx.x == 0) reduce.prepare();
  opaque_use(prefetched);
  __syncwarp();
  __syncthreads();
  cluster_arrive();
  if (warp == CONSUMERS * 4) {
    if (elect_one()) produce_dims<true>(args, smem, rank);
    __syncwarp();
    cluster_wait();
  } else if (warp == CONSUMERS * 4 + 1) {
    if (elect_one()) produce_dims<false>(args, smem, rank);
    __syncwarp();
    cluster_wait();
  } else {
    wait_on_dependent_grids();
    const int steps = steps_of(args, rank);
    Accumulators accum;
    mainloop(smem, steps, accum);
    if (steps == 0) clear(accum);
    cluster_wait();
    reduce.exchange(accum);
    store_owned(args, reduce);
  }
}
