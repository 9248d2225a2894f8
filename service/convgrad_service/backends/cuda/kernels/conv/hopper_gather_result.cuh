// From a warpgroup's sums in registers to hopper_gather.cu's results.
#pragma once

#include "ptx/load_store.cuh"
#include "conv/hopper_gather.cuh"
#include "core/vectors.cuh"
#include "ptx/warpgroup.cuh"

// Whether plain results have a bias or an activation, which their instances alone have code for.
#ifndef EPILOGUE
#define EPILOGUE 0
#endif

namespace convgrad {

// Of shared memory, for each warp: 16 rows of 128 bytes.
constexpr u32 kPatchBytes = 16 * 128, kStagingBytes = 4 * kPatchBytes;

// Rows of joined sums lie apart by so much that what a warp's products leave meets no bank twice.
template <int kColumns>
__device__ __forceinline__ u32 joined_at(u32 sums, int row, int column) {
  return sums + (row * (kColumns + 8) + column) * 4;
}
// A warpgroup's sums, its rows from `first_row` on, for blocks of the cluster to add up.
template <int kColumns, int kParts, int kFragments>
__device__ __forceinline__ void keep_sums(u32 sums, int first_row,
                                          const float (&sum)[kParts][kFragments][4]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int j = 0; j < kFragments; ++j) {
      const int row = first_row + part * 64 + warp * 16 + lane / 4, column = j * 8 + lane % 4 * 2;
      st_shared_v2(joined_at<kColumns>(sums, row, column), sum[part][j][0], sum[part][j][1]);
      st_shared_v2(joined_at<kColumns>(sums, row + 8, column), sum[part][j][2], sum[part][j][3]);
    }
  }
}

// A tile's rows in slabs, one for each of the kJoined blocks that split its reduction: each sends the
// others' slabs of its sums to them, behind a place as large as the tile's sums, where its own lie.
// What it asks for: a cluster's blocks have come so far that none of them uses its ring, before any
// sends; and each has got all of its slabs before any leaves, for nothing else tells that they were read.
template <int kRows, int kColumns, int kJoined>
struct Joined {
  static constexpr u32 kRowBytes = (kColumns + 8) * 4;
  static constexpr int kMost = (kRows + kJoined - 1) / kJoined;  // rows of a slab

  __device__ __forceinline__ static int first_of(int block) { return kRows * block / kJoined; }
  __device__ __forceinline__ static u32 slab_bytes(int block) {
    return (first_of(block + 1) - first_of(block)) * kRowBytes;
  }
  // By the threads that multiplied: a warp for each of the other blocks.
  __device__ __forceinline__ static void send(u32 sums, u32 joined, int block, int thread) {
    const int way = thread / 32 + 1;
    if (thread % 32 != 0 || way >= kJoined) return;
    const int other = block + way < kJoined ? block + way : block + way - kJoined;
    bulk_copy_to_peer(slab_at(sums, other, block), sums + first_of(other) * kRowBytes, slab_bytes(other),
               joined, other);
  }
  // Where a block has its slab of another block's sums, or of its own.
  __device__ __forceinline__ static u32 slab_at(u32 sums, int block, int from) {
    if (from == block) return sums + first_of(block) * kRowBytes;
    return sums + (kRows + (from < block ? from : from - 1) * kMost) * kRowBytes;
  }
};

// kParts times 64 pixels x kFragments times 8 channels, as warpgroup products leave them.
template <class T, int kParts, int kFragments>
struct Results {
  static constexpr int kChunk = 16 / static_cast<int>(sizeof(T));
  static constexpr int kRowOf = 128 / static_cast<int>(sizeof(T));  // channels in a buffer's row
  static constexpr int kBlocks = kParts * kFragments / 4;           // of 32 channels

  const HopperGatherArgs& args;
  const GatherPhase& phase;
  i64 row_at;  // where the result has channel 0 of this lane's row of the warp's: see row_of
  int first_pixel, first_channel;
  int lane, warp;  // of the warpgroup
  u32 staging;

