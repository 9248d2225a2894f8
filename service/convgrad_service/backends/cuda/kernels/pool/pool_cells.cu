// The gradient of max pooling from its input, for windows that do not overlap (kernel <= stride). Launched by
// pool_cells.py.
//
// Input positions u = i + pad are divided into cells of one stride, one for each window. The gradient
// of window o goes to the first maximum among the first `kernel` positions of cell o (a NaN wins over
// any number, of several the last). Other positions of the cell get zero, and so do cells past the
// last window.
// A thread computes WIDTH cells: those of adjacent channels (channels last), or with ALONG adjacent
// ones along W, of two positions each, without padding (channels first: a row of these is one vector).
// With a kernel that is known at compile time (KERNEL_W > 0) all of its positions are loaded before the
// first comparison.
// Block: 128 threads; shared memory: none. Grid: ceil(threads / 128). Preconditions:
// aligned vectors and an image's extent below 2^31 elements.
// Deterministic; gradients are copied bit by bit.
#include "core/vectors.cuh"

using namespace convgrad;

namespace {

using T = ELEMENT;

struct CellArgs {
  const void* x;
  const void* grad;
  void* grad_x;
  i64 x_stride[5];  // N C D H W, in elements; of grad_x too
  i64 grad_stride[5];
  i64 threads;
  int vectors;  // along the channels: of channels, or channels
  int x_size[3];
  int y_size[3];
  int cells[3];  // along W in vectors with ALONG
  int kernel[3];
  int stride[3];
  int pad[3];
};

// Positions of a row that are loaded at once, in each of a thread's cells, and such rows.
constexpr bool kKnown = KERNEL_W > 0;
constexpr int kTaps = kKnown ? KERNEL_W : 4, kRows = kKnown ? KERNEL_D * KERNEL_H : 1;
using Gradients = Vector<T, WIDTH>;
using Positions = Vector<T, ALONG ? kTaps * WIDTH : WIDTH>;

struct Row {
  Positions vectors[ALONG ? 1 : kTaps];

  __device__ __forceinline__ T at(int s, int v) const {
    return ALONG ? vectors[0].at[v * kTaps + s] : vectors[ALONG ? 0 : s].at[v];
  }

