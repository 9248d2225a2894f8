// Max pooling forward: maxima and their positions, several channels per thread. The host's side is
// pool_windows.py.
//
// output[n, c, o] = max over the window. Of equal maxima the first wins; a NaN wins over any number,
// and of several NaNs the last. Indices are flat in their (n, c) plane.
// A thread computes a window in VECTOR adjacent channels (channels last), by accesses of 16 bytes, or
// in one channel (channels first, adjacent threads have adjacent windows). Block: 128 threads; shared
// memory: none. Deterministic. Relies on its launcher for the grid, ceil(threads / 128), for aligned
// vectors, channels divisible by VECTOR, windows that contain an element, and an image's extent and
// number of positions below 2^31.
#include "core/vectors.cuh"

using namespace convgrad;

namespace {

using T = ELEMENT;
using Values = Vector<T, VECTOR>;

struct WindowsArgs {
  const void* x;
  void* y;        // or null
  void* indices;  // or null
  i64 x_stride[5];  // N C D H W, in elements
  i64 y_stride[5];
  i64 index_stride[5];
  i64 threads;
  int vectors;  // of channels
  int x_size[3];
  int y_size[3];
  int kernel[3];
  int stride[3];
  int dilation[3];
  int pad[3];
  int lanes;  // index that varies along adjacent threads: 0 positions, 1 channels
};

// The taps of a window that are inside the input along one dimension: `count` from `first` on.
struct Span {
  int at, first, count;
};

__device__ __forceinline__ Span span_of(const WindowsArgs& args, int dim, int window) {
  const int at = window * args.stride[dim] - args.pad[dim], step = args.dilation[dim];
  const int first = at < 0 ? (-at + step - 1) / step : 0;
  const int beyond = args.x_size[dim] - at;
  const int end = min(args.kernel[dim], beyond <= 0 ? 0 : (beyond + step - 1) / step);
  return {at + first * step, first, max(0, end - first)};
}

}  // namespace

extern "C" __global__ void __launch_bounds__(128)
    pool_windows(const __grid_constant__ WindowsArgs args) {
  i64 index = static_cast<i64>(blockIdx.x) * 128 + threadIdx.x;
  if (index >= args.threads) return;
  i64 vector = 0, at[3];
  if (args.lanes) index = divide(index, args.vectors, vector);
#pragma unroll
  for (int dim = 2; dim >= 0; --dim) index = divide(index, args.y_size[dim], at[dim]);
  if (!args.lanes) index = divide(index, args.vectors, vector);
  const i64 n = index, c = vector * VECTOR;
  Span span[3];
#pragma unroll
  for (int dim = 0; dim < 3; ++dim) span[dim] = span_of(args, dim, static_cast<int>(at[dim]));

  const int steps[3] = {args.dilation[0] * static_cast<int>(args.x_stride[2]),
                        args.dilation[1] * static_cast<int>(args.x_stride[3]),
                        args.dilation[2] * static_cast<int>(args.x_stride[4])};
  const T* const x = static_cast<const T*>(args.x) + n * args.x_stride[0] + c * args.x_stride[1] +
                     span[0].at * args.x_stride[2] + span[1].at * args.x_stride[3] +
                     span[2].at * args.x_stride[4];
  ElementAccumulator<T> most[VECTOR];
  int where[VECTOR];
  Values stored = Values::zero();
  bool some = false;
  for (int t = 0; t < span[0].count; ++t) {
    for (int r = 0; r < span[1].count; ++r) {
      const T* from = x + (t * steps[0] + r * steps[1]);
      int place = ((span[0].at + t * args.dilation[0]) * args.x_size[1] + span[1].at +
                   r * args.dilation[1]) * args.x_size[2] + span[2].at;
#pragma unroll 2
      for (int s = 0; s < span[2].count; ++s) {
        const Values values = Values::load(from);
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) {
          const ElementAccumulator<T> value = widen(values.at[v]);
          if (!some || value > most[v] || value != value) {
            most[v] = value;
            where[v] = place;
            stored.at[v] = values.at[v];
          }
        }
        some = true;
        from += steps[2];
        place += args.dilation[2];
      }
    }
  }
  const i64 lead = c * args.y_stride[1] + n * args.y_stride[0] + at[0] * args.y_stride[2] +
                   at[1] * args.y_stride[3] + at[2] * args.y_stride[4];
  if (args.y != nullptr) stored.store(static_cast<T*>(args.y) + lead);
  if (args.indices == nullptr) return;
  INDEX* const to = static_cast<INDEX*>(args.indices) + n * args.index_stride[0] +
                    c * args.index_stride[1] + at[0] * args.index_stride[2] +
                    at[1] * args.index_stride[3] + at[2] * args.index_stride[4];
  constexpr int kAtOnce = 16 / static_cast<int>(sizeof(INDEX));
  if constexpr (VECTOR % kAtOnce == 0) {
#pragma unroll
    for (int v = 0; v < VECTOR; v += kAtOnce) {
      Vector<INDEX, kAtOnce> part;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) part.at[i] = where[v + i];
      part.store(to + v);
    }
  } else {
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) to[v] = where[v];
  }
}
