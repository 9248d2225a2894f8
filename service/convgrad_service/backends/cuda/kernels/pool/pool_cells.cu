// The gradient of max pooling from its input, for windows that do not overlap (kernel <= stride). The
// host's side is pool_cells.py.
//
// Input positions u = i + pad are divided into cells of one stride, one for each window. The gradient
// of window o goes to the first maximum among the first KERNEL positions of cell o (a NaN wins over
// any number, of several the last). Other positions of the cell get zero, and so do cells past the
// last window.
// A thread computes a cell of VECTOR adjacent channels (channels last) or of one channel (channels
// first, adjacent threads have adjacent windows), all in registers: each tensor moves once.
// Block: 128 threads; shared memory: none. Grid: ceil(threads / 128). Relies on its launcher for
// aligned vectors, channels divisible by VECTOR and an image's extent below 2^31 elements.
// Deterministic; gradients are copied bit by bit.
#include "pool/max_pool.cuh"
#include "core/vectors.cuh"

using namespace convgrad;

namespace {

using T = ELEMENT;
using Values = Vector<T, VECTOR>;
constexpr int kTaps = KERNEL_D * KERNEL_H * KERNEL_W;

struct CellArgs {
  const void* x;
  const void* grad;
  void* grad_x;
  i64 x_stride[5];  // N C D H W, in elements
  i64 grad_stride[5];
  i64 grad_x_stride[5];
  int batch;
  int vectors;  // of channels
  int x_size[3];
  int y_size[3];
  int cells[3];
  int pad[3];
  int lanes;  // index that varies along adjacent threads: 0 positions, 1 channels
};

}  // namespace

extern "C" __global__ void __launch_bounds__(128)
    pool_cells(const __grid_constant__ CellArgs args) {
  i64 index = static_cast<i64>(blockIdx.x) * 128 + threadIdx.x;
  i64 vector = 0, at[3];
  if (args.lanes) index = divide(index, args.vectors, vector);
#pragma unroll
  for (int dim = 2; dim >= 0; --dim) index = divide(index, args.cells[dim], at[dim]);
  if (!args.lanes) index = divide(index, args.vectors, vector);
  if (index >= args.batch) return;
  const i64 c = vector * VECTOR;
  const int first[3] = {static_cast<int>(at[0]) * STRIDE_D - args.pad[0],
                        static_cast<int>(at[1]) * STRIDE_H - args.pad[1],
                        static_cast<int>(at[2]) * STRIDE_W - args.pad[2]};
  const T* const x = static_cast<const T*>(args.x) + index * args.x_stride[0] + c * args.x_stride[1];
  T* const grad_x =
      static_cast<T*>(args.grad_x) + index * args.grad_x_stride[0] + c * args.grad_x_stride[1];
  Values grad = Values::zero();
  int best[VECTOR];
#pragma unroll
  for (int v = 0; v < VECTOR; ++v) best[v] = -1;

  if (at[0] < args.y_size[0] && at[1] < args.y_size[1] && at[2] < args.y_size[2]) {
    Values taps[kTaps];
    u32 inside = 0;
#pragma unroll
    for (int tap = 0; tap < kTaps; ++tap) {
      const int d = first[0] + tap / (KERNEL_H * KERNEL_W);
      const int h = first[1] + tap / KERNEL_W % KERNEL_H;
      const int w = first[2] + tap % KERNEL_W;
      if (d >= 0 && d < args.x_size[0] && h >= 0 && h < args.x_size[1] && w >= 0 &&
          w < args.x_size[2]) {
        inside |= 1u << tap;
        taps[tap] = Values::load(x + (d * static_cast<int>(args.x_stride[2]) +
                                      h * static_cast<int>(args.x_stride[3]) +
                                      w * static_cast<int>(args.x_stride[4])));
      }
    }
    grad = Values::load(static_cast<const T*>(args.grad) + index * args.grad_stride[0] +
                        c * args.grad_stride[1] + at[0] * args.grad_stride[2] +
                        at[1] * args.grad_stride[3] + at[2] * args.grad_stride[4]);
    ElementAccumulator<T> most[VECTOR];
#pragma unroll
    for (int tap = 0; tap < kTaps; ++tap) {
      if (!((inside >> tap) & 1)) continue;
#pragma unroll
      for (int v = 0; v < VECTOR; ++v) {
        const ElementAccumulator<T> value = widen(taps[tap].at[v]);
        if (best[v] < 0 || value > most[v] || value != value) {
          most[v] = value;
          best[v] = tap;
        }
      }
    }
  }
#pragma unroll
  for (int a = 0; a < STRIDE_D; ++a) {
#pragma unroll
    for (int b = 0; b < STRIDE_H; ++b) {
#pragma unroll
      for (int k = 0; k < STRIDE_W; ++k) {
        const int d = first[0] + a, h = first[1] + b, w = first[2] + k;
        if (d < 0 || d >= args.x_size[0] || h < 0 || h >= args.x_size[1] || w < 0 ||
            w >= args.x_size[2]) {
          continue;
        }
        Values routed = Values::zero();
        if (a < KERNEL_D && b < KERNEL_H && k < KERNEL_W) {
          const int tap = (a * KERNEL_H + b) * KERNEL_W + k;
#pragma unroll
          for (int v = 0; v < VECTOR; ++v) {
            if (best[v] == tap) routed.at[v] = grad.at[v];
          }
        }
        routed.store(grad_x + (d * static_cast<int>(args.grad_x_stride[2]) +
                               h * static_cast<int>(args.grad_x_stride[3]) +
                               w * static_cast<int>(args.grad_x_stride[4])));
      }
    }
  }
}
