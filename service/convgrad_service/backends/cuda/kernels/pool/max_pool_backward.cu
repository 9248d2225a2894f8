// The gradient of max pooling from the indices of its maxima. The host's side is max_pool.py.
//
// max_pool_backward: grad_x[n, c, i] = sum of grad[n, c, o] over the windows o that contain i and
// whose index is i. It is a gather without atomics, in the order of the windows. Deterministic.
// check_indices: sets `bad` to 1 if an index is outside its plane or not at a tap of its window.
// Block: 256 threads, one input element (or one window) each, along positions or channels as
// `lanes` says. Shared memory: none. Relies on its launcher for the grid, ceil(elements / 256), and
// for `bad` being 0 before. Memory-safe for any index: indices are compared, never dereferenced.
// Index limits: extents below 2^31, tensors by 64-bit offsets.
#include "pool/max_pool.cuh"

using namespace convgrad;

extern "C" __global__ void __launch_bounds__(256, 1)
    max_pool_backward(const __grid_constant__ PoolArgs args) {
  using T = ELEMENT;
  Place element;
  if (!place_of(args, args.x_size, element)) return;
  // The windows that contain this element: o*stride <= i + pad <= o*stride + (k-1)*dilation.
  i64 low[3], high[3];
  for (int dim = 0; dim < 3; ++dim) {
    const i64 stride = args.stride[dim];
    const i64 last = element.at[dim] + args.pad[dim];
    const i64 first = last - static_cast<i64>(args.kernel[dim] - 1) * args.dilation[dim];
    low[dim] = first <= 0 ? 0 : ceil_div(first, stride);
    high[dim] = last < 0 ? -1 : min(last / stride, static_cast<i64>(args.y_size[dim] - 1));
  }
  const i64 wanted =
      (element.at[0] * args.x_size[1] + element.at[1]) * args.x_size[2] + element.at[2];
  const INDEX* const indices = static_cast<const INDEX*>(args.indices) +
                               element.n * args.index_stride[0] + element.c * args.index_stride[2];
  const T* const grad =
      static_cast<const T*>(args.grad) + element.n * args.grad_stride[0] +
      element.c * args.grad_stride[2];
  ElementAccumulator<T> sum = 0;
  for (i64 z = low[0]; z <= high[0]; ++z) {
    for (i64 p = low[1]; p <= high[1]; ++p) {
      for (i64 q = low[2]; q <= high[2]; ++q) {
        const i64 at = z * args.index_stride[3] + p * args.index_stride[4] +
                       q * args.index_stride[5];
        if (indices[at] != wanted) continue;
        sum += widen(grad[z * args.grad_stride[3] + p * args.grad_stride[4] +
                          q * args.grad_stride[5]]);
      }
    }
  }
  static_cast<T*>(args.grad_x)[element.offset(args.grad_x_stride)] = narrow<T>(sum);
}

extern "C" __global__ void __launch_bounds__(256, 1)
    check_indices(const __grid_constant__ PoolArgs args) {
  Place window;
  if (!place_of(args, args.y_size, window)) return;
  i64 index = static_cast<const INDEX*>(args.indices)[window.offset(args.index_stride)];
  const i64 plane = static_cast<i64>(args.x_size[0]) * args.x_size[1] * args.x_size[2];
  bool good = index >= 0 && index < plane;
  for (int dim = 2; good && dim >= 0; --dim) {
    i64 at;
    index = divide(index, args.x_size[dim], at);
    const i64 reach = at + args.pad[dim] - window.at[dim] * args.stride[dim];
    good = reach >= 0 && reach % args.dilation[dim] == 0 &&
           reach / args.dilation[dim] < args.kernel[dim];
  }
  if (!good) *args.bad = 1;  // all writers write the same value
}
