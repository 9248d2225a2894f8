// Two tensors of float32 as float16 that fills its range: each channel is multiplied by the power of
// two that takes its largest finite magnitude to [2^14, 2^15). The host's side is scaled_halves.py.
//
// The kernel runs twice. First (COPIES 0) it finds each channel's largest magnitude, then it writes
// the copies, channels side by side, zeros up to multiples of eight, and counts the elements of each
// channel that are not zero and lie below 2^-14 then: they lose bits. The second time it begins with
// what was read last and may still lie in the L2 cache.
//
// Block: 256 threads, `rows` pixels of `lanes` vectors of four channels, kEach times at once;
// blockIdx.y chooses the channels, blockIdx.z the tensor. Static shared memory: 4 KB.
// Relies on its launcher for `peaks` being zeros at first, for channels in multiples of 4, and for
// elements aligned to 16 bytes. Deterministic: largest values and counts know no order.
// Index limits: pixels below 2^31 less a grid's; elements 64-bit.
#include "divider.cuh"
#include "overlap.cuh"
#include "scaled_halves.cuh"
#include "tensor_core.cuh"

using namespace convgrad;

struct ScaledTensor {
  const float* from;
  f16* to;
  u32* peaks;      // of each channel the bits of its largest magnitude; counts follow
  i64 stride[4];   // of `from`: N D H W, in elements
  Divider by[3];   // D H W
  int size[3];
  int pixels;
  int readable;    // channels, rounded up to 4
  int padded;      // rounded up to 8: those of `to`
  int peaks_at;    // of this tensor
  int lanes;
  int rows;
};

struct ScaledHalvesArgs {
  ScaledTensor of[2];
};

extern "C" __global__ void __launch_bounds__(256)
    scaled_halves(const __grid_constant__ ScaledHalvesArgs args) {
  start_next();
  if (COPIES) wait_for_previous();
  constexpr int kEach = 8;
  __shared__ u32 found[256][4];
  const ScaledTensor& of = args.of[COPIES ? 1 - blockIdx.z : blockIdx.z];
  const int thread = threadIdx.x, row = thread / of.lanes, lane = thread - row * of.lanes;
  const int c = (blockIdx.y * of.lanes + lane) * 4;
  const bool mine = row < of.rows && c < of.padded, real = mine && c < of.readable;
  u32* const peaks = of.peaks + of.peaks_at + c;
  const int each = of.rows * kEach, chunks = (of.pixels + each - 1) / each;

  float factor[4][2];
  u32 noted[4] = {};
  if (COPIES && mine) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int scale = scale_of(peaks[e]), half = scale / 2;
      factor[e][0] = power_of_two(half), factor[e][1] = power_of_two(scale - half);
    }
  }
  for (int i = blockIdx.x; i < chunks && mine; i += gridDim.x) {
    const int first = (COPIES ? chunks - 1 - i : i) * each + row;
    float4 four[kEach];
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int pixel = first + j * of.rows;
      four[j] = {};
      if (!real || pixel >= of.pixels) continue;
      const int rest2 = divide(pixel, of.by[2]), rest1 = divide(rest2, of.by[1]);
      const int n = divide(rest1, of.by[0]);
      four[j] = *reinterpret_cast<const float4*>(
          of.from + n * of.stride[0] + (rest1 - n * of.size[0]) * of.stride[1] +
          (rest2 - rest1 * of.size[1]) * of.stride[2] +
          (pixel - rest2 * of.size[2]) * of.stride[3] + c);
    }
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      float value[4] = {four[j].x, four[j].y, four[j].z, four[j].w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const u32 magnitude = __float_as_uint(value[e]) & 0x7fffffff;
        if (!COPIES) {
          if (magnitude < 0x7f800000) noted[e] = max(noted[e], magnitude);
          continue;
        }
        value[e] = value[e] * factor[e][0] * factor[e][1];
        noted[e] += magnitude != 0 && fabsf(value[e]) < 0x1p-14f;
      }
      const int pixel = first + j * of.rows;
      if (COPIES && pixel < of.pixels) {
        *reinterpret_cast<uint2*>(of.to + static_cast<i64>(pixel) * of.padded + c) = make_uint2(
            narrow_two<f16>(value[0], value[1]), narrow_two<f16>(value[2], value[3]));
      }
    }
  }
  if (COPIES) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (noted[e] != 0) atomicAdd(peaks + of.padded + e, noted[e]);
    }
    return;
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) found[thread][e] = noted[e];
  __syncthreads();
  if (row > 0 || !real) return;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    u32 most = 0;
    for (int other = 0; other < of.rows; ++other) most = max(most, found[other * of.lanes + lane][e]);
    // Another block's may be larger already: so many at one place would wait for each other.
    if (most > *const_cast<const volatile u32*>(peaks + e)) atomicMax(peaks + e, most);
  }
}
