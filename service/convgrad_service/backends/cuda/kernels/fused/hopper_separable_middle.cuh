// The depthwise part of hopper_separable.cu: computes chunks of the intermediate, an operand of wgmma
// in shared memory, from boxes of the input with their halo. A lane computes two channels of a unit of
// kUnitW columns and kUnitH rows, and reads each of its inputs once.
#pragma once

#include "ptx/load_store.cuh"
#include "fused/hopper_separable_args.cuh"

namespace convgrad {

__device__ __forceinline__ void widen_both(float (&to)[2], u32 both) {
  to[0] = widen(T{static_cast<unsigned short>(both)});
  to[1] = widen(T{static_cast<unsigned short>(both >> 16)});
}

struct Maker {
  static constexpr int kReadW = (kUnitW - 1) * kStride + 3, kReadH = (kUnitH - 1) * kStride + 3;
  static constexpr int kAhead = 1;  // rows read ahead
  static constexpr int kOpen = (3 + kStride - 1) / kStride;  // rows of sums in flight

  const HopperSeparableArgs& args;
  const Place& place;
  int warp;                    // of the team
  int pair;                    // of channels in the chunk
  int column;                  // of the unit in the tile
  u32 read;                    // address of this lane's first input in the first box
  u32 written[8];              // addresses of pixels 0 to 7 of the unit in the first stage

  __device__ __forceinline__ Maker(const HopperSeparableArgs& args, const Place& place, int warp)
      : args(args), place(place), warp(warp) {
    const int lane = threadIdx.x & 31;
    pair = lane % kLanes;
    const int unit = warp + lane / kLanes * kWarpUnits;
    const int above = unit / kStrips;
    column = (unit - above * kStrips) * kUnitW;
    const int row = above * kUnitH;
    read = place.boxes + pair * 4 + (row * kStride * kBoxW + column * kStride) * kRowBytes;
    const int first = row * kTileW + column;
#pragma unroll
    for (int i = 0; i < 8; ++i) written[i] = place_of(first + i) - i * kRowBytes;
  }

  // Address of a pixel of the tile in the first stage.
  __device__ __forceinline__ u32 place_of(int pixel) const {
    const int swizzled = kRowBytes == 128 ? pixel & 7 : pixel >> 1 & 3;
    return place.middle + pixel * kRowBytes + (((pair >> 2) ^ swizzled) << 4) + (pair & 3) * 4;
  }

  __device__ __forceinline__ void store(u32 to, int pixel, float (&sum)[2]) const {
    st_shared_u32(written[pixel & 7] + to + pixel * kRowBytes, narrow_x2<T>(sum[0], sum[1]));
  }

  // Computes this lane's part of a chunk, from a stage of inputs to a stage of the intermediate.
  __device__ __forceinline__ void make(int chunk, int stage, int to_place) const {
    const bool there = chunk * kChunk + pair * 2 < args.channels;
    const u32 stage_at = place.boxes + stage * kBoxStage;
    const u32 taps = stage_at + kTapsAt + pair * (2 * kTapBytes);
    float weight[9][2], bias[2] = {};
    if (there) {
      u32 words[9];
#pragma unroll
      for (int i = 0; i < 9; ++i) words[i] = ld_shared_u32(taps + i * 4);
      // The first channel's taps, then the second one's.
      float flat[9][2];
#pragma unroll
      for (int i = 0; i < 9; ++i) widen_both(flat[i], words[i]);
#pragma unroll
      for (int tap = 0; tap < 9; ++tap) {
        weight[tap][0] = flat[tap / 2][tap % 2];
        weight[tap][1] = flat[(tap + 9) / 2][(tap + 9) % 2];
      }
      if (args.bias0 != nullptr) widen_both(bias, ld_shared_u32(stage_at + kBiasesAt + pair * 4));
    } else {
#pragma unroll
      for (int tap = 0; tap < 9; ++tap) weight[tap][0] = weight[tap][1] = 0;
    }
    const u32 box = read + stage * kBoxStage, to = to_place * kMiddleBytes;
    // Separate code for each case keeps branches out of the loop.
    if (__builtin_expect(args.activation0 == kNone, true)) {
      return add_units<kNone>(box, to, weight, bias);
    }
    switch (args.activation0) {
      case kRelu: return add_units<kRelu>(box, to, weight, bias);
      case kRelu6: return add_units<kRelu6>(box, to, weight, bias);
      default: return add_units<kSilu>(box, to, weight, bias);
    }
  }

  template <Activation kActivation>
  __device__ __forceinline__ void add_units(u32 box, u32 to, const float (&weight)[9][2],
                                            const float (&bias)[2]) const {
    if constexpr (kNextPixels % 8 == 0) {
      // One code path for both.
#pragma unroll 1
      for (int turn = 0; turn < kTurns; ++turn) {
        if (warp + turn * kMakers >= kWarpUnits) break;
        add_rows<kActivation, 0>(box, to, weight, bias);
        box += kNextRead * kRowBytes, to += kNextPixels * kRowBytes;
      }
    } else {
      add_rows<kActivation, 0>(box, to, weight, bias);
      if (kTurns > 1 && warp + kMakers < kWarpUnits) {
        add_rows<kActivation, 1>(box + kNextRead * kRowBytes, to, weight, bias);
      }
    }
  }

  // Accumulates a unit's sums row by row.
  template <Activation kActivation, int kTurn>
  __device__ __forceinline__ void add_rows(u32 box, u32 to, const float (&weight)[9][2],
                                           const float (&bias)[2]) const {
    constexpr int kFirst = kTurn * kNextPixels;
    constexpr int kColumn = kTurn * kMakers * kUnitW;
    float sum[kOpen][kUnitW][2];
    u32 next[kAhead][kReadW];
#pragma unroll
    for (int h = 0; h < kAhead; ++h) {
#pragma unroll
      for (int i = 0; i < kReadW; ++i) next[h][i] = ld_shared_u32(box + (h * kBoxW + i) * kRowBytes);
    }
#pragma unroll
    for (int h = 0; h < kReadH; ++h) {
      float in[kReadW][2];
#pragma unroll
      for (int i = 0; i < kReadW; ++i) widen_both(in[i], next[h % kAhead][i]);
      if (h + kAhead < kReadH) {
#pragma unroll
        for (int i = 0; i < kReadW; ++i) {
          next[h % kAhead][i] = ld_shared_u32(box + ((h + kAhead) * kBoxW + i) * kRowBytes);
        }
      }
#pragma unroll
      for (int r = 2; r >= 0; --r) {
        // The row of sums for which this row of inputs is tap r.
        if (h < r || (h - r) % kStride != 0 || (h - r) / kStride >= kUnitH) continue;
        const int own = (h - r) / kStride;
#pragma unroll
        for (int j = 0; j < kUnitW; ++j) {
          float(&here)[2] = sum[own % kOpen][j];
#pragma unroll
          for (int s = 0; s < 3; ++s) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const float before = r == 0 && s == 0 ? bias[e] : here[e];
              here[e] = fmaf(in[j * kStride + s][e], weight[r * 3 + s][e], before);
            }
          }
        }
        if (r < 2) continue;
#pragma unroll
        for (int j = 0; j < kUnitW; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            sum[own % kOpen][j][e] = activate(sum[own % kOpen][j][e], kActivation);
          }
          if (kTileW % kUnitW == 0 || column + kColumn + j < kTileW) {
            store(to, kFirst + own * kTileW + j, sum[own % kOpen][j]);
          }
        }
      }
    }
  }
};

}  // namespace convgrad
