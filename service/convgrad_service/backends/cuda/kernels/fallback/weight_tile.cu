// The gradient of a convolution's weight as a GEMM on the FMA units: M = output channels, N = input
// channels of one group at one tap, K = the pixels of one split.
//
// Block: 256 threads compute a tile of 64 x 64 channels of one tap, 4 x 4 per thread, in steps of 16
// pixels. Static shared memory: 9 KiB for the steps (double 17) and 4 KiB for the offsets of 256
// pixels. Deterministic: each sum runs over its split's pixels in order.
// A pixel whose tap is in padding is read as zero from both tensors.
// Grid: splits * groups * taps * tiles of K * tiles of C, the last one
// fastest.
// Index limits: extents below 2^31, tensors by 64-bit offsets.
#include "fallback/weight_args.cuh"

using namespace convgrad;

namespace {

constexpr int kTile = 64, kStep = 16, kThreads = 256, kSide = 4, kAhead = 256;

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    weight_tile(const __grid_constant__ WeightArgs args) {
  using T = ELEMENT;
  using S = ElementAccumulator<T>;
  __shared__ alignas(16) S y_tile[kStep][kTile + 4];
  __shared__ alignas(16) S x_tile[kStep][kTile + 4];
  __shared__ Meeting met[kAhead];

  const int thread = threadIdx.x;
  const i64 taps = static_cast<i64>(args.kernel[0]) * args.kernel[1] * args.kernel[2];
  i64 index = blockIdx.x, c_tile, k_tile, tap_index, group;
  index = divide(index, ceil_div(args.in_channels, kTile), c_tile);
  index = divide(index, ceil_div(args.out_channels, kTile), k_tile);
  index = divide(index, taps, tap_index);
  const i64 split = divide(index, args.groups, group);
  i64 tap[3];
  tap_of(args, tap_index, tap);
  const int first_k = k_tile * kTile, first_c = c_tile * kTile;
  const T* const x = static_cast<const T*>(args.x) + group * args.x_stride[1];
  const T* const y = static_cast<const T*>(args.y) + group * args.y_stride[1];
  const int row = thread / 16 * kSide, column = thread % 16 * kSide;
  S sum[kSide][kSide] = {};

  const i64 begin = split * args.split_pixels;
  const i64 end = min(begin + args.split_pixels, args.pixels);
  for (i64 ahead = begin; ahead < end; ahead += kAhead) {
    __syncthreads();  // the last offsets are no longer read
    const i64 pixel = ahead + thread;
    met[thread] = pixel < end ? meeting_of(args, pixel, tap) : Meeting{-1, 0};
    __syncthreads();
    const int count = min(static_cast<i64>(kAhead), end - ahead);
    for (int p0 = 0; p0 < count; p0 += kStep) {
      S from_y[kTile * kStep / kThreads], from_x[kTile * kStep / kThreads];
#pragma unroll
      for (int i = 0; i < kTile * kStep / kThreads; ++i) {
        const int at = thread + i * kThreads;
        const int p = p0 + (args.y_lanes ? at / kTile : at % kStep);
        const int k = first_k + (args.y_lanes ? at % kTile : at / kStep);
        const bool there = met[p].x >= 0 && k < args.out_channels;
        from_y[i] = there ? S(widen(y[met[p].y + k * args.y_stride[2]])) : S(0);
      }
#pragma unroll
      for (int i = 0; i < kTile * kStep / kThreads; ++i) {
        const int at = thread + i * kThreads;
        const int p = p0 + (args.x_lanes ? at / kTile : at % kStep);
        const int c = first_c + (args.x_lanes ? at % kTile : at / kStep);
        const bool there = met[p].x >= 0 && c < args.in_channels;
        from_x[i] = there ? S(widen(x[met[p].x + c * args.x_stride[2]])) : S(0);
      }
      __syncthreads();  // the last step's tiles are no longer read
#pragma unroll
      for (int i = 0; i < kTile * kStep / kThreads; ++i) {
        const int at = thread + i * kThreads;
        y_tile[args.y_lanes ? at / kTile : at % kStep][args.y_lanes ? at % kTile : at / kStep] =
            from_y[i];
        x_tile[args.x_lanes ? at / kTile : at % kStep][args.x_lanes ? at % kTile : at / kStep] =
            from_x[i];
      }
      __syncthreads();
#pragma unroll
      for (int p = 0; p < kStep; ++p) {
        S left[kSide], right[kSide];
#pragma unroll
        for (int i = 0; i < kSide; ++i) left[i] = y_tile[p][row + i];
#pragma unroll
        for (int j = 0; j < kSide; ++j) right[j] = x_tile[p][column + j];
#pragma unroll
        for (int i = 0; i < kSide; ++i) {
#pragma unroll
          for (int j = 0; j < kSide; ++j) sum[i][j] += left[i] * right[j];
        }
      }
    }
  }

#pragma unroll
  for (int i = 0; i < kSide; ++i) {
#pragma unroll
    for (int j = 0; j < kSide; ++j) {
      const i64 k = first_k + row + i, c = first_c + column + j;
      if (k < args.out_channels && c < args.in_channels) {
        put_weight<RESULT, S>(args, split, group, k, c, tap_index, tap, sum[i][j]);
      }
    }
  }
}
