// Dense convolution with few channels on Hopper, fprop or dgrad (TMA, wgmma). The source of a tile
// and its halo is loaded once, rather than once per tap. Launched by hopper_halo.py. Needs sm_90a.
//
//   y[n, k, m] = sum over taps j and c of x[n, c, m + offset(j)] * w[k, c, tap(j)], as the stride is 1.
// GEMM per tap: M = 64 result channels, N = COLUMNS positions, K = 32 source channels. Positions are numbered
// along the rows of a slice of the source including its halo, so a tap is a displacement: its operand is the
// slice from some pixel on, 64 bytes per pixel. Columns beyond the ends of rows are computed and discarded.
//
// Grid: a tile is a box of positions of one image and channel tile; a block takes tiles blockIdx.x,
//   + gridDim.x, ...
// Block (384 threads): two consumer warpgroups, which divide the columns, and a
//   producer warpgroup: one warp loads source slices (boxes over W and H) through a pipeline of stages,
//   another loads weights through a second pipeline, or once where all of them fit. Tables
//   (hopper_halo_args.cuh) list the slices, k-steps and taps of a tile. With 32 result channels M holds them twice: for a position with one tap, and for the
//   position one deeper with the tap before it.
// Shared memory: the tables; dynamic: 1,024 bytes of alignment, stages, weights, mbarriers; counted by
//   hopper_halo_tiles.py.
// Preconditions: the tables; channels of source and weight contiguous in whole 16-byte chunks. Positions
//   outside the source are zeros.
// Determinism: one order of additions per result, whatever the tiles.
// Limits: positions along a dimension below 2^28; byte offsets within a result tile below 2^31; 64-bit
//   elsewhere.
#include "core/pipeline_state.cuh"
#include "conv/hopper_halo_result.cuh"
#include "ptx/pdl.cuh"
#include "ptx/warpgroup.cuh"

using namespace convgrad;

