// The argument of hopper_separable.cu, and definitions that its parts share. Host side:
// hopper_separable.py.
#pragma once

#include "core/divider.cuh"
#include "core/epilogue.cuh"
#include "core/pipeline_state.cuh"
#include "core/staging.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"

namespace convgrad {

struct HopperSeparableArgs {
  TensorMap x_map;    // C W H N, boxes of a chunk of channels and a tile's pixels with their halo
  TensorMap w1_map;   // C K, boxes of a chunk and kOutputs rows
  TensorMap y_map;    // K W H N, boxes of 64 channels and a group's pixels
  const void* w0;     // one channel after another, its nine taps side by side
  const void* bias0;  // one for each channel, or null
  const void* bias1;  // one for each output channel, or null
  int channels;
  int outputs;
  int chunks;        // chunks of the channels
  int slices;        // slices of kOutputs outputs
  int tiles_across;  // in an image
  int tiles_down;
  int items;     // items: slices of tiles, over all images
  int x_stages;  // stages of the ring of boxes of x
  int w_stages;  // stages of the ring of w1's boxes; all of them if `resident`
  int resident;
  int activation0;
  int activation1;
  int pad[2];
  Divider by_slices, by_across, by_down;  // slices, tiles_across, tiles_down
};

using T = ELEMENT;
constexpr int kRowBytes = ROW_BYTES;            // of a pixel's chunk of channels
constexpr int kChunk = kRowBytes / 2;           // channels
// Consumer warpgroups: some share the tile's pixels, others the outputs, PARTS x 64 each.
constexpr int kGroups = GROUPS, kSharers = SHARERS, kParts = PARTS;
constexpr int kOutputs = kGroups / kSharers * kParts * 64;
constexpr int kColumns = COLUMNS;  // columns of a product: a group's pixels and padding
constexpr int kFragments = kColumns / 8;
constexpr int kStride = STRIDE;
constexpr int kTileW = TILE_W, kTileH = TILE_H;  // pixels of a tile
constexpr int kUnitW = UNIT_W, kUnitH = UNIT_H;  // pixels that a lane computes
constexpr int kBoxW = BOX_W, kBoxH = (kTileH - 1) * kStride + 3;
constexpr int kBoxBytes = kBoxW * kBoxH * kRowBytes;
// With the box: its channels' depthwise weights and biases.
constexpr int kTapBytes = 18;
constexpr int kTapsAt = (kBoxBytes + 127) / 128 * 128, kBiasesAt = kTapsAt + kChunk * kTapBytes;
constexpr int kBoxStage = (kBiasesAt + kChunk * 2 + 127) / 128 * 128;
constexpr int kWeightBytes = kOutputs * kRowBytes;
constexpr int kOwnPixels = kTileH * kTileW / kSharers;  // of a group
constexpr int kMiddleRows = kOwnPixels * (kSharers - 1) + kColumns;
constexpr int kMiddleBytes = (kMiddleRows * kRowBytes + 1023) / 1024 * 1024;
constexpr int kMiddles = MIDDLES;
constexpr int kStagingBytes = kColumns * 128;  // of a group

// Lanes have two channels each, so a warp has one unit of 64 channels or two of 32.
constexpr int kLanes = kChunk / 2, kHalves = 32 / kLanes;
constexpr int kStrips = (kTileW + kUnitW - 1) / kUnitW;
constexpr int kUnits = kStrips * (kTileH / kUnitH);
// Two teams of four warps compute a chunk each at a time. A warp has one or two units (twice as many
// with half chunks): those after the first four are kNextPixels further on.
constexpr int kTeams = 2, kMakers = 4;  // warps of a team
constexpr int kWarpUnits = kUnits / kHalves, kTurns = (kWarpUnits + kMakers - 1) / kMakers;
constexpr int kNextPixels = kMakers * kUnitW, kNextRead = kNextPixels * kStride;
constexpr int kConsumers = kGroups * 4;    // warps
constexpr int kThreads = (kGroups + 3) * 128;

static_assert(kTileH % kUnitH == 0 && kUnits % kHalves == 0, "whole units");
static_assert(kWarpUnits >= kMakers && kTurns <= 2 && kStrips == kWarpUnits,
              "the second unit of each warp is as far from the first");
static_assert(kOwnPixels <= kColumns && kColumns % 8 == 0, "room for the tile");
static_assert(kGroups % kSharers == 0 && kTileH * kTileW % kSharers == 0, "alike");
static_assert(kBoxW >= (kTileW - 1) * kStride + 3, "the halo");

// Shared-memory addresses.
struct Place {
  u32 weights, middle, staging, boxes, barriers;
  int x_stages, w_stages;

  __device__ __forceinline__ Place(const HopperSeparableArgs& args, u32 start)
      : x_stages(args.x_stages), w_stages(args.w_stages) {
    weights = (start + 1023) & ~1023u;
    middle = weights + w_stages * kWeightBytes;
    staging = middle + kMiddles * kMiddleBytes;
    boxes = staging + kGroups * kStagingBytes;
    barriers = boxes + x_stages * kBoxStage;
  }
  __device__ __forceinline__ u32 made(int i) const { return barriers + i * 8; }
  __device__ __forceinline__ u32 middle_free(int i) const { return barriers + (kMiddles + i) * 8; }
  __device__ __forceinline__ u32 x_full(int i) const { return barriers + (2 * kMiddles + i) * 8; }
  __device__ __forceinline__ u32 x_free(int i) const { return x_full(x_stages + i); }
  __device__ __forceinline__ u32 w_full(int i) const { return x_full(2 * x_stages + i); }
  __device__ __forceinline__ u32 w_free(int i) const { return w_full(w_stages + i); }
};

// An item's tile, and its slice of outputs.
struct ItemAt {
  int slice, n, row, column;

  __device__ __forceinline__ ItemAt(const HopperSeparableArgs& args, int item) {
    const int tile = divide(item, args.by_slices);
    slice = item - tile * args.slices;
    const int above = divide(tile, args.by_across);
    n = divide(above, args.by_down);
    column = (tile - above * args.tiles_across) * kTileW;
    row = (above - n * args.tiles_down) * kTileH;
  }
};

}  // namespace convgrad
