// Kernel parameters of hopper_gather.cu, its tile schedule, and the taps of a tile.
#pragma once

#include "core/divider.cuh"
#include "core/epilogue.cuh"
#include "ptx/tma.cuh"
#include "ptx/pdl.cuh"

// Whether each block has one tile: hopper_gather_single.cuh.
#ifndef SINGLE
#define SINGLE 0
#endif
// Whether cooperative warpgroups alternate tiles.
#ifndef PINGPONG
#define PINGPONG 0
#endif
// Whether plain results of cooperative warpgroups have a bias or an activation.
#ifndef EPILOGUE
#define EPILOGUE 0
#endif
// The taps of a kernel row that share a tile's pixels. If there are several, rows of pixels extend beyond the
// result's, so that pixels that are adjacent in a tile are adjacent in the source.
#ifndef TAPS
#define TAPS 1
#endif
// The bfloat16 parts that float32 operands, scaled, are the sums of (conv/float_parts.cu).
#ifndef PARTS
#define PARTS 1
#endif
// The type of results.
#ifndef RESULT
#define RESULT ELEMENT
#endif

namespace convgrad {

// One dimension of a phase, see hopper_gather.cu. `low` is the first source position.
struct GatherAxis {
  int taps, r0, x0, y0, count, low;
};

struct GatherPhase {
  GatherAxis axis[3];  // D H W
  int pixels;
  int share;       // pixel tiles in one round
  int tiles;       // pixel tiles in all rounds
  int extent[3];   // extents of the pixels' three fastest coordinates
  u32 factor[3];   // for division by them, see core/divider.cuh
  int shift[3];
  Divider by_taps, by_plane, by_row;  // hopper_gather_single.cuh: a k-tile's taps, those of a plane and of a row
};

struct HopperGatherArgs {
  TensorMap weight;
  TensorMap source[MAPS];
  void* y;                 // the result: output, or grad_input
  const void* accumulate;  // like y, or null
  const void* bias;        // one per result channel, or null
  i64 y_stride[6];         // N G C D H W, in elements; accumulate's too
  float alpha;
  float beta;
  int in_channels;    // of the source, of a group
  int out_channels;   // of the result, of a group
  int activation;
  int plain;          // results are the sums (1), or after bias and a clamping activation (2), with wide stores
  int wide_stores;    // the result's channels are contiguous, in whole and aligned 16-byte chunks;
                      // with PLANES: the number of contiguous pixels that are stored at once
  int images_first;   // N is the fastest coordinate of pixels
  int dims;           // dimensions of the source's tensor maps
  int rounds;
  int slots;          // tiles of a round: of all phases, over pixels and channels
  int channel_tiles;  // of all groups
  int phases;
  // hopper_gather_single.cuh: blocks that split K; see SplitKReduce; pipeline stages; bytes for results and of
  // a box of pixels (with TAPS > 1 always); whether any tile skips taps.
  int cluster, owned, stages, reduce_bytes, a_bytes, skips;
  Divider by_cluster;
  int x_size[3];
  int x_step[3];
  int x_tap[3];
  int y_step[3];
  int r_step[3];
  int images;  // of each of several parts of the source, which follow one another
  int group_tiles;    // channel tiles of a group
  int source_group;   // channels of the source from one group's first to the next one's
  int weight_group;   // rows of a group's weight
  int weight_rows;    // and of all groups', in each of several parts
  Divider by_group;   // group_tiles
  const float* unscale;  // the factor of the sums of parts' products
  GatherPhase phase[MAPS];
};

// A pixel's four coordinates, the fastest first: W H D N, or N W H D with `images_first`.
struct PixelAt {
  int at[4];
  int slower[3];  // slower[i]: the linear index of the coordinates above i
};

__device__ __forceinline__ PixelAt pixel_at(const GatherPhase& phase, int pixel) {
  PixelAt result;
  u32 remaining = pixel;
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const u32 extent = phase.extent[i];
    const u32 quotient = extent == 1 ? remaining : __umulhi(remaining, phase.factor[i]) >> phase.shift[i];
    result.at[i] = remaining - quotient * extent;
    result.slower[i] = remaining = quotient;
  }
  result.at[3] = remaining;
  return result;
}