  __device__ __forceinline__ Results(const HopperGatherArgs& args, const GatherTile& tile,
                                     u32 staging)
      : args(args),
        phase(phase_of(args, tile.phase)),
        first_pixel(tile.first_pixel),
        first_channel(tile.first_channel),
        lane(threadIdx.x % 32),
        warp(threadIdx.x % 128 / 32),
        staging(staging) {
    static_assert(kParts <= 2, "a lane for each of a warp's rows");
    const int pixel = first_pixel + lane / 16 % kParts * 64 + warp * 16 + lane % 16;
    row_at = pixel < phase.pixels ? result_at(pixel_at(phase, pixel)) : -1;
  }

  // Where the result has channel 0 of one of the warp's 16 rows; negative past the last pixel.
  __device__ __forceinline__ i64 row_of(int part, int row) const {
    return __shfl_sync(~0u, row_at, part * 16 + row);
  }

  // Stores all sums; every thread of a warp together. Sums are used up.
  __device__ __forceinline__ void store(float (&sum)[kParts][kFragments][4]) const {
    if (args.plain) {
      store_rows(sum);
    } else {
      store_finished(sum);
    }
  }

  // Where a pixel's channel 0 is in the result.
  __device__ __forceinline__ i64 result_at(const PixelAt& pixel) const {
    i64 at = image(pixel, args.images_first) * args.y_stride[0];
#pragma unroll
    for (int d = 0; d < 3; ++d) {
      const int m = position(pixel, d, args.images_first);
      at += (phase.axis[d].y0 + m * args.y_step[d]) * args.y_stride[3 + d];
    }
    return at;
  }

