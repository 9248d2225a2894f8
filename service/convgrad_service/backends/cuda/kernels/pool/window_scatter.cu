// Scatter of elements by indices, for windows of any kind, channels first: the gradient of max pooling
// from the indices of the maxima, and max unpooling. The host's side is window_scatter.py.
//
// y[i] = sum of x[o] over the windows o that contain i and whose index is i, in the order of the
// windows; with MOVE, the last of them, bit by bit; 0 if there are none. An index outside its window
// sets bad[MOVE] unless `bad` is null.
// A block clears a tile of y in shared memory, copies the box of x and indices (window_box.cuh), and
// has one thread for each window. If other windows that contain the window's index have the same index,
// the thread of the first one (MOVE: the last) computes the sum; so each position has one writer.
// Then the tile is stored. FLAT: planes of one slice. TAPS: the most windows that contain a position
// along the last axis; 0 for any number.
// Block: 256 threads. Dynamic shared memory: x, indices, y, ranges of windows. Deterministic, no atomics. Memory-safe for
// any index. Index limits: planes, and elements of a box, below 2^31; offsets in 64 bits.
#include "pool/window_box.cuh"

using namespace convgrad;

namespace {

using T = ELEMENT;
using S = ElementAccumulator<T>;

// The windows that contain a position, along an axis of the box.
struct Span {
  int start, stop;
};
__device__ __forceinline__ Span span_of(const BoxArgs& args, const Box& box, int axis, int i) {
  const WindowRange& range = args.windows.window[axis];
  return {range.start(i) - box.first[axis], range.stop(i) - box.first[axis]};
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kBoxThreads, 4)
    window_scatter(const __grid_constant__ BoxArgs args) {
  extern __shared__ __align__(16) unsigned char shared[];
  const WindowArgs& windows = args.windows;
  const Box box(args);
  const T* const x = box.load<T>(args, windows.x, shared);
  const INDEX* const indices = box.load<INDEX>(args, windows.indices, shared + args.indices_at);
  for (int at = args.y_at + static_cast<int>(threadIdx.x) * 16; at < args.ranges_at;
       at += kBoxThreads * 16) {
    *reinterpret_cast<uint4*>(shared + at) = {};
  }
  constexpr int kChunk = 16 / sizeof(T);
  T* const y = reinterpret_cast<T*>(shared + args.y_at) +
               static_cast<int>(box.y_begin(windows) % kChunk);
  // Those of the tile's lines, and of its columns unless they are many.
  Span* const ranges = reinterpret_cast<Span*>(shared + args.ranges_at);
  const bool columns = args.ranges > args.tile[1];
  for (int i = static_cast<int>(threadIdx.x); i < args.tile[1]; i += kBoxThreads) {
    ranges[i] = span_of(args, box, 1, box.base[1] + i);
  }
  for (int i = static_cast<int>(threadIdx.x); i < args.ranges - args.tile[1]; i += kBoxThreads) {
    ranges[args.tile[1] + i] = span_of(args, box, 2, box.base[2] + i);
  }
  cp_async_wait<0>();
  __syncthreads();

  const int size1 = windows.y_size[1], size2 = windows.y_size[2];
  const int plane_size = windows.y_size[0] * size1 * size2;
  const int items = box.planes * args.box[0] * args.box[1] * args.box[2];
  for (int item = static_cast<int>(threadIdx.x); item < items; item += kBoxThreads) {
    const int line = divide(item, args.by_box[2]), at2 = item - line * args.box[2];
    const int slice = divide(line, args.by_box[1]), at1 = line - slice * args.box[1];
    const int plane = FLAT ? slice : divide(slice, args.by_box[0]);
    const int at0 = slice - plane * args.box[0];
    if (at0 >= box.extent[0] || at1 >= box.extent[1] || at2 >= box.extent[2]) continue;
    const int lead = plane * box.extent[0] * args.pitch[0];
    const int own = lead + at0 * args.pitch[0] + at1 * args.pitch[1] + at2;
    const INDEX index = indices[own];
    const bool exists = index >= 0 && index < plane_size;
    const int position = exists ? static_cast<int>(index) : 0;
    const int row = divide(position, args.by_y_size[2]), i2 = position - row * size2;
    const int i0 = FLAT ? 0 : divide(row, args.by_y_size[1]), i1 = row - i0 * size1;
    const int y0 = i0 - box.base[0], y1 = i1 - box.base[1], y2 = i2 - box.base[2];
    const bool mine = y0 >= 0 && y0 < box.count[0] && y1 >= 0 && y1 < box.count[1] && y2 >= 0 &&
                      y2 < box.count[2];
    // The windows that contain the position.
    const auto [start0, stop0] = FLAT ? Span{0, 1} : span_of(args, box, 0, i0);
    const auto [start1, stop1] = mine ? ranges[y1] : span_of(args, box, 1, i1);
    const auto [start2, stop2] = mine && columns ? ranges[args.tile[1] + y2]
                                                 : span_of(args, box, 2, i2);
    if (!exists || at0 < start0 || at0 >= stop0 || at1 < start1 || at1 >= stop1 || at2 < start2 ||
        at2 >= stop2) {
      if (windows.bad != nullptr) windows.bad[MOVE] = 1;  // all writers write the same value
      continue;
    }
    if (!mine) continue;
    bool writes = true;
    [[maybe_unused]] S sum = S(0);
#pragma unroll 1
    for (int o0 = start0; o0 < stop0; ++o0) {
#pragma unroll 1
      for (int o1 = start1; o1 < stop1; ++o1) {
        const int from = lead + o0 * args.pitch[0] + o1 * args.pitch[1];
        const auto meet = [&](int at) {
          if (indices[at] != index) return;
          writes &= MOVE ? at <= own : at >= own;
          sum += widen(x[at]);
        };
#if TAPS
#pragma unroll
        for (int t = 0; t < TAPS; ++t) {
          if (start2 + t < stop2) meet(from + start2 + t);
        }
#else
#pragma unroll 1
        for (int o2 = start2; o2 < stop2; ++o2) meet(from + o2);
#endif
      }
    }
    if (!writes) continue;
    const int to = args.whole ? plane * plane_size + position : y1 * args.y_pitch + y2;
    y[to] = MOVE ? x[own] : narrow<T>(sum);
  }
  __syncthreads();
  box.store<T>(args, shared + args.y_at);
}
