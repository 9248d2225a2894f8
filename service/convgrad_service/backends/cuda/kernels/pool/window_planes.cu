// Pooling over windows of any kind, channels first. Launched by window_planes.py.
//
// Averages: y[o] = (sum of x[i] over the window of o) / divisor(o); with WEIGHTED the terms are
// x[i] / size(i), for gradients of windows that differ in size.
// MAXIMA: y[o] = the maximum, indices[o] = its flat position in the plane. Of equal maxima the first
// wins; a NaN wins over any number, and of several NaNs the last. With LINES 0, x's elements may have other
// numbers than their positions.
//
// A block computes a tile of y from the box of x that its windows cover (window_box.cuh). A thread
// computes `run` adjacent positions of y along axis 1 in kTogether planes. If windows have at most
// LINES by TAPS positions along the last two axes, it reduces each line of x once, in all slices, and
// keeps the last LINES results; for maxima, windows must then be in one slice. Adjacent threads have
// adjacent columns.
// SIMPLE: one slice, and windows that slide by whole positions.
// Block: 256 threads. Dynamic shared memory: the box of x, the windows along axis 1 of the tile, with
// WEIGHTED a weight per column, line and slice of the box. Deterministic: the order of additions
// follows from the windows, however the tile is chosen. Relies on windows that contain a position for
// maxima. Index limits: planes, and elements of a tile, below 2^31; offsets in 64 bits.
#include "pool/window_box.cuh"

using namespace convgrad;

namespace {

using T = ELEMENT;
using S = ElementAccumulator<T>;
constexpr int kTogether = sizeof(T) == 8 ? 2 : 4;

#if MAXIMA
// The element that is a maximum, so that a NaN keeps its bits, and its position; -1: none.
struct Part {
  T stored = narrow<T>(S(0));
  int where = -1;

  // Elements come in the order of their positions.
  __device__ __forceinline__ void take(T element, int position) {
    const S found = widen(element);
    if (where >= 0 && !(found > widen(stored)) && found == found) return;
    stored = element;
    where = position;
  }
  __device__ __forceinline__ void meet(const Part& part, S) {
    if (part.where >= 0) take(part.stored, part.where);
  }
};
#else
struct Part {
  S value = S(0);

  __device__ __forceinline__ void meet(const Part& part, S weight) {
    value = WEIGHTED ? multiply_add(part.value, weight, value) : value + part.value;
  }
};
#endif

// Of as many planes.
struct Parts {
  Part of[kTogether];

  __device__ __forceinline__ void meet(const Parts& parts, S weight) {
#pragma unroll
    for (int p = 0; p < kTogether; ++p) of[p].meet(parts.of[p], weight);
  }
};

// What a thread reads.
struct Column {
  const T* x;  // the first line of its first slice in the box, in the first plane
  int start0, stop0, start2, stop2;
  int plane_pitch, slice_pitch, line_pitch;
  int slice_size, line_size, first;  // of x, for positions in the plane
#if WEIGHTED
  const S* weights;        // of columns
  const S* slice_weights;
#endif

