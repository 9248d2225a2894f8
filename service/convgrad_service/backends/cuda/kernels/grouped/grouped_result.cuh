// The argument of grouped_gather.cu, its boxes, and the epilogue of a sum.
#pragma once

#include "grouped/grouped_box.cuh"

namespace convgrad {

constexpr int kMaxPhases = 16;

struct Phase {
  int taps, r0, x0, y0, count;
};

struct GroupedGatherArgs {
  const void* x;           // the source: input, or grad_output
  const void* w;
  void* y;                 // the result: output, or grad_input
  const void* accumulate;  // like y, or null
  const void* bias;        // one value for each channel of the result, or null
  i64 x_group, y_group;    // strides of a group, in elements
  i64 y_stride[4];         // N D H W, in elements
  i64 w_group;
  int w_stride[6];         // -, out channel, in channel (of the convolution), T R S, in elements
  BoxStrides x_stride;
  Box box;                 // of the source
  float alpha;
  float beta;
  int batch;
  int groups;
  int x_channels;  // of the source, in a group
  int y_channels;  // of the result, in a group
  int merged;      // groups merged
  int merges;
  int own;  // EXACT: 8 result channels are whole groups, each of which meets only itself
  int padded;      // merges are no whole chunks in memory
  int y_piece;     // bytes that are stored at once, at most
  int slice;       // merges in a block
  int w_vector;  // adjacent weights of a group in one load: a chunk, half of one, or 1
  int w_pitch;   // bytes between output channels of the weights
  int activation;
  int plain;  // no epilogue
  int tile[4];    // positions: images, D, H, W
  int tiles[4];   // in the largest phase
  int x_size[3];
  int x_step[3];  // in units of the lattice, as x_tap
  int x_tap[3];
  int lattice[3];
  int y_step[3];
  int r_step[3];
  int phases[3];
  int stage_bytes;  // bytes between boxes, 0 if a block has one
  int weights_at, results_at, sources_at, digits_at, steps_at, rows_at;  // in shared memory
  Phase phase[3][kMaxPhases];
};

// The block's phase and a box of it, in shared memory to save registers.
struct Place {
  Phase phase[3];
  int low[3];  // least offset of a tap from a position, where the source's box starts
  int group;
};
struct Spot {
  int image, from[3];  // the first image, and the first position of the source
  int left[4];         // remaining images and positions from the first one on
  int whole;           // whether the box is complete
  i64 y;               // offset of the first result, in elements
};

__device__ Spot spot_of(const GroupedGatherArgs& args, const Place& place, u32 index) {
  Spot spot;
  spot.y = 0;
  spot.whole = 1;
#pragma unroll
  for (int dim = 2; dim >= 0; --dim) {
    const u32 above = index < (1u << 20) ? quick_divide(index, args.tiles[dim + 1])
                                         : index / static_cast<u32>(args.tiles[dim + 1]);
    const int first = (index - above * args.tiles[dim + 1]) * args.tile[dim + 1];
    const Phase& phase = place.phase[dim];
    index = above;
    spot.from[dim] =
        phase.x0 + (first * args.x_step[dim] + place.low[dim]) * args.lattice[dim];
    spot.left[dim + 1] = phase.count - first;
    spot.whole &= spot.left[dim + 1] >= args.tile[dim + 1];
    spot.y += (phase.y0 + first * args.y_step[dim]) * args.y_stride[dim + 1];
  }
  spot.image = index * args.tile[0];
  spot.left[0] = args.batch - spot.image;
  spot.whole &= spot.left[0] >= args.tile[0];
  spot.y += spot.image * args.y_stride[0];
  return spot;
}

// Finishes one sum.
__device__ __forceinline__ void settle(const GroupedGatherArgs& args, const Spot& spot, float value,
                                       i64 at, int group, int k) {
  using T = ELEMENT;
  at += spot.y + group * args.y_group + k;
  const T* accumulate = static_cast<const T*>(args.accumulate);
  if (accumulate != nullptr) accumulate += at;
  const T* bias = static_cast<const T*>(args.bias);
  if (bias != nullptr) bias += group * args.y_channels + k;
  static_cast<T*>(args.y)[at] = narrow<T>(
      finish<T, float>(value, args.alpha, args.beta, accumulate, bias, args.activation));
}

}  // namespace convgrad
