// Max pooling: maxima and their positions. The host's side is max_pool.py.
//
// output[n, c, o] = max over the window. Of equal maxima the first wins; a NaN wins over any number,
// and of several NaNs the last. Block: 256 threads, one window each, along positions or channels as
// `lanes` says. Shared memory: none. Deterministic. Relies on its launcher for the grid,
// ceil(windows / 256) blocks, and on every window containing an element.
// Index limits: extents below 2^31, tensors by 64-bit offsets; INDEX fits a plane's positions.
#include "pool/max_pool.cuh"

using namespace convgrad;

extern "C" __global__ void __launch_bounds__(256, 1)
    max_pool_forward(const __grid_constant__ PoolArgs args) {
  using T = ELEMENT;
  Place window;
  if (!place_of(args, args.y_size, window)) return;
  i64 first[3];
  for (int dim = 0; dim < 3; ++dim) {
    first[dim] = window.at[dim] * args.stride[dim] - args.pad[dim];
  }
  const T* const x =
      static_cast<const T*>(args.x) + window.n * args.x_stride[0] + window.c * args.x_stride[2];
  ElementAccumulator<T> best = 0;
  T stored = {};
  i64 where = -1;
  for (int t = 0; t < args.kernel[0]; ++t) {
    const i64 d = first[0] + static_cast<i64>(t) * args.dilation[0];
    if (d < 0 || d >= args.x_size[0]) continue;
    for (int r = 0; r < args.kernel[1]; ++r) {
      const i64 h = first[1] + static_cast<i64>(r) * args.dilation[1];
      if (h < 0 || h >= args.x_size[1]) continue;
      for (int s = 0; s < args.kernel[2]; ++s) {
        const i64 v = first[2] + static_cast<i64>(s) * args.dilation[2];
        if (v < 0 || v >= args.x_size[2]) continue;
        const T element = x[d * args.x_stride[3] + h * args.x_stride[4] + v * args.x_stride[5]];
        const ElementAccumulator<T> value = widen(element);
        if (where < 0 || value > best || value != value) {
          best = value;
          stored = element;
          where = (d * args.x_size[1] + h) * args.x_size[2] + v;
        }
      }
    }
  }
  if (args.y != nullptr) static_cast<T*>(args.y)[window.offset(args.y_stride)] = stored;
  if (args.indices != nullptr) {
    static_cast<INDEX*>(args.indices)[window.offset(args.index_stride)] =
        static_cast<INDEX>(where);
  }
}
