// A convolution as a gather, forward or the gradient of the input, as an implicit GEMM on the FMA
// units: M = pixels of one phase (over the batch), N = result channels of one group, K = taps x
// source channels.
//
// Block: 256 threads compute a tile of 128 pixels x 64 channels, 8 x 4 per thread, in steps of 16
// source channels of one tap. Static shared memory: 13 KiB for the steps (double 26) and 5 KiB for
// the pixels' coordinates and offsets. Deterministic: every result is one sum over taps, then
// channels, in order, independent of tiles.
// Source positions outside the tensor are read as zeros.
// Grid: phases * pixel tiles (of the largest phase) * groups * channel
// tiles, the last one fastest.
// Index limits: extents below 2^31, tensors by 64-bit offsets.
#include "core/epilogue.cuh"
#include "fallback/gather_args.cuh"

using namespace convgrad;

namespace {

constexpr int kPixels = 128, kChannels = 64, kStep = 16;
constexpr int kThreads = 256, kRows = 8, kColumns = 4;  // pixels and channels of a thread

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, sizeof(ElementAccumulator<ELEMENT>) == 4 ? 2 : 1)
    gather_tile(const __grid_constant__ GatherArgs args) {
  using T = ELEMENT;
  using S = ElementAccumulator<T>;
  __shared__ alignas(16) S a_tile[kStep][kPixels + 4];
  __shared__ alignas(16) S b_tile[kStep][kChannels + 4];
  __shared__ i64 pixel_x[kPixels];       // offset of image and group; negative for no pixel
  __shared__ i64 pixel_at[3][kPixels];   // the source position at tap 0
  __shared__ i64 offset[kPixels];        // of the source at this tap; negative if outside
  __shared__ Axis axis[3];

  const int thread = threadIdx.x;
  const i64 channel_tiles = ceil_div(args.out_channels, kChannels);
  i64 index = blockIdx.x, channel_tile, group_index, phase;
  index = divide(index, channel_tiles, channel_tile);
  index = divide(index, args.groups, group_index);
  const int group = static_cast<int>(group_index);
  const i64 phases = static_cast<i64>(args.phases[0]) * args.phases[1] * args.phases[2];
  const i64 pixel_tile = divide(index, phases, phase);
  if (thread == 0) {
    i64 at[3];
    const i64 outer = divide(phase, args.phases[2], at[2]);
    at[0] = divide(outer, args.phases[1], at[1]);
    for (int dim = 0; dim < 3; ++dim) axis[dim] = axis_of(args, dim, at[dim]);
  }
  __syncthreads();
  const i64 pixels = args.batch * axis[0].count * axis[1].count * axis[2].count;
  const i64 first_pixel = pixel_tile * kPixels;
  if (first_pixel >= pixels) return;  // this phase has fewer tiles than the largest

  if (thread < kPixels) {
    const i64 pixel = first_pixel + thread;
    i64 m[3];
    i64 rest = divide(pixel, axis[2].count, m[2]);
    rest = divide(rest, axis[1].count, m[1]);
    const i64 n = divide(rest, axis[0].count, m[0]);
    pixel_x[thread] = pixel < pixels ? n * args.x_stride[0] + group * args.x_stride[1] : -1;
    for (int dim = 0; dim < 3; ++dim) {
      pixel_at[dim][thread] = axis[dim].x0 + m[dim] * axis[dim].x_step;
    }
  }

  const int first_channel = channel_tile * kChannels;
  const T* const x = static_cast<const T*>(args.x);
  const T* const w = static_cast<const T*>(args.w) + group * args.w_stride[0];
  const int row = thread / 16 * kRows, column = thread % 16 * kColumns;
  S sum[kRows][kColumns] = {};

  for (int t = 0; t < static_cast<int>(axis[0].taps); ++t) {
    for (int r = 0; r < static_cast<int>(axis[1].taps); ++r) {
      for (int s = 0; s < static_cast<int>(axis[2].taps); ++s) {
        __syncthreads();  // the last tap's offsets are no longer read
        bool inside = false;
        if (thread < kPixels) {
          const i64 d = pixel_at[0][thread] + t * axis[0].x_tap;
          const i64 h = pixel_at[1][thread] + r * axis[1].x_tap;
          const i64 v = pixel_at[2][thread] + s * axis[2].x_tap;
          inside = pixel_x[thread] >= 0 && d >= 0 && d < args.x_size[0] && h >= 0 &&
                   h < args.x_size[1] && v >= 0 && v < args.x_size[2];
          offset[thread] = inside ? pixel_x[thread] + d * args.x_stride[3] +
                                        h * args.x_stride[4] + v * args.x_stride[5]
                                  : -1;
        }
        if (!__syncthreads_or(inside)) continue;  // the tap is in padding for all pixels
        const T* const weight = w + (axis[0].r0 + t * axis[0].r_step) * args.w_stride[3] +
                                (axis[1].r0 + r * axis[1].r_step) * args.w_stride[4] +
                                (axis[2].r0 + s * axis[2].r_step) * args.w_stride[5];

        for (int c0 = 0; c0 < args.in_channels; c0 += kStep) {
          T a[kPixels * kStep / kThreads] = {};
          S b[kChannels * kStep / kThreads];
          if (args.lanes) {
            const int c = c0 + thread % kStep;
            const T* const from = x + c * args.x_stride[2];
#pragma unroll
            for (int i = 0; i < kPixels * kStep / kThreads; ++i) {
              const i64 at = offset[thread / kStep + i * (kThreads / kStep)];
              if (at >= 0 && c < args.in_channels) a[i] = from[at];
            }
          } else {
            int c = c0 + thread / kPixels;
            const i64 at = offset[thread % kPixels];
            const T* from = x + at + c * args.x_stride[2];
#pragma unroll
            for (int i = 0; i < kPixels * kStep / kThreads; ++i) {
              if (at >= 0 && c < args.in_channels) a[i] = *from;
              c += kThreads / kPixels;
              from += kThreads / kPixels * args.x_stride[2];
            }
          }
          const int c = c0 + thread % kStep;
          int k = first_channel + thread / kStep;
          const T* from = weight + c * args.w_stride[2] + k * args.w_stride[1];
#pragma unroll
          for (int i = 0; i < kChannels * kStep / kThreads; ++i) {
            b[i] = c < args.in_channels && k < args.out_channels ? S(widen(*from)) : S(0);
            k += kThreads / kStep;
            from += kThreads / kStep * args.w_stride[1];
          }
          __syncthreads();  // the last step's tiles are no longer read
#pragma unroll
          for (int i = 0; i < kPixels * kStep / kThreads; ++i) {
            const int at = thread + i * kThreads;
            a_tile[args.lanes ? at % kStep : at / kPixels]
                  [args.lanes ? at / kStep : at % kPixels] = widen(a[i]);
          }
#pragma unroll
          for (int i = 0; i < kChannels * kStep / kThreads; ++i) {
            const int at = thread + i * kThreads;
            b_tile[at % kStep][at / kStep] = b[i];
          }
          __syncthreads();
#pragma unroll
          for (int k = 0; k < kStep; ++k) {
            S left[kRows], right[kColumns];
#pragma unroll
            for (int i = 0; i < kRows; ++i) left[i] = a_tile[k][row + i];
#pragma unroll
            for (int j = 0; j < kColumns; ++j) right[j] = b_tile[k][column + j];
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
#pragma unroll
              for (int j = 0; j < kColumns; ++j) sum[i][j] += left[i] * right[j];
            }
          }
        }
      }
    }
  }

  __syncthreads();  // a phase without taps has not synchronized since the pixels were written
  const T* const accumulate = static_cast<const T*>(args.accumulate);
  const T* const bias = static_cast<const T*>(args.bias);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (pixel_x[row + i] < 0) continue;
    const i64 pixel = first_pixel + row + i;
    i64 m[3];
    i64 rest = divide(pixel, axis[2].count, m[2]);
    rest = divide(rest, axis[1].count, m[1]);
    const i64 n = divide(rest, axis[0].count, m[0]);
    i64 y = n * args.y_stride[0] + group * args.y_stride[1];
    i64 old = n * args.accumulate_stride[0] + group * args.accumulate_stride[1];
    for (int dim = 0; dim < 3; ++dim) {
      const i64 position = axis[dim].y0 + m[dim] * axis[dim].y_step;
      y += position * args.y_stride[3 + dim];
      old += position * args.accumulate_stride[3 + dim];
    }
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const i64 k = first_channel + column + j;
      if (k >= args.out_channels) continue;
      const S done = finish<T, S>(
          sum[i][j], S(args.alpha), S(args.beta),
          accumulate == nullptr ? nullptr : accumulate + old + k * args.accumulate_stride[2],
          bias == nullptr ? nullptr : bias + group * args.out_channels + k, args.activation);
      static_cast<T*>(args.y)[y + k * args.y_stride[2]] = narrow<T>(done);
    }
  }
}
