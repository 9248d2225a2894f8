// The epilogue of hopper_gather.cu with PINGPONG (plain results), 64 pixels at a time to limit registers: a
// thread holds up to 192 accumulators.
#pragma once

#include "conv/hopper_gather_result.cuh"

namespace convgrad {

constexpr u32 kNowhere = ~0u;

// Offsets of channel 0 of the warp's rows, 16 per 64 pixels, in units of 16 bytes; kNowhere past the last
// pixel. Lanes 0-15 and 16-31 hold those of two consecutive parts.
template <class T, int kMmasM>
struct PartRows {
  static constexpr int kChunk = 16 / static_cast<int>(sizeof(T));
  u32 at[(kMmasM + 1) / 2];

  __device__ __forceinline__ PartRows(const HopperGatherArgs& args, const GatherTile& tile) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    const GatherPhase& phase = phase_of(args, tile.phase);
#pragma unroll
    for (int i = 0; i < (kMmasM + 1) / 2; ++i) {
      const int pixel = tile.first_pixel + (i * 2 + lane / 16) * 64 + warp * 16 + lane % 16;
      const PixelAt found = pixel_at(phase, pixel);
      const i64 element = result_at(args, phase, found);
      at[i] = pixel < phase.pixels && is_result(phase, found) ? static_cast<u32>(element / kChunk) : kNowhere;
    }
  }
  __device__ __forceinline__ u32 of(int part, int row) const {
    return __shfl_sync(~0u, at[part / 2], part % 2 * 16 + row);
  }
};

// Stores 64 pixels through the warp's staging buffer, eight lanes per 128-byte row. Reads all before storing
// any: a store holds its registers for long.
template <bool kFinish, class T, int kFragmentsN>
__device__ __forceinline__ void store_part(const Results<T, 1, kFragmentsN>& results,
                                           const u32 (&rows)[4],
                                           const float (&accum)[1][kFragmentsN][4]) {
  using Part = Results<T, 1, kFragmentsN>;
  constexpr int kOfBuffer = Part::kRowOf / 8;
  constexpr int kBuffers = (kFragmentsN + kOfBuffer - 1) / kOfBuffer;
  const int lane = results.lane, column = lane % 8 * Part::kChunk;
  const u32 staging_rows = results.staging + results.warp * kWarpStagingBytes;
  uint4* const y = reinterpret_cast<uint4*>(static_cast<T*>(results.args.y)) +
                   (results.first_channel + column) / Part::kChunk;
#pragma unroll
  for (int j = 0; j < kBuffers; ++j) {
    __syncwarp();
    results.template write_rows<kFinish>(staging_rows, accum[0], j * kOfBuffer);
    __syncwarp();
    const bool inside = results.first_channel + j * Part::kRowOf + column < results.end_channel &&
                        j * Part::kRowOf + column < kFragmentsN * 8;
    u32 words[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = i * 4 + lane / 8;
      ld_shared_v4(words[i], staging_rows + row * 128 + (lane % 8 ^ (row & 7)) * 16);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 chunk = {words[i][0], words[i][1], words[i][2], words[i][3]};
      store_if(inside && rows[i] != kNowhere, y + (static_cast<u64>(rows[i]) + j * 8), chunk);
    }
  }
}

// Warp.
template <bool kFinish, class T, int kMmasM, int kFragmentsN>
__device__ __forceinline__ void store_parts(const HopperGatherArgs& args, const GatherTile& tile,
                                            const PartRows<T, kMmasM>& rows, u32 staging,
                                            const float (&accum)[kMmasM][kFragmentsN][4]) {
  using Part = Results<T, 1, kFragmentsN>;
  const Part results(args, tile, staging);
#pragma unroll
  for (int part = 0; part < kMmasM; ++part) {
    const auto& own = reinterpret_cast<const float(&)[1][kFragmentsN][4]>(accum[part]);
    u32 to[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = rows.of(part, i * 4 + results.lane / 8);
    store_part<kFinish>(results, to, own);
  }
}

}  // namespace convgrad
