// The epilogue of hopper_gather.cu: from a warpgroup's accumulators to results in global memory.
#pragma once

#include "ptx/load_store.cuh"
#include "conv/hopper_gather.cuh"
#include "core/staging.cuh"
#include "core/vectors.cuh"
#include "ptx/warpgroup.cuh"

namespace convgrad {

// Staging buffer per warp: 16 rows of 128 bytes.
constexpr u32 kWarpStagingBytes = 16 * 128, kStagingBytes = 4 * kWarpStagingBytes;

// Element offset of a pixel's channel 0 in the result.
__device__ __forceinline__ i64 result_at(const HopperGatherArgs& args, const GatherPhase& phase,
                                         const PixelAt& pixel) {
  i64 at = image(pixel, args.images_first) * args.y_stride[0];
#pragma unroll
  for (int d = 0; d < 3; ++d) {
    const int m = position(pixel, d, args.images_first);
    at += (phase.axis[d].y0 + m * args.y_step[d]) * args.y_stride[3 + d];
  }
  return at;
}

// The results of a warpgroup: kMmasM * 64 pixels x kFragmentsN * 8 channels, in wgmma's accumulator layout.
template <class T, int kMmasM, int kFragmentsN>
struct Results {
  static constexpr int kChunk = 16 / static_cast<int>(sizeof(T));
  static constexpr int kRowOf = 128 / static_cast<int>(sizeof(T));  // channels in a staging row
  static constexpr int kChannelBlocks = kMmasM * kFragmentsN / 4;           // blocks of 32 channels

  const HopperGatherArgs& args;
  const GatherPhase& phase;
  i64 row_at;  // element offset of channel 0 of this lane's row, see row_of
  int first_pixel, first_channel, end_channel;  // the tile's first channel, and its group's end
  int lane, warp;  // warp within the warpgroup
  u32 staging;

  __device__ __forceinline__ Results(const HopperGatherArgs& args, const GatherTile& tile,
                                     u32 staging)
      : args(args),
        phase(phase_of(args, tile.phase)),
        first_pixel(tile.first_pixel),
        first_channel(first_channel_of<kFragmentsN * 8>(args, tile.column)),
        end_channel((divide(tile.column, args.by_group) + 1) * args.out_channels),
        lane(threadIdx.x % 32),
        warp(threadIdx.x % 128 / 32),
        staging(staging) {
    static_assert(kMmasM <= 2, "a lane for each of a warp's rows");
    const int pixel = first_pixel + lane / 16 % kMmasM * 64 + warp * 16 + lane % 16;
    const PixelAt found = pixel_at(phase, pixel);
    row_at = pixel < phase.pixels && is_result(phase, found) ? result_at(args, phase, found) : -1;
  }

  // Element offset of channel 0 of one of the warp's 16 rows; negative past the last pixel.
  __device__ __forceinline__ i64 row_of(int part, int row) const {
    return __shfl_sync(~0u, row_at, part * 16 + row);
  }

  // Warp: stores all results; overwrites the accumulators. With kFinishes, plain ones may have a bias and an
  // activation.
  template <bool kFinishes>
  __device__ __forceinline__ void store(float (&accum)[kMmasM][kFragmentsN][4]) const {
    if (args.plain) {
      if (kFinishes && (EPILOGUE || args.plain == 2)) {
        store_rows<true>(accum);
      } else {
        store_rows<false>(accum);
      }
    } else {
      store_finished(accum);
    }
  }

