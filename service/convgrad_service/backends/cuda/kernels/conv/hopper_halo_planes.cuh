// The epilogue of hopper_halo.cu for channels-first results (contiguous positions). A warp has 16 of a
// tile's channels.
#pragma once

#include "conv/hopper_halo_args.cuh"
#include "core/staging.cuh"

namespace convgrad {

// Staging per consumer warp: 16 rows of 64 columns, padded by 16 bytes.
constexpr u32 kHaloPitch = 64 * 2 + 16, kHaloStaging = 16 * kHaloPitch;

// For rows of whole chunks of eight positions. Columns pass through a ring in shared memory; a
// chunk is stored once all its columns have arrived, two chunks at a time, to write whole 32-byte
// sectors.
// Results is HaloResults.
template <class T, class Results, int kFragments>
__device__ __forceinline__ void put_chunks(const Results& to, const float (&sum)[kFragments][4],
                                           u32 staging) {
  constexpr int kAll = kFragments * 8, kBatch = 4;
  const HopperHaloArgs& args = to.args;
  const int lane = threadIdx.x & 31, left = args.out_channels - to.channel;
  const int across = args.tile[2] / 8, all = to.rows * across;
  const u32 factor = 0xffffu / across + 1;  // for division by it
  T* const y = static_cast<T*>(args.y) + to.at;
  // The number of chunks that end before a position, counted along rows with their halo.
  const auto ended = [&](int position) {
    const int h = row_of(args, position), w = position - h * args.row_pixels;
    return min(h * across + min(w / 8, across), all);
  };
  int done = ended(to.first_column);
#pragma unroll
  for (int j = 0; j < kFragments; j += kBatch) {
#pragma unroll
    for (int k = j; k < j + kBatch && k < kFragments; k += 2) {
      store_fragments<T>(staging + lane % 16 * kHaloPitch + (k + lane / 16) % 8 * 16, sum[k], sum[k + 1]);
    }
    __syncwarp();
    const bool last = j + kBatch >= kFragments;
    const int there = last ? kAll : (j + kBatch) * 8;
    int end = ended(to.first_column + there);
    if (!last) {
      end = max(end & ~1, done);
    } else if (end < all) {
      // If this chunk begins here, the other warpgroup has the rest of its columns.
      const int h = end * factor >> 16;
      end += h * args.row_pixels + (end - h * across) * 8 < to.first_column + kAll;
    }
    for (int chunk = done + lane % 4; chunk < end; chunk += 4) {
      const int h = chunk * factor >> 16, w = (chunk - h * across) * 8;
      const int column = h * args.row_pixels + w - to.first_column;
      const bool whole = column >= 0 && column + 8 <= kAll;
      T* const here = y + h * to.row_step + w;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = lane / 4 + half * 8;
        const bool real = row < left && w < to.width;
        u32 word[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          word[i] = ld_shared_u32(staging + row * kHaloPitch + (column + 2 * i & 63) * 2);
        }
        T* const at = here + row * args.y_stride[2];
        if (whole) store_if(real, at, make_uint4(word[0], word[1], word[2], word[3]));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const bool own = real && column + 2 * i >= 0 && column + 2 * i < kAll;
          if (!whole) store_if(own, at + 2 * i, word[i]);
        }
      }
    }
    done = end;
    __syncwarp();
  }
}

// For other rows: stores a lane's two adjacent columns at once if rows and planes have even sizes,
// else one by one.
template <class T, class Results, int kFragments>
__device__ __forceinline__ void put_pairs(const Results& to, const float (&sum)[kFragments][4]) {
  const HopperHaloArgs& args = to.args;
  const int lane = threadIdx.x & 31, row = lane / 4, left = args.out_channels - to.channel;
  const bool low_there = row < left, high_there = row + 8 < left;
  T* const y = static_cast<T*>(args.y) + to.at + row * args.y_stride[2];
  T* const y_high = y + 8 * args.y_stride[2];
#pragma unroll
  for (int j = 0; j < kFragments; ++j) {
    const u32 low = narrow_x2<T>(sum[j][0], sum[j][1]);
    const u32 high = narrow_x2<T>(sum[j][2], sum[j][3]);
    const int column = j * 8 + lane % 4 * 2;
    int h, w;
    const bool there = to.position(column, h, w);
    const int at = to.offset(h, w);
    if (args.planes > 1) {
      store_if(there && low_there, y + at, low);
      store_if(there && high_there, y_high + at, high);
      continue;
    }
    const bool next_there = to.position(column + 1, h, w);
    const int next = to.offset(h, w);
    store_if(there && low_there, y + at, static_cast<unsigned short>(low));
    store_if(next_there && low_there, y + next, static_cast<unsigned short>(low >> 16));
    store_if(there && high_there, y_high + at, static_cast<unsigned short>(high));
    store_if(next_there && high_there, y_high + next, static_cast<unsigned short>(high >> 16));
  }
}

}  // namespace convgrad
