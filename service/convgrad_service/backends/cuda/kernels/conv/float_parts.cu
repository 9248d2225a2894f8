// Splits two float32 tensors into bfloat16 parts, for products of parts on the tensor cores. Launched by
// float_parts.py.
//
// An element is the sum of its parts, each the rest so far rounded to bfloat16: two parts have 16 of its 24 bits,
// three all of them. A target has the PARTS parts one after another, each channels last (N D H W C) with channels
// padded to whole chunks of eight by zeros. NaN and infinities have parts whose sum is not finite.
// With two parts, an element whose first part would round to infinity has it truncated instead.
// With three parts, elements are multiplied by a power of two, at first 2^`lift`: with 2^16, the last bit of the
// smallest subnormal is bfloat16's last bit, so every element that stays finite is split exactly. The launch stores the
// extremes of the elements that each block found. A second one (`again`) chooses other powers where bits would be lost,
// or elements or products of two could overflow, and splits such tensors again; else it ends. It also stores the factor
// that undoes the scales of a product.
//
// Grid: blocks of the first tensor, then of the second; each takes chunks or tiles in turn. If `again`, a few, as most
//   launches do nothing: the product's blocks can start beside them. Block: 256 threads.
//   Channels that are contiguous in the source: a thread has kEach chunks of eight channels at a time. Others
//   are transposed: a block has a tile of 64 pixels and 64 channels (`narrow`: twice or four times as many
//   pixels, of fewer channels), read along pixels, the next one while it stores.
// Shared memory (static): the tile.
// Preconditions: `vectors` if the source's pixels start at multiples of 16 bytes and have a multiple of four channels.
// Determinism: each element is written once in a launch; scales depend on the extremes of all elements only, and change
// no bits while all are split exactly.
// Limits: pixels, and chunks or tiles, below 2^31; 64-bit elements.
#include "core/divider.cuh"
#include "core/split_floats.cuh"
#include "core/vectors.cuh"
#include "ptx/pdl.cuh"

using namespace convgrad;

struct FloatTensor {
  i64 stride[4];       // N D H W of the source, in elements
  i64 channel_stride;  // likewise
  i64 part;            // elements of a part
  int pixels, channels;
  int padded;          // channels of a pixel of a part
  int jobs;            // chunks, or tiles
  int transposes;      // its channels are not contiguous
  int narrow;          // log2 of the factor by which its tiles have fewer channels and more pixels
  int vectors;         // chunks can be read by vectors of 16 bytes
  int in_order;        // one stride, that of W, separates all pixels
  int size[3];         // D H W
  Divider by[3];       // the sizes
  Divider by_across;   // chunks, or tiles, of a pixel
};

struct FloatPartsArgs {
  const float* source0;
  const float* source1;
  bf16* target0;
  bf16* target1;
  Extremes* ranges;  // of each block
  float* unscale;
  FloatTensor of[2];
  int blocks[2];
  int found[2];    // blocks of the first launch
  int lift[2];
  int again;
};

namespace {

constexpr int kBlock = 256, kBlocksEach = 3, kEach = 2, kChunk = 8;
constexpr int kMostNarrow = 2, kTile = 64, kPitch = kTile + 1, kRows = kBlock / kTile;
constexpr bool kScales = PARTS == 3;
// What lets every element be split exactly, the least exponent of a product of scales, and biased exponents of the
// largest scaled element and product: sums of a k-tile's 64 products are finite.
constexpr int kLift = 16, kLeast = -16, kMostExponent = 253, kMostProduct = 127 + 127 + 118;

// The exponents of the powers of two that scale two tensors with these extremes: if possible, `lift`, else others with
// which both are split exactly, and of the same product, which then changes no bits of results.
struct PartScales {
  int of[2];

  __device__ __forceinline__ PartScales(const Extremes (&ranges)[2], const int (&lift)[2]) {
    int exact[2], most[2];  // the least exponents of an exact split, and the most without overflow
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      exact[i] = min(kLift, kLift + 1 - static_cast<int>(ranges[i].least >> 24));
      most[i] = kMostExponent - ranges[i].exponent();
    }
    const int finite = max(kMostProduct - ranges[0].exponent() - ranges[1].exponent(), kLeast);
    const int both = min(max(lift[0] + lift[1], exact[0] + exact[1]), min(finite, most[0] + most[1]));
    const int low = max(exact[0], both - most[1]), high = min(most[0], both - exact[1]);
    const int first = low <= high ? min(max(lift[0], low), high) : (low + high) / 2;
    of[0] = min(max(first, both - most[1]), most[0]), of[1] = both - of[0];
  }
};

