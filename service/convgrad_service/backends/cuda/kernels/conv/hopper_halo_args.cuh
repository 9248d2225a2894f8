// Kernel parameters of hopper_halo.cu. Launched by hopper_halo.py.
#pragma once

#include "ptx/tma.cuh"

namespace convgrad {

constexpr int kMaxHaloSlices = 16, kMaxHaloSteps = 64, kMaxHaloTaps = 128;

// k-steps on one slice whose weights are loaded together.
struct HaloStep {
  unsigned char taps;
  unsigned char last;  // the last step on its slice
  unsigned short first_tap;
};
struct HaloTap {
  unsigned short pixel;   // offset in the slice of the tile's first position, in 16 bytes
  unsigned short weight;  // offset of its weights, in 16 bytes
};
// A step's box of the weight: consecutive taps along S, 32 source channels, and the result channels of a
// tile. If M has two depths, it holds the tap along T and the next one.
struct HaloLoad {
  unsigned short to;    // in 16 bytes
  signed char t, r, s;  // of the first tap; outside the kernel zeros are loaded
};

struct HaloTables {
  HaloStep step[kMaxHaloSteps];
  HaloTap tap[kMaxHaloTaps];
  HaloLoad load[kMaxHaloSteps];
  int depth[kMaxHaloSlices];  // of each slice, from the tile's first position
};

struct HopperHaloArgs {
  TensorMap x_map;         // C W H D N
  TensorMap w_map;         // C K T S R
  void* y;                 // the result: output, or grad_input
  const void* accumulate;  // like y, or null
  const void* bias;        // one per result channel, or null
  i64 y_stride[6];         // N G C D H W, in elements; accumulate's too
  float alpha;
  float beta;
  int out_channels;  // of the result
  int activation;
  int plain;        // no epilogue
  int wide_stores;  // the result's channels are contiguous in whole, aligned groups of four
  int planes;       // its positions are contiguous in whole, aligned groups of 8, 2 or 1; else 0
  // Tiles: their positions along D, H, W, and their numbers over result channels (fastest), W, H, D and
  // the batch.
  int tile[3];
  int tiles[3];
  int channel_tiles;
  int all_tiles;
  int size[3];  // positions of the result
  int first[2];  // row and pixel of a slice's first one, from the tile's first position
  int row_pixels;  // pixels of a slice's row
  u32 row_factor;  // 2^20 divided by it, rounded up, to divide a tile's positions
  // The source's pipeline, and the weights': `slots` stages, or (slots 0) all weights resident.
  int chunks;      // chunks of 32 channels
  int slices, steps;
  int stages, stage_bytes, box_bytes;
  int slots, slot_bytes, load_bytes;
  int chunk_bytes;             // resident weights: of one chunk
  int shared_weights;          // offset of the weights in shared memory
  int row_channels;  // result channels in M: 64, or 32 twice (the second time one position deeper)
  int deeper_first;  // in the latter case, rows of the deeper position come first
  HaloTables tables;
};

// The row of the position-th pixel of a slice, of which a tile has fewer than 512.
__device__ __forceinline__ int row_of(const HopperHaloArgs& args, u32 position) {
  return position * args.row_factor >> 20;
}

}  // namespace convgrad
