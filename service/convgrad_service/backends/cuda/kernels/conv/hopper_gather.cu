// Dense convolution on Hopper, fprop or dgrad, as an implicit GEMM (TMA im2col, wgmma). Launched by
// hopper_gather.py. Needs sm_90a.
//
// M = pixels of one phase of the result (over the batch), N = result channels,
// K = source channels in k-tiles of 128 bytes (outer) x taps (inner).
// Phases and taps are those of core/gather_axes.py: along each dimension, result position y0 + m*y_step (m in
// [0, count)) of a phase reads, at its tap j in [0, taps), source position x0 + m*x_step + j*x_tap with
// weight tap r0 + j*r_step. Taps that no pixel of a tile reads inside the source are skipped.
//
// Grid: persistent, one block per SM, in clusters of CLUSTER = SHARING or SPLIT blocks; in each wave a
//   cluster takes one tile of the list of all phases' tiles (hopper_gather.cuh).
// Block: BM pixels x BN channels. Producer warpgroup: one warp computes the coming tiles and their taps, one
//   thread loads source pixels (im2col), one loads weights. CONSUMERS warpgroups run wgmma: cooperatively,
//   BM / CONSUMERS pixels each; or with PINGPONG two take alternate tiles, so that one's epilogue overlaps
//   the other's mainloop (plain results only). The weight is K-major (ACROSS 0) or N-major (ACROSS 1,
//   16-bit types).
// Cluster: SHARING blocks with different pixels share weights by multicast. SPLIT blocks split the k-tiles of
//   one tile and reduce through distributed shared memory, each its part of the rows; a cluster then has one
//   tile, and all tiles of a phase are split at the same k-tiles, whatever taps they skip.
// Shared memory (dynamic): 1,024 bytes of alignment; STAGES stages of BM rows of 128 bytes and of the weights'
//   64-row boxes; 8 KB of staging per consumer warpgroup; mbarriers: full and empty per stage, full and
//   empty per entry of the tile queue, one per warpgroup (PINGPONG) or one for the reduction (SPLIT); the
//   tile queue.
// Preconditions: one group; source strides are multiples of 16 bytes. Positions outside the source are zeros.
// Determinism: one order of additions per result, whatever the tile shape, except for SPLIT.
// Limits: pixels of a phase and tiles below 2^31; 64-bit offsets. PINGPONG addresses results in 32-bit counts
//   of 16 bytes: below 64 GiB (hopper_gather_plan.py: may_alternate).
#include "conv/hopper_gather_copies.cuh"
#include "conv/hopper_gather_pingpong.cuh"
#include "conv/hopper_gather_planes.cuh"
#include "core/opaque.cuh"

using namespace convgrad;

namespace {

constexpr Major kWeights = ACROSS ? kMajorMn : kMajorK;
constexpr int kArgumentWords = (sizeof(HopperGatherArgs) - sizeof(TensorMap) * (MAPS + 1)) / 4 - 1;

// Starts the products of one step.
__device__ __forceinline__ void multiply_step(float (&sum)[kParts][kFragments][4], u32 rows,
                                              u32 weights, int add) {
  auto one = [&](int i, int adds) {
    const u64 b =
        ACROSS ? advance_descriptor(mn_major_descriptor<128>(weights, kBoxBytes), i * kDeep * kRowBytes)
               : advance_descriptor(k_major_descriptor<128>(weights), i * 32);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const u64 a = advance_descriptor(k_major_descriptor<128>(rows + part * 64 * kRowBytes), i * 32);
      wgmma<T, kMajorK, kWeights>(sum[part], a, b, adds);
    }
  };
#pragma unroll
  for (int i = 0; i < kProducts; ++i) one(i, i > 0 ? 1 : add);
}

// Warps of a warpgroup say that its products have read a stage.
__device__ __forceinline__ void release(const Place& place, int stage) {
  const int lane = threadIdx.x & 31;
  if constexpr (SHARING > 1) {
    if (lane < SHARING) mbarrier_arrive_cluster(place.read(stage), lane);
  } else {
    if (lane == 0) mbarrier_arrive(place.read(stage));
  }
}

__device__ __forceinline__ void clear(float (&sum)[kParts][kFragments][4]) {
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int j = 0; j < kFragments; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[part][j][e] = 0.0f;
    }
  }
}

#if !PINGPONG
// Starts the products of a tile's steps; the last are under way still. Its last stage.
__device__ __forceinline__ int multiply_steps(const Place& place, Turning<STAGES>& ring, int steps,
                                              int first_row,
                                              float (&sum)[kParts][kFragments][4]) {
  if (steps == 0) clear(sum);
  int before = 0;  // the stage whose products are under way
#pragma unroll 1
  for (int i = 0; i < steps; ++i) {
    mbarrier_wait(place.filled(ring.at), ring.parity);
    wgmma_fence();
    const u32 rows = place.stage(ring.at) + first_row * kRowBytes;
    multiply_step(sum, rows, place.stage(ring.at) + kABytes, i > 0);
    wgmma_commit();
    wgmma_wait<1>();
    if (i > 0) release(place, before);
    before = ring.at;
    ring.step();
  }
  return before;
}

