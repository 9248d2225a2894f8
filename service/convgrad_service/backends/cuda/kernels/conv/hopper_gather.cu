// Dense convolution on Hopper, fprop or dgrad, as an implicit GEMM (TMA im2col, wgmma). Launched by
// hopper_gather.py. Needs sm_90a.
//
// Of each group: M = pixels of one phase of the result (over the batch), N = result channels,
// K = source channels in k-tiles of 128 bytes (outer) x taps (inner). Of the last, partial chunk of channels,
//   only as many wgmmas run as it has channels for.
// Phases and taps are those of core/gather_axes.py: along each dimension, result position y0 + m*y_step (m in
// [0, count)) of a phase reads, at its tap j in [0, taps), source position x0 + m*x_step + j*x_tap with
// weight tap r0 + j*r_step. Taps that no pixel of a tile reads inside the source are skipped.
//
// Grid: persistent, one block per SM, in clusters of SHARING blocks; in each wave a cluster takes one tile of
//   the list of all phases' tiles (hopper_gather.cuh). With SINGLE see hopper_gather_single.cuh.
// Block: BM pixels x BN channels. Producer warpgroup: one warp computes the coming tiles and their taps, one
//   thread loads source pixels (im2col), one loads weights. CONSUMERS warpgroups run wgmma: cooperatively,
//   BM / CONSUMERS pixels each; or with PINGPONG two take alternate tiles, so that one's epilogue overlaps
//   the other's mainloop (plain results only). The weight is K-major (ACROSS 0) or N-major (ACROSS 1,
//   16-bit types).
//   With TAPS > 1 (PINGPONG), a k-tile is a chunk of channels of all taps of a kernel row, which share its pixels, as
//   in hopper_gather_single.cuh.
// Parts: with PARTS 3, both operands are three bfloat16 tensors each, float32's parts (hopper_gather_parts.cuh),
//   one after another along images and along the weight's outermost dimension. A stage holds one part of a k-tile.
// Cluster: SHARING blocks with different pixels share weights by multicast.
// Shared memory (dynamic): 1,024 bytes of alignment; STAGES stages of BM rows of 128 bytes (TAPS > 1: up to
//   eight more) and of the weights' 64-row boxes; 8 KB of staging per consumer warpgroup; mbarriers: full and
//   empty per stage, full and empty per entry of the tile queue, one per warpgroup (PINGPONG); the tile queue.
// Preconditions: source strides are multiples of 16 bytes; channels of several groups follow one another, and those of
//   a group are whole MMAs along K (SINGLE: whole k-tiles). Positions outside the source are zeros.
// Determinism: one order of additions per result, whatever the tile shape.
// Limits: pixels of a phase and tiles below 2^31; 64-bit offsets. PINGPONG addresses results in 32-bit counts
//   of 16 bytes: below 64 GiB (hopper_gather_plan.py: may_alternate).
#include "conv/hopper_gather_parts.cuh"
#include "conv/hopper_gather_pingpong.cuh"
#include "conv/hopper_gather_planes.cuh"
#include "conv/hopper_gather_products.cuh"
#include "conv/hopper_gather_single.cuh"
#include "core/opaque.cuh"

#if !SINGLE

using namespace convgrad;

