// hopper_gather.cu's shared-memory layout, its tile scheduler warp, and its producer threads: one for source pixels,
// one for weights. Each fills a stage's part and counts its bytes on the stage's full barrier.
#pragma once

#include "conv/hopper_gather_tile.cuh"
#include "core/pipeline_state.cuh"

#if !SINGLE
namespace convgrad {
namespace {

// The part of a k-tile's weights that one block multicasts to all that share them: whole boxes, or, of N-major
// weights whose boxes cannot be divided evenly, a part of each.
constexpr int kLoadedChannels = BN / SHARING;
constexpr bool kWholeBoxes = kBoxes % SHARING == 0;
constexpr int kLoadedBoxes = kWholeBoxes ? kBoxes / SHARING : kBoxes;
constexpr int kLoadedK = kWholeBoxes ? kTileK : kTileK / SHARING;

static_assert(kWarpgroupRows % 64 == 0 && kWarpgroupRows * kWarpgroupsPerTile == BM,
              "whole products for each");
static_assert(!PINGPONG || CONSUMERS == 2, "two take turns");
static_assert(TAPS == 1 || (PINGPONG && SHARING == 1), "the results of a row of taps");
static_assert(PARTS == 1 || (!PINGPONG && STAGES > PARTS), "a k-tile's parts at once");
static_assert(BN % 32 == 0 && (ACROSS || kLoadedChannels % 8 == 0), "whole boxes for each");

// Entries of the tile queue.
constexpr int kTileQueue = 4;
// mbarriers: full and empty per stage and per queue entry; with PINGPONG one per warpgroup.
constexpr int kBarriers = 2 * STAGES + 2 * kTileQueue + (PINGPONG ? CONSUMERS : 0);
struct SharedLayout {
  u32 ring, staging, barriers;  // shared addresses
  QueuedTile* queue;
  int row;  // which of the cluster's pixels this block has

  __device__ __forceinline__ u32 stage(int i) const { return ring + i * kStageBytes; }
  // mbarriers of a stage and of an entry of the tile queue.
  __device__ __forceinline__ u32 full_barrier(int i) const { return barriers + i * 8; }
  __device__ __forceinline__ u32 empty_barrier(int i) const { return barriers + (STAGES + i) * 8; }
  __device__ __forceinline__ u32 tile_full_barrier(int i) const { return barriers + (2 * STAGES + i) * 8; }
  __device__ __forceinline__ u32 tile_empty_barrier(int i) const {
    return barriers + (2 * STAGES + kTileQueue + i) * 8;
  }
  // PINGPONG: this warpgroup may start its mainloop.
  __device__ __forceinline__ u32 order_barrier(int warpgroup) const {
    return barriers + (2 * STAGES + 2 * kTileQueue + warpgroup) * 8;
  }
};

// A cluster's slots in the schedule: one in each wave, in alternating direction, so that a cluster with a long
// tile in one wave gets a short one in the next.
struct TileSchedule {
  int own, clusters, all;

