// How hopper_gather.cu's operands come: what a stage of its ring holds, the warp that looks ahead at
// tiles, and the threads that start the copies.
#pragma once

#include "conv/hopper_gather.cuh"

namespace convgrad {
namespace {

using T = ELEMENT;
constexpr int kRowBytes = 128, kDepth = kRowBytes / static_cast<int>(sizeof(T));
constexpr int kDeep = 32 / static_cast<int>(sizeof(T));  // of one product
constexpr int kProducts = kDepth / kDeep;
// Weights come in boxes of 64 rows, or columns: the last of an odd width is not all used.
constexpr int kBoxColumns = 64, kBoxes = (BN + kBoxColumns - 1) / kBoxColumns;
constexpr u32 kABytes = BM * kRowBytes, kBBytes = kBoxes * kBoxColumns * kRowBytes;
constexpr u32 kStageBytes = kABytes + kBBytes;
constexpr u32 kLoadedBytes = kABytes + (ACROSS ? kBBytes : BN * kRowBytes);
// Warpgroups that multiply a tile together; by turns each has one to itself.
constexpr int kTogether = PINGPONG ? 1 : CONSUMERS;
constexpr int kRowsOf = BM / kTogether;  // of a warpgroup
constexpr int kParts = kRowsOf / 64, kFragments = BN / 8;
// Of the weights across: how far apart boxes lie.
constexpr int kBoxBytes = kDepth * kRowBytes;

// Of a step's weights, what one block copies to all that share them: whole boxes, or of weights
// across, where boxes do not come out even, a part of each.
constexpr int kOwnChannels = BN / SHARING;
constexpr bool kWholeBoxes = kBoxes % SHARING == 0;
constexpr int kOwnBoxes = kWholeBoxes ? kBoxes / SHARING : kBoxes;
constexpr int kOwnDepth = kWholeBoxes ? kDepth : kDepth / SHARING;

static_assert(kRowsOf % 64 == 0 && kRowsOf * kTogether == BM, "whole products for each");
static_assert(!PINGPONG || (CONSUMERS == 2 && SPLIT == 1), "two take turns, with whole tiles");
static_assert(CLUSTER == SHARING * SPLIT && (SPLIT == 1 || SHARING == 1),
              "blocks of a cluster share operands, or a reduction");
static_assert(BN % 32 == 0 && (ACROSS || kOwnChannels % 8 == 0), "whole boxes for each");

// Tiles that are worked out ahead.
constexpr int kTileQueue = 4;
// Of a stage, two; of a place in the queue, two; and where warpgroups take turns, one each, or where a
// reduction is split, one.
constexpr int kBarriers = 2 * STAGES + 2 * kTileQueue + (PINGPONG ? CONSUMERS : SPLIT > 1 ? 1 : 0);
struct Place {
  u32 ring, staging, barriers;  // shared addresses
  QueuedTile* queue;
  int row;   // of the block in its cluster: which pixels
  int part;  // of the reduction

  __device__ __forceinline__ u32 stage(int i) const { return ring + i * kStageBytes; }
  // Barriers: a stage's operands are there, or have been read; likewise a place in the queue.
  __device__ __forceinline__ u32 filled(int i) const { return barriers + i * 8; }
  __device__ __forceinline__ u32 read(int i) const { return barriers + (STAGES + i) * 8; }
  __device__ __forceinline__ u32 queued(int i) const { return barriers + (2 * STAGES + i) * 8; }
  __device__ __forceinline__ u32 taken(int i) const {
    return barriers + (2 * STAGES + kTileQueue + i) * 8;
  }
  // The other blocks' sums of this one's rows are there.
  __device__ __forceinline__ u32 joined() const { return barriers + (2 * STAGES + 2 * kTileQueue) * 8; }
  // It is this warpgroup's turn to multiply.
  __device__ __forceinline__ u32 turn(int warpgroup) const {
    return barriers + (2 * STAGES + 2 * kTileQueue + warpgroup) * 8;
  }
};

// A block's (or a cluster's) places in the schedule: one of every turn, forwards and backwards by
// turns, so that who had a long tile first gets a short one next.
struct Turns {
  int own, others, all;

  __device__ __forceinline__ int count() const { return (all + others - 1) / others; }
  __device__ __forceinline__ int place(int turn) const {
    return turn * others + (turn & 1 ? others - 1 - own : own);
  }
};

// A place in a ring of so many, and the parity of the phase that it is in.
template <int kCount>
struct Turning {
  int at = 0;
  u32 parity;