// The extremes of all threads' elements, for all of them.
__device__ __forceinline__ Extremes range_of_block(const Extremes& found, Extremes (&warps)[kBlock / 32]) {
  const Extremes range = found.of_warp();
  __syncthreads();
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = range;
  __syncthreads();
  Extremes all = warps[0];
#pragma unroll
  for (int i = 1; i < kBlock / 32; ++i) all.add(warps[i]);
  return all;
}

__device__ __forceinline__ i64 source_at(const FloatTensor& of, int pixel) {
  if (of.in_order) return pixel * of.stride[3];
  const int rest2 = divide(pixel, of.by[2]), rest1 = divide(rest2, of.by[1]);
  const int n = divide(rest1, of.by[0]);
  return n * of.stride[0] + (rest1 - n * of.size[0]) * of.stride[1] +
         (rest2 - rest1 * of.size[1]) * of.stride[2] + (pixel - rest2 * of.size[2]) * of.stride[3];
}

// Reads eight channels, of which so many exist.
__device__ __forceinline__ void load_chunk(const FloatTensor& of, const float* from, int count,
                                           float (&chunk)[kChunk]) {
  if (of.vectors) {
#pragma unroll
    for (int i = 0; i < kChunk; i += 4) {
      const Vector<float, 4> found = i < count ? Vector<float, 4>::load(from + i) : Vector<float, 4>::zero();
#pragma unroll
      for (int e = 0; e < 4; ++e) chunk[i + e] = found.at[e];
    }
  } else {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) chunk[i] = i < count ? from[i] : 0;
  }
}

// The element rounded to bfloat16 in the low or the high half of `part`, unless that is infinity.
__device__ __forceinline__ void keep_finite(u32& part, float first, float second) {
  if ((part & 0x7fff) == 0x7f80) part = (part & 0xffff0000) | __float_as_uint(first) >> 16;
  if ((part & 0x7fff0000) == 0x7f800000) part = (part & 0xffff) | (__float_as_uint(second) & 0xffff0000);
}

// Splits eight channels and stores their parts, and notes their extremes.
__device__ __forceinline__ void store_parts(const FloatTensor& of, bf16* to, const float (&chunk)[kChunk],
                                            float by, Extremes& range) {
  u32 parts[PARTS][kChunk / 2];
#pragma unroll
  for (int i = 0; i < kChunk; i += 2) {
    u32 found[PARTS];
    float pair[2] = {chunk[i], chunk[i + 1]};
    if constexpr (kScales) {
#pragma unroll
      for (float& one : pair) {
        range.add(__float_as_uint(one));
        one *= by;
      }
      split_x2(pair[0], pair[1], found);
    } else {
      found[0] = narrow_x2<bf16>(pair[0], pair[1]);
      keep_finite(found[0], pair[0], pair[1]);
      found[1] = narrow_x2<bf16>(pair[0] - __uint_as_float(found[0] << 16),
                                 pair[1] - __uint_as_float(found[0] & 0xffff0000));
    }
#pragma unroll
    for (int part = 0; part < PARTS; ++part) parts[part][i / 2] = found[part];
  }
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
    Vector<bf16, kChunk> whole;
    whole.raw = make_uint4(parts[part][0], parts[part][1], parts[part][2], parts[part][3]);
    whole.store(to + part * of.part);
  }
}

// Takes every `blocks`th group of chunks.
__device__ __forceinline__ void split_chunks(const FloatTensor& of, const float* source, bf16* target,
                                             u32 block, u32 blocks, float by, Extremes& range) {
  const int across = of.padded / kChunk;
  for (u32 first = block * (kBlock * kEach) + threadIdx.x; first < of.jobs; first += blocks * kBlock * kEach) {
    float chunk[kEach][kChunk];
    i64 to[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int index = min(first + i * kBlock, static_cast<u32>(of.jobs - 1));
      const int pixel = divide(index, of.by_across), column = (index - pixel * across) * kChunk;
      to[i] = static_cast<i64>(pixel) * of.padded + column;
      load_chunk(of, source + source_at(of, pixel) + column, of.channels - column, chunk[i]);
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (first + i * kBlock < of.jobs) store_parts(of, target + to[i], chunk[i], by, range);
    }
  }
}

// A tile's element, without bank conflicts for neighbouring pixels, nor for 4 pixels of each chunk.
__device__ __forceinline__ int tile_at(int channel, int pixel) {
  return channel * kPitch + (pixel ^ (channel >> 5 << 2));
}

