// Building blocks of hopper_gather.cu's mainloops.
#pragma once

#include "conv/hopper_gather_copies.cuh"
#include "core/fragments.cuh"
#include "ptx/warpgroup.cuh"

#if !SINGLE
namespace convgrad {
namespace {

// Calls run(Constant<kMmas>, end) for ranges of a tile's k-tiles, each from where the one before ended: first for
// whole chunks of channels, then for the last chunk, whose k-tiles need fewer wgmmas along K as zeros follow.
// A loop for each number, because ptxas serializes wgmmas that it cannot prove to run unconditionally.
template <class Run>
__device__ __forceinline__ void for_k_tiles(const HopperGatherArgs& args, int steps, Run run) {
  static_assert(kMmasK == 4, "a case for each number");
  const int chunks = (args.in_channels - 1) / kTileK + 1, last = (args.in_channels - 1) % kTileK / kMmaK + 1;
  run(Constant<kMmasK>{}, last == kMmasK ? steps : steps - steps / chunks);
  if (last == 1) run(Constant<1>{}, steps);
  if (last == 2) run(Constant<2>{}, steps);
  if (last == 3) run(Constant<3>{}, steps);
}

// Each warp signals that its warpgroup's wgmmas have read a stage.
__device__ __forceinline__ void release_stage(const SharedLayout& smem, int stage) {
  const int lane = threadIdx.x & 31;
  if constexpr (SHARING > 1) {
    if (lane < SHARING) mbarrier_arrive_cluster(smem.empty_barrier(stage), lane);
  } else {
    if (lane == 0) mbarrier_arrive(smem.empty_barrier(stage));
  }
}

// Waits for a tile's last products, which read stage `last`, or none if that is negative.
__device__ __forceinline__ void end_mainloop(const SharedLayout& smem, int last, Accumulators& accum) {
  wgmma_wait<0>();
  fence_accumulators(accum);
  if (last >= 0) release_stage(smem, last);
}

}  // namespace
}  // namespace convgrad
#endif