namespace {

// Whether there is code for a bias and an activation of plain results, as registers allow it. It costs ping-pong
// warpgroups nothing, which overlap it; others have instances with and without (EPILOGUE).
constexpr bool kFinishes = PINGPONG ? sizeof(T) == 2 && MAPS == 1 && kMmasM * kFragmentsN * 4 <= 160 : EPILOGUE;

#if PARTS > 1
// Mainloop over products of parts. None is in flight on return, which -1 stands for.
__device__ __forceinline__ int mainloop(const HopperGatherArgs& args, const SharedLayout& smem,
                                        PipelineState& state, int steps, int first_row, Accumulators& sum) {
  clear(sum);
  const float unscale = *args.unscale;
  int i = 0;
  for_k_tiles(args, steps, [&](auto mmas, int end) {
#pragma unroll 1
    for (; i < end; ++i) {
      int stages[PARTS];
#pragma unroll
      for (int part = PARTS - 1; part >= 0; --part) {
        mbarrier_wait(smem.full_barrier(state.index), state.parity);
        stages[part] = state.index;
        state.advance(STAGES);
      }
      multiply_parts(
          [&](Accumulators& accum, int of_a, int of_b, int add) {
            const u32 rows = smem.stage(stages[of_a]) + first_row * kRowBytes;
            issue_k_tile<decltype(mmas)::value>(accum, rows, smem.stage(stages[of_b]) + kABytes, add);
          },
          [&](int part) { release_stage(smem, stages[part]); }, unscale, sum);
    }
  });
  return -1;
}
#endif

#if !PINGPONG
#if PARTS == 1
// Mainloop; the last k-tile's wgmmas are still in flight on return. Returns their stage, -1 if there are none.
__device__ __forceinline__ int mainloop(const HopperGatherArgs& args, const SharedLayout& smem,
                                        PipelineState& state, int steps, int first_row, Accumulators& accum) {
  if (steps == 0) clear(accum);
  int previous = 0;  // the stage whose products are under way
  int i = 0;
  for_k_tiles(args, steps, [&](auto mmas, int end) {
#pragma unroll 1
    for (; i < end; ++i) {
      mbarrier_wait(smem.full_barrier(state.index), state.parity);
      wgmma_fence();
      const u32 rows = smem.stage(state.index) + first_row * kRowBytes;
      issue_k_tile<mmas.value>(accum, rows, smem.stage(state.index) + kABytes, i > 0);
      wgmma_commit();
      wgmma_wait<1>();
      if (i > 0) release_stage(smem, previous);
      previous = state.index;
      state.advance(STAGES);
    }
  });
  return steps > 0 ? previous : -1;
}
#endif

// Cooperative consumers: all warpgroups work on each tile, each on its rows.
__device__ __forceinline__ void consume(const HopperGatherArgs& args, const SharedLayout& smem) {
  const int warpgroup = threadIdx.x / 128 - 1, lane = threadIdx.x & 31;
  PipelineState queue_state;
  PipelineState state;
#pragma unroll 1
  for (;;) {
    mbarrier_wait(smem.tile_full_barrier(queue_state.index), queue_state.parity);
    const QueuedTile& queued = smem.queue[queue_state.index];
    const int steps = queued.steps;
    const GatherTile tile = {queued.phase, queued.first_pixel + smem.row * BM + warpgroup * kWarpgroupRows,
                             queued.column};
    __syncwarp();
    if (lane == 0) mbarrier_arrive(smem.tile_empty_barrier(queue_state.index));
    queue_state.advance(kTileQueue);
    if (steps < 0) break;
    Accumulators accum;
    const int last = mainloop(args, smem, state, steps, warpgroup * kWarpgroupRows, accum);
    // Result addresses are computed while the last wgmmas run.
    const Results<RESULT, kMmasM, kFragmentsN> results(args, tile, smem.staging + warpgroup * kStagingBytes);
    end_mainloop(smem, last, accum);
    if constexpr (PLANES) {
      store_planes(results, accum, 8 + warpgroup);
    } else {
      results.template store<kFinishes>(accum);
    }
  }
}

#else
// Mainloop that lets the other warpgroup start its own once the last k-tile's wgmmas are issued; they are
// still in flight on return. Returns their stage, -1 if there are none.
__device__ __forceinline__ int ordered_mainloop(const HopperGatherArgs& args, const SharedLayout& smem,
                                                PipelineState& state, int steps, u32 next_order_barrier,
                                                Accumulators& accum) {
  const int lane = threadIdx.x & 31;
  // With TAPS > 1, the pixel of a stage with which the first tap of a row starts, and the distance to the next's.
  const int first_shift = args.phase[0].axis[2].x0 - args.phase[0].axis[2].low, shift = args.x_tap[2];
  if (steps == 0 && lane == 0) mbarrier_arrive(next_order_barrier);
  int previous = 0;  // the stage whose products are under way
  int i = 0;
  for_k_tiles(args, steps, [&](auto mmas, int end) {
    if constexpr (mmas.value < kMmasK) {
      // Cleared accumulators may reach this loop: without a wait, ptxas would serialize all wgmmas.
      wgmma_wait<0>();
      fence_accumulators(accum);
    }
#pragma unroll 1
    for (; i < end; ++i) {
      mbarrier_wait(smem.full_barrier(state.index), state.parity);
      wgmma_fence();
#pragma unroll
      for (int tap = 0; tap < TAPS; ++tap) {
        const u32 rows = smem.stage(state.index) + (TAPS > 1 ? (first_shift + tap * shift) * kRowBytes : 0);
        issue_k_tile<mmas.value>(accum, rows, smem.stage(state.index) + kABytes + tap * kBBytes, 1);
      }
      wgmma_commit();
      if (i == steps - 1 && lane == 0) mbarrier_arrive(next_order_barrier);
      wgmma_wait<1>();
      if (i > 0) release_stage(smem, previous);
      previous = state.index;
      state.advance(STAGES);
    }
  });
  return steps > 0 ? previous : -1;
}

// Ping-pong consumers: two warpgroups take alternate tiles, and one's epilogue overlaps the other's mainloop,
// which runs at the full rate: a k-tile is long enough to issue the next one's wgmmas in time.
__device__ __forceinline__ void consume(const HopperGatherArgs& args, const SharedLayout& smem) {
  const int warpgroup = threadIdx.x / 128 - 1, lane = threadIdx.x & 31;
  PipelineState state;
  // Tiles taken from the queue, the other warpgroup's included.
  u32 count_taken = 0;
  auto take = [&](GatherTile& tile) {
    const u32 at = count_taken % kTileQueue;
    mbarrier_wait(smem.tile_full_barrier(at), count_taken / kTileQueue & 1);
    const QueuedTile& queued = smem.queue[at];
    const int steps = queued.steps;
    tile = {queued.phase, queued.first_pixel + smem.row * BM, queued.column};
    __syncwarp();
    if (lane == 0) mbarrier_arrive(smem.tile_empty_barrier(at));
    ++count_taken;
    return steps;
  };
  // Skips the other warpgroup's tile and takes the next.
  auto skip_and_take = [&](GatherTile& tile) {
    const int clusters = take(tile);
    if (clusters < 0) return clusters;
    state.advance_by<STAGES>(clusters);
    return take(tile);
  };
  GatherTile tile;
  int steps = warpgroup == 0 ? take(tile) : skip_and_take(tile);
#pragma unroll 1
  while (steps >= 0) {
    // Cleared while the other warpgroup runs its mainloop: a first wgmma with scale_d = 0 would keep the
    // accumulators' registers alive from one tile to the next.
    Accumulators accum;
    clear(accum);
    mbarrier_wait(smem.order_barrier(warpgroup), ((count_taken - 1) / 2 & 1) ^ 1 ^ warpgroup);
    const int last = ordered_mainloop(args, smem, state, steps, smem.order_barrier(warpgroup ^ 1), accum);
    // While they run, compute the result addresses and take the next tile.
    const PartRows<T, kMmasM> rows(args, tile);
    GatherTile next;
    const int next_steps = skip_and_take(next);
    end_mainloop(smem, last, accum);
    const u32 staging = smem.staging + warpgroup * kStagingBytes;
    if (kFinishes && args.plain == 2) {
      store_parts<true, T>(args, tile, rows, staging, accum);
    } else {
      store_parts<false, T>(args, tile, rows, staging, accum);
    }
    tile = next, steps = next_steps;
  }
}
#endif

}  // namespace

