// Splits a channels-last float32 tensor into bfloat16 parts, for products of parts. Launched by bf16x3_weight.py.
//
// The target has three tensors of the source's shape, one after another: two copies of the high parts and one of
// the low parts. high is an element rounded to bfloat16, low the rounded rest: together 16 bits of 24. An
// element that would round to infinity is truncated instead, so that finite elements have finite parts.
// The low part of an infinity is NaN.
//
// Grid: linear over the source's 16-byte vectors. Block: 256 threads, kEach vectors each.
// Shared memory: none.
// Preconditions: channels contiguous in whole 16-byte chunks, strides and addresses multiples of 16 bytes; the
//   rest of the last chunk may hold anything.
// Determinism: each element is written once.
// Limits: 16-byte vectors below 2^31; 64-bit elements.
#include "core/divider.cuh"
#include "core/vectors.cuh"
#include "ptx/mma.cuh"

using namespace convgrad;

struct Bf16PartsArgs {
  const float* source;
  bf16* target;
  i64 stride[4];     // N D H W of the source, in elements
  i64 part;          // elements of one of the three tensors
  int vectors;       // of the source
  int chunks;        // vectors of a pixel
  int padded;        // channels of a pixel of the target
  int low;           // which of the three holds the low parts
  int in_order;      // one stride, that of W, separates all pixels
  int size[3];       // D H W
  Divider by[3];     // the sizes
  Divider by_chunks;
};

namespace {

constexpr int kBlock = 256, kEach = 4;

__device__ __forceinline__ i64 source_at(const Bf16PartsArgs& args, int pixel) {
  if (args.in_order) return pixel * args.stride[3];
  const int rest2 = divide(pixel, args.by[2]), rest1 = divide(rest2, args.by[1]);
  const int n = divide(rest1, args.by[0]);
  return n * args.stride[0] + (rest1 - n * args.size[0]) * args.stride[1] +
         (rest2 - rest1 * args.size[1]) * args.stride[2] +
         (pixel - rest2 * args.size[2]) * args.stride[3];
}

// The parts of two elements.
struct Parts {
  u32 high, low;
};

__device__ __forceinline__ Parts parts_of(float first, float second) {
  u32 high = narrow_x2<bf16>(first, second);
  if ((high & 0x7fff) == 0x7f80) high = (high & 0xffff0000) | __float_as_uint(first) >> 16;
  if ((high & 0x7fff0000) == 0x7f800000) {
    high = (high & 0xffff) | (__float_as_uint(second) & 0xffff0000);
  }
  const float rest = first - __uint_as_float(high << 16);
  return {high, narrow_x2<bf16>(rest, second - __uint_as_float(high & 0xffff0000))};
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kBlock)
    bf16_parts(const __grid_constant__ Bf16PartsArgs args) {
  using Chunk = Vector<float, 4>;
  const u32 first = blockIdx.x * (kBlock * kEach) + threadIdx.x, last = args.vectors - 1;
  Chunk chunk[kEach];
  i64 to[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int index = min(first + i * kBlock, last), pixel = divide(index, args.by_chunks);
    const int column = (index - pixel * args.chunks) * 4;
    to[i] = static_cast<i64>(pixel) * args.padded + column;
    chunk[i] = Chunk::load(args.source + source_at(args, pixel) + column);
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (first + i * kBlock > last) continue;
    const float(&e)[4] = chunk[i].at;
    const Parts one = parts_of(e[0], e[1]), two = parts_of(e[2], e[3]);
#pragma unroll
    for (int part = 0; part < 3; ++part) {
      Vector<bf16, 4> found;
      found.raw = part == args.low ? uint2{one.low, two.low} : uint2{one.high, two.high};
      found.store(args.target + part * args.part + to[i]);
    }
  }
}