  // Plain results, rounded, in rows of 128 bytes: through the warp's staging buffer, so that eight lanes store a
  // row. TMA stores would queue behind the next tile's loads.
  template <bool kFinish>
  __device__ __forceinline__ void store_rows(const float (&accum)[kMmasM][kFragmentsN][4]) const {
    constexpr int kOfBuffer = kRowOf / 8;
    constexpr int kBuffers = (kFragmentsN + kOfBuffer - 1) / kOfBuffer;
    const u32 staging_rows = staging + warp * kWarpStagingBytes;
    const int column = lane % 8 * kChunk;
    T* const y = static_cast<T*>(args.y) + first_channel + column;
#pragma unroll
    for (int part = 0; part < kMmasM; ++part) {
      i64 to[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) to[i] = row_of(part, i * 4 + lane / 8);
#pragma unroll
      for (int j = 0; j < kBuffers; ++j) {
        __syncwarp();
        write_rows<kFinish>(staging_rows, accum[part], j * kOfBuffer);
        __syncwarp();
        // Read all before storing any: a store holds its registers for long.
        const bool inside = first_channel + j * kRowOf + column < end_channel &&
                            j * kRowOf + column < kFragmentsN * 8;
        u32 all[4][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = i * 4 + lane / 8;
          ld_shared_v4(all[i], staging_rows + row * 128 + (lane % 8 ^ (row & 7)) * 16);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint4 chunk = {all[i][0], all[i][1], all[i][2], all[i][3]};
          store_if(inside && to[i] >= 0, y + to[i] + j * kRowOf, chunk);
        }
      }
    }
  }

  // This lane's two sums of a fragment's row, rounded; with kFinish after bias and a clamping activation, with
  // the same bits as `finish`.
  template <bool kFinish>
  __device__ __forceinline__ u32 rounded(const float (&accum)[4], int half, u32 biases) const {
    float first = accum[half * 2], second = accum[half * 2 + 1];
    if constexpr (kFinish) {
      first = clamped(first + widen(T{static_cast<unsigned short>(biases)}));
      second = clamped(second + widen(T{static_cast<unsigned short>(biases >> 16)}));
    }
    return narrow_x2<T>(first, second);
  }
  // Preserves NaN, like every activation.
  __device__ __forceinline__ float clamped(float v) const {
    v = args.activation != kNone && v < 0.0f ? 0.0f : v;
    return args.activation == kRelu6 && v > 6.0f ? 6.0f : v;
  }
  // Biases of this lane's two columns of a fragment; zeros where there are none.
  template <bool kFinish>
  __device__ __forceinline__ u32 biases_of(int fragment) const {
    if constexpr (!kFinish) return 0;
    const int channel = first_channel + fragment * 8 + lane % 4 * 2;
    u32 both;
    load_if(args.bias != nullptr && channel < end_channel,
            static_cast<const T*>(args.bias) + channel, both);
    return both;
  }

  // Writes the warp's 16 rows of 128 bytes, from fragment `first` on, to its staging buffer.
  template <bool kFinish>
  __device__ __forceinline__ void write_rows(u32 staging_rows, const float (&accum)[kFragmentsN][4],
                                             int first) const {
    if constexpr (sizeof(T) == 2) {
      const int row = lane % 16, chunk = lane / 16;
#pragma unroll
      for (int j = 0; j < 8 && first + j < kFragmentsN; j += 2) {
        const u32 to = staging_rows + row * 128 + ((j + chunk) ^ (row & 7)) * 16;
        const u32 here = biases_of<kFinish>(first + j), beside = biases_of<kFinish>(first + j + 1);
        const u32 words[4] = {rounded<kFinish>(accum[first + j], 0, here),
                              rounded<kFinish>(accum[first + j], 1, here),
                              rounded<kFinish>(accum[first + j + 1], 0, beside),
                              rounded<kFinish>(accum[first + j + 1], 1, beside)};
        stmatrix(to, words);
      }
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int row = lane / 4, column = j * 8 + lane % 4 * 2;
        st_shared_v2(staging_address(staging_rows, row, column), accum[first + j][0], accum[first + j][1]);
        st_shared_v2(staging_address(staging_rows, row + 8, column), accum[first + j][2],
                     accum[first + j][3]);
      }
    }
  }

