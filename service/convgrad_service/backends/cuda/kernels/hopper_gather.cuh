// What hopper_gather.cu is given, and how its tiles lie. The host's side is hopper_gather.py.
#pragma once

#include "epilogue.cuh"
#include "hopper.cuh"

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
  const void* x;           // the source: input, or grad_output
  const void* w;           //
  void* y;                 // the result: output, or grad_input
  const void* accumulate;  // like y, or null
  const void* bias;        // one for each of the result's channels, or null
  i64 x_stride[6];         // N G C D H W, in elements
  i64 w_stride[6];         // G, result channel, source channel, T R S
  i64 y_stride[6];         // accumulate's too
  float alpha;
  float beta;
  int in_channels;    // of the source
  int out_channels;   // of the result
  int activation;
  int plain;          // results are sums, with wide stores
  int wide_stores;    // the result's channels are side by side in whole, aligned 16-byte chunks
  int may_skip;       // some tile may lie wholly outside some tap
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

// The taps that some pixel of a tile meets inside the source: a bit each, along D, H and W.
struct KeptTaps {
  u32 axis[3];

  __device__ __forceinline__ int count() const {
    return __popc(axis[0]) * __popc(axis[1]) * __popc(axis[2]);
  }
};

template <int kPixels>
__device__ __forceinline__ KeptTaps kept_taps(const HopperGatherArgs& args,
                                              const GatherTile& tile) {
  const GatherPhase& phase = args.phase[tile.phase];
  KeptTaps kept;
  if (!args.may_skip) {
#pragma unroll
    for (int d = 0; d < 3; ++d) {
      const int taps = phase.axis[d].taps;
      kept.axis[d] = taps >= 32 ? ~0u : (1u << taps) - 1;
    }
    return kept;
  }
  const PixelAt first = pixel_at(phase, tile.first_pixel);
  const PixelAt last = pixel_at(phase, min(tile.first_pixel + kPixels, phase.pixels) - 1);
#pragma unroll
  for (int d = 0; d < 3; ++d) {
    const GatherAxis& axis = phase.axis[d];
    int from = args.images_first ? first.at[3 - d] : first.at[2 - d];
    int to = args.images_first ? last.at[3 - d] : last.at[2 - d];
    int turns = 0;  // how often positions start again between the two
    if (!args.images_first || d > 0) {
      turns = args.images_first ? last.slower[(3 - d) % 3] - first.slower[(3 - d) % 3]
                                : last.slower[2 - d] - first.slower[2 - d];
    }
    if (turns > 1) from = 0, to = axis.count - 1, turns = 0;
    const int step = args.x_step[d], size = args.x_size[d];
    u32 bits = 0;
    for (int j = 0; j < axis.taps; ++j) {
      const int at = axis.x0 + j * args.x_tap[d];
      auto meets = [&](int a, int b) { return at + a * step < size && at + b * step >= 0; };
      const bool some = turns == 0 ? meets(from, to) : meets(from, axis.count - 1) || meets(0, to);
      bits |= static_cast<u32>(some) << j;
    }
    kept.axis[d] = bits;
  }
  return kept;
}

// The next bit that is set above `bit` (from -1 on), or 32.
__device__ __forceinline__ int next_bit(u32 bits, int bit) {
  const u32 above = bit >= 31 ? 0u : bits & (~0u << (bit + 1));
  return above ? __ffs(above) - 1 : 32;
}

}  // namespace convgrad
