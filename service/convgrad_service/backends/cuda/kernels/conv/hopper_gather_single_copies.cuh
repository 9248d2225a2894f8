// hopper_gather_single.cuh's shared-memory layout, the k-tiles of a block, and its producer warps.
#pragma once

#include "conv/hopper_gather_tile.cuh"
#include "conv/hopper_gather_result.cuh"
#include "core/pipeline_state.cuh"
#include "core/split_k_reduce.cuh"

#if SINGLE
namespace convgrad {
namespace {

// Registers allow the code for a bias and an activation.
constexpr bool kFinishes = sizeof(T) == 2 && PARTS == 1 && MAPS == 1 && kMmasM * kFragmentsN * 4 <= 128;
constexpr int kConsumers = CONSUMERS * 128, kThreads = kConsumers + 64;
static_assert(PARTS == 1 || TAPS == 1, "a stage has one part of one tap");
using Reduce = SplitKReduce<kMmasM * kFragmentsN, CONSUMERS * 4>;

struct SharedLayout {
  u32 ring, reduce, barriers;
  char* base;
  int stages;

  __device__ __forceinline__ char* pointer(u32 address) const { return base + (address - ring); }
  __device__ __forceinline__ u32 stage(int i) const { return ring + i * kStageBytes; }
  __device__ __forceinline__ u32 full_barrier(int i) const { return barriers + i * 8; }
  __device__ __forceinline__ u32 empty_barrier(int i) const { return barriers + (stages + i) * 8; }
  __device__ __forceinline__ u32 reduce_barrier() const { return barriers + 2 * stages * 8; }
  // The list of k-tiles is complete.
  __device__ __forceinline__ u32 list_barrier() const { return reduce_barrier() + 8; }
  __device__ __forceinline__ u32 walk() const { return reduce_barrier() + 16; }
  __device__ __forceinline__ u32 taps() const { return walk() + 16; }
};

// The tile of a block, and its k-tiles [first, end), numbered with taps as the inner loop.
struct Place {
  GatherTile tile;
  int group, first_channel;  // where the tile's column is
  int part;  // rank in the cluster
  int first, end, taps;