// All warpgroups multiply each tile together, some of its rows each.
__device__ __forceinline__ void consume(const HopperGatherArgs& args, const Place& place) {
  const int warpgroup = threadIdx.x / 128 - 1, lane = threadIdx.x & 31;
  Turning<kTileQueue> turning(0);
  Turning<STAGES> ring(0);
#pragma unroll 1
  for (;;) {
    mbarrier_wait(place.queued(turning.at), turning.parity);
    const QueuedTile& ahead = place.queue[turning.at];
    const int steps = ahead.steps;
    const GatherTile tile = {ahead.phase, ahead.first_pixel + place.row * BM + warpgroup * kRowsOf,
                             ahead.first_channel};
    __syncwarp();
    if (lane == 0) mbarrier_arrive(place.taken(turning.at));
    turning.step();
    if (steps < 0) break;
    float sum[kParts][kFragments][4];
    const int last = multiply_steps(place, ring, steps, warpgroup * kRowsOf, sum);
    // Where its rows go is found while the last products run.
    const Results<T, kParts, kFragments> results(args, tile,
                                                 place.staging + warpgroup * kStagingBytes);
    wgmma_wait<0>();
#pragma unroll
    for (int part = 0; part < kParts; ++part) fence_accumulators(sum[part]);
    if (steps > 0) release(place, last);
    if constexpr (SPLIT > 1) {
      // The ring's place is theirs once no product reads it, in this block and the others.
      named_barrier_sync(1, CONSUMERS * 128);
      cluster_arrive();
      keep_sums<BN>(place.ring, warpgroup * kRowsOf, sum);
    } else if constexpr (PLANES) {
      store_planes(results, sum, 8 + warpgroup);
    } else {
      results.store(sum);
    }
  }
}

#else
// Starts the products of a tile's steps and has the other warpgroup follow once it has started the
// last; they are under way still. Its last stage.
__device__ __forceinline__ int multiply_in_turn(const Place& place, Turning<STAGES>& ring, int steps,
                                                u32 others_turn,
                                                float (&sum)[kParts][kFragments][4]) {
  const int lane = threadIdx.x & 31;
  if (steps == 0 && lane == 0) mbarrier_arrive(others_turn);
  int before = 0;  // the stage whose products are under way
#pragma unroll 1
  for (int i = 0; i < steps; ++i) {
    mbarrier_wait(place.filled(ring.at), ring.parity);
    wgmma_fence();
    multiply_step(sum, place.stage(ring.at), place.stage(ring.at) + kABytes, 1);
    wgmma_commit();
    if (i == steps - 1 && lane == 0) mbarrier_arrive(others_turn);
    wgmma_wait<1>();
    if (i > 0) release(place, before);
    before = ring.at;
    ring.step();
  }
  return before;
}

// Two warpgroups have every other tile to themselves: one stores while the other multiplies, at the
// full rate, for steps are long enough to have the next one's products started in time.
__device__ __forceinline__ void consume(const HopperGatherArgs& args, const Place& place) {
  const int warpgroup = threadIdx.x / 128 - 1, lane = threadIdx.x & 31;
  Turning<STAGES> ring(0);
  // How many tiles it has taken from the queue, the other warpgroup's included: its turn is every other one.
  u32 count_taken = 0;
  auto take = [&](GatherTile& tile) {
    const u32 at = count_taken % kTileQueue;
    mbarrier_wait(place.queued(at), count_taken / kTileQueue & 1);
    const QueuedTile& ahead = place.queue[at];
    const int steps = ahead.steps;
    tile = {ahead.phase, ahead.first_pixel + place.row * BM, ahead.first_channel};
    __syncwarp();
    if (lane == 0) mbarrier_arrive(place.taken(at));
    ++count_taken;
    return steps;
  };
  // What the other warpgroup has, and then its own.
  auto skip_and_take = [&](GatherTile& tile) {
    const int others = take(tile);
    if (others < 0) return others;
    ring.step_by(others);
    return take(tile);
  };
  GatherTile tile;
  int steps = warpgroup == 0 ? take(tile) : skip_and_take(tile);
#pragma unroll 1
  while (steps >= 0) {
    // Cleared, while the other multiplies: a first product that ignores what they were would have them
    // keep their registers from one tile to the next.
    float sum[kParts][kFragments][4];
    clear(sum);
    mbarrier_wait(place.turn(warpgroup), ((count_taken - 1) / 2 & 1) ^ 1 ^ warpgroup);
    const int last = multiply_in_turn(place, ring, steps, place.turn(warpgroup ^ 1), sum);
    // While they run: where its rows go, and what comes next.
    const PartRows<T, kParts> rows(args, tile);
    GatherTile next;
    const int next_steps = skip_and_take(next);
    wgmma_wait<0>();
#pragma unroll
    for (int part = 0; part < kParts; ++part) fence_accumulators(sum[part]);
    if (steps > 0) release(place, last);
    store_parts<T>(args, tile, rows, place.staging + warpgroup * kStagingBytes, sum);
    tile = next, steps = next_steps;
  }
}
#endif

}  // namespace