// The pixel's position along D, H or W (0 to 2) in its phase.
__device__ __forceinline__ int position(const PixelAt& pixel, int axis, bool images_first) {
  return images_first ? pixel.at[3 - axis] : pixel.at[2 - axis];
}
__device__ __forceinline__ int image(const PixelAt& pixel, bool images_first) {
  return images_first ? pixel.at[0] : pixel.at[3];
}

__device__ __forceinline__ bool is_result(const GatherPhase& phase, const PixelAt& pixel) {
  return TAPS == 1 || pixel.at[0] < phase.axis[2].count;
}

// The origin of a cluster's tile: pixels of one phase, and which of the channel tiles of all groups.
struct GatherTile {
  int phase, first_pixel, column;
};

// The first channel of a column of kChannels, among those of all groups of the result.
template <int kChannels>
__device__ __forceinline__ int first_channel_of(const HopperGatherArgs& args, int column) {
  const int group = divide(column, args.by_group);
  return group * args.out_channels + (column - group * args.group_tiles) * kChannels;
}

__device__ __forceinline__ const GatherPhase& phase_of(const HopperGatherArgs& args, int phase) {
  return args.phase[MAPS == 1 ? 0 : phase];
}

// The tile at `slot` of the schedule; false where there is none. Each of several rounds has a part of all
// phases' tiles, phases with the most taps first, so that phases read the source while it is in the L2 cache.
// Channel tiles are the fastest.
template <int kPixels>
__device__ __forceinline__ bool tile_at(const HopperGatherArgs& args, int slot, int slots,
                                        GatherTile& tile) {
  if (slot >= slots) return false;
  int round = 0;
  if (args.rounds > 1) {
    round = static_cast<u32>(slot) / static_cast<u32>(args.slots);
    slot -= round * args.slots;
  }
  const u32 pixel_slot = static_cast<u32>(slot) / static_cast<u32>(args.channel_tiles);
  tile.column = slot - pixel_slot * args.channel_tiles;
  int index = pixel_slot, phase = 0;
  while (index >= args.phase[phase].share) index -= args.phase[phase++].share;
  index += round * args.phase[phase].share;
  tile.phase = phase;
  tile.first_pixel = index * kPixels;
  return index < args.phase[phase].tiles;
}

// Warp (a lane per tap): a bit mask of the taps along D, H or W with which some pixel in [first, last] reads
// inside the source.
__device__ __forceinline__ u32 taps_inside(const HopperGatherArgs& args, const GatherPhase& phase,
                                        const PixelAt& first, const PixelAt& last, int d) {
  const GatherAxis& axis = phase.axis[d];
  int from = position(first, d, args.images_first), to = position(last, d, args.images_first);
  int wraps = 0;  // how often positions wrap around between the two
  if (!args.images_first) {
    wraps = last.slower[2 - d] - first.slower[2 - d];
  } else if (d > 0) {
    wraps = last.slower[3 - d] - first.slower[3 - d];
  }
  if (wraps > 1) from = 0, to = axis.count - 1, wraps = 0;
  const int lane = threadIdx.x & 31, step = args.x_step[d], size = args.x_size[d];
  const int at = axis.x0 + lane * args.x_tap[d];
  auto reads = [&](int a, int b) { return at + a * step < size && at + b * step >= 0; };
  const bool any = wraps == 0 ? reads(from, to) : reads(from, axis.count - 1) || reads(0, to);
  return __ballot_sync(~0u, lane < axis.taps && any);
}

// An entry of a block's tile queue, in shared memory.
struct QueuedTile {
  int phase, first_pixel, column;         // of the cluster's tile
  int group, first_channel;               // where the column is
  int steps;                              // k-tiles of this block; negative: end of the queue
  u32 taps[3];                            // bit masks of the taps along D, H and W
  int at[3], image;                       // source coordinates of the first pixel that this block loads
};

// The lowest set bit above `bit` (at least -1), or 32.
__device__ __forceinline__ int next_bit(u32 bits, int bit) {
  const u32 above = bit >= 31 ? 0u : bits & (~0u << (bit + 1));
  return above ? __ffs(above) - 1 : 32;
}

}  // namespace convgrad
