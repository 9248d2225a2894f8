// Dense convolution on Hopper, fprop or dgrad, as an implicit GEMM (TMA im2col, wgmma). Launched by
// hopper_gather.py. Needs sm_90a.
//
// M = pixels of one phase of the result (over the batch), N = result channels,
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
// Parts: with PARTS 3, both operands are three bfloat16 tensors each, of float32's parts (hopper_gather_parts.cuh),
//   one after another along images and along the weight's outermost dimension. A stage holds one part of a k-tile.
// Cluster: SHARING blocks with different pixels share weights by multicast.
// Shared memory (dynamic): 1,024 bytes of alignment; STAGES stages of BM rows of 128 bytes (TAPS > 1: up to
//   eight more) and of the weights' 64-row boxes; 8 KB of staging per consumer warpgroup; mbarriers: full and
//   empty per stage, full and empty per entry of the tile queue, one per warpgroup (PINGPONG); the tile queue.
// Preconditions: one group; source strides are multiples of 16 bytes. Positions outside the source are zeros.
// Determinism: one order of additions per result, whatever the tile shape.
// Limits: pixels of a phase and tiles below 2^31; 64-bit offsets. PINGPONG addresses results in 32-bit counts
//   of 16 bytes: below 64 GiB (hopper_gather_plan.py: may_alternate).
#include "conv/hopper_gather_copies.cuh"
#include "conv/hopper_gather_pingpong.cuh"
#include "conv/hopper_gather_planes.cuh"
#include "conv/hopper_gather_single.cuh"
#include "core/opaque.cuh"

#if !SINGLE

using namespace convgrad;

namespace {

constexpr Major kWeights = ACROSS ? kMajorMn : kMajorK;
constexpr int kArgumentWords = (sizeof(HopperGatherArgs) - sizeof(TensorMap) * (MAPS + 1)) / 4 - 1;

// Whether there is code for a bias and an activation of plain results, as registers allow it. It costs ping-pong
// warpgroups nothing, which overlap it; others have instances with and without (EPILOGUE).
constexpr bool kFinishes = PINGPONG ? sizeof(T) == 2 && MAPS == 1 && kMmasM * kFragmentsN * 4 <= 160 : EPILOGUE;

template <int kValue>
struct Count {
  enum : int { value = kValue };
};

// Calls run(Count<kMmas>, end) for ranges of a tile's k-tiles, each from where the one before ended: first for
// whole chunks of channels, then for the last chunk, whose k-tiles need fewer wgmmas along K as zeros follow.
// A loop for each number, because ptxas serializes wgmmas that it cannot prove to run unconditionally.
template <class Run>
__device__ __forceinline__ void for_k_tiles(const HopperGatherArgs& args, int steps, Run run) {
  static_assert(kMmasK == 4, "a case for each number");
  const int chunks = (args.in_channels - 1) / kTileK + 1, last = (args.in_channels - 1) % kTileK / kMmaK + 1;
  run(Count<kMmasK>{}, last == kMmasK ? steps : steps - steps / chunks);
  if (last == 1) run(Count<1>{}, steps);
  if (last == 2) run(Count<2>{}, steps);
  if (last == 3) run(Count<3>{}, steps);
}

// Issues the first kMmas wgmmas along K of one k-tile, of one tap.
template <int kMmas>
__device__ __forceinline__ void issue_k_tile(float (&accum)[kMmasM][kFragmentsN][4], u32 rows,
                                              u32 weights, int add) {
  auto one = [&](int i, int adds) {
    const u64 b =
        ACROSS ? advance_descriptor(mn_major_descriptor<128>(weights, kBoxBytes), i * kMmaK * kRowBytes)
               : advance_descriptor(k_major_descriptor<128>(weights), i * 32);
#pragma unroll
    for (int part = 0; part < kMmasM; ++part) {
      const u64 a = advance_descriptor(k_major_descriptor<128>(rows + part * 64 * kRowBytes), i * 32);
      wgmma<T, kMajorK, kWeights>(accum[part], a, b, adds);
    }
  };
#pragma unroll
  for (int i = 0; i < kMmas; ++i) one(i, i > 0 ? 1 : add);
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

__device__ __forceinline__ void clear(float (&accum)[kMmasM][kFragmentsN][4]) {
#pragma unroll
  for (int part = 0; part < kMmasM; ++part) {
#pragma unroll
    for (int j = 0; j < kFragmentsN; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) accum[part][j][e] = 0.0f;
    }
  }
}

#if PARTS > 1
using Sums = float[kMmasM][kFragmentsN][4];

// Starts a k-tile's products of part `of_a` of A and part `of_b` of B.
template <int kMmas>
__device__ __forceinline__ void start_products(const SharedLayout& smem, const int (&stages)[PARTS], int first_row,
                                               int of_a, int of_b, int add, Sums& accum) {
  issue_k_tile<kMmas>(accum, smem.stage(stages[of_a]) + first_row * kRowBytes,
                      smem.stage(stages[of_b]) + kABytes, add);
}

// sum += accum * weight, after the wgmmas of accum.
__device__ __forceinline__ void fold(Sums& accum, float weight, Sums& sum) {
#pragma unroll
  for (int part = 0; part < kMmasM; ++part) {
    fence_accumulators(accum[part]);
#pragma unroll
    for (int j = 0; j < kFragmentsN; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[part][j][e] = fmaf(accum[part][j][e], weight, sum[part][j][e]);
    }
  }
}

// Mainloop over the products of parts, the smallest first. Tensor cores truncate their sums, so those of a k-tile
// are added to float32 in registers while the next ones run.
__device__ __forceinline__ void mainloop_of_parts(const HopperGatherArgs& args, const SharedLayout& smem,
                                                  PipelineState& state, int steps, int first_row, Sums& sum) {
  constexpr float kSmall = 0x1p-8f, kSmallest = 0x1p-16f;
  clear(sum);
  int i = 0;
#if OVERLAP
  Sums accum[2];
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
      const auto start = [&](int to, int a, int b, int add) {
        start_products<decltype(mmas)::value>(smem, stages, first_row, a, b, add, accum[to]);
      };
      wgmma_fence();
      start(0, 1, 1, 0), start(0, 0, 2, 1);
      wgmma_commit();
      start(1, 2, 0, 0);
      wgmma_commit();
      wgmma_wait<1>();
      fold(accum[0], kSmallest, sum);
      wgmma_fence();
      start(0, 0, 1, 0), start(0, 1, 0, 1);
      wgmma_commit();
      wgmma_wait<1>();
      release_stage(smem, stages[2]);
      fold(accum[1], kSmallest, sum);
      wgmma_fence();
      start(1, 0, 0, 0);
      wgmma_commit();
      wgmma_wait<1>();
      release_stage(smem, stages[1]);
      fold(accum[0], kSmall, sum);
      wgmma_wait<0>();
      release_stage(smem, stages[0]);
      fold(accum[1], 1.0f, sum);
    }
  });