  // General epilogue, or strided channels: 32 channels of a warp's 16 pixels at a time, as float32 through
  // shared memory. The accumulators are shifted down after each block, which keeps indices static.
  __device__ __forceinline__ void store_finished(float (&accum)[kMmasM][kFragmentsN][4]) const {
    const u32 staging_rows = staging + warp * kWarpStagingBytes;
#pragma unroll 1
    for (int block = 0; block < kChannelBlocks; ++block) {
      const int part = block / (kFragmentsN / 4);
      const int pixel = first_pixel + part * 64 + warp * 16;
      const int channel = first_channel + block % (kFragmentsN / 4) * 32;
      if (channel < end_channel && pixel < phase.pixels) {
        __syncwarp();
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int row = lane / 4, column = j * 8 + lane % 4 * 2;
          st_shared_v2(staging_address(staging_rows, row, column), accum[0][j][0], accum[0][j][1]);
          st_shared_v2(staging_address(staging_rows, row + 8, column), accum[0][j][2], accum[0][j][3]);
        }
        __syncwarp();
        if (args.wide_stores) {
          store_chunks(staging_rows, part, channel);
        } else {
          store_each(staging_rows, part, channel);
        }
      }
#pragma unroll
      for (int j = 0; j + 4 < kMmasM * kFragmentsN; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          accum[j / kFragmentsN][j % kFragmentsN][e] =
              accum[(j + 4) / kFragmentsN][(j + 4) % kFragmentsN][e];
        }
      }
    }
  }

  // Address in a staging buffer of 16 rows of 32 float32, with 16-byte chunks swizzled.
  __device__ __forceinline__ static u32 staging_address(u32 staging_rows, int row, int column) {
    return staging_rows + row * 128 + (column / 4 ^ (row & 7)) * 16 + column % 4 * 4;
  }

  __device__ __forceinline__ void store_chunks(u32 staging_rows, int in_part, int channel) const {
    using Chunk = Vector<T, kChunk>;
    constexpr int kOfRow = 32 / kChunk;
#pragma unroll 1
    for (int i = lane; i < 16 * kOfRow; i += 32) {
      const int row = i / kOfRow, column = i % kOfRow * kChunk;
      const i64 row_start = row_of(in_part, row), at = row_start + channel + column;
      if (row_start < 0 || channel + column >= end_channel) continue;
      Chunk finished_chunk, previous = Chunk::zero();
      if (args.accumulate != nullptr) {
        previous = Chunk::load(static_cast<const T*>(args.accumulate) + at);
      }
#pragma unroll
      for (int part = 0; part < kChunk; part += 4) {
        u32 four[4];
        ld_shared_v4(four, staging_address(staging_rows, row, column + part));
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float value = args.alpha * __uint_as_float(four[e]);
          if (args.accumulate != nullptr) value += args.beta * widen(previous.at[part + e]);
          if (args.bias != nullptr) {
            value += widen(static_cast<const T*>(args.bias)[channel + column + part + e]);
          }
          finished_chunk.at[part + e] = narrow<T>(activate(value, args.activation));
        }
      }
      finished_chunk.store(static_cast<T*>(args.y) + at);
    }
  }

  // Element by element, along the result's contiguous dimension.
  __device__ __forceinline__ void store_each(u32 staging_rows, int part, int channel) const {
    const bool channels_last = args.y_stride[2] == 1;
#pragma unroll 1
    for (int i = lane; i < 16 * 32; i += 32) {
      const int row = channels_last ? i / 32 : i % 16, column = channels_last ? i % 32 : i / 16;
      const i64 row_start = row_of(part, row);
      const i64 at = row_start + (channel + column) * args.y_stride[2];
      if (row_start < 0 || channel + column >= end_channel) continue;
      const float value = __uint_as_float(ld_shared_u32(staging_address(staging_rows, row, column)));
      static_cast<T*>(args.y)[at] = narrow<T>(finish_at<T>(args, value, at, channel + column));
    }
  }

  // Finishes and stores eight sums of a pixel, channels `channel` on, of which the first lies at `at`.
  __device__ __forceinline__ void store_eight(i64 at, int channel, const float (&sums)[8]) const {
    using Chunk = Vector<T, kChunk>;
    if (args.wide_stores) {
#pragma unroll
      for (int first = 0; first < 8; first += kChunk) {
        if (channel + first >= end_channel) return;
        Chunk chunk;
#pragma unroll
        for (int e = 0; e < kChunk; ++e) {
          const float sum = sums[first + e];
          chunk.at[e] = narrow<T>(args.plain ? sum : finish_at<T>(args, sum, at + first + e, channel + first + e));
        }
        chunk.store(static_cast<T*>(args.y) + at + first);
      }
      return;
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      if (channel + e >= end_channel) return;
      const i64 here = at + e * args.y_stride[2];
      static_cast<T*>(args.y)[here] = narrow<T>(finish_at<T>(args, sums[e], here, channel + e));
    }
  }
};

}  // namespace convgrad