  // The positions from `w` on that are below `count` and inside the input.
  __device__ __forceinline__ void load(const T* from, int step, int w, int count, int width) {
    if constexpr (ALONG) {
      vectors[0] = Positions::load(from);
    } else {
#pragma unroll
      for (int s = 0; s < kTaps; ++s) {
        const bool there = s < count && w + s >= 0 && w + s < width;
        if (there) vectors[s] = Positions::load(from + s * step);
      }
    }
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(128)
    pool_cells(const __grid_constant__ CellArgs args) {
  i64 index = static_cast<i64>(blockIdx.x) * 128 + threadIdx.x;
  if (index >= args.threads) return;
  i64 vector = 0, at[3];
  if (!ALONG) index = divide(index, args.vectors, vector);
#pragma unroll
  for (int dim = 2; dim >= 0; --dim) index = divide(index, args.cells[dim], at[dim]);
  if (ALONG) index = divide(index, args.vectors, vector);
  if (ALONG) at[2] *= WIDTH;
  const i64 c = vector * (ALONG ? 1 : WIDTH);
  const int kernel[3] = {kKnown ? KERNEL_D : args.kernel[0], kKnown ? KERNEL_H : args.kernel[1],
                         kKnown ? KERNEL_W : args.kernel[2]};
  const int stride[3] = {kKnown ? STRIDE_D : args.stride[0], kKnown ? STRIDE_H : args.stride[1],
                         kKnown ? STRIDE_W : args.stride[2]};
  int first[3];
#pragma unroll
  for (int dim = 0; dim < 3; ++dim) {
    first[dim] = static_cast<int>(at[dim]) * stride[dim] - (ALONG ? 0 : args.pad[dim]);
  }
  const i64 lead = index * args.x_stride[0] + c * args.x_stride[1];
  const T* const x = static_cast<const T*>(args.x) + lead;
  T* const grad_x = static_cast<T*>(args.grad_x) + lead;
  const auto inside = [&](int d, int h) {
    return d >= 0 && d < args.x_size[0] && h >= 0 && h < args.x_size[1];
  };
  const int x_step = static_cast<int>(args.x_stride[4]);

  auto grad = Gradients::zero();
  int best[WIDTH];
#pragma unroll
  for (int v = 0; v < WIDTH; ++v) best[v] = -1;
  if (at[0] < args.y_size[0] && at[1] < args.y_size[1] && at[2] < args.y_size[2]) {
    ElementAccumulator<T> most[WIDTH];
    const int rows = kernel[0] * kernel[1];
#pragma unroll
    for (int row0 = 0; row0 < rows; row0 += kRows) {
#pragma unroll
      for (int s0 = 0; s0 < kernel[2]; s0 += kTaps) {
        Row values[kRows];
        const int w0 = first[2] + s0;
#pragma unroll
        for (int row = 0; row < kRows; ++row) {
          const int d = first[0] + (row0 + row) / kernel[1], h = first[1] + (row0 + row) % kernel[1];
          if (!inside(d, h)) continue;
          values[row].load(x + (d * static_cast<int>(args.x_stride[2]) +
                                h * static_cast<int>(args.x_stride[3]) + w0 * x_step),
                           x_step, w0, kernel[2] - s0, args.x_size[2]);
        }
        if (row0 + kRows >= rows && s0 + kTaps >= kernel[2]) {
          grad = Gradients::load(static_cast<const T*>(args.grad) + index * args.grad_stride[0] +
                                 c * args.grad_stride[1] + at[0] * args.grad_stride[2] +
                                 at[1] * args.grad_stride[3] + at[2] * args.grad_stride[4]);
        }
#pragma unroll
        for (int row = 0; row < kRows; ++row) {
          const int d = first[0] + (row0 + row) / kernel[1], h = first[1] + (row0 + row) % kernel[1];
          if (!inside(d, h)) continue;
#pragma unroll
          for (int s = 0; s < kTaps; ++s) {
            const int w = w0 + s;
            if (!ALONG && (s0 + s >= kernel[2] || w < 0 || w >= args.x_size[2])) continue;
#pragma unroll
            for (int v = 0; v < WIDTH; ++v) {
              const ElementAccumulator<T> value = widen(values[row].at(s, v));
              if (best[v] < 0 || value > most[v] || value != value) {
                most[v] = value;
                best[v] = (row0 + row) * kernel[2] + s0 + s;
              }
            }
          }
        }
      }
    }
  }
#pragma unroll
  for (int a = 0; a < stride[0]; ++a) {
#pragma unroll
    for (int b = 0; b < stride[1]; ++b) {
      const int d = first[0] + a, h = first[1] + b;
      if (!inside(d, h)) continue;
      T* const to = grad_x + (d * static_cast<int>(args.x_stride[2]) +
                              h * static_cast<int>(args.x_stride[3]) +
                              first[2] * x_step);
      const bool reached = a < kernel[0] && b < kernel[1];
      const int tap = (a * kernel[1] + b) * kernel[2];
      if constexpr (ALONG) {
        auto routed = Positions::zero();
#pragma unroll
        for (int e = 0; e < kTaps * WIDTH; ++e) {
          if (best[e / kTaps] == tap + e % kTaps) routed.at[e] = grad.at[e / kTaps];
        }
        routed.store(to);
      } else {
#pragma unroll
        for (int s = 0; s < stride[2]; ++s) {
          if (first[2] + s < 0 || first[2] + s >= args.x_size[2]) continue;
          auto routed = Positions::zero();
#pragma unroll
          for (int v = 0; v < WIDTH; ++v) {
            if (reached && s < kernel[2] && best[v] == tap + s) routed.at[v] = grad.at[v];
          }
          routed.store(to + s * x_step);
        }
      }
    }
  }
}
