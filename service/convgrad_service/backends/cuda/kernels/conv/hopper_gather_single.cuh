// hopper_gather.cu with SINGLE: few tiles, one per block, or per cluster whose blocks split K.
//
// The GEMM, its phases and taps are the same. For few tiles, a scheduler would delay the first loads; here
// producers compute the block's tile themselves.
// Grid: blocks that split K, column tiles, row tiles of all phases.
// Block: CONSUMERS warpgroups of BM / CONSUMERS pixels each and two producer warps, one for source pixels
//   (im2col), one for weights. Both load the first k-tile before the first lists the taps that the tile reads
//   inside the source: the others are skipped, except in the first k-tile.
// TAPS > 1: a kernel row has TAPS taps, and the phase is the only one. A k-tile is a chunk of channels of all
//   of them: pixels are loaded once, with up to eight more, and each tap reads them from a different row on.
//   Rows of pixels extend beyond the result's by as many (`is_result`).
// Cluster: if there are several blocks, they divide the k-tiles of one tile and reduce through distributed shared memory
//   (SplitKReduce); all tiles of a phase are split at the same k-tiles, whatever taps they skip.
// Shared memory (dynamic): 1,024 bytes of alignment; `stages` stages of rows of 128 bytes, of pixels and of
//   weights (boxes of 64); partial sums (clusters) or 8 KB of staging per warpgroup; mbarriers: full and empty per
//   stage, of the reduction, of the list; the list of taps.
// Preconditions: at most 128 taps of a phase.
// Determinism: one order of additions per result, whatever the tile shape and TAPS; of clusters, one for
//   each number of blocks and TAPS.
#pragma once

#include "conv/hopper_gather_parts.cuh"
#include "conv/hopper_gather_single_copies.cuh"
#include "core/opaque.cuh"

#if SINGLE
namespace convgrad {
namespace {

// This warpgroup's accumulators over `steps` k-tiles, of which the first tap of a row starts at pixel `first_shift`.
__device__ __forceinline__ void mainloop(const HopperGatherArgs& args, const SharedLayout& smem, int steps,
                                         int first_shift, Accumulators& accum) {
  const int first_row = CONSUMERS == 1 ? 0 : static_cast<int>(threadIdx.x / 128) * kWarpgroupRows;
  const int lane = threadIdx.x & 31;
  PipelineState state;
#if PARTS > 1
  const float unscale = *args.unscale;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    int stages[PARTS];
#pragma unroll
    for (int part = PARTS - 1; part >= 0; --part) {
      mbarrier_wait(smem.full_barrier(state.index), state.parity);
      stages[part] = state.index;
      state.advance(smem.stages);
    }
    multiply_parts(
        [&](Accumulators& to, int of_a, int of_b, int add) {
          issue_k_tile<kMmasK>(to, smem.stage(stages[of_a]) + first_row * kRowBytes, smem.stage(stages[of_b]) + kABytes, add);
        },
        [&](int part) {
          if (lane == 0) mbarrier_arrive(smem.empty_barrier(stages[part]));
        },
        unscale, accum);
  }
#else
  const int shift = args.x_tap[2];
  int previous = -1;  // the stage that wgmmas in flight read
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    mbarrier_wait(smem.full_barrier(state.index), state.parity);
    const u32 rows = smem.stage(state.index) + first_row * kRowBytes, weights = smem.stage(state.index) + kABytes;
    wgmma_fence();
#pragma unroll
    for (int tap = 0; tap < TAPS; ++tap) {
      const u32 at = TAPS > 1 ? rows + (first_shift + tap * shift) * kRowBytes : rows, to = weights + tap * kBBytes;
      issue_k_tile<kMmasK>(accum, at, to, tap > 0 || step > 0);
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (previous >= 0 && lane == 0) mbarrier_arrive(smem.empty_barrier(previous));
    previous = state.index;
    state.advance(smem.stages);
  }
  wgmma_wait<0>();
  fence_accumulators(accum);
#endif
}

// Where the results of this warpgroup lie.
struct TileRows : Results<RESULT, kMmasM, kFragmentsN> {
  __device__ __forceinline__ TileRows(const HopperGatherArgs& args, const GatherTile& tile, u32 staging)
      : Results(args, of_warpgroup(tile), staging + threadIdx.x / 128 * kStagingBytes) {}
  __device__ __forceinline__ static GatherTile of_warpgroup(GatherTile tile) {
    tile.first_pixel += threadIdx.x / 128 * kWarpgroupRows;
    return tile;
  }
};

// Warp: finishes and stores the fragments that this block owns.
__device__ __forceinline__ void store_owned(const TileRows& tile, const Reduce& reduce) {
#pragma unroll 1
  for (int first = 0; first < reduce.fragment_count(); first += 4) {
    const int fragment = first + tile.lane / 8, row = tile.lane % 8, f = reduce.first_fragment() + fragment;
    const int part = kMmasM == 1 ? 0 : f / kFragmentsN, channel = tile.first_channel + f % kFragmentsN * 8;
    const bool own = fragment < reduce.fragment_count() && channel < tile.end_channel;
    float sums[2][8];
    if (own) reduce.load_rows(fragment, row, sums);
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const i64 at = tile.row_of(part, row + half * 8);
      float one[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) one[e] = half == 0 ? sums[0][e] : sums[1][e];
      if (own && at >= 0) tile.store_eight(at + channel * tile.args.y_stride[2], channel, one);
    }
  }
}

}  // namespace
}  // namespace convgrad

