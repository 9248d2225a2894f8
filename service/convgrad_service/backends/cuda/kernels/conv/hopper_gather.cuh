// What hopper_gather.cu is given, and how its tiles lie. The host's side is hopper_gather.py.
#pragma once

#include "core/epilogue.cuh"
#include "ptx/tma.cuh"
#include "ptx/pdl.cuh"

namespace convgrad {

// One dimension of a phase, see hopper_gather.cu. `low` is where the source's positions start.
struct GatherAxis {
  int taps, r0, x0, y0, count, low;
};

struct GatherPhase {
  GatherAxis axis[3];  // D H W
  int pixels;
  int share;       // tiles of pixels in one round
  int tiles;       // in all
  int extent[3];   // of the pixels' three fastest coordinates
  u32 factor[3];   // for dividing by them
  int shift[3];
};

struct HopperGatherArgs {
  TensorMap weight;
  TensorMap source[MAPS];
  void* y;                 // the result: output, or grad_input
  const void* accumulate;  // like y, or null
  const void* bias;        // one for each of the result's channels, or null
  i64 y_stride[6];         // N G C D H W, in elements; accumulate's too
  float alpha;
  float beta;
  int in_channels;    // of the source
  int out_channels;   // of the result
  int activation;
  int plain;          // results are sums, with EPILOGUE finished ones, with wide stores
  int wide_stores;    // the result's channels are side by side in whole, aligned 16-byte chunks;
                      // with PLANES: pixels that are, in aligned chunks of so many
  int images_first;   // neighbouring pixels are those of neighbouring images
  int dims;           // of the source's maps
  int rounds;
  int slots;          // of a round: tiles of all phases, of pixels and channels
  int channel_tiles;
  int phases;
  int x_size[3];
  int x_step[3];
  int x_tap[3];
  int y_step[3];
  int r_step[3];
  GatherPhase phase[MAPS];
};

// A pixel's four coordinates, the fastest first: W H D N, or N W H D with `images_first`; and what
// they are of: all pixels up to it, slower coordinates alone.
struct PixelAt {
  int at[4];
  int slower[3];  // at slower[i], the coordinates above i as one number
};

__device__ __forceinline__ PixelAt pixel_at(const GatherPhase& phase, int pixel) {
  PixelAt found;
  u32 rest = pixel;
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const u32 extent = phase.extent[i];
    const u32 above = extent == 1 ? rest : __umulhi(rest, phase.factor[i]) >> phase.shift[i];
    found.at[i] = rest - above * extent;
    found.slower[i] = rest = above;
  }
  found.at[3] = rest;
  return found;
}

// Position of the pixel along D, H or W (0 to 2) of its phase.
__device__ __forceinline__ int position(const PixelAt& pixel, int axis, bool images_first) {
  return images_first ? pixel.at[3 - axis] : pixel.at[2 - axis];
}
__device__ __forceinline__ int image(const PixelAt& pixel, bool images_first) {
  return images_first ? pixel.at[0] : pixel.at[3];
}

// A tile: pixels of one phase from the first on, for all blocks of a cluster, and channels.
struct GatherTile {
  int phase, first_pixel, first_channel;
};

__device__ __forceinline__ const GatherPhase& phase_of(const HopperGatherArgs& args, int phase) {
  return args.phase[MAPS == 1 ? 0 : phase];
}

// The tile at a place of the schedule; false where there is none. Phases follow each other, that with
// the most taps first, in each of several rounds, so that they read the source while it is in the L2
// cache. Tiles of channels are the fastest.
template <int kPixels, int kChannels>
__device__ __forceinline__ bool tile_at(const HopperGatherArgs& args, int place, int places,
                                        GatherTile& tile) {
  if (place >= places) return false;
  int round = 0;
  if (args.rounds > 1) {
    round = static_cast<u32>(place) / static_cast<u32>(args.slots);
    place -= round * args.slots;
  }
  const u32 pixel_place = static_cast<u32>(place) / static_cast<u32>(args.channel_tiles);
  tile.first_channel = (place - pixel_place * args.channel_tiles) * kChannels;
  int index = pixel_place, phase = 0;
  while (index >= args.phase[phase].share) index -= args.phase[phase++].share;
  index += round * args.phase[phase].share;
  tile.phase = phase;
  tile.first_pixel = index * kPixels;
  return index < args.phase[phase].tiles;
}

// The taps, a bit each, along D, H or W that some pixel from the first to the last meets inside the
// source; a warp together, a lane a tap.
__device__ __forceinline__ u32 met_taps(const HopperGatherArgs& args, const GatherPhase& phase,
                                        const PixelAt& first, const PixelAt& last, int d) {
  const GatherAxis& axis = phase.axis[d];
  int from = position(first, d, args.images_first), to = position(last, d, args.images_first);
  int turns = 0;  // how often positions start again between the two
  if (!args.images_first) {
    turns = last.slower[2 - d] - first.slower[2 - d];
  } else if (d > 0) {
    turns = last.slower[3 - d] - first.slower[3 - d];
  }
  if (turns > 1) from = 0, to = axis.count - 1, turns = 0;
  const int lane = threadIdx.x & 31, step = args.x_step[d], size = args.x_size[d];
  const int at = axis.x0 + lane * args.x_tap[d];
  auto meets = [&](int a, int b) { return at + a * step < size && at + b * step >= 0; };
  const bool some = turns == 0 ? meets(from, to) : meets(from, axis.count - 1) || meets(0, to);
  return __ballot_sync(~0u, lane < axis.taps && some);
}

// A tile in the queue of a block's warps, in shared memory.
struct QueuedTile {
  int phase, first_pixel, first_channel;  // of the cluster's tile
  int steps;                              // of this block; fewer than 0: there are no more tiles
  int first_step, end_step;               // of a split reduction: among all, kept or not
  u32 taps[3];                            // that are kept along D, H and W
  int at[3], image;                       // of the first pixel that this block copies
};

// How many of a tile's steps from the first to before the end are kept, of chunks of channels and in
// each the taps; a warp together.
__device__ __forceinline__ int kept_steps(const GatherPhase& phase, const QueuedTile& tile) {
  const int taps1 = phase.axis[1].taps, taps2 = phase.axis[2].taps;
  const int taps = phase.axis[0].taps * taps1 * taps2;
  int kept = 0;
  for (int from = tile.first_step; from < tile.end_step; from += 32) {
    const int step = from + (threadIdx.x & 31), tap = taps > 0 ? step % taps : 0;
    const u32 t = tap / (taps1 * taps2), r = tap / taps2 % taps1, s = tap % taps2;
    const u32 all = tile.taps[0] >> t & tile.taps[1] >> r & tile.taps[2] >> s & 1;
    kept += __popc(__ballot_sync(~0u, step < tile.end_step && all != 0));
  }
  return kept;
}

// The next bit that is set above `bit` (from -1 on), or 32.
__device__ __forceinline__ int next_bit(u32 bits, int bit) {
  const u32 above = bit >= 31 ? 0u : bits & (~0u << (bit + 1));
  return above ? __ffs(above) - 1 : 32;
}

}  // namespace convgrad
