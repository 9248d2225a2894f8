// Dense convolution with few channels on Hopper, fprop or dgrad (TMA, wgmma): a tile of positions finds all
// its taps in boxes of the source that are loaded once, not once per tap. Launched by hopper_halo.py.
// Needs sm_90a.
//
//   y[n, k, y0 + m*y_step] = sum over taps j and c of x[n, c, m*x_step + offset(j)] * w[k, c, tap(j)].
// GEMM per tap: M = 64 result channels, N = COLUMNS positions, K = 32 source channels. Positions are numbered
// along the rows of a slice of the source including its halo, so a tap is a displacement: its operand is the
// slice from some pixel on, 64 bytes per pixel. Columns beyond the ends of rows are computed and discarded.
//
// Grid: a tile is a box of positions of one image and channel tile; a block takes tiles blockIdx.x,
//   + gridDim.x, ...
// Block (384 threads): two consumer warpgroups, which divide the columns or the result channels, and a
//   producer warpgroup: one warp loads source slices (boxes over W and H) through a pipeline of stages,
//   another loads weights through a second pipeline, or once where all of them fit. Tables
//   (hopper_halo_args.cuh) list passes, each of which accumulates one result of the tile, and their slices,
//   k-steps and taps. With 32 result channels M holds them twice: for a position with one tap, and for the
//   position one deeper with the tap before it.
// Shared memory: the tables; dynamic: 1,024 bytes of alignment, stages, weights, mbarriers; counted by
//   hopper_halo_tiles.py.
// Preconditions: the tables; channels of source and weight contiguous in whole 16-byte chunks. Positions
//   outside the source are zeros.
// Determinism: one order of additions per result, whatever the tiles.
// Limits: positions along a dimension below 2^28; byte offsets within a result tile below 2^31; 64-bit
//   elsewhere.
#include "conv/hopper_halo_result.cuh"
#include "ptx/pdl.cuh"
#include "ptx/warpgroup.cuh"

using namespace convgrad;

namespace {

using T = ELEMENT;
constexpr int kColumns = COLUMNS;
constexpr int kDepth = 32;  // channels of a chunk
constexpr Major kWeights = ACROSS ? kMajorMn : kMajorK;
constexpr int kThreads = 384, kGroups = 2, kLoaders = 8;  // the first warp that loads
constexpr int kConsumers = kGroups * 4;                   // warps
constexpr int kConsume = 1;                               // a barrier

template <int kCount>
struct Count {
  static constexpr int value = kCount;
};

// A place in a ring, and the parity of its turn.
struct Place {
  u32 at = 0, parity = 0;

