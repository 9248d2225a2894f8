// Sums of the products of a GEMM over taps: the second half of a convolution whose result has few
// channels (col2im). Launched by col2im.py.
//
// columns[(t, r, s, c)][m] holds, for pixel m of the source, its product with the weight of tap
// (t, r, s) and result channel c, summed over the source's channels. An element of the result is the
// sum of one column of each pixel that its taps meet, in the order of t, r, s, then its epilogue.
//
// Block: 256 threads, each of which computes all channels of one pixel of the result; adjacent
// threads have adjacent pixels, and read adjacent elements of a column. Shared memory: none.
// Deterministic. Grid: ceil(pixels / 256) blocks.
// Index limits: 64-bit for addresses; pixels of the source and of the result below 2^31.
//
// Macros: ELEMENT, the type of the result; CHANNELS, the most channels of the result.
#include "core/elements.cuh"
#include "core/epilogue.cuh"
#include "ptx/pdl.cuh"

using namespace convgrad;

// A dimension of the result. Position i meets source position (i + offset + step * t) / stride in
// tap t if the division is exact; its taps are `tap_step` apart.
struct Col2imAxis {
  int extent;
  int source;
  int taps;
  int stride;
  int offset;
  int step;
  int tap_step;
};

struct Col2imArgs {
  const float* columns;
  void* result;
  const void* accumulate;  // has the strides of the result, or null
  const void* bias;        // one element a channel, or null
  i64 result_stride[5];    // n, d, h, w, c
  Col2imAxis axis[3];
  int pixels;         // of the result
  int column_stride;  // pixels of the source
  int channels;
  int activation;
  float alpha, beta;
};

// As many as registers hold.
constexpr int kTapsInFlight = CHANNELS > 4 ? 2 : 4;

extern "C" __global__ void __launch_bounds__(256, 2)
    col2im(const __grid_constant__ Col2imArgs args) {
  using T = ELEMENT;
  wait_on_dependent_grids();
  const u32 index = blockIdx.x * 256 + threadIdx.x;
  if (index >= static_cast<u32>(args.pixels)) return;
  // The pixel, and in each dimension the first tap that meets the source, where, and how the source
  // position advances from one such tap to the next.
  u32 rest = index;
  int at[3], first[3], from[3], advance[3];
#pragma unroll
  for (int dim = 2; dim >= 0; --dim) {
    const Col2imAxis& axis = args.axis[dim];
    const u32 outer = rest / axis.extent;
    at[dim] = rest - outer * axis.extent;
    rest = outer;
    const int start = at[dim] + axis.offset;
    int t = 0;
    while (t < axis.tap_step && (start + t * axis.step) % axis.stride != 0) ++t;
    first[dim] = t < axis.tap_step ? t : axis.taps;
    from[dim] = (start + t * axis.step) / axis.stride;
    advance[dim] = axis.tap_step * axis.step / axis.stride;
  }
  const i64 n = rest;

  const Col2imAxis &depth = args.axis[0], &height = args.axis[1], &width = args.axis[2];
  const i64 image = n * depth.source * height.source * width.source;
  const i64 column = args.column_stride;
  const i64 next_tap = width.tap_step * args.channels * column + advance[2];
  float sums[CHANNELS] = {};
  for (int t = first[0], d = from[0]; t < depth.taps; t += depth.tap_step, d += advance[0]) {
    if (static_cast<u32>(d) >= static_cast<u32>(depth.source)) continue;
    for (int r = first[1], h = from[1]; r < height.taps; r += height.tap_step, h += advance[1]) {
      if (static_cast<u32>(h) >= static_cast<u32>(height.source)) continue;
      const i64 row = image + (d * height.source + h) * width.source;
      const int tap = (t * height.taps + r) * width.taps;
      const float* products = args.columns + (tap + first[2]) * args.channels * column + row + from[2];
      // Loads of several taps in flight: none depends on whether another one's pixel exists.
#pragma unroll kTapsInFlight
      for (int s = first[2], w = from[2]; s < width.taps; s += width.tap_step, w += advance[2]) {
        const bool exists = static_cast<u32>(w) < static_cast<u32>(width.source);
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c) {
          sums[c] += exists && c < args.channels ? products[c * column] : 0.0f;
        }
        products += next_tap;
      }
    }
  }
  const i64 to = n * args.result_stride[0] + at[0] * args.result_stride[1] +
                 at[1] * args.result_stride[2] + at[2] * args.result_stride[3];
#pragma unroll
  for (int c = 0; c < CHANNELS; ++c) {
    if (c >= args.channels) break;
    const i64 element = to + c * args.result_stride[4];
    static_cast<T*>(args.result)[element] = narrow<T>(finish_at<T>(args, sums[c], element, c));
  }
}
