// Parts of depthwise_pairs.cu: its argument, its sizes, copies of rows, the kernel's taps.
// Made for the same preprocessor's names. Host side: depthwise_pairs.py.
#pragma once

#include "ptx/load_store.cuh"
#include "core/architecture.cuh"
#include "core/divider.cuh"
#include "depthwise/depthwise_activation.cuh"
#include "core/opaque.cuh"
#include "ptx/mma.cuh"
#include "core/vectors.cuh"

namespace convgrad {

struct DepthwisePairsArgs {
  const void* x;  // the source: input, or grad_output
  const void* w;
  void* y;          // the result: output, or grad_input
  const void* bias;  // one per channel, or null
  float alpha;
  int activation;
  u32 x_stride[3];  // N H W, in units of 16 bytes; a pixel's channels are contiguous
  u32 y_stride[3];
  int w_stride[3];  // C R S, in elements
  int batch;
  int channels;
  int x_size[2];
  int y_size[2];
  int pad[2];
  int kernel[2];  // extent of the dilated kernel
  int dilation[2];
  int w_first;  // first tap of the kernel, and steps to the next rows and columns
  int w_step[2];
  int flipped;    // forward: the kernel is read in reverse
  int left;       // first column of x of the first strip
  int first_tap;  // kernel column from x's column `left` to the result's column 0
  int base;       // first row with a sum, in units of STRIDE relative to -pad
  int rows;       // of an image, in those units
  int tiles;      // tiles of strips
  int share;      // rows of all tiles that a block has
  int strips;     // in an image
  int read;       // columns of x that a strip reads
  int row_bytes;  // of a row of x in shared memory
  Divider by_rows, by_strips, by_units, by_dilation;
};

using T = ELEMENT;

constexpr int kTileStrips = 8;
constexpr int kOwnChannels = 2 * PAIRS;  // channels of a warp
constexpr int kParts = OCTETS * 8 / kOwnChannels;
constexpr int kThreads = 32 * kParts;
constexpr int kChannels = OCTETS * 8;
constexpr int kReach = (KERNEL_H + STRIDE - 1) / STRIDE;
// Blocks of an SM for which registers suffice.
constexpr int kHeld = kBlackwell && EPILOGUE && KERNEL_H == 5 ? BLOCKS - 1 : BLOCKS;
constexpr int kOpen = kReach * STRIDE;    // unfinished rows of the result
constexpr int kStripColumns = 8;          // columns of the result
constexpr int kUnitColumns = 8 / STRIDE;  // columns of x that a strip does not share
// Columns of x between rows of a product, and rows of products that a lane reads.
constexpr int kApart = 4 / STRIDE;
constexpr int kBlocks = STRIDE == 1 ? UNITS + 1 : 2 * UNITS;
constexpr int kBlocksApart = STRIDE;  // of those, between units
// Units that a strip reads after its own, which are padding after an image's last one.
constexpr int kMore = ((kBlocks - 1) * kApart + 3) / kUnitColumns;
// Offset of a pixel without bank conflicts between 8 adjacent lanes, which read 4 pixels of each of
// two strips. If pixels are an odd number of 16 bytes apart, groups of 8 are shifted by half the
// banks; if twice an odd number, by 16 bytes (which would separate the strips of stride 2).
constexpr bool kTwiceOdd = OCTETS % 4 == 2;
constexpr int kPixelBytes = (kTwiceOdd && STRIDE == 1 ? OCTETS : OCTETS | 1) * 16;
constexpr int kApartBytes = STRIDE == 1 ? (kTwiceOdd ? 16 : 64) : 0;
constexpr int kResultPixelBytes = (kTwiceOdd ? OCTETS : OCTETS | 1) * 16;
constexpr int kResultApartBytes = kTwiceOdd ? 16 : 64;
constexpr int kRoundPixels = kThreads / OCTETS;  // pixels of one round of copies
constexpr int kMostPixels = (1 + kMore) * kTileStrips * kUnitColumns;
constexpr int kRounds = (kMostPixels + kRoundPixels - 1) / kRoundPixels;
constexpr int kSureRounds = ((kTileStrips + kMore) * kUnitColumns + kRoundPixels - 1) / kRoundPixels;
static_assert(kRoundPixels % 32 == 0, "a round begins with a group of eight pixels");

__host__ __device__ constexpr int place_of(int pixel) {
  return pixel * kPixelBytes + pixel / 8 * kApartBytes;
}
__host__ __device__ constexpr int result_place(int pixel) {
  return pixel * kResultPixelBytes + pixel / 8 * kResultApartBytes;
}
// The first pixel of which a thread copies or stores its octet: adjacent threads have all octets of a
// pixel; if 8 threads have two pixels, these are 4 apart to avoid bank conflicts.
__device__ __forceinline__ int own_pixel() {
  const int pixel = threadIdx.x / OCTETS;
  return OCTETS % 8 == 4 ? pixel / 8 * 8 + pixel % 2 * 4 + pixel % 8 / 2 : pixel;
}

constexpr int kResultBytes = result_place(kTileStrips * kStripColumns);  // of one row
constexpr int kResultsBytes = STRIDE * kResultBytes;  // of all results that one row of x finishes
constexpr int kTilePixels = kTileStrips * kStripColumns;
constexpr int kWrites = (kTilePixels + kRoundPixels - 1) / kRoundPixels;

__device__ __forceinline__ void clear(float (&sum)[4]) {
  sum[0] = sum[1] = sum[2] = sum[3] = 0;
}

// A pixel's channels in a warp.
union Pixels {
  typename RawOf<4 * PAIRS>::type raw;
  u32 words[PAIRS];
};

// Whether any element is not finite.
__device__ __forceinline__ bool any_odd(const Pixels (&pixels)[kBlocks]) {
  u32 odd[2] = {};  // independent of one another
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair) flag_nonfinite_x2<T>(odd[pair % 2], pixels[block].words[pair]);
  }
  return (odd[0] | odd[1]) != 0;
}
// A strip's channels, four bits each: the pairs' first channels, and 16 bits higher their second ones.
static_assert(PAIRS <= 4 && kReach < 16);
constexpr u32 kAllChannels = (0x1111u >> 4 * (4 - PAIRS)) * 0x10001u;
// Replaces non-finite elements by zeros, and returns the channels of this lane's strip that have any; four
// lanes read a strip.
__device__ __forceinline__ u32 clear_odd(Pixels (&pixels)[kBlocks]) {
  u32 channels = 0;
#pragma unroll
  for (int pair = 0; pair < PAIRS; ++pair) {
    u32 any = 0;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      u32 odd = 0;
      flag_nonfinite_x2<T>(odd, pixels[block].words[pair]);
      pixels[block].words[pair] &= ~odd;
      any |= odd;
    }
    channels |= (any & 0x10001u) << 4 * pair;  // a flag is a NaN with all bits but the sign
  }
  channels |= __shfl_xor_sync(0xffffffffu, channels, 1);
  return channels | __shfl_xor_sync(0xffffffffu, channels, 2);
}

