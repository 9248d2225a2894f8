// The gradient of a convolution's weight, one thread per weight element and part of the pixels: for
// few channels per group, which would not fill a tile. Launched by weight_direct.py.
//
// Block: 32 weight elements of one tap, adjacent along (g, k, c), times 8 rows that each sum every
// eighth pixel of one split. Static shared memory: 4 KiB for the offsets of 256 pixels, 1 KiB for
// the rows' sums (double 2). Deterministic: each row sums in order, the rows are added in order.
// Grid: splits * taps * ceil(elements / 32), the last one fastest.
// Index limits: extents below 2^31, tensors by 64-bit offsets.
#include "fallback/weight_args.cuh"

using namespace convgrad;

namespace {

constexpr int kLanes = 32, kRows = 8, kAhead = kLanes * kRows;

}  // namespace

extern "C" __global__ void __launch_bounds__(kAhead)
    weight_direct(const __grid_constant__ WeightArgs args) {
  using T = ELEMENT;
  using S = ElementAccumulator<T>;
  __shared__ Meeting met[kAhead];
  __shared__ S rows[kRows][kLanes];

  const int lane = threadIdx.x % kLanes, row = threadIdx.x / kLanes;
  const i64 taps = static_cast<i64>(args.kernel[0]) * args.kernel[1] * args.kernel[2];
  const i64 elements = static_cast<i64>(args.groups) * args.out_channels * args.in_channels;
  i64 index = blockIdx.x, block, tap_index;
  index = divide(index, ceil_div(elements, kLanes), block);
  const i64 split = divide(index, taps, tap_index);
  i64 tap[3];
  tap_of(args, tap_index, tap);
  const i64 element = block * kLanes + lane;
  const bool real = element < elements;
  i64 c, k;
  const i64 rest = divide(real ? element : 0, args.in_channels, c);
  const i64 group = divide(rest, args.out_channels, k);
  const T* const x =
      static_cast<const T*>(args.x) + group * args.x_stride[1] + c * args.x_stride[2];
  const T* const y =
      static_cast<const T*>(args.y) + group * args.y_stride[1] + k * args.y_stride[2];

  S sum = 0;
  const i64 begin = split * args.split_pixels;
  const i64 end = min(begin + args.split_pixels, args.pixels);
  for (i64 ahead = begin; ahead < end; ahead += kAhead) {
    __syncthreads();  // the last offsets are no longer read
    const i64 pixel = ahead + threadIdx.x;
    met[threadIdx.x] = pixel < end ? meeting_of(args, pixel, tap) : Meeting{-1, 0};
    __syncthreads();
    if (!real) continue;
#pragma unroll 4
    for (int p = row; p < kAhead; p += kRows) {
      const Meeting at = met[p];
      if (at.x >= 0) sum += S(widen(y[at.y])) * S(widen(x[at.x]));
    }
  }
  rows[row][lane] = sum;
  __syncthreads();
  if (row == 0 && real) {
    sum = 0;
    for (int i = 0; i < kRows; ++i) sum += rows[i][lane];
    put_weight<RESULT, S>(args, split, group, k, c, tap_index, tap, sum);
  }
}