// Takes every `blocks`th tile. Row v of a tile in shared memory is 64 pixels of a channel.
__device__ __forceinline__ void transpose_tiles(const FloatTensor& of, const float* source, bf16* target,
                                                u32 block, u32 blocks, float by, Extremes& range,
                                                float (&tile)[kTile * kPitch]) {
  const int lane = threadIdx.x % kTile, row = threadIdx.x / kTile, narrow = of.narrow;
  const int wide = kTile >> narrow, across = (of.padded + wide - 1) / wide;  // channels of a tile
  float found[kTile / kRows];
  const auto load = [&](u32 job) {
    const int along = divide(static_cast<int>(job), of.by_across), first_pixel = along * (kTile << narrow);
    const int first_channel = (job - along * across) * wide;
    i64 from = 0;
#pragma unroll
    for (int i = 0; i < kTile / kRows; ++i) {
      const int v = row + i * kRows, channel = first_channel + (v & (wide - 1));
      // Another row of pixels, which begins every 64, 32 or 16 rows of the tile.
      if (i == 0 || (i * kRows % (kTile >> kMostNarrow) == 0 && (i * kRows & (wide - 1)) == 0)) {
        from = source_at(of, min(first_pixel + (v >> (6 - narrow)) * kTile + lane, of.pixels - 1));
      }
      found[i] = channel < of.channels ? source[from + channel * of.channel_stride] : 0;
    }
  };
  // The next tile is read while one is stored. One copy of the code for both, as a launch waits for its code.
  bool holds = false;
  for (u32 next = block; holds || next < of.jobs; next += blocks) {
    const u32 job = next - blocks;
    const int along = divide(static_cast<int>(job), of.by_across), first_pixel = along * (kTile << narrow);
    const int first_channel = (job - along * across) * wide;
    if (holds) {
      __syncthreads();  // the previous tile is read
#pragma unroll
      for (int i = 0; i < kTile / kRows; ++i) tile[tile_at(row + i * kRows, lane)] = found[i];
      __syncthreads();
    }
    if (next < of.jobs) load(next);
#pragma unroll
    for (int i = 0; holds && i < kTile * kTile / kChunk / kBlock; ++i) {
      const int index = threadIdx.x + i * kBlock, chunks = wide / kChunk, pixel = index >> (3 - narrow);
      const int column = (index & (chunks - 1)) * kChunk, first = pixel / kTile * wide + column;
      if (first_pixel + pixel >= of.pixels || first_channel + column >= of.padded) continue;
      float chunk[kChunk];
#pragma unroll
      for (int e = 0; e < kChunk; ++e) chunk[e] = tile[tile_at(first + e, pixel % kTile)];
      store_parts(of, target + static_cast<i64>(first_pixel + pixel) * of.padded + first_channel + column,
                  chunk, by, range);
    }
    holds = next < of.jobs;
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kBlock, kBlocksEach)
    float_parts(const __grid_constant__ FloatPartsArgs args) {
  __shared__ float tile[kTile * kPitch];
  __shared__ Extremes warps[kBlock / 32];
  launch_dependent_grids();
  wait_on_dependent_grids();
  const bool second = blockIdx.x >= args.blocks[0];
  const FloatTensor& of = args.of[second];
  float by = kScales ? power_of_two(args.lift[second]) : 1;
  if (kScales && args.again) {
    // Every warp reads all, so that none waits for others.
    Extremes first = Extremes::none(), other = first;
#pragma unroll 4
    for (int i = threadIdx.x % 32; i < args.found[0] + args.found[1]; i += 32) {
      const Extremes one = args.ranges[i];
      if (i < args.found[0]) first.add(one);
      else other.add(one);
    }
    const PartScales scales({first.of_warp(), other.of_warp()}, args.lift);
    if (blockIdx.x == 0 && threadIdx.x == 0) *args.unscale = power_of_two(-scales.of[0] - scales.of[1]);
    const int exponent = second ? scales.of[1] : scales.of[0];
    if (exponent == args.lift[second]) return;
    by = power_of_two(exponent);
  }
  const float* const source = second ? args.source1 : args.source0;
  bf16* const target = second ? args.target1 : args.target0;
  const u32 block = blockIdx.x - (second ? args.blocks[0] : 0), blocks = args.blocks[second];
  Extremes range = Extremes::none();
  if (of.transposes) {
    transpose_tiles(of, source, target, block, blocks, by, range, tile);
  } else {
    split_chunks(of, source, target, block, blocks, by, range);
  }
  if (kScales && !args.again) {
    range = range_of_block(range, warps);
    if (threadIdx.x == 0) args.ranges[blockIdx.x] = range;
  }
}