  // Rounded, in rows of 128 bytes: through shared memory, where a warp has its own part, so that
  // eight lanes store a row. The copy engine would keep them waiting behind the next tile's loads.
  __device__ __forceinline__ void store_rows(const float (&sum)[kParts][kFragments][4]) const {
    constexpr int kOfBuffer = kRowOf / 8;
    constexpr int kBuffers = (kFragments + kOfBuffer - 1) / kOfBuffer;
    const u32 patch = staging + warp * kPatchBytes;
    const int column = lane % 8 * kChunk;
    T* const y = static_cast<T*>(args.y) + first_channel + column;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      i64 to[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) to[i] = row_of(part, i * 4 + lane / 8);
#pragma unroll
      for (int j = 0; j < kBuffers; ++j) {
        __syncwarp();
        write_rows(patch, sum[part], j * kOfBuffer);
        __syncwarp();
        // All of it is read before any is stored: a store keeps its registers for long.
        const bool inside = first_channel + j * kRowOf + column < args.out_channels &&
                            j * kRowOf + column < kFragments * 8;
        u32 all[4][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = i * 4 + lane / 8;
          ld_shared_v4(all[i], patch + row * 128 + (lane % 8 ^ (row & 7)) * 16);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint4 chunk = {all[i][0], all[i][1], all[i][2], all[i][3]};
          store_if(inside && to[i] >= 0, y + to[i] + j * kRowOf, chunk);
        }
      }
    }
  }

  // This lane's two sums of a row, in the columns of a fragment, rounded; with EPILOGUE after a bias
  // and an activation that clamps, as `finish` has them.
  __device__ __forceinline__ u32 rounded(const float (&sum)[4], int half, u32 biases) const {
    float first = sum[half * 2], second = sum[half * 2 + 1];
    if constexpr (EPILOGUE) {
      first = clamped(first + widen(T{static_cast<unsigned short>(biases)}));
      second = clamped(second + widen(T{static_cast<unsigned short>(biases >> 16)}));
    }
    return narrow_x2<T>(first, second);
  }
  // NaN passes, as it does through every activation.
  __device__ __forceinline__ float clamped(float v) const {
    v = args.activation != kNone && v < 0.0f ? 0.0f : v;
    return args.activation == kRelu6 && v > 6.0f ? 6.0f : v;
  }
  // Of this lane's two columns of a fragment; zeros where there is none.
  __device__ __forceinline__ u32 biases_of(int fragment) const {
    if constexpr (!EPILOGUE) return 0;
    const int channel = first_channel + fragment * 8 + lane % 4 * 2;
    u32 both;
    load_if(args.bias != nullptr && channel < args.out_channels,
            static_cast<const T*>(args.bias) + channel, both);
    return both;
  }

  // A warp's 16 rows of 128 bytes, from fragment `first` on.
  __device__ __forceinline__ void write_rows(u32 patch, const float (&sum)[kFragments][4],
                                             int first) const {
    if constexpr (sizeof(T) == 2) {
      const int row = lane % 16, chunk = lane / 16;
#pragma unroll
      for (int j = 0; j < 8 && first + j < kFragments; j += 2) {
        const u32 to = patch + row * 128 + ((j + chunk) ^ (row & 7)) * 16;
        const u32 here = biases_of(first + j), beside = biases_of(first + j + 1);
        const u32 words[4] = {rounded(sum[first + j], 0, here), rounded(sum[first + j], 1, here),
                              rounded(sum[first + j + 1], 0, beside),
                              rounded(sum[first + j + 1], 1, beside)};
        stmatrix(to, words);
      }
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int row = lane / 4, column = j * 8 + lane % 4 * 2;
        st_shared_v2(patch_at(patch, row, column), sum[first + j][0], sum[first + j][1]);
        st_shared_v2(patch_at(patch, row + 8, column), sum[first + j][2], sum[first + j][3]);
      }
    }
  }

  // With an epilogue, or to channels apart: 32 of them of a warp's 16 pixels at a time, as sums
  // through shared memory. Here too sums move up.
  __device__ __forceinline__ void store_finished(float (&sum)[kParts][kFragments][4]) const {
    const u32 patch = staging + warp * kPatchBytes;
#pragma unroll 1
    for (int block = 0; block < kBlocks; ++block) {
      const int part = block / (kFragments / 4);
      const int pixel = first_pixel + part * 64 + warp * 16;
      const int channel = first_channel + block % (kFragments / 4) * 32;
      if (channel < args.out_channels && pixel < phase.pixels) {
        __syncwarp();
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int row = lane / 4, column = j * 8 + lane % 4 * 2;
          st_shared_v2(patch_at(patch, row, column), sum[0][j][0], sum[0][j][1]);
          st_shared_v2(patch_at(patch, row + 8, column), sum[0][j][2], sum[0][j][3]);
        }
        __syncwarp();
        if (args.wide_stores) {
          store_chunks(patch, part, channel);
        } else {
          store_each(patch, part, channel);
        }
      }
#pragma unroll
      for (int j = 0; j + 4 < kParts * kFragments; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          sum[j / kFragments][j % kFragments][e] =
              sum[(j + 4) / kFragments][(j + 4) % kFragments][e];
        }
      }
    }
  }

  // Of a patch of 16 rows of 32 sums, chunks of four in an order that keeps rows out of each other's
  // banks.
  __device__ __forceinline__ static u32 patch_at(u32 patch, int row, int column) {
    return patch + row * 128 + (column / 4 ^ (row & 7)) * 16 + column % 4 * 4;
  }

  __device__ __forceinline__ float finished(float value, i64 at, int channel) const {
    const T* const accumulate = static_cast<const T*>(args.accumulate);
    const T* const bias = static_cast<const T*>(args.bias);
    return finish<T, float>(value, args.alpha, args.beta,
                            accumulate == nullptr ? nullptr : accumulate + at,
                            bias == nullptr ? nullptr : bias + channel, args.activation);
  }

  __device__ __forceinline__ void store_chunks(u32 patch, int in_part, int channel) const {
    using Neighbours = Vector<T, kChunk>;
    constexpr int kOfRow = 32 / kChunk;
#pragma unroll 1
    for (int i = lane; i < 16 * kOfRow; i += 32) {
      const int row = i / kOfRow, column = i % kOfRow * kChunk;
      const i64 row_start = row_of(in_part, row), at = row_start + channel + column;
      if (row_start < 0 || channel + column >= args.out_channels) continue;
      Neighbours done, before = Neighbours::zero();
      if (args.accumulate != nullptr) {
        before = Neighbours::load(static_cast<const T*>(args.accumulate) + at);
      }
#pragma unroll
      for (int part = 0; part < kChunk; part += 4) {
        u32 four[4];
        ld_shared_v4(four, patch_at(patch, row, column + part));
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float value = args.alpha * __uint_as_float(four[e]);
          if (args.accumulate != nullptr) value += args.beta * widen(before.at[part + e]);
          if (args.bias != nullptr) {
            value += widen(static_cast<const T*>(args.bias)[channel + column + part + e]);
          }
          done.at[part + e] = narrow<T>(activate(value, args.activation));
        }
      }
      done.store(static_cast<T*>(args.y) + at);
    }
  }

  // One by one, along what lies side by side in the result.
  __device__ __forceinline__ void store_each(u32 patch, int part, int channel) const {
    const bool channels_last = args.y_stride[2] == 1;
#pragma unroll 1
    for (int i = lane; i < 16 * 32; i += 32) {
      const int row = channels_last ? i / 32 : i % 16, column = channels_last ? i % 32 : i / 16;
      const i64 row_start = row_of(part, row);
      const i64 at = row_start + (channel + column) * args.y_stride[2];
      if (row_start < 0 || channel + column >= args.out_channels) continue;
      const float value = __uint_as_float(ld_shared_u32(patch_at(patch, row, column)));
      static_cast<T*>(args.y)[at] = narrow<T>(finished(value, at, channel + column));
    }
  }

  // This block's rows of a tile of kRows x kColumns, of which it has slabs of kJoined blocks, added up
  // in the order of the blocks; by kThreads threads, the last of the block.
  template <int kRows, int kColumns, int kJoined, int kThreads>
  __device__ __forceinline__ void store_joined(u32 sums, int block) const {
    using Neighbours = Vector<T, kChunk>;
    using Slabs = Joined<kRows, kColumns, kJoined>;
    constexpr int kOfRow = kColumns / kChunk;
    const int first = Slabs::first_of(block), rows = Slabs::first_of(block + 1) - first;
#pragma unroll 1
    for (int i = threadIdx.x - 128; i < rows * kOfRow; i += kThreads) {
      const int row = first + i / kOfRow, column = i % kOfRow * kChunk;
      const int pixel = first_pixel + row, channel = first_channel + column;
      if (pixel >= phase.pixels || channel >= args.out_channels) continue;
      float value[kChunk];
#pragma unroll
      for (int part = 0; part < kChunk; part += 4) {
        float4 four = {};
#pragma unroll
        for (int from = 0; from < kJoined; ++from) {
          const u32 slab = Slabs::slab_at(sums, block, from);
          u32 more[4];
          ld_shared_v4(more, joined_at<kColumns>(slab, row - first, column + part));
          four.x += __uint_as_float(more[0]), four.y += __uint_as_float(more[1]);
          four.z += __uint_as_float(more[2]), four.w += __uint_as_float(more[3]);
        }
        value[part] = four.x, value[part + 1] = four.y;
        value[part + 2] = four.z, value[part + 3] = four.w;
      }
      const i64 at = result_at(pixel_at(phase, pixel)) + channel * args.y_stride[2];
      if (args.wide_stores) {
        Neighbours done;
#pragma unroll
        for (int e = 0; e < kChunk; ++e) {
          done.at[e] = narrow<T>(finished(value[e], at + e, channel + e));
        }
        done.store(static_cast<T*>(args.y) + at);
        continue;
      }
#pragma unroll 1
      for (int e = 0; e < kChunk && channel + e < args.out_channels; ++e) {
        float one = value[0];
#pragma unroll
        for (int next = 0; next + 1 < kChunk; ++next) value[next] = value[next + 1];
        const i64 here = at + e * args.y_stride[2];
        static_cast<T*>(args.y)[here] = narrow<T>(finished(one, here, channel + e));
      }
    }
  }
};

}  // namespace convgrad
