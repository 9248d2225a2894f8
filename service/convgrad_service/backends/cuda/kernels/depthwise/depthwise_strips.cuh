// Parts of depthwise_weight_mma.cu: strips of columns, their copies and transposition. Host side:
// depthwise_strips.py.
//
// A strip is 8 adjacent columns of a row; 16 strips, adjacent and continuing through the images of the
// batch, are one operand of a product, for one channel. Tensor cores need a channel's columns to be
// contiguous, but in memory a column's channels are. So a block copies a row's columns into shared
// memory and transposes them in 8 x 8 matrices: one ldmatrix and one 16-byte store per lane for 32
// columns of 8 channels. Then each channel has its own lines of units of 8 columns.
// Between the strips of two images are the columns past the end that the first image's last strip
// reads. Neither copies nor matrix loads have bank conflicts.
#pragma once

#include "ptx/load_store.cuh"
#include "core/epilogue.cuh"
#include "core/opaque.cuh"
#include "ptx/mma.cuh"

namespace convgrad {

constexpr int kStripColumns = 8;
constexpr int kTileStrips = 16;

// How blocks divide an image's strips and rows.
struct StripTiling {
  int strips;         // in a row of an image
  int units;          // units of source columns in a row
  int slots;          // units that fit in a block, a multiple of 4
  int tiles;          // tiles of 16 strips, over all images
  int chunks;         // chunks of rows in an image
  int rows;           // rows of a chunk
  int channel_tiles;
};

// A block's strips and rows.
struct TileAt {
  int n, strip, chunk;  // the first strip, in image n
};

__device__ __forceinline__ TileAt tile_at(const StripTiling& tiling, int item) {
  const int tile = item / tiling.chunks, first = tile * kTileStrips;
  const int n = first / tiling.strips;
  return {n, first - n * tiling.strips, item - tile * tiling.chunks};
}

// The first unit in shared memory of a strip of a tile.
__device__ __forceinline__ int slot_of(const StripTiling& tiling, const TileAt& tile, int strip) {
  const int along = tile.strip + strip, images = along / tiling.strips;
  return images * tiling.units + along - images * tiling.strips - tile.strip;
}

// Offset of 16 bytes of a column: a column's channels are contiguous but permuted.
template <int kOctets>
__device__ __forceinline__ int place_of(int column, int octet) {
  static_assert(kOctets == 2 || kOctets == 4, "16 or 32 channels");
  if (kOctets == 4) return column * 4 + (octet ^ (column >> 3 & 3));
  return (column ^ (column >> 4 & 1) << 1) * 2 + (octet ^ (column >> 3 & 1));
}

// A thread's part of copying rows of units.
template <class T, int kOctets, int kCopies, int kThreads>
struct UnitCopier {
  static_assert(kThreads / kOctets % 32 == 0, "a permutation of 32 columns repeats");
  static constexpr int kStepBytes = kThreads * 16;
  static constexpr int kPiece = 16 / sizeof(T);

  const T* from;
  u32 next[kCopies];  // in units of 16 bytes
  int rows;
  u32 inside, target;  // one bit for each valid copy and, from bit 16 on, for each that has a slot

  // `units` of an image, from unit `first` of image n on; `end` of `slots` are wanted. Unit 0 starts
  // at column `left`.
  __device__ __forceinline__ UnitCopier(u32 to, const void* from, const i64 (&stride)[3], int batch,
                                        int n, int first, int units, int slots, int end, int row,
                                        int rows, int left, int columns, int channel, int channels)
      : from(static_cast<const T*>(from)),
        rows(rows),
        inside(0) {
    const int octet = threadIdx.x % kOctets, own = threadIdx.x / kOctets;
    const int c = channel + octet * 8;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int column = own + i * (kThreads / kOctets), slot = column / kStripColumns;
      const int images = (first + slot) / units, unit = first + slot - images * units;
      const int at = left + unit * kStripColumns + column % kStripColumns;
      const bool there = slot < end && n + images < batch && at >= 0 && at < columns && c < channels;
      // Invalid pixels and rows outside are not read, whatever the address.
      const i64 start = (there ? (n + images) * stride[0] + at * stride[2] + c : 0);
      next[i] = opaque_value(static_cast<u32>((start + row * stride[1]) / kPiece));
      inside |= static_cast<u32>(there) << i;
      inside |= static_cast<u32>(slot < slots) << (16 + i);
    }
    inside = opaque_value(inside);
    target = opaque_value(to + place_of<kOctets>(own, octet) * 16);
  }

  // The next row, which is `row`, into the stage `offset_bytes` from the first on; `pitch` is a row's,
  // in pieces.
  __device__ __forceinline__ void copy(int offset_bytes, int row, u32 pitch) {
    const u32 exists = opaque_value(static_cast<u32>(row) < static_cast<u32>(rows) ? inside : 0);
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      if (inside >> (16 + i) & 1) {
        cp_async<16>(target + offset_bytes + i * kStepBytes,
                       from + static_cast<i64>(next[i]) * kPiece, (exists >> i & 1) * 16);
      }
      next[i] += pitch;
    }
  }
};

// A warp's part of transposing rows of up to kMost units to lines.
template <int kOctets, int kWarps, int kMost>
struct Turner {
  static_assert(kWarps % kOctets == 0, "a warp keeps to its octet");
  static constexpr int kGroups = kWarps / kOctets;  // groups of 32 columns between a warp's

  static constexpr int kRounds = (kMost / 4 + kGroups - 1) / kGroups;

  int from, to, count;

  // `pitch` is that of a line, in bytes.
  __device__ __forceinline__ Turner(int slots, int pitch) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int octet = warp % kOctets, matrix = lane / 8, row = lane % 8;
    const int first = warp / kOctets;
    count = opaque_value((slots / 4 - first + kGroups - 1) / kGroups);
    const int column = first * 32 + row / 2 * 8 + matrix * 2 + row % 2;
    from = opaque_value(place_of<kOctets>(column, octet) * 16);
    to = opaque_value((octet * 8 + lane / 4) * pitch + (first * 4 + lane % 4) * 16);
  }

  __device__ __forceinline__ void turn(u32 row, unsigned char* lines) const {
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      if (i >= count) break;
      u32 words[4];
      ldmatrix_trans(words, row + from + i * (kGroups * 32 * kOctets * 16));
      *reinterpret_cast<uint4*>(lines + to + i * (kGroups * 4 * 16)) =
          make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
};

// Bytes of a line, such that 4 units of one channel and 4 of the next are in different banks.
__device__ __forceinline__ int line_pitch(int slots) { return (slots + (slots % 8 == 0 ? 4 : 0)) * 16; }

// The input channels [from a multiple of 8, end) that a block's output channels need, each of them for
// `multiplier` outputs.
struct Sources {
  int first, end, multiplier;

  __device__ __forceinline__ Sources(int channel, int block_channels, int multiplier, int channels)
      : first(channel / multiplier / 8 * 8),
        end(min(channels, (channel + block_channels - 1) / multiplier + 1)),
        multiplier(multiplier) {}
  // Index of the input's channel among the lines.
  __device__ __forceinline__ int line(int channel) const { return channel / multiplier - first; }
};

}  // namespace convgrad
