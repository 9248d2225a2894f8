// Splits float32 tensors into three bfloat16 parts each, channels last, for products on the tensor cores. Launched
// by float_parts.py.
//
// An element is part[0] + 2^-8 * part[1] + 2^-16 * part[2], exactly: a part is what the ones before leave of the
// element, times its weight's inverse, rounded to nearest. Because of these weights no part underflows before the
// element does: the smallest subnormal is 2^-16 * 2^-133. Elements of 2^127 or more are truncated instead, so that
// no part of a finite element rounds to infinity. A part's magnitude is at most that of the element, rounded up to
// a power of two. The last two parts of an infinity are NaN.
//
// The target has the tensors of the three parts one after another, in the order (image, D, H, W, channel).
// TRANSPOSED 0: the source's channels are contiguous; a thread splits eight of a pixel. TRANSPOSED 1: neighbouring
//   pixels are; a block splits 64 pixels of 64 channels through shared memory.
//
// Grid: linear over eights of channels; or tiles of channels (fastest), tiles of pixels, images.
// Block: 256 threads. Shared memory (static): TRANSPOSED 1: 64 x 65 words.
// Preconditions: with VECTORS, strides and addresses are multiples of 16 bytes, and channels of 8.
// Determinism: each element is written once.
// Limits: pixels of an image and eights of channels below 2^31; 64-bit offsets.
#include "core/divider.cuh"
#include "core/vectors.cuh"
#include "ptx/mma.cuh"
#include "ptx/pdl.cuh"

using namespace convgrad;

struct FloatPartsArgs {
  const float* source;
  bf16* target;
  i64 stride[5];      // N C D H W of the source, in elements
  i64 part;           // elements of a part
  int eights;         // of channels, in all pixels and images
  int pixels;         // of an image
  int channels;       // of the source
  int padded;         // channels of a pixel of the target, a multiple of 8
  int in_order;       // the stride of W separates all pixels of an image
  int size[3];        // D H W
  Divider by[3];      // the sizes
  Divider by_eights;  // of a pixel
  Divider by_pixels;
};

namespace {

constexpr int kBlock = 256, kParts = 3, kTile = 64;

__device__ __forceinline__ i64 pixel_offset(const FloatPartsArgs& args, int pixel) {
  if (args.in_order) return pixel * args.stride[4];
  const int row = divide(pixel, args.by[2]), plane = divide(row, args.by[1]);
  return plane * args.stride[2] + (row - plane * args.size[1]) * args.stride[3] +
         (pixel - row * args.size[2]) * args.stride[4];
}

// Rounds to the parts' type: to nearest, or of the largest elements toward zero.
__device__ __forceinline__ float rounded(float value, bool largest) {
  const u32 word = largest ? __float_as_uint(value) : narrow_x2<bf16>(0.0f, value);
  return __uint_as_float(word & 0xffff0000);
}

// Splits eight values, and stores the parts at `to`.
__device__ __forceinline__ void store_parts(const FloatPartsArgs& args, float (&value)[8], i64 to) {
  bool largest[8];
#pragma unroll
  for (int e = 0; e < 8; ++e) largest[e] = (__float_as_uint(value[e]) & 0x7f800000) == 0x7f000000;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    Vector<bf16, 8> found;
    u32 words[4];
#pragma unroll
    for (int e = 0; e < 8; e += 2) {
      const float first = rounded(value[e], largest[e]), second = rounded(value[e + 1], largest[e + 1]);
      words[e / 2] = __float_as_uint(first) >> 16 | __float_as_uint(second);
      value[e] = (value[e] - first) * 256.0f;
      value[e + 1] = (value[e + 1] - second) * 256.0f;
    }
    found.raw = {words[0], words[1], words[2], words[3]};
    found.store(args.target + part * args.part + to);
  }
}

#if !TRANSPOSED
__device__ __forceinline__ void split(const FloatPartsArgs& args) {
  const int index = blockIdx.x * kBlock + threadIdx.x;
  if (index >= args.eights) return;
  const int place = divide(index, args.by_eights), channel = (index - place * (args.padded / 8)) * 8;
  const int image = divide(place, args.by_pixels);
  const float* const from =
      args.source + image * args.stride[0] + pixel_offset(args, place - image * args.pixels) + channel;
  float value[8];
  if constexpr (VECTORS) {
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      const auto four = Vector<float, 4>::load(from + i);
#pragma unroll
      for (int e = 0; e < 4; ++e) value[i + e] = four.at[e];
    }
  } else {
#pragma unroll
    for (int e = 0; e < 8; ++e) value[e] = channel + e < args.channels ? from[e] : 0.0f;
  }
  store_parts(args, value, static_cast<i64>(place) * args.padded + channel);
}
#else
__device__ __forceinline__ void split(const FloatPartsArgs& args) {
  __shared__ float tile[kTile][kTile + 1];
  const int first_channel = blockIdx.x * kTile, first_pixel = blockIdx.y * kTile, image = blockIdx.z;
  const int column = threadIdx.x % kTile, pixel = first_pixel + column;
  const float* const from = args.source + image * args.stride[0] +
                            (pixel < args.pixels ? pixel_offset(args, pixel) : 0);
  constexpr int kRows = kBlock / kTile;
  float value[kTile / kRows];
#pragma unroll
  for (int i = 0; i < kTile / kRows; ++i) {
    const int channel = first_channel + threadIdx.x / kTile + i * kRows;
    value[i] = 0.0f;
    if (channel < args.channels && pixel < args.pixels) value[i] = from[channel * args.stride[1]];
  }
#pragma unroll
  for (int i = 0; i < kTile / kRows; ++i) tile[threadIdx.x / kTile + i * kRows][column] = value[i];
  __syncthreads();
#pragma unroll
  for (int i = threadIdx.x; i < kTile * kTile / 8; i += kBlock) {
    const int eight = i % (kTile / 8) * 8, at = i / (kTile / 8);
    if (first_channel + eight >= args.padded || first_pixel + at >= args.pixels) continue;
    float eights[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) eights[e] = tile[eight + e][at];
    const i64 place = static_cast<i64>(image) * args.pixels + first_pixel + at;
    store_parts(args, eights, place * args.padded + first_channel + eight);
  }
}
#endif

}  // namespace

extern "C" __global__ void __launch_bounds__(kBlock) float_parts(const __grid_constant__ FloatPartsArgs args) {
  launch_dependent_grids();
  wait_on_dependent_grids();
  split(args);
}
