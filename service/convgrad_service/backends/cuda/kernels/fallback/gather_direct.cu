// A convolution as a gather, forward or the gradient of the input, one thread per pixel and CHANNELS
// result channels of a group: for few channels per group, which would not fill a tile. Launched by
// gather_direct.py.
//
// Block: 256 threads, along pixels or channels as `lanes` says (whichever is contiguous in memory).
// Shared memory: none. Deterministic: every result is one sum over taps, then source
// channels, in order. Grid: ceil(threads / 256) blocks.
// Index limits: extents below 2^31, tensors by 64-bit offsets.
#include "core/epilogue.cuh"
#include "fallback/gather_args.cuh"

using namespace convgrad;

// Two blocks per multiprocessor hide more latency, but would spill on Blackwell.
#if __CUDA_ARCH__ >= 1000
#define BLOCKS 1
#else
#define BLOCKS 2
#endif

extern "C" __global__ void __launch_bounds__(256, BLOCKS)
    gather_direct(const __grid_constant__ GatherArgs args) {
  using T = ELEMENT;
  using S = ElementAccumulator<T>;
  const i64 pixels = static_cast<i64>(args.batch) * args.y_size[0] * args.y_size[1] * args.y_size[2];
  const i64 blocks = ceil_div(args.out_channels, CHANNELS);  // blocks of channels in a group
  const i64 index = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x;
  if (index >= pixels * args.groups * blocks) return;

  i64 pixel, channel;
  if (args.lanes == 0) {
    channel = divide(index, pixels, pixel);
  } else {
    pixel = divide(index, args.groups * blocks, channel);
  }
  i64 first;
  const i64 group = divide(channel, blocks, first);
  first *= CHANNELS;
  i64 position[3];
  i64 rest = divide(pixel, args.y_size[2], position[2]);
  rest = divide(rest, args.y_size[1], position[1]);
  const i64 n = divide(rest, args.y_size[0], position[0]);

  Axis axis[3];
  i64 x0[3];
  for (int dim = 0; dim < 3; ++dim) {
    i64 phase = 0, m = position[dim];
    if (args.backward) m = divide(position[dim], args.stride[dim], phase);
    axis[dim] = axis_of(args, dim, phase);
    x0[dim] = axis[dim].x0 + m * axis[dim].x_step;
  }

  const T* const x = static_cast<const T*>(args.x) + n * args.x_stride[0] + group * args.x_stride[1];
  const T* const w =
      static_cast<const T*>(args.w) + group * args.w_stride[0] + first * args.w_stride[1];
  const int channels = min(static_cast<i64>(CHANNELS), args.out_channels - first);
  S sum[CHANNELS] = {};
  for (i64 t = 0; t < axis[0].taps; ++t) {
    const i64 d = x0[0] + t * axis[0].x_tap;
    if (d < 0 || d >= args.x_size[0]) continue;
    const i64 x_d = d * args.x_stride[3];
    const i64 w_t = (axis[0].r0 + t * axis[0].r_step) * args.w_stride[3];
    for (i64 r = 0; r < axis[1].taps; ++r) {
      const i64 h = x0[1] + r * axis[1].x_tap;
      if (h < 0 || h >= args.x_size[1]) continue;
      const i64 x_h = x_d + h * args.x_stride[4];
      const i64 w_r = w_t + (axis[1].r0 + r * axis[1].r_step) * args.w_stride[4];
      for (i64 s = 0; s < axis[2].taps; ++s) {
        const i64 v = x0[2] + s * axis[2].x_tap;
        if (v < 0 || v >= args.x_size[2]) continue;
        const T* source = x + x_h + v * args.x_stride[5];
        const T* weight = w + w_r + (axis[2].r0 + s * axis[2].r_step) * args.w_stride[5];
        for (int c = 0; c < args.in_channels; ++c) {
          const S value = widen(*source);
#pragma unroll
          for (int k = 0; k < CHANNELS; ++k) {
            if (k < channels) sum[k] += value * widen(weight[k * args.w_stride[1]]);
          }
          source += args.x_stride[2];
          weight += args.w_stride[2];
        }
      }
    }
  }

  const i64 at[6] = {n, group, first, position[0], position[1], position[2]};
  i64 y = 0, old = 0;
  for (int dim = 0; dim < 6; ++dim) {
    y += at[dim] * args.y_stride[dim];
    old += at[dim] * args.accumulate_stride[dim];
  }
  const T* const accumulate = static_cast<const T*>(args.accumulate);
  const T* const bias = static_cast<const T*>(args.bias);
#pragma unroll
  for (int k = 0; k < CHANNELS; ++k) {
    if (k >= channels) continue;
    const S done = finish<T, S>(
        sum[k], S(args.alpha), S(args.beta),
        accumulate == nullptr ? nullptr : accumulate + old + k * args.accumulate_stride[2],
        bias == nullptr ? nullptr : bias + group * args.out_channels + first + k, args.activation);
    static_cast<T*>(args.y)[y + k * args.y_stride[2]] = narrow<T>(done);
  }
}
