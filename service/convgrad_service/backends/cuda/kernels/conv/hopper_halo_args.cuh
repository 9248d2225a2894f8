// What hopper_halo.cu is given. The host's side is hopper_halo.py.
#pragma once

#include "ptx/tma.cuh"

namespace convgrad {

constexpr int kMaxHaloPasses = 8, kMaxHaloSlices = 16, kMaxHaloSteps = 64, kMaxHaloTaps = 128;

// One result of each tile: positions y0 + m*y_step, m below `count`, of the result.
struct HaloPass {
  int first_step, steps;
  int y0[3], count[3];
};
// A box of the source: where it starts, from the tile's first position.
struct HaloSlice {
  int at[3];
};
// Products with one slice, whose weights come together.
struct HaloStep {
  unsigned char slice, taps, loads;
  unsigned char last;  // with its slice, of all passes
  unsigned short first_tap, first_load;
};
struct HaloTap {
  unsigned short pixel;   // of the slice, for the tile's first position, in 16 bytes
  unsigned short weight;  // where its weights are, in 16 bytes
};
// A box of the weight: taps along S one after another, 32 channels of the source, so many of the
// result as a box has; of each tap, where a product has two depths, the one along T and the next.
struct HaloLoad {
  unsigned short to;    // in 16 bytes
  signed char t, r, s;  // of the first; zeros come from outside the kernel
  unsigned char block;  // of the result's channels
};

struct HaloTables {
  HaloPass pass[kMaxHaloPasses];
  HaloSlice slice[kMaxHaloSlices];
  HaloStep step[kMaxHaloSteps];
  HaloTap tap[kMaxHaloTaps];
  HaloLoad load[kMaxHaloTaps];
};

struct HopperHaloArgs {
  TensorMap x_map;         // C W H D N
  TensorMap w_map;         // C K T S R
  void* y;                 // the result: output, or grad_input
  const void* accumulate;  // like y, or null
  const void* bias;        // one for each of the result's channels, or null
  i64 y_stride[6];         // N G C D H W, in elements; accumulate's too
  float alpha;
  float beta;
  int out_channels;  // of the result
  int activation;
  int plain;        // the result is the sum itself
  int wide_stores;  // the result's channels are side by side in whole, aligned groups of four
  int planes;       // its positions are, in whole, aligned groups of 8, 2 or 1; else 0
  // Tiles: positions along D, H, W of each, and how many there are of the result's channels (which
  // run fastest), along W, H, D and over the batch.
  int tile[3];
  int tiles[3];
  int channel_tiles;
  int all_tiles;
  int x_step[3];  // of the source, from one position to the next
  int y_step[3];  // likewise of the result
  int row_pixels;  // of a slice's row
  u32 row_factor;  // for dividing by it
  // The source's ring, and the weights: a ring of slots, or (slots 0) all that there are.
  int chunks;      // of 32 channels
  int slices;
  int stages, stage_bytes, box_bytes;
  int slots, slot_bytes, load_bytes;
  int all_loads, chunk_bytes;  // where all weights stay: of one chunk
  int shared_weights;          // where the weights start
  // What the second warpgroup has beside the first: pixels on, blocks of channels on, and how far on
  // its weights are, in 16 bytes.
  int group_pixels, group_blocks, group_weights;
  int row_channels;  // of the result in a product: 64, or 32 and the same ones one position deeper
  int deeper_first;  // of the two in a product, the deeper position's rows come first
  int passes;
  HaloTables tables;
};

}  // namespace convgrad