  __device__ __forceinline__ void advance(u32 size) {
    if (++at == size) at = 0, parity ^= 1;
  }
};

struct Barriers {
  u32 x_full, x_empty, w_full, w_empty;
};

template <int kFragments>
__device__ __forceinline__ void clear_sums(float (&sum)[kFragments][4]) {
#pragma unroll
  for (int j = 0; j < kFragments; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sum[j][e] = 0;
  }
}

__device__ void load_source(const HopperHaloArgs& args, const HaloTables& tables, u32 ring,
                            const Barriers& barriers) {
  Place place;
  for (int tile = blockIdx.x; tile < args.all_tiles; tile += gridDim.x) {
    const HaloTile at(args, tile);
    for (int chunk = 0; chunk < args.chunks; ++chunk) {
      for (int slice = 0; slice < args.slices; ++slice, place.advance(args.stages)) {
        mbarrier_wait(barriers.x_empty + 8 * place.at, place.parity ^ 1);
        const u32 full = barriers.x_full + 8 * place.at;
        mbarrier_arrive_expect_tx(full, args.box_bytes);
        const HaloSlice& from = tables.slice[slice];
        const int corner[5] = {chunk * kDepth, at.m[2] * args.x_step[2] + from.at[2],
                               at.m[1] * args.x_step[1] + from.at[1],
                               at.m[0] * args.x_step[0] + from.at[0], at.n};
        tma_load(ring + place.at * args.stage_bytes, args.x_map, full, corner);
      }
    }
  }
}

__device__ __forceinline__ void load_weight(const HopperHaloArgs& args, const HaloLoad& load, u32 to,
                                            u32 full, int chunk, int channel_tile) {
  const int channel = (channel_tile + load.block) * args.row_channels;
  const int corner[5] = {ACROSS ? channel : chunk * kDepth, ACROSS ? chunk * kDepth : channel,
                         load.t, load.s, load.r};
  tma_load(to + load.to * 16, args.w_map, full, corner, kEvictLast);
}

__device__ void load_weights(const HopperHaloArgs& args, const HaloTables& tables, u32 weights,
                             const Barriers& barriers) {
  const int blocks = 1 + args.group_blocks;
  if (args.slots == 0) {
    for (int chunk = 0; chunk < args.chunks; ++chunk) {
      const u32 full = barriers.w_full + 8 * chunk;
      mbarrier_arrive_expect_tx(full, args.all_loads * args.load_bytes);
      for (int i = 0; i < args.all_loads; ++i) {
        load_weight(args, tables.load[i], weights + chunk * args.chunk_bytes, full, chunk, 0);
      }
    }
    return;
  }
  Place place;
  for (int tile = blockIdx.x; tile < args.all_tiles; tile += gridDim.x) {
    const HaloTile at(args, tile);
    for (int pass = 0; pass < args.passes; ++pass) {
      for (int chunk = 0; chunk < args.chunks; ++chunk) {
        for (int i = 0; i < tables.pass[pass].steps; ++i, place.advance(args.slots)) {
          const HaloStep& step = tables.step[tables.pass[pass].first_step + i];
          mbarrier_wait(barriers.w_empty + 8 * place.at, place.parity ^ 1);
          const u32 full = barriers.w_full + 8 * place.at;
          mbarrier_arrive_expect_tx(full, step.loads * args.load_bytes);
          for (int j = 0; j < step.loads; ++j) {
            load_weight(args, tables.load[step.first_load + j],
                        weights + place.at * args.slot_bytes, full, chunk,
                        at.channel_tile * blocks);
          }
        }
      }
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    hopper_halo(const __grid_constant__ HopperHaloArgs args) {
  extern __shared__ uint4 shared[];
  const int thread = threadIdx.x, lane = thread & 31;
  // The same in all lanes, which the compiler knows of a shuffle alone.
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
  const u32 staging = (barriers.w_empty + 8 * w_barriers + 15) & ~15u;  // where results go by chunks
  if (warp == kLoaders) {
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

  if (warp >= kLoaders) {
    setmaxnreg_dec<40>();
    if (warp == kLoaders && elect_one()) load_source(args, args.tables, ring, barriers);
    if (warp == kLoaders + 1 && elect_one()) load_weights(args, args.tables, weights, barriers);
  } else {
    setmaxnreg_inc<232>();
    // Read again and again, which the constants' cache is slow at.
    for (u32 i = thread; i < sizeof tables / sizeof(int); i += kConsumers * 32) {
      reinterpret_cast<int*>(&tables)[i] = reinterpret_cast<const int*>(&args.tables)[i];
    }
    named_barrier_sync(kConsume, kConsumers * 32);
    const int group = warp / 4;
    // Descriptors of the operands at shared address 0, from where they are moved in 16 bytes.
    const bool twice = args.row_channels == 32;
    constexpr u32 kRowBytes = 2 * kDepth, kHalfBytes = 32 * kRowBytes;
    const u64 a_kind = !ACROSS ? k_major_descriptor<64>(0)
                       : twice ? mn_major_descriptor<64>(0, kHalfBytes)
                               : mn_major_descriptor<128>(0);
    const u32 a_next = !ACROSS ? 2 : twice ? 16 * 64 / 16 : 16 * 128 / 16;
    const u64 a_first = a_kind + (weights >> 4) + group * args.group_weights;
    const u64 b_first =
        k_major_descriptor<64>(ring) + group * args.group_pixels * (kRowBytes / 16);

    float sum[kColumns / 8][4];
    clear_sums(sum);
    Place first, w_place;  // the former of the tile's first slice
    for (int tile = blockIdx.x; tile < args.all_tiles; tile += gridDim.x) {
      Place x_place;
      for (int pass = 0; pass < args.passes; ++pass) {
        const HaloPass& now = tables.pass[pass];
        int add = 0;  // to what the sums are from before
        // Barriers to pass once the step before is over, or 0.
        u32 x_release = 0, w_release = 0;
        const auto release = [&] {
          if (lane == 0) {
            if (x_release != 0) mbarrier_arrive(x_release);
            if (w_release != 0) mbarrier_arrive(w_release);
          }
          __syncwarp();
          x_release = w_release = 0;
        };
        // And waits for the products before.
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
        x_place = first;
        for (int chunk = 0; chunk < args.chunks; ++chunk) {
          int slice = 0;
          for (int i = 0; i < now.steps; ++i) {
            const HaloStep step = tables.step[now.first_step + i];
            const int taps = __shfl_sync(0xffffffff, static_cast<int>(step.taps), 0);
            for (; slice < step.slice; ++slice) x_place.advance(args.stages);
            const u32 w_at = args.slots == 0 ? chunk : w_place.at;
            mbarrier_wait(barriers.x_full + 8 * x_place.at, x_place.parity);
            mbarrier_wait(barriers.w_full + 8 * w_at, w_place.parity);
            const u64 a_step =
                a_first + (w_at * (args.slots == 0 ? args.chunk_bytes : args.slot_bytes) >> 4);
            const u64 b_step = b_first + (x_place.at * args.stage_bytes >> 4);
            // Three taps at a time, so that the tensor cores do not wait for addresses.
            int j = 0;
            for (; j + 3 <= taps; j += 3) {
              multiply_taps(a_step, b_step, &tables.tap[step.first_tap + j], Count<3>());
            }
            if (j + 2 == taps) {
              multiply_taps(a_step, b_step, &tables.tap[step.first_tap + j], Count<2>());
            } else if (j + 1 == taps) {
              multiply_taps(a_step, b_step, &tables.tap[step.first_tap + j], Count<1>());
            }
            x_release = step.last ? barriers.x_empty + 8 * x_place.at : 0;
            w_release = args.slots != 0 ? barriers.w_empty + 8 * w_at : 0;
            if (args.slots != 0) w_place.advance(args.slots);
          }
          for (; slice < args.slices; ++slice) x_place.advance(args.stages);
        }
        HaloResults results(args, now, HaloTile(args, tile));
        wgmma_wait<0>();
        fence_accumulators(sum);
        release();
        if (now.steps == 0) clear_sums(sum);
        put_results<T>(results, sum, staging + warp * kHaloStaging);
      }
      first = x_place;
    }
  }
}