  __device__ __forceinline__ explicit Turning(u32 parity) : parity(parity) {}
  __device__ __forceinline__ void step() {
    if (++at == kCount) at = 0, parity ^= 1;
  }
  __device__ __forceinline__ void step_by(int places) {
    const u32 there = at + places, rounds = there / kCount;
    at = there - rounds * kCount, parity ^= rounds & 1;
  }
};

// One warp looks ahead at tiles, so that others need not wait for where they lie.
__device__ __forceinline__ void look_ahead(const HopperGatherArgs& args, const Place& place,
                                           const Turns& turns) {
  Turning<kTileQueue> turning(1);
  const int chunks = (args.in_channels + kDepth - 1) / kDepth;
  auto enqueue = [&](const QueuedTile& ahead) {
    mbarrier_wait(place.taken(turning.at), turning.parity);
    if ((threadIdx.x & 31) == 0) {
      place.queue[turning.at] = ahead;
      mbarrier_arrive(place.queued(turning.at));
    }
    turning.step();
  };
  QueuedTile ahead;
#pragma unroll 1
  for (int turn = 0; turn < turns.count(); ++turn) {
    GatherTile tile;
    if (!tile_at<BM * SHARING, BN>(args, turns.place(turn), turns.all, tile)) {
      continue;
    }
    const GatherPhase& phase = phase_of(args, tile.phase);
    const int past = min(tile.first_pixel + BM * SHARING, phase.pixels);
    const PixelAt first = pixel_at(phase, tile.first_pixel), last = pixel_at(phase, past - 1);
    const PixelAt own = pixel_at(phase, tile.first_pixel + place.row * BM);
    ahead.phase = tile.phase, ahead.first_pixel = tile.first_pixel;
    ahead.first_channel = tile.first_channel;
    int steps = chunks;
#pragma unroll
    for (int d = 0; d < 3; ++d) {
      ahead.taps[d] = met_taps(args, phase, first, last, d);
      ahead.at[d] = phase.axis[d].low + position(own, d, args.images_first) * args.x_step[d];
      steps *= __popc(ahead.taps[d]);
    }
    ahead.image = image(own, args.images_first);
    ahead.steps = steps;
    if constexpr (SPLIT > 1) {
      const int all = chunks * phase.axis[0].taps * phase.axis[1].taps * phase.axis[2].taps;
      ahead.first_step = all * place.part / SPLIT, ahead.end_step = all * (place.part + 1) / SPLIT;
      ahead.steps = kept_steps(phase, ahead);
    }
    enqueue(ahead);
  }
  ahead.steps = -1;
  enqueue(ahead);
}

// Calls `copy(channel, t, r, s)` for each step of this block: chunks of channels, and in each the
// taps that are kept. A part of them is not walked up to: that takes 80 ns a step.
template <class Copy>
__device__ __forceinline__ void for_each_step(const GatherPhase& phase, const QueuedTile& tile,
                                              int channels, const Copy& copy) {
  const int taps1 = phase.axis[1].taps, taps2 = phase.axis[2].taps;
  const int taps = phase.axis[0].taps * taps1 * taps2;
  // Where the first chunk starts: those after it start at the first tap.
  int first = 0, first_t = 0, first_r = 0, first_s = 0;
  if constexpr (SPLIT > 1) {
    if (tile.steps == 0) return;
    first = tile.first_step / taps;
    const int tap = tile.first_step - first * taps, outer = tap / taps2;
    first_t = outer / taps1, first_r = outer - first_t * taps1, first_s = tap - outer * taps2;
  }
#pragma unroll 1
  for (int channel = first * kDepth; channel < channels; channel += kDepth) {
#pragma unroll 1
    for (int t = next_bit(tile.taps[0], first_t - 1); t < 32; t = next_bit(tile.taps[0], t)) {
      if (t != first_t) first_r = first_s = 0;
#pragma unroll 1
      for (int r = next_bit(tile.taps[1], first_r - 1); r < 32; r = next_bit(tile.taps[1], r)) {
        if (r != first_r) first_s = 0;
#pragma unroll 1
        for (int s = next_bit(tile.taps[2], first_s - 1); s < 32; s = next_bit(tile.taps[2], s)) {
          if constexpr (SPLIT > 1) {
            const int step = channel / kDepth * taps + (t * taps1 + r) * taps2 + s;
            if (step >= tile.end_step) return;
          }
          copy(channel, t, r, s);
        }
        first_s = 0;
      }
      first_r = first_s = 0;
    }
    // Also where no tap is kept from the first one on.
    first_t = first_r = first_s = 0;
  }
}

// One thread starts the copies of the pixels.
__device__ __forceinline__ void copy_pixels(const HopperGatherArgs& args, const Place& place) {
  Turning<kTileQueue> turning(0);
  Turning<STAGES> ring(1);
  const int channels = args.in_channels, way = args.dims + (args.images_first ? 3 : 0);
  const int x_tap[3] = {args.x_tap[0], args.x_tap[1], args.x_tap[2]};
#pragma unroll 1
  for (;;) {
    mbarrier_wait(place.queued(turning.at), turning.parity);
    const QueuedTile tile = place.queue[turning.at];
    mbarrier_arrive(place.taken(turning.at));
    turning.step();
    if (tile.steps < 0) return;
    const GatherPhase& phase = phase_of(args, tile.phase);
    const TensorMap& map = args.source[MAPS == 1 ? 0 : tile.phase];
    const int d = tile.at[0], h = tile.at[1], w = tile.at[2], n = tile.image;
    int by[3];
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) by[axis] = phase.axis[axis].x0 - phase.axis[axis].low;
    for_each_step(phase, tile, channels, [&](int channel, int t, int r, int s) {
      mbarrier_wait(place.read(ring.at), ring.parity);
      const u32 barrier = place.filled(ring.at), to = place.stage(ring.at);
      mbarrier_arrive_expect_tx(barrier, kABytes);
      const int dd = by[0] + t * x_tap[0], dh = by[1] + r * x_tap[1], dw = by[2] + s * x_tap[2];
      // Of the slowest dimension there are no corners: what moves it is part of where it is.
      switch (way) {
        case 3: tma_load_im2col<3>(to, map, barrier, {channel, w, n}, {dw}); break;
        case 4: tma_load_im2col<4>(to, map, barrier, {channel, w, h, n}, {dw, dh}); break;
        case 5: tma_load_im2col<5>(to, map, barrier, {channel, w, h, d, n}, {dw, dh, dd}); break;
        case 6: tma_load_im2col<3>(to, map, barrier, {channel, n, w + dw}, {0}); break;
        case 7: tma_load_im2col<4>(to, map, barrier, {channel, n, w, h + dh}, {0, dw}); break;
        default: tma_load_im2col<5>(to, map, barrier, {channel, n, w, h, d + dd}, {0, dw, dh});
      }
      ring.step();
    });
  }
}

// One thread starts the copies of this block's part of the weights, to all that share them.
__device__ __forceinline__ void copy_weights(const HopperGatherArgs& args, const Place& place) {
  Turning<kTileQueue> turning(0);
  Turning<STAGES> ring(1);
  const int channels = args.in_channels;
  const int r_step[3] = {args.r_step[0], args.r_step[1], args.r_step[2]};
#pragma unroll 1
  for (;;) {
    mbarrier_wait(place.queued(turning.at), turning.parity);
    const QueuedTile tile = place.queue[turning.at];
    mbarrier_arrive(place.taken(turning.at));
    turning.step();
    if (tile.steps < 0) return;
    const GatherPhase& phase = phase_of(args, tile.phase);
    const int r0[3] = {phase.axis[0].r0, phase.axis[1].r0, phase.axis[2].r0};
    for_each_step(phase, tile, channels, [&](int channel, int j0, int j1, int j2) {
      mbarrier_wait(place.read(ring.at), ring.parity);
      const u32 barrier = place.filled(ring.at), to = place.stage(ring.at) + kABytes;
      mbarrier_arrive_expect_tx(barrier, kLoadedBytes - kABytes);
      const int t = r0[0] + j0 * r_step[0], r = r0[1] + j1 * r_step[1], s = r0[2] + j2 * r_step[2];
      auto load = [&](u32 there, const int (&at)[5]) {
        if constexpr (SHARING > 1) {
          tma_load_multicast<5>((1u << SHARING) - 1, there, args.weight, barrier, at, kEvictLast);
        } else {
          tma_load<5>(there, args.weight, barrier, at, kEvictLast);
        }
      };
      if constexpr (ACROSS) {
#pragma unroll
        for (int i = 0; i < kOwnBoxes; ++i) {
          const int box = kWholeBoxes ? place.row * kOwnBoxes + i : i;
          const int own = kWholeBoxes ? 0 : place.row * kOwnDepth;
          load(to + box * kBoxBytes + own * kRowBytes,
               {tile.first_channel + box * kBoxColumns, s, r, t, channel + own});
        }
      } else {
        const int own = place.row * kOwnChannels;
        load(to + own * kRowBytes, {channel, s, r, t, tile.first_channel + own});
      }
      ring.step();
    });
  }
}

}  // namespace
}  // namespace convgrad