  __device__ __forceinline__ int count() const { return (all + clusters - 1) / clusters; }
  __device__ __forceinline__ int slot(int wave) const {
    return wave * clusters + (wave & 1 ? clusters - 1 - own : own);
  }
};

// The scheduler warp: computes tiles ahead of the producers and consumers, and queues them.
__device__ __forceinline__ void schedule_tiles(const HopperGatherArgs& args, const SharedLayout& smem,
                                           const TileSchedule& schedule) {
  PipelineState queue_state{0, 1};
  const int chunks = (args.in_channels + kTileK - 1) / kTileK;
  auto enqueue = [&](const QueuedTile& queued) {
    mbarrier_wait(smem.tile_empty_barrier(queue_state.index), queue_state.parity);
    if ((threadIdx.x & 31) == 0) {
      smem.queue[queue_state.index] = queued;
      mbarrier_arrive(smem.tile_full_barrier(queue_state.index));
    }
    queue_state.advance(kTileQueue);
  };
  QueuedTile queued;
#pragma unroll 1
  for (int wave = 0; wave < schedule.count(); ++wave) {
    GatherTile tile;
    if (!tile_at<BM * SHARING>(args, schedule.slot(wave), schedule.all, tile)) continue;
    const GatherPhase& phase = phase_of(args, tile.phase);
    const int past = min(tile.first_pixel + BM * SHARING, phase.pixels);
    const PixelAt first = pixel_at(phase, tile.first_pixel), last = pixel_at(phase, past - 1);
    const PixelAt own = pixel_at(phase, tile.first_pixel + smem.row * BM);
    queued.phase = tile.phase, queued.first_pixel = tile.first_pixel;
    queued.column = tile.column, queued.group = divide(tile.column, args.by_group);
    queued.first_channel = (tile.column - queued.group * args.group_tiles) * BN;
    int steps = chunks;
#pragma unroll
    for (int d = 0; d < 3; ++d) {
      queued.taps[d] = TAPS > 1 && d == 2 ? 1 : taps_inside(args, phase, first, last, d);
      queued.at[d] = phase.axis[d].low + position(own, d, args.images_first) * args.x_step[d];
      steps *= __popc(queued.taps[d]);
    }
    queued.image = image(own, args.images_first);
    queued.steps = steps;
    enqueue(queued);
  }
  queued.steps = -1;
  enqueue(queued);
}

// Calls copy(channel, t, r, s, part) for each k-tile of this block: chunks of channels (outer), from `first` on, and taps
// that are not skipped (inner). Parts of one follow one another, the smallest first.
template <class Copy>
__device__ __forceinline__ void for_each_step(const QueuedTile& tile, int first, int channels, const Copy& copy) {
#pragma unroll 1
  for (int channel = first; channel < first + channels; channel += kTileK) {
#pragma unroll 1
    for (int t = next_bit(tile.taps[0], -1); t < 32; t = next_bit(tile.taps[0], t)) {
#pragma unroll 1
      for (int r = next_bit(tile.taps[1], -1); r < 32; r = next_bit(tile.taps[1], r)) {
#pragma unroll 1
        for (int s = next_bit(tile.taps[2], -1); s < 32; s = next_bit(tile.taps[2], s)) {
#pragma unroll
          for (int part = PARTS - 1; part >= 0; --part) copy(channel, t, r, s, part);
        }
      }
    }
  }
}

// Producer thread of the source pixels.
__device__ __forceinline__ void load_pixels(const HopperGatherArgs& args, const SharedLayout& smem) {
  PipelineState queue_state;
  PipelineState state{0, 1};
  const int channels = args.in_channels, mode = args.dims + (args.images_first ? 3 : 0);
  const int x_tap[3] = {args.x_tap[0], args.x_tap[1], args.x_tap[2]};
#pragma unroll 1
  for (;;) {
    mbarrier_wait(smem.tile_full_barrier(queue_state.index), queue_state.parity);
    const QueuedTile tile = smem.queue[queue_state.index];
    mbarrier_arrive(smem.tile_empty_barrier(queue_state.index));
    queue_state.advance(kTileQueue);
    if (tile.steps < 0) return;
    const GatherPhase& phase = phase_of(args, tile.phase);
    const TensorMap& map = args.source[MAPS == 1 ? 0 : tile.phase];
    const int d = tile.at[0], h = tile.at[1], w = tile.at[2], first_image = tile.image;
    int base_offset[3];
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) base_offset[axis] = phase.axis[axis].x0 - phase.axis[axis].low;
    if (TAPS > 1) base_offset[2] = 0;
    for_each_step(tile, tile.group * args.source_group, channels, [&](int channel, int t, int r, int s, int part) {
      mbarrier_wait(smem.empty_barrier(state.index), state.parity);
      const u32 barrier = smem.full_barrier(state.index), to = smem.stage(state.index);
      mbarrier_arrive_expect_tx(barrier, TAPS > 1 ? args.a_bytes : kABytes);
      const int dd = base_offset[0] + t * x_tap[0], dh = base_offset[1] + r * x_tap[1],
                dw = base_offset[2] + s * x_tap[2];
      const int n = first_image + (PARTS > 1 ? part * args.images : 0);
      const int at[4] = {d, h, w, n};
      switch (mode) {
        case 3: load_im2col<3, false>(to, barrier, map, at, channel, dd, dh, dw); break;
        case 4: load_im2col<4, false>(to, barrier, map, at, channel, dd, dh, dw); break;
        case 5: load_im2col<5, false>(to, barrier, map, at, channel, dd, dh, dw); break;
        case 6: load_im2col<3, true>(to, barrier, map, at, channel, dd, dh, dw); break;
        case 7: load_im2col<4, true>(to, barrier, map, at, channel, dd, dh, dw); break;
        default: load_im2col<5, true>(to, barrier, map, at, channel, dd, dh, dw);
      }
      state.advance(STAGES);
    });
  }
}

// Producer thread of this block's part of the weights, multicast to the blocks that share them.
__device__ __forceinline__ void load_weights(const HopperGatherArgs& args, const SharedLayout& smem) {
  PipelineState queue_state;
  PipelineState state{0, 1};
  const int channels = args.in_channels;
  const int r_step[3] = {args.r_step[0], args.r_step[1], args.r_step[2]};
#pragma unroll 1
  for (;;) {
    mbarrier_wait(smem.tile_full_barrier(queue_state.index), queue_state.parity);
    const QueuedTile tile = smem.queue[queue_state.index];
    mbarrier_arrive(smem.tile_empty_barrier(queue_state.index));
    queue_state.advance(kTileQueue);
    if (tile.steps < 0) return;
    const GatherPhase& phase = phase_of(args, tile.phase);
    const int r0[3] = {phase.axis[0].r0, phase.axis[1].r0, phase.axis[2].r0};
    const int group_row = tile.group * args.weight_group;
    for_each_step(tile, ACROSS ? group_row : 0, channels, [&](int channel, int j0, int j1, int j2, int part) {
      mbarrier_wait(smem.empty_barrier(state.index), state.parity);
      const u32 barrier = smem.full_barrier(state.index), to = smem.stage(state.index) + kABytes;
      mbarrier_arrive_expect_tx(barrier, kWeightBytes);
      const int t = r0[0] + j0 * r_step[0], r = r0[1] + j1 * r_step[1];
      auto load = [&](u32 there, const int (&at)[5]) {
        tma_load_multicast<5, (SHARING > 1)>((1u << SHARING) - 1, there, args.weight, barrier, at, kEvictLast);
      };
#pragma unroll
      for (int tap = 0; tap < TAPS; ++tap) {
        const u32 at = to + tap * kBBytes;
        const int s = r0[2] + (j2 + tap) * r_step[2];
        if constexpr (ACROSS) {
#pragma unroll
          for (int i = 0; i < kLoadedBoxes; ++i) {
            const int box = kWholeBoxes ? smem.row * kLoadedBoxes + i : i;
            const int own = kWholeBoxes ? 0 : smem.row * kLoadedK;
            load(at + box * kBoxBytes + own * kRowBytes,
                 {tile.first_channel + box * kBoxColumns, s, r, t, part * args.weight_rows + channel + own});
          }
        } else {
          const int own = smem.row * kLoadedChannels;
          load(at + own * kRowBytes,
               {channel, s, r, t, part * args.weight_rows + group_row + tile.first_channel + own});
        }
      }
      state.advance(STAGES);
    });
  }
}

}  // namespace
}  // namespace convgrad
#endif