extern "C" __global__ void __launch_bounds__(128 * (CONSUMERS + 1), 1)
#if SHARING > 1
    __cluster_dims__(SHARING, 1, 1)
#endif
        hopper_gather(const __grid_constant__ HopperGatherArgs args) {
  extern __shared__ uint4 shared[];
  SharedLayout smem;
  const u32 padding = -shared_address(shared) & 1023;
  smem.ring = shared_address(shared) + padding;
  smem.staging = smem.ring + STAGES * kStageBytes;
  smem.barriers = smem.staging + CONSUMERS * kStagingBytes;
  char* const after = reinterpret_cast<char*>(shared) + (smem.barriers - smem.ring) + padding;
  smem.queue = reinterpret_cast<QueuedTile*>(after + kBarriers * 8);
  smem.row = SHARING > 1 ? static_cast<int>(cluster_rank()) : 0;
  const TileSchedule schedule = {static_cast<int>(blockIdx.x) / SHARING,
                       static_cast<int>(gridDim.x) / SHARING, args.rounds * args.slots};
  const int warp = threadIdx.x / 32;
  // Each warp prefetches a part of the kernel parameters into the constant cache.
  const int queued = reinterpret_cast<const int*>(&args.y)[min(warp * 16, kArgumentWords)];
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(smem.full_barrier(i), 2);
      mbarrier_init(smem.empty_barrier(i), SHARING * kWarpgroupsPerTile * 4);
    }
    for (int i = 0; i < kTileQueue; ++i) {
      mbarrier_init(smem.tile_full_barrier(i), 1);
      mbarrier_init(smem.tile_empty_barrier(i), 2 + CONSUMERS * 4);
    }
    if constexpr (PINGPONG) {
      for (int i = 0; i < CONSUMERS; ++i) mbarrier_init(smem.order_barrier(i), 4);
    }
    fence_mbarrier_init();
  }
  if (threadIdx.x == 128) prefetch_tensor_map(args.weight), prefetch_tensor_map(args.source[0]);
  opaque_use(queued);
  if constexpr (SHARING > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }
  // The scheduler warp reads arguments only.
  if (warp != 2) wait_on_dependent_grids();
  if (threadIdx.x < 128) {
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    if (warp == 0) {
      if (elect_one()) load_pixels(args, smem);
    } else if (warp == 1) {
      if (elect_one()) load_weights(args, smem);
    } else if (warp == 2) {
      schedule_tiles(args, smem, schedule);
    }
    __syncwarp();
  } else {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    consume(args, smem);
  }
  // A block must not exit while others of its cluster may still access its shared memory.
  if constexpr (SHARING > 1) cluster_sync();
}
#endif
