// The gradient of max pooling from its input, for adjacent windows of two positions along W, channels
// first. The host's side is pool_cell_rows.py.
//
// As in pool_cells.cu, the gradient of a window goes to its first maximum (a NaN wins over any number,
// of several the last). Other positions get zero, and so do positions past the last window.
// A thread computes VECTOR adjacent windows of a row, from 2*VECTOR adjacent positions of each input
// row in them: each tensor moves once, by accesses of 16 (8) bytes.
// Block: 128 threads; shared memory: none. Grid: ceil(threads / 128). Relies on its launcher for no
// padding, an even W of whole vectors, rows aligned to vectors, and an image's extent below 2^31.
// Deterministic; gradients are copied bit by bit.
#include "core/vectors.cuh"

using namespace convgrad;

namespace {

using T = ELEMENT;
using Positions = Vector<T, 2 * VECTOR>;
using Gradients = Vector<T, VECTOR>;
constexpr int kRows = KERNEL_D * KERNEL_H;

struct CellRowArgs {
  const void* x;
  const void* grad;
  void* grad_x;
  i64 x_stride[5];  // N C D H W, in elements
  i64 grad_stride[5];
  i64 grad_x_stride[5];
  i64 threads;
  int channels;
  int x_size[3];
  int y_size[3];
  int cells[3];  // windows, including those past the last one; along W in vectors
};

}  // namespace

extern "C" __global__ void __launch_bounds__(128)
    pool_cell_rows(const __grid_constant__ CellRowArgs args) {
  i64 index = static_cast<i64>(blockIdx.x) * 128 + threadIdx.x;
  if (index >= args.threads) return;
  i64 at[3], c;
#pragma unroll
  for (int dim = 2; dim >= 0; --dim) index = divide(index, args.cells[dim], at[dim]);
  index = divide(index, args.channels, c);
  const int d0 = static_cast<int>(at[0]) * KERNEL_D, h0 = static_cast<int>(at[1]) * KERNEL_H;
  const int q = static_cast<int>(at[2]) * VECTOR;
  const T* const x = static_cast<const T*>(args.x) + index * args.x_stride[0] + c * args.x_stride[1];
  T* const grad_x =
      static_cast<T*>(args.grad_x) + index * args.grad_x_stride[0] + c * args.grad_x_stride[1];

  auto grad = Gradients::zero();
  int best[VECTOR];
#pragma unroll
  for (int v = 0; v < VECTOR; ++v) best[v] = -1;
  if (d0 / KERNEL_D < args.y_size[0] && h0 / KERNEL_H < args.y_size[1]) {
    Positions rows[kRows];
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const int d = d0 + row / KERNEL_H, h = h0 + row % KERNEL_H;
      if (d < args.x_size[0] && h < args.x_size[1]) {
        rows[row] = Positions::load(x + (d * static_cast<int>(args.x_stride[2]) +
                                         h * static_cast<int>(args.x_stride[3]) + 2 * q));
      }
    }
    grad = Gradients::load(static_cast<const T*>(args.grad) + index * args.grad_stride[0] +
                           c * args.grad_stride[1] + at[0] * args.grad_stride[2] +
                           at[1] * args.grad_stride[3] + q);
    ElementAccumulator<T> most[VECTOR];
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const int d = d0 + row / KERNEL_H, h = h0 + row % KERNEL_H;
      if (d >= args.x_size[0] || h >= args.x_size[1]) continue;
#pragma unroll
      for (int i = 0; i < 2 * VECTOR; ++i) {
        const ElementAccumulator<T> value = widen(rows[row].at[i]);
        if (best[i / 2] < 0 || value > most[i / 2] || value != value) {
          most[i / 2] = value;
          best[i / 2] = row * 2 + i % 2;
        }
      }
    }
  }
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    const int d = d0 + row / KERNEL_H, h = h0 + row % KERNEL_H;
    if (d >= args.x_size[0] || h >= args.x_size[1]) continue;
    auto routed = Positions::zero();
#pragma unroll
    for (int i = 0; i < 2 * VECTOR; ++i) {
      if (best[i / 2] == row * 2 + i % 2) routed.at[i] = grad.at[i / 2];
    }
    routed.store(grad_x + (d * static_cast<int>(args.grad_x_stride[2]) +
                           h * static_cast<int>(args.grad_x_stride[3]) + 2 * q));
  }
}