  // The part of a line in the window, in the slices [first0, last0).
  __device__ __forceinline__ Parts line(int at, int first0, int last0) const {
    Parts parts;
#pragma unroll 1
    for (int i0 = first0; i0 < (SIMPLE ? first0 + 1 : last0); ++i0) {
      const T* from[kTogether];
#pragma unroll
      for (int p = 0; p < kTogether; ++p) {
        from[p] = x + p * plane_pitch + i0 * slice_pitch + at * line_pitch + start2;
      }
      [[maybe_unused]] const int position = first + i0 * slice_size + at * line_size + start2;
      const auto tap = [&](int t) {
#pragma unroll
        for (int p = 0; p < kTogether; ++p) {
          Part& part = parts.of[p];
          const T element = from[p][t];
#if MAXIMA
          part.take(element, position + t);
#elif WEIGHTED
          const S weight = weights[start2 + t] * slice_weights[i0];
          part.value = multiply_add(widen(element), weight, part.value);
#else
          part.value += widen(element);
#endif
        }
      };
      const int taps = stop2 - start2;
#if TAPS
#pragma unroll
      for (int t = 0; t < TAPS; ++t) {
        if (t < taps) tap(t);
      }
#else
#pragma unroll 2
      for (int t = 0; t < taps; ++t) tap(t);
#endif
    }
    return parts;
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(kBoxThreads, sizeof(T) == 8 ? 3 : 4)
    window_planes(const __grid_constant__ BoxArgs args) {
  extern __shared__ __align__(16) unsigned char shared[];
  const WindowArgs& windows = args.windows;
  const Box box(args);
  const T* const x = box.load<T>(args, windows.x, shared);
  int2* const ranges = reinterpret_cast<int2*>(shared + args.ranges_at);
  for (int i = static_cast<int>(threadIdx.x); i < box.count[1]; i += kBoxThreads) {
    const int o = box.base[1] + i;
    ranges[i] = make_int2(window_start<SIMPLE>(windows.window[1], o) - box.first[1],
                          window_stop<SIMPLE>(windows.window[1], o) - box.first[1]);
  }
#if WEIGHTED
  S* weights = reinterpret_cast<S*>(shared + args.weights_at);
#pragma unroll
  for (int axis = 2; axis >= 0; --axis) {
    for (int i = static_cast<int>(threadIdx.x); i < box.extent[axis]; i += kBoxThreads) {
      weights[i] = S(1) / static_cast<S>(window_size<SIMPLE>(windows.counted[axis], box.first[axis] + i));
    }
    weights += args.box[axis];
  }
#endif
  cp_async_wait<0>();
  __syncthreads();

  const int runs = (args.tile[1] + windows.run - 1) / windows.run;
  const int groups = (box.planes + kTogether - 1) / kTogether;
  const int items = groups * args.tile[0] * runs * args.tile[2];
  const i64 outputs = static_cast<i64>(windows.y_size[0]) * windows.y_size[1] * windows.y_size[2];
  for (int item = static_cast<int>(threadIdx.x); item < items; item += kBoxThreads) {
    const int above = divide(item, args.by_tile[2]), at2 = item - above * args.tile[2];
    const int outer = divide(above, args.by_tile[1]), at1 = (above - outer * runs) * windows.run;
    const int group = SIMPLE ? outer : divide(outer, args.by_tile[0]);
    const int at0 = outer - group * args.tile[0], plane = group * kTogether;
    if (at0 >= box.count[0] || at1 >= box.count[1] || at2 >= box.count[2]) continue;
    const int o0 = box.base[0] + at0, o2 = box.base[2] + at2;
    Column column;
    column.start0 = SIMPLE ? 0 : window_start(windows.window[0], o0) - box.first[0];
    column.stop0 = SIMPLE ? 1 : window_stop(windows.window[0], o0) - box.first[0];
    column.start2 = window_start<SIMPLE>(windows.window[2], o2) - box.first[2];
    column.stop2 = window_stop<SIMPLE>(windows.window[2], o2) - box.first[2];
    column.plane_pitch = args.pitch[0];
    column.slice_pitch = args.pitch[1];
    column.line_pitch = args.pitch[2];
    column.x = x + plane * args.pitch[0];
    column.line_size = windows.x_size[2];
    column.slice_size = windows.x_size[1] * windows.x_size[2];
    column.first = (box.first[0] * windows.x_size[1] + box.first[1]) * windows.x_size[2] +
                   box.first[2];
#if WEIGHTED
    column.weights = reinterpret_cast<S*>(shared + args.weights_at);
    const S* const line_weights = column.weights + args.box[2];
    column.slice_weights = line_weights + args.box[1];
#endif
    const int end = min(at1 + windows.run, box.count[1]);
    int position = (o0 * windows.y_size[1] + box.base[1] + at1) * windows.y_size[2] + o2;
    const i64 to = (box.plane + plane) * outputs;
#if LINES
    Parts kept[LINES];
    int next = 0;
#endif
    for (int i = at1; i < end; ++i, position += windows.y_size[2]) {
      const int2 range = ranges[i];
      Parts total;
#if LINES
      next = max(next, range.x);
#pragma unroll 1
      for (; next < range.y; ++next) {
#pragma unroll
        for (int l = 1; l < LINES; ++l) kept[l - 1] = kept[l];
        kept[LINES - 1] = column.line(next, column.start0, column.stop0);
      }
#pragma unroll
      for (int l = 0; l < LINES; ++l) {
        const int line = range.y - LINES + l;
        S weight = S(1);
#if WEIGHTED
        if (line >= range.x) weight = line_weights[line];
#endif
        if (line >= range.x) total.meet(kept[l], weight);
      }
#else
      for (int i0 = column.start0; i0 < column.stop0; ++i0) {
        for (int line = range.x; line < range.y; ++line) {
          S weight = S(1);
#if WEIGHTED
          weight = line_weights[line];
#endif
          total.meet(column.line(line, i0, i0 + 1), weight);
        }
      }
#endif
#if !MAXIMA
      const DividedBy<T, SIMPLE> division(windows, o0, box.base[1] + i, o2);
#endif
#if MAXIMA && !LINES
      if (windows.carried != nullptr) {
#pragma unroll
        for (int p = 0; p < kTogether; ++p) {
          if (plane + p >= box.planes) break;
          const i64 lead = static_cast<i64>(box.plane + plane + p) * windows.x_plane;
          total.of[p].where = windows.carried[lead + total.of[p].where];
        }
      }
#endif
#pragma unroll
      for (int p = 0; p < kTogether; ++p) {
        if (plane + p >= box.planes) break;
        const Part& part = total.of[p];
        const i64 own = to + p * outputs + position;
#if MAXIMA
        if (windows.indices != nullptr) static_cast<INDEX*>(windows.indices)[own] = part.where;
        if (windows.y != nullptr) static_cast<T*>(windows.y)[own] = part.stored;
#else
        static_cast<T*>(windows.y)[own] = narrow<T>(division(part.value));
#endif
      }
    }
  }
}
