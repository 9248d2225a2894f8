// The gradient of a bias: each channel of y summed over the batch and all positions.
//
// Block: 256 threads. With `lanes` 1, where channels lie side by side: 32 channels times 8 rows
// that take every eighth pixel of one split. With `lanes` 0: one channel, all threads along its
// pixels. Static shared memory: 1 KiB (double 2). Deterministic: each thread sums in order, then
// the threads' sums are added in a fixed tree. Writes partial sums [split][channel], which
// split_sum.cu adds up.
// Relies on its launcher for the grid: x = splits * (lanes ? ceil(channels / 32) : channels), the
// last running fastest.
// Index limits: extents below 2^31, tensors by 64-bit offsets.
#include "elements.cuh"

using namespace convgrad;

struct ChannelSumsArgs {
  const void* y;
  void* partials;
  i64 y_stride[6];  // N G K D H W
  i64 pixels;
  i64 split_pixels;
  int channels;      // in all
  int out_channels;  // in one group
  int y_size[3];
  int lanes;
};

extern "C" __global__ void __launch_bounds__(256)
    channel_sums(const __grid_constant__ ChannelSumsArgs args) {
  using T = ELEMENT;
  using S = Sum<T>;
  __shared__ S sums[256];
  const int width = args.lanes ? 32 : 1, height = 256 / width;
  const int lane = threadIdx.x % width, row = threadIdx.x / width;
  i64 block;
  const i64 split = divide(blockIdx.x, ceil_div(args.channels, width), block);
  const i64 channel = block * width + lane;
  const bool real = channel < args.channels;
  i64 k;
  const i64 group = divide(real ? channel : 0, args.out_channels, k);
  const T* const y =
      static_cast<const T*>(args.y) + group * args.y_stride[1] + k * args.y_stride[2];
  const i64 begin = split * args.split_pixels;
  const i64 end = min(begin + args.split_pixels, args.pixels);
  S sum = 0;
  for (i64 pixel = begin + row; real && pixel < end; pixel += height) {
    i64 at[3];
    i64 rest = divide(pixel, args.y_size[2], at[2]);
    rest = divide(rest, args.y_size[1], at[1]);
    const i64 n = divide(rest, args.y_size[0], at[0]);
    sum += widen(y[n * args.y_stride[0] + at[0] * args.y_stride[3] + at[1] * args.y_stride[4] +
                   at[2] * args.y_stride[5]]);
  }
  sums[threadIdx.x] = sum;
  for (int half = height / 2; half > 0; half /= 2) {
    __syncthreads();
    if (row < half) sums[threadIdx.x] += sums[threadIdx.x + half * width];
  }
  if (row == 0 && real) {
    static_cast<S*>(args.partials)[split * args.channels + channel] = sums[threadIdx.x];
  }
}