#else
  Sums accum;
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
#pragma unroll
      for (int order = PARTS - 1; order >= 0; --order) {
        wgmma_fence();
#pragma unroll
        for (int part = 0; part <= order; ++part) {
          start_products<mmas.value>(smem, stages, first_row, part, order - part, part > 0, accum);
        }
        wgmma_commit();
        wgmma_wait<0>();
        release_stage(smem, stages[order]);
        fold(accum, order == 2 ? kSmallest : order == 1 ? kSmall : 1.0f, sum);
      }
    }
  });
#endif
}
#endif

#if !PINGPONG
// Mainloop; the last k-tile's wgmmas are still in flight on return. Returns their stage.
__device__ __forceinline__ int mainloop(const HopperGatherArgs& args, const SharedLayout& smem,
                                        PipelineState& state, int steps, int first_row,
                                        float (&accum)[kMmasM][kFragmentsN][4]) {
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
  return previous;
}

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
                             queued.first_channel};
    __syncwarp();
    if (lane == 0) mbarrier_arrive(smem.tile_empty_barrier(queue_state.index));
    queue_state.advance(kTileQueue);
    if (steps < 0) break;
    float accum[kMmasM][kFragmentsN][4];
#if PARTS > 1
    mainloop_of_parts(args, smem, state, steps, warpgroup * kWarpgroupRows, accum);
#else
    const int last = mainloop(args, smem, state, steps, warpgroup * kWarpgroupRows, accum);
#endif
    // Result addresses are computed while the last wgmmas run.
    const Results<RESULT, kMmasM, kFragmentsN> results(args, tile, smem.staging + warpgroup * kStagingBytes);
#if PARTS == 1
    wgmma_wait<0>();
#pragma unroll
    for (int part = 0; part < kMmasM; ++part) fence_accumulators(accum[part]);
    if (steps > 0) release_stage(smem, last);
#endif
    if constexpr (PLANES) {
      store_planes(results, accum, 8 + warpgroup);
    } else {
      results.template store<kFinishes>(accum);
    }
  }
}

#else
// Mainloop that lets the other warpgroup start its own once the last k-tile's wgmmas are issued; they are
// still in flight on return. Returns their stage.
__device__ __forceinline__ int ordered_mainloop(const HopperGatherArgs& args, const SharedLayout& smem,
                                                PipelineState& state, int steps, u32 next_order_barrier,
                                                float (&accum)[kMmasM][kFragmentsN][4]) {
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
#pragma unroll
      for (int part = 0; part < kMmasM; ++part) fence_accumulators(accum[part]);
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
  return previous;
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
    tile = {queued.phase, queued.first_pixel + smem.row * BM, queued.first_channel};
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
    float accum[kMmasM][kFragmentsN][4];
    clear(accum);
    mbarrier_wait(smem.order_barrier(warpgroup), ((count_taken - 1) / 2 & 1) ^ 1 ^ warpgroup);
    const int last = ordered_mainloop(args, smem, state, steps, smem.order_barrier(warpgroup ^ 1), accum);
    // While they run, compute the result addresses and take the next tile.
    const PartRows<T, kMmasM> rows(args, tile);
    GatherTile next;
    const int next_steps = skip_and_take(next);
    wgmma_wait<0>();
#pragma unroll
    for (int part = 0; part < kMmasM; ++part) fence_accumulators(accum[part]);
    if (steps > 0) release_stage(smem, last);
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