  __device__ __forceinline__ explicit Place(const HopperGatherArgs& args) {
    part = args.cluster > 1 ? static_cast<int>(cluster_rank()) : 0;
    int phase = 0, row = blockIdx.z;
    if (MAPS > 1) {
      while (row >= args.phase[phase].tiles) row -= args.phase[phase++].tiles;
    }
    tile = {phase, row * BM, static_cast<int>(blockIdx.y)};
    group = divide(tile.column, args.by_group);
    first_channel = (tile.column - group * args.group_tiles) * BN;
    const GatherPhase& of = phase_of(args, phase);
    taps = of.axis[0].taps * of.axis[1].taps * (TAPS > 1 ? 1 : of.axis[2].taps);
    const int all = (args.in_channels + kTileK - 1) / kTileK * taps;
    first = 0, end = all;
    if (args.cluster > 1) {
      first = divide(all * part, args.by_cluster), end = divide(all * (part + 1), args.by_cluster);
    }
  }
};

// t, r and s of a tap, eight bits each.
__device__ __forceinline__ u32 tap_of(const GatherPhase& phase, int tap) {
  const int outer = divide(tap, phase.by_row), t = divide(tap, phase.by_plane);
  const int s = TAPS > 1 ? 0 : tap - outer * phase.axis[2].taps;
  return t | (outer - t * phase.axis[1].taps) << 8 | s << 16;
}

// The number of k-tiles after the first one, and where they start: in the list of `kept` taps, and of channels.
struct Walk {
  int steps, kept, index, channel;
};

// Warp: lists the taps that some pixel of the tile reads inside the source (`tap_of`), and counts the k-tiles after the first one, which is loaded in any case.
__device__ __forceinline__ Walk list_taps(const HopperGatherArgs& args, const Place& place, const PixelAt& first,
                                          u32 list) {
  const GatherPhase& phase = phase_of(args, place.tile.phase);
  u32 inside[3] = {~0u, ~0u, ~0u};
  if (args.skips) {
    const PixelAt last = pixel_at(phase, min(place.tile.first_pixel + BM, phase.pixels) - 1);
#pragma unroll
    for (int d = 0; d < (TAPS > 1 ? 2 : 3); ++d) inside[d] = taps_inside(args, phase, first, last, d);
  }
  const int taps = place.taps, next = place.first + 1, lane = threadIdx.x & 31;
  int chunk = 0, end_chunk = (args.in_channels + kTileK - 1) / kTileK, end_tap = 0, next_tap = 1;
  if (args.cluster > 1) {
    chunk = divide(next, phase.by_taps), next_tap = next - chunk * taps;
    end_chunk = divide(place.end, phase.by_taps), end_tap = place.end - end_chunk * taps;
  }
  Walk walk = {0, 0, 0, 0};
  int below_end = 0;
#pragma unroll 1
  for (int from = 0; from < taps; from += 32) {
    const int tap = from + lane;
    const u32 entry = tap_of(phase, tap), t = entry & 255, r = entry >> 8 & 255, s = entry >> 16;
    const bool in = tap < taps && (inside[0] >> t & inside[1] >> r & inside[2] >> s & 1);
    const u32 mask = __ballot_sync(~0u, in);
    if (in) st_shared_u32(list + (walk.kept + __popc(mask & ((1u << lane) - 1))) * 4, entry);
    walk.index += __popc(__ballot_sync(~0u, in && tap < next_tap));
    if (args.cluster > 1) below_end += __popc(__ballot_sync(~0u, in && tap < end_tap));
    walk.kept += __popc(mask);
  }
  walk.steps = (end_chunk - chunk) * walk.kept + below_end - walk.index;
  if (walk.index == walk.kept) walk.index = 0, ++chunk;
  walk.channel = chunk * kTileK;
  return walk;
}

// Walks through the list.
struct Steps {
  Walk walk;
  u32 list, entry;
  __device__ __forceinline__ Steps(const Walk& walk, u32 list)
      : walk(walk), list(list), entry(ld_shared_u32(list + walk.index * 4)) {}
  __device__ __forceinline__ void next() {
    if (++walk.index == walk.kept) walk.index = 0, walk.channel += kTileK;
    entry = ld_shared_u32(list + walk.index * 4);
  }
};

// The tap of the block's first k-tile, and its channel.
__device__ __forceinline__ u32 first_entry(const HopperGatherArgs& args, const Place& place, int& channel) {
  channel = 0;
  if (args.cluster == 1) return 0;
  const GatherPhase& phase = phase_of(args, place.tile.phase);
  const int chunk = divide(place.first, phase.by_taps);
  channel = chunk * kTileK;
  return tap_of(phase, place.first - chunk * place.taps);
}

// All threads, between the initialisation of the mbarriers and their use.
__device__ __forceinline__ void sync_block(bool split) {
  __syncwarp();
  __syncthreads();
  if (split) cluster_arrive();
}

template <int kDims, bool kImages>
__device__ __forceinline__ void produce_pixels(const HopperGatherArgs& args, const SharedLayout& smem) {
  const Place place(args);
  const GatherPhase& phase = phase_of(args, place.tile.phase);
  const TensorMap& map = args.source[MAPS == 1 ? 0 : place.tile.phase];
  const PixelAt first = pixel_at(phase, place.tile.first_pixel);
  int at[4], base[3], tap[3];
#pragma unroll
  for (int d = 0; d < 3; ++d) {
    at[d] = phase.axis[d].low + position(first, d, args.images_first) * args.x_step[d];
    base[d] = phase.axis[d].x0 - phase.axis[d].low, tap[d] = args.x_tap[d];
    if (TAPS > 1 && d == 2) base[d] = tap[d] = 0;
  }
  at[3] = image(first, args.images_first);
  const bool elected = elect_one(), any = place.end > place.first;
  PipelineState state{0, 1};
  const int first_image = at[3], first_channel = place.group * args.source_group;
  auto load = [&](u32 entry, int channel, bool waits) {
    const int t = entry & 255, r = entry >> 8 & 255, s = entry >> 16;
#pragma unroll
    for (int part = PARTS - 1; part >= 0; --part) {
      if (waits) mbarrier_wait(smem.empty_barrier(state.index), state.parity);
      const u32 barrier = smem.full_barrier(state.index);
      mbarrier_arrive_expect_tx(barrier, args.a_bytes);
      if (PARTS > 1) at[3] = first_image + part * args.images;
      load_im2col<kDims, kImages>(smem.stage(state.index), barrier, map, at, first_channel + channel, base[0] + t * tap[0],
                                  base[1] + r * tap[1], base[2] + s * tap[2]);
      state.advance(smem.stages);
    }
  };
  if (elected) {
    wait_on_dependent_grids();
    int channel;
    const u32 entry = first_entry(args, place, channel);
    if (any) load(entry, channel, false);
  }
  __syncwarp();
  if (any) {
    const Walk walk = list_taps(args, place, first, smem.taps());
    __syncwarp();
    if (elected) {
      st_shared_v4(smem.walk(), {static_cast<u32>(walk.steps), static_cast<u32>(walk.kept),
                                 static_cast<u32>(walk.index), static_cast<u32>(walk.channel)});
      mbarrier_arrive(smem.list_barrier());
      Steps at_step(walk, smem.taps());
#pragma unroll 1
      for (int i = 0; i < walk.steps; ++i) {
        const u32 entry = at_step.entry;
        const int channel = at_step.walk.channel;
        at_step.next();
        load(entry, channel, true);
      }
    }
  }
}

__device__ __forceinline__ void produce_weights(const HopperGatherArgs& args, const SharedLayout& smem) {
  const Place place(args);
  const GatherPhase& phase = phase_of(args, place.tile.phase);
  const int r0[3] = {phase.axis[0].r0, phase.axis[1].r0, phase.axis[2].r0};
  const int step[3] = {args.r_step[0], args.r_step[1], args.r_step[2]};
  const int first_row = place.group * args.weight_group + (ACROSS ? 0 : place.first_channel);
  PipelineState state{0, 1};
  auto load = [&](u32 entry, int channel, bool waits) {
    const int t = r0[0] + (entry & 255) * step[0], r = r0[1] + (entry >> 8 & 255) * step[1],
              s = r0[2] + (entry >> 16) * step[2];
#pragma unroll
    for (int part = PARTS - 1; part >= 0; --part) {
      if (waits) mbarrier_wait(smem.empty_barrier(state.index), state.parity);
      const u32 barrier = smem.full_barrier(state.index), to = smem.stage(state.index) + kABytes;
      mbarrier_arrive_expect_tx(barrier, kWeightBytes);
#pragma unroll
      for (int tap = 0; tap < TAPS; ++tap) {
        const int s_tap = s + tap * step[2];
        if constexpr (ACROSS) {
#pragma unroll
          for (int box = 0; box < kBoxes; ++box) {
            tma_load<5>(to + tap * kBBytes + box * kBoxBytes, args.weight, barrier,
                        {place.first_channel + box * kBoxColumns, s_tap, r, t, part * args.weight_rows + first_row + channel},
                        kEvictLast);
          }
        } else {
          tma_load<5>(to + tap * kBBytes, args.weight, barrier,
                      {channel, s_tap, r, t, part * args.weight_rows + first_row}, kEvictLast);
        }
      }
      state.advance(smem.stages);
    }
  };
  if (elect_one() && place.end > place.first) {
    wait_on_dependent_grids();
    int channel;
    const u32 entry = first_entry(args, place, channel);
    load(entry, channel, false);
    mbarrier_wait(smem.list_barrier(), 0);
    u32 words[4];
    ld_shared_v4(words, smem.walk());
    Steps at_step({static_cast<int>(words[0]), static_cast<int>(words[1]), static_cast<int>(words[2]),
                   static_cast<int>(words[3])}, smem.taps());
#pragma unroll 1
    for (int i = 0; i < at_step.walk.steps; ++i) {
      const u32 next_entry = at_step.entry;
      const int next_channel = at_step.walk.channel;
      at_step.next();
      load(next_entry, next_channel, true);
    }
  }
}

}  // namespace
}  // namespace convgrad
#endif