using namespace convgrad;

extern "C" __global__ void __launch_bounds__(kThreads, CONSUMERS == 1 ? 2 : 1)
    hopper_gather(const __grid_constant__ HopperGatherArgs args) {
  extern __shared__ uint4 shared[];
  const int warp = threadIdx.x / 32;
  // Each warp prefetches a part of the kernel parameters into the constant cache.
  const int prefetched = reinterpret_cast<const int*>(&args.y)[min(warp * 16, kArgumentWords)];
  SharedLayout smem;
  const u32 padding = -shared_address(shared) & 1023;
  smem.ring = shared_address(shared) + padding;
  smem.base = reinterpret_cast<char*>(shared) + padding;
  smem.stages = args.stages;
  smem.reduce = smem.stage(args.stages);
  smem.barriers = smem.reduce + args.reduce_bytes;
  if (warp == CONSUMERS * 4 + 1 && elect_one()) {
    prefetch_tensor_map(args.weight);
    if (MAPS == 1) prefetch_tensor_map(args.source[0]);
  }
  if (warp == CONSUMERS * 4 && elect_one()) {
    for (int i = 0; i < smem.stages; ++i) {
      mbarrier_init(smem.full_barrier(i), 2);
      mbarrier_init(smem.empty_barrier(i), CONSUMERS * 4);
    }
    mbarrier_init(smem.list_barrier(), 1);
    fence_mbarrier_init();
    fence_proxy_async();
  }
  const bool split = args.cluster > 1;
  const Reduce reduce(smem.pointer(smem.reduce), smem.reduce_barrier(), split ? cluster_rank() : 0, args.cluster,
                      args.owned);
  if (split && threadIdx.x == 0) reduce.prepare();
  opaque_use(prefetched);
  sync_block(split);
  if (warp == CONSUMERS * 4) {
    switch (args.dims + (args.images_first ? 3 : 0)) {
      case 3: produce_pixels<3, false>(args, smem); break;
      case 4: produce_pixels<4, false>(args, smem); break;
      case 5: produce_pixels<5, false>(args, smem); break;
      case 6: produce_pixels<3, true>(args, smem); break;
      case 7: produce_pixels<4, true>(args, smem); break;
      default: produce_pixels<5, true>(args, smem);
    }
    __syncwarp();
    if (split) cluster_wait();
  } else if (warp == CONSUMERS * 4 + 1) {
    produce_weights(args, smem);
    __syncwarp();
    if (split) cluster_wait();
  } else {
    wait_on_dependent_grids();
    const Place place(args);
    int steps = 0;
    if (place.end > place.first) {
      mbarrier_wait(smem.list_barrier(), 0);
      steps = 1 + ld_shared_u32(smem.walk());
    }
    // While the first k-tile is copied.
    const TileRows tile(args, place.tile, smem.reduce);
    Accumulators accum;
    const GatherAxis& row = phase_of(args, place.tile.phase).axis[2];
    if (PARTS > 1) clear(accum);
    mainloop(args, smem, steps, row.x0 - row.low, accum);
    if (PARTS == 1 && steps == 0) clear(accum);
    if (split) {
      cluster_wait();
      reduce.exchange(accum);
      store_owned(tile, reduce);
    } else {
      tile.template store<kFinishes>(accum);
    }
  }
}
#endif