namespace {

using T = ELEMENT;
constexpr int kColumns = COLUMNS;
constexpr int kTileK = 32;  // channels of a chunk
constexpr Major kWeights = ACROSS ? kMajorMn : kMajorK;
constexpr int kThreads = 384, kWarpgroups = 2, kFirstProducerWarp = 8;  // the first producer warp
constexpr int kConsumers = kWarpgroups * 4;                   // warps
constexpr int kConsumerBarrier = 1;                               // a named barrier

struct Barriers {
  u32 x_full, x_empty, w_full, w_empty;
};

__device__ void load_source(const HopperHaloArgs& args, const HaloTables& tables, u32 ring,
                            const Barriers& barriers) {
  PipelineState state;
  for (int tile = blockIdx.x; tile < args.all_tiles; tile += gridDim.x) {
    const HaloTile tile_at(args, tile);
    for (int chunk = 0; chunk < args.chunks; ++chunk) {
      for (int slice = 0; slice < args.slices; ++slice, state.advance(args.stages)) {
        mbarrier_wait(barriers.x_empty + 8 * state.index, state.parity ^ 1);
        const u32 full = barriers.x_full + 8 * state.index;
        mbarrier_arrive_expect_tx(full, args.box_bytes);
        const int corner[5] = {chunk * kTileK, tile_at.m[2] + args.first[1],
                               tile_at.m[1] + args.first[0], tile_at.m[0] + tables.depth[slice],
                               tile_at.n};
        tma_load(ring + state.index * args.stage_bytes, args.x_map, full, corner);
      }
    }
  }
}

__device__ __forceinline__ void load_weight(const HopperHaloArgs& args, const HaloLoad& load, u32 to,
                                            u32 full, int chunk, int channel_tile) {
  const int channel = channel_tile * args.row_channels;
  const int corner[5] = {ACROSS ? channel : chunk * kTileK, ACROSS ? chunk * kTileK : channel,
                         load.t, load.s, load.r};
  tma_load(to + load.to * 16, args.w_map, full, corner, kEvictLast);
}

__device__ void load_weights(const HopperHaloArgs& args, const HaloTables& tables, u32 weights,
                             const Barriers& barriers) {
  if (args.slots == 0) {
    for (int chunk = 0; chunk < args.chunks; ++chunk) {
      const u32 full = barriers.w_full + 8 * chunk;
      mbarrier_arrive_expect_tx(full, args.steps * args.load_bytes);
      for (int i = 0; i < args.steps; ++i) {
        load_weight(args, tables.load[i], weights + chunk * args.chunk_bytes, full, chunk, 0);
      }
    }
    return;
  }
  PipelineState state;
  for (int tile = blockIdx.x; tile < args.all_tiles; tile += gridDim.x) {
    const HaloTile tile_at(args, tile);
    for (int chunk = 0; chunk < args.chunks; ++chunk) {
      for (int step = 0; step < args.steps; ++step, state.advance(args.slots)) {
        mbarrier_wait(barriers.w_empty + 8 * state.index, state.parity ^ 1);
        const u32 full = barriers.w_full + 8 * state.index;
        mbarrier_arrive_expect_tx(full, args.load_bytes);
        load_weight(args, tables.load[step], weights + state.index * args.slot_bytes, full, chunk,
                    tile_at.channel_tile);
      }
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    hopper_halo(const __grid_constant__ HopperHaloArgs args) {
  extern __shared__ uint4 shared[];
  const int thread = threadIdx.x, lane = thread & 31;
  // Warp-uniform, which the compiler infers only from a shuffle.
  const int warp = __shfl_sync(0xffffffff, thread / 32, 0);
  __shared__ HaloTables tables;
  const u32 base = (shared_address(shared) + 1023) & ~1023u;
  const u32 ring = base, weights = base + args.shared_weights;
  Barriers barriers;
  barriers.x_full = weights + (args.slots == 0 ? args.chunks * args.chunk_bytes
                                               : args.slots * args.slot_bytes);
  barriers.x_empty = barriers.x_full + 8 * args.stages;
  barriers.w_full = barriers.x_empty + 8 * args.stages;
  const int w_barriers = args.slots == 0 ? args.chunks : args.slots;
  barriers.w_empty = barriers.w_full + 8 * w_barriers;
  const u32 staging = (barriers.w_empty + 8 * w_barriers + 15) & ~15u;  // staging of the epilogue
  if (warp == kFirstProducerWarp) {
    for (int i = lane; i < args.stages; i += 32) {
      mbarrier_init(barriers.x_full + 8 * i, 1);
      mbarrier_init(barriers.x_empty + 8 * i, kConsumers);
    }
    for (int i = lane; i < w_barriers; i += 32) {
      mbarrier_init(barriers.w_full + 8 * i, 1);
      mbarrier_init(barriers.w_empty + 8 * i, kConsumers);
    }
    fence_mbarrier_init();
  } else if (thread == 0) {
    prefetch_tensor_map(args.x_map);
    prefetch_tensor_map(args.w_map);
  }
  __syncthreads();
  wait_on_dependent_grids();

  if (warp >= kFirstProducerWarp) {
    setmaxnreg_dec<40>();
    if (warp == kFirstProducerWarp && elect_one()) load_source(args, args.tables, ring, barriers);
    if (warp == kFirstProducerWarp + 1 && elect_one()) load_weights(args, args.tables, weights, barriers);
  } else {
    setmaxnreg_inc<232>();
    // Copied to shared memory, as repeated reads from the constant cache are slow.
    for (u32 i = thread; i < sizeof tables / sizeof(int); i += kConsumers * 32) {
      reinterpret_cast<int*>(&tables)[i] = reinterpret_cast<const int*>(&args.tables)[i];
    }
    named_barrier_sync(kConsumerBarrier, kConsumers * 32);
    const int group = warp / 4;
    // Operand descriptors at shared address 0; advanced in units of 16 bytes.
    const bool twice = args.row_channels == 32;
    constexpr u32 kRowBytes = 2 * kTileK, kHalfBytes = 32 * kRowBytes;
    const u64 a_kind = !ACROSS ? k_major_descriptor<64>(0)
                       : twice ? mn_major_descriptor<64>(0, kHalfBytes)
                               : mn_major_descriptor<128>(0);
    const u32 a_next = !ACROSS ? 2 : twice ? 16 * 64 / 16 : 16 * 128 / 16;
    const u64 a_first = a_kind + (weights >> 4);
    const u64 b_first =
        k_major_descriptor<64>(ring) + group * kColumns * (kRowBytes / 16);

    float sum[kColumns / 8][4] = {};
    PipelineState x_state, w_state;
    for (int tile = blockIdx.x; tile < args.all_tiles; tile += gridDim.x) {
      int add = 0;  // scale_d: accumulate onto the previous sums
      // mbarriers to arrive at once the previous step is complete, or 0.
      u32 x_empty_barrier = 0, w_empty_barrier = 0;
      const auto release = [&] {
        if (lane == 0) {
          if (x_empty_barrier != 0) mbarrier_arrive(x_empty_barrier);
          if (w_empty_barrier != 0) mbarrier_arrive(w_empty_barrier);
        }
        __syncwarp();
        x_empty_barrier = w_empty_barrier = 0;
      };
      // Also waits for the previous wgmmas.
      const auto multiply_taps = [&](u64 a_step, u64 b_step, const HaloTap* from, auto count) {
        HaloTap tap[count.value];
#pragma unroll
        for (int i = 0; i < count.value; ++i) tap[i] = from[i];
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < count.value; ++i) {
          const u64 a = a_step + tap[i].weight, b = b_step + tap[i].pixel;
          wgmma<T, kWeights, kMajorK>(sum, a, b, i == 0 ? add : 1);
          wgmma<T, kWeights, kMajorK>(sum, a + a_next, b + 2, 1);
        }
        add = 1;
        wgmma_commit();
        wgmma_wait<1>();
        release();
      };
      for (int chunk = 0; chunk < args.chunks; ++chunk) {
        for (int i = 0; i < args.steps; ++i) {
          const HaloStep step = tables.step[i];
          const int taps = __shfl_sync(0xffffffff, static_cast<int>(step.taps), 0);
          const u32 w_at = args.slots == 0 ? chunk : w_state.index;
          mbarrier_wait(barriers.x_full + 8 * x_state.index, x_state.parity);
          mbarrier_wait(barriers.w_full + 8 * w_at, w_state.parity);
          const u64 a_step =
              a_first + (w_at * (args.slots == 0 ? args.chunk_bytes : args.slot_bytes) >> 4);
          const u64 b_step = b_first + (static_cast<u32>(x_state.index) * args.stage_bytes >> 4);
          // Three taps at a time, so that the tensor cores do not wait for address arithmetic.
          int j = 0;
          for (; j + 3 <= taps; j += 3) {
            multiply_taps(a_step, b_step, &tables.tap[step.first_tap + j], Constant<3>());
          }
          if (j + 2 == taps) {
            multiply_taps(a_step, b_step, &tables.tap[step.first_tap + j], Constant<2>());
          } else if (j + 1 == taps) {
            multiply_taps(a_step, b_step, &tables.tap[step.first_tap + j], Constant<1>());
          }
          x_empty_barrier = step.last ? barriers.x_empty + 8 * x_state.index : 0;
          w_empty_barrier = args.slots != 0 ? barriers.w_empty + 8 * w_at : 0;
          if (step.last) x_state.advance(args.stages);
          if (args.slots != 0) w_state.advance(args.slots);
        }
      }
      HaloResults results(args, HaloTile(args, tile));
      wgmma_wait<0>();
      fence_accumulators(sum);
      release();
      put_results<T>(results, sum, staging + warp * kHaloStaging);
    }
  }
}