// The biases of a block's channels from `channel` on, which a barrier follows.
__device__ __forceinline__ void load_biases(const DepthwisePairsArgs& args, float* biases, int channel) {
  if (args.bias == nullptr) return;
  const T* const from = static_cast<const T*>(args.bias) + channel;
  for (int i = threadIdx.x; i < kChannels; i += kThreads) {
    biases[i] = channel + i < args.channels ? widen(from[i]) : 0.0f;
  }
}
// `finish` for the sum of a channel. Registers do not suffice to keep its bias.
__device__ __forceinline__ float finish_sum(const DepthwisePairsArgs& args, float sum,
                                            const float* bias) {
  sum *= args.alpha;
  if (args.bias != nullptr) {
    float own[1];
    ld_shared_volatile(bias, own);
    sum += own[0];
  }
  return args.activation == kNone ? sum : activated(sum, args.activation);
}

// For each channel of a strip, how many more rows of x finish results that are NaN, because a row with
// non-finite elements contributed to them.
struct NanRows {
  u32 left = 0;

  // The next row of x begins.
  __device__ __forceinline__ void next() {
    left -= (left | left >> 1 | left >> 2 | left >> 3) & 0x11111111u;
  }
  // It has non-finite elements in these channels.
  __device__ __forceinline__ void add(u32 odd) { left = (left & ~(odd * 15)) | odd * kReach; }
  __device__ __forceinline__ bool any() const { return left != 0; }
  // Makes those of a finished row of results NaN that are; it is the a-th that the last row of x finishes.
  __device__ __forceinline__ void apply(int a, Pixels (&result)[2]) const {
    // A row of x contributes to as many rows of a-th results, or to one less.
    const bool fewer = (KERNEL_H - a + STRIDE - 1) / STRIDE < kReach;
    const u32 odd = (fewer ? 0 : left) | left >> 1 | left >> 2 | left >> 3;
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair) {
      const u32 mask = (odd >> 4 * pair & 0x10001u) * 0xffffu;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        u32& word = result[half].words[pair];
        word = (word & ~mask) | (0x7fff7fffu & mask);
      }
    }
  }
};