extern "C" __global__ void __launch_bounds__(128 * (CONSUMERS + 1), 1)
#if CLUSTER > 1
    __cluster_dims__(CLUSTER, 1, 1)
#endif
        hopper_gather(const __grid_constant__ HopperGatherArgs args) {
  extern __shared__ uint4 shared[];
  Place place;
  const u32 padding = -shared_address(shared) & 1023;
  place.ring = shared_address(shared) + padding;
  place.staging = place.ring + STAGES * kStageBytes;
  place.barriers = place.staging + CONSUMERS * kStagingBytes;
  char* const after = reinterpret_cast<char*>(shared) + (place.barriers - place.ring) + padding;
  place.queue = reinterpret_cast<QueuedTile*>(after + kBarriers * 8);
  const int rank = CLUSTER > 1 ? static_cast<int>(cluster_rank()) : 0;
  place.row = rank % SHARING, place.part = rank / SHARING;
  const Turns turns = {static_cast<int>(blockIdx.x) / CLUSTER,
                       static_cast<int>(gridDim.x) / CLUSTER, args.rounds * args.slots};
  const int warp = threadIdx.x / 32;
  // Each warp has some of the argument fetched, so that nobody waits for one line after another.
  const int ahead = reinterpret_cast<const int*>(&args.y)[min(warp * 16, kArgumentWords)];
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(place.filled(i), 2);
      mbarrier_init(place.read(i), SHARING * kTogether * 4);
    }
    for (int i = 0; i < kTileQueue; ++i) {
      mbarrier_init(place.queued(i), 1);
      mbarrier_init(place.taken(i), 2 + CONSUMERS * 4);
    }
    if constexpr (PINGPONG) {
      for (int i = 0; i < CONSUMERS; ++i) mbarrier_init(place.turn(i), 4);
    }
    if constexpr (SPLIT > 1) {
      mbarrier_init(place.joined(), 1);
    }
    fence_mbarrier_init();
    if constexpr (SPLIT > 1) {
      mbarrier_arrive_expect_tx(place.joined(),
                                Joined<BM, BN, SPLIT>::slab_bytes(place.part) * (SPLIT - 1));
    }
  }
  if (threadIdx.x == 128) prefetch_tensor_map(args.weight), prefetch_tensor_map(args.source[0]);
  opaque_use(ahead);
  if constexpr (SHARING > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }
  // Who looks ahead at tiles reads arguments alone.
  if (warp != 2) wait_on_dependent_grids();
  if (threadIdx.x < 128) {
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    if (warp == 0) {
      if (elect_one()) copy_pixels(args, place);
    } else if (warp == 1) {
      if (elect_one()) copy_weights(args, place);
    } else if (warp == 2) {
      look_ahead(args, place, turns);
    }
    __syncwarp();
    if constexpr (SPLIT > 1) {
      for (int i = 0; i < 2; ++i) {
        cluster_arrive();
        cluster_wait();
      }
    }
  } else {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    consume(args, place);
    if constexpr (SPLIT > 1) {
      using Slabs = Joined<BM, BN, SPLIT>;
      static_assert((BM + (SPLIT - 1) * Slabs::kMost) * Slabs::kRowBytes <= STAGES * kStageBytes,
                    "sums and slabs have room where the ring was");
      fence_proxy_async();
      named_barrier_sync(1, CONSUMERS * 128);
      cluster_wait();
      Slabs::send(place.ring, place.joined(), place.part, threadIdx.x - 128);
      GatherTile tile;
      tile_at<BM, BN>(args, turns.place(0), turns.all, tile);
      const Results<T, kParts, kFragments> results(args, tile, place.staging);
      mbarrier_wait(place.joined(), 0);
      cluster_arrive();
      results.template store_joined<BM, BN, SPLIT, CONSUMERS * 128>(place.ring, place.part);
      cluster_wait();
    }
  }
  // A block's shared memory stays until others of its cluster have been there for the last time.
  if constexpr (SHARING > 1) cluster_sync();
}