// A thread's part of copying rows of x.
struct RowsCopier {
  const T* from;
  u32 next[kRounds];  // in units of 16 bytes
  u32 inside;         // one bit for each valid pixel
  u32 target;
  int rounds;

  // From strip `strip` of image n on, `pixels` of them; `end` are wanted. The first row is `row`.
  __device__ __forceinline__ RowsCopier(const DepthwisePairsArgs& args, u32 to, int n, int strip,
                                        int pixels, int end, int row)
      : from(static_cast<const T*>(args.x)), inside(0) {
    const int octet = threadIdx.x % OCTETS, own = own_pixel();
    const int c = blockIdx.x * kChannels + octet * 8;
    const int units = args.strips + kMore;
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int pixel = own + i * kRoundPixels;
      const int unit = strip + pixel / kUnitColumns, images = divide(unit, args.by_units);
      const int at = args.left + (unit - images * units) * kUnitColumns + pixel % kUnitColumns;
      const bool there = pixel < end && n + images < args.batch && at >= 0 &&
                         at < args.x_size[1] && c < args.channels;
      // Invalid pixels and rows outside are not read, whatever the address.
      next[i] = opaque_value((n + images) * args.x_stride[0] + row * args.x_stride[1] +
                           at * args.x_stride[2] + c / 8);
      inside |= static_cast<u32>(there) << i;
    }
    rounds = (pixels + kRoundPixels - 1) / kRoundPixels;
    target = to + place_of(own) + octet * 16;
    inside = opaque_value(inside);
    target = opaque_value(target);
  }

  // Copies the next row, `row`, to `offset_bytes` after the first stage.
  __device__ __forceinline__ void copy(int offset_bytes, int row, int rows, u32 pitch) {
    const u32 exists = opaque_value(static_cast<u32>(row) < static_cast<u32>(rows) ? inside : 0);
    const u32 to = opaque_value(target + offset_bytes);
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      if (i < kSureRounds || i < rounds) {
        cp_async_zfill(to + place_of(i * kRoundPixels), from + static_cast<i64>(next[i]) * 8,
                   (exists & 1u << i) != 0);
      }
      next[i] += pitch;
    }
  }
};

// A warp's taps as operand B, from channel `channel` on.
using Taps = u32[KERNEL_H][PAIRS][UNITS];

__device__ __forceinline__ void load_taps(Taps& taps, const DepthwisePairsArgs& args, int channel) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  // Column g of operand B: column g / 2 of the result, channel g % 2 of the pair.
  unsigned short raw[KERNEL_H][PAIRS][UNITS];
#pragma unroll
  for (int unit = 0; unit < UNITS; ++unit) {
    const int s = args.first_tap + g / 2 - (unit * 4 + t) * STRIDE;
    const int tap = divide(s, args.by_dilation);
    const bool wanted = s >= 0 && s < args.kernel[1] && tap * args.dilation[1] == s;
    const int pairs = wanted ? (args.channels - channel - g % 2 + 1) / 2 : 0;
    const T* w = static_cast<const T*>(args.w) +
                 (args.w_first + (channel + g % 2) * args.w_stride[0] + tap * args.w_step[1]);
    int between = 0;  // rows since the last row of taps
#pragma unroll
    for (int r = 0; r < KERNEL_H; ++r) {
      const bool there = between == 0 && r < args.kernel[0];
#pragma unroll
      for (int pair = 0; pair < PAIRS; ++pair) {
        load_if(there && pair < pairs, w + 2 * pair * args.w_stride[0], raw[r][pair][unit]);
      }
      if (between == 0) w += args.w_step[0];
      if (++between == args.dilation[0]) between = 0;
    }
  }
#pragma unroll
  for (int r = 0; r < KERNEL_H; ++r) {
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair) {
#pragma unroll
      for (int unit = 0; unit < UNITS; ++unit) {
        taps[r][pair][unit] = static_cast<u32>(raw[r][pair][unit]) << (g % 2 * 16);
      }
    }
  }
}

}  // namespace convgrad
