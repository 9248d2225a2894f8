// Pooling over windows of any kind, channels first. The host's side is window_planes.py.
//
// KIND 0, averages: y[o] = (sum of x[i] over the window of o) / divisor(o); with WEIGHTED the terms are
// x[i] / size(i), for gradients of windows that differ in size.
// KIND 1, maxima: y[o] = the maximum, indices[o] = its flat position in the plane. Of equal maxima the
// first wins; a NaN wins over any number, and of several NaNs the last.
// KIND 2, the gradient of maxima: y[i] = sum of x[o] over the windows o that contain i and whose index
// is i. If `bad` is given, bad[0] is increased by the number of windows whose index is not in them: all
// windows less those that a position matches.
//
// A block computes a tile of y in `planes` adjacent planes. It copies the box of x (and of indices) that
// the tile's windows cover to shared memory, in 16-byte chunks whatever the alignment of lines: whole
// planes as one segment, otherwise the lines of each slice along axis 0 as one segment, or with
// `by_lines` each line. A segment keeps its misalignment in shared memory.
// A thread computes `run` adjacent positions of y along axis 1. If windows have at most LINES by TAPS
// positions along the last two axes, it reduces each line of x once, in all slices, and keeps the last
// LINES results; for maxima, windows must then be in one slice.
// Adjacent threads have adjacent columns. SIMPLE: one slice, and windows that slide by whole positions.
// Block: 256 threads. Dynamic shared memory: the box of x, that of indices, the windows along axis 1 of
// the tile, with WEIGHTED a weight per column, line and slice of the box. Deterministic: the order of
// additions follows from the windows, however the tile is chosen. Memory-safe for any index. Relies on its launcher for tensors aligned to 16 bytes, pitches that are
// equal to those of x modulo a chunk, and windows that contain a position for maxima.
// Index limits: planes, and elements of a tile, below 2^31; offsets in 64 bits.
#include "pool/windows.cuh"
#include "ptx/mma.cuh"

using namespace convgrad;

namespace {

using T = ELEMENT;
using S = ElementAccumulator<T>;
constexpr int kThreads = 256;

__device__ __forceinline__ int start_of(const WindowRange& range, int o) {
  return SIMPLE ? max(range.low, o * range.whole + range.first) : range.start(o);
}
__device__ __forceinline__ int stop_of(const WindowRange& range, int o) {
  return SIMPLE ? min(range.high, o * range.whole + range.last) : range.stop(o);
}

struct PlanesArgs {
  WindowArgs windows;
  int tile[3];   // positions of y
  int tiles[3];  // of a plane, along each axis
  int box[3];    // the most positions of x under a tile
  int planes;    // of a block
  int run;
  int pitch[2];  // elements between slices, and between lines, in shared memory
  int whole;     // whether a block has whole planes
  int by_lines;  // whether each line is a segment
  int indices_at, ranges_at, weights_at;  // bytes, in shared memory
  Divider by_tile[3];                     // axis 1: by the runs of a column
  Divider by_tiles[3];
};

// What a block computes and holds, along each axis.
struct Box {
  int base[3], count[3];    // positions of y
  int first[3], extent[3];  // positions of x
  int plane, planes;

  __device__ __forceinline__ explicit Box(const PlanesArgs& args) {
    int rest = static_cast<int>(blockIdx.x);
#pragma unroll
    for (int axis = 2; axis >= 0; --axis) {
      base[axis] = first[axis] = 0;
      count[axis] = args.tile[axis];
      extent[axis] = args.windows.x_size[axis];
      if (args.whole) continue;
      const int outer = divide(rest, args.by_tiles[axis]);
      base[axis] = (rest - outer * args.tiles[axis]) * args.tile[axis];
      rest = outer;
      count[axis] = min(args.tile[axis], args.windows.y_size[axis] - base[axis]);
      if (axis == 2 && !args.by_lines) continue;
      const WindowRange& range = args.windows.window[axis];
      first[axis] = start_of(range, base[axis]);
      extent[axis] = max(0, stop_of(range, base[axis] + count[axis] - 1) - first[axis]);
    }
    plane = rest * args.planes;
    planes = min(args.planes, args.windows.batch - plane);
  }

  // Copies the box of a tensor of x's shape; returns its first position.
  template <class E>
  __device__ __forceinline__ const E* stage(const PlanesArgs& args, const void* tensor,
                                            unsigned char* to) const {
    constexpr int kChunk = 16 / sizeof(E);
    const int(&size)[3] = args.windows.x_size;
    const i64 slice = static_cast<i64>(size[1]) * size[2], plane_size = slice * size[0];
    const i64 all = plane_size * args.windows.batch;
    const i64 begin = plane * plane_size + first[0] * slice +
                      static_cast<i64>(first[1]) * size[2] + first[2];
    const int lead = static_cast<int>(begin % kChunk);
    const auto copy = [&](i64 from, int into, int length) {
      if (length <= 0) return;
      const int head = into % kChunk, chunks = (head + length + kChunk - 1) / kChunk;
      const u32 target = shared_address(to) + (into - head) * static_cast<int>(sizeof(E));
      const E* const source = static_cast<const E*>(tensor) + (from - head);
      const i64 left = all - (from - head);
      for (int c = static_cast<int>(threadIdx.x); c < chunks; c += kThreads) {
        const int there = static_cast<int>(min(left - c * kChunk, static_cast<i64>(kChunk)));
        cp_async<16>(target + c * 16, source + c * kChunk, there * static_cast<int>(sizeof(E)));
      }
    };
    if (args.whole) {
      copy(begin, lead, planes * static_cast<int>(plane_size));
    } else {
      for (int i0 = 0; i0 < extent[0]; ++i0) {
        const i64 from = begin + i0 * slice;
        const int into = lead + i0 * args.pitch[0];
        if (!args.by_lines) {
          copy(from, into, extent[1] * size[2]);
          continue;
        }
        for (int i1 = 0; i1 < extent[1]; ++i1) {
          copy(from + static_cast<i64>(i1) * size[2], into + i1 * args.pitch[1], extent[2]);
        }
      }
    }
    cp_async_commit();
    return reinterpret_cast<const E*>(to) + lead;
  }
};

#if KIND == 1
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

// What a thread reads.
struct Column {
  const T* x;  // the first line of its first slice in the box
  int start0, stop0, start2, stop2;
  int slice_pitch, line_pitch;
  int slice_size, line_size, first;  // of x, for positions in the plane
#if WEIGHTED
  const S* weights;        // of columns
  const S* slice_weights;
#endif

  __device__ __forceinline__ void tap(Part& part, int i0, int line, int i2) const {
    const T element = x[i0 * slice_pitch + line * line_pitch + i2];
#if KIND == 1
    part.take(element, first + i0 * slice_size + line * line_size + i2);
#elif WEIGHTED
    part.value = multiply_add(widen(element), weights[i2] * slice_weights[i0], part.value);
#else
    part.value += widen(element);
#endif
  }
  // The part of a line in the window, in the slices [first0, last0).
  __device__ __forceinline__ Part line(int at, int first0, int last0) const {
    Part part;
#pragma unroll 1
    for (int i0 = first0; i0 < (SIMPLE ? first0 + 1 : last0); ++i0) {
#if TAPS
#pragma unroll
      for (int t = 0; t < TAPS; ++t) {
        if (start2 + t < stop2) tap(part, i0, at, start2 + t);
      }
#else
#pragma unroll 4
      for (int i2 = start2; i2 < stop2; ++i2) tap(part, i0, at, i2);
#endif
    }
    return part;
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, sizeof(T) == 8 ? 3 : 4)
    window_planes(const __grid_constant__ PlanesArgs args) {
  extern __shared__ __align__(16) unsigned char shared[];
  const WindowArgs& windows = args.windows;
  const Box box(args);
  const T* const x = box.stage<T>(args, windows.x, shared);
#if KIND == 2
  const INDEX* const indices = box.stage<INDEX>(args, windows.indices, shared + args.indices_at);
#endif
  int2* const ranges = reinterpret_cast<int2*>(shared + args.ranges_at);
  for (int i = static_cast<int>(threadIdx.x); i < box.count[1]; i += kThreads) {
    const int o = box.base[1] + i;
    ranges[i] = make_int2(start_of(windows.window[1], o) - box.first[1],
                          stop_of(windows.window[1], o) - box.first[1]);
  }
#if WEIGHTED
  S* weights = reinterpret_cast<S*>(shared + args.weights_at);
#pragma unroll
  for (int axis = 2; axis >= 0; --axis) {
    for (int i = static_cast<int>(threadIdx.x); i < box.extent[axis]; i += kThreads) {
      weights[i] = S(1) / static_cast<S>(windows.counted[axis].size(box.first[axis] + i));
    }
    weights += args.box[axis];
  }
#endif
  cp_async_wait<0>();
  __syncthreads();

  const int runs = (args.tile[1] + args.run - 1) / args.run;
  const int items = box.planes * args.tile[0] * runs * args.tile[2];
  const i64 outputs = static_cast<i64>(windows.y_size[0]) * windows.y_size[1] * windows.y_size[2];
  [[maybe_unused]] int matches = 0;
  [[maybe_unused]] S by = static_cast<S>(windows.divisor);
  [[maybe_unused]] S reciprocal = static_cast<S>(windows.reciprocal);
  for (int item = static_cast<int>(threadIdx.x); item < items; item += kThreads) {
    const int above = divide(item, args.by_tile[2]), at2 = item - above * args.tile[2];
    const int outer = divide(above, args.by_tile[1]), at1 = (above - outer * runs) * args.run;
    const int plane = SIMPLE ? outer : divide(outer, args.by_tile[0]);
    const int at0 = outer - plane * args.tile[0];
    if (at0 >= box.count[0] || at1 >= box.count[1] || at2 >= box.count[2]) continue;
    const int o0 = box.base[0] + at0, o2 = box.base[2] + at2;
    Column column;
    column.start0 = SIMPLE ? 0 : windows.window[0].start(o0) - box.first[0];
    column.stop0 = SIMPLE ? 1 : windows.window[0].stop(o0) - box.first[0];
    column.start2 = start_of(windows.window[2], o2) - box.first[2];
    column.stop2 = stop_of(windows.window[2], o2) - box.first[2];
    column.slice_pitch = args.pitch[0];
    column.line_pitch = args.pitch[1];
    const int lead = plane * box.extent[0] * args.pitch[0];
    column.x = x + lead;
    column.line_size = windows.x_size[2];
    column.slice_size = windows.x_size[1] * windows.x_size[2];
    column.first = (box.first[0] * windows.x_size[1] + box.first[1]) * windows.x_size[2] +
                   box.first[2];
#if WEIGHTED
    column.weights = reinterpret_cast<S*>(shared + args.weights_at);
    const S* const line_weights = column.weights + args.box[2];
    column.slice_weights = line_weights + args.box[1];
#endif
    const int end = min(at1 + args.run, box.count[1]);
    int position = (o0 * windows.y_size[1] + box.base[1] + at1) * windows.y_size[2] + o2;
    const i64 to = (box.plane + plane) * outputs;
#if KIND == 0
    S across = S(1);
    if (windows.by_outputs) {
      across = static_cast<S>(windows.counted[0].size(o0)) *
               static_cast<S>(windows.counted[2].size(o2));
    }
#endif
#if KIND != 2 && LINES
    Part kept[LINES];
    int next = 0;
#endif
    for (int i = at1; i < end; ++i, position += windows.y_size[2]) {
      const int2 range = ranges[i];
      [[maybe_unused]] Part total;
#if KIND == 2
#pragma unroll 1
      for (int i0 = column.start0; i0 < (SIMPLE ? 1 : column.stop0); ++i0) {
#pragma unroll 1
        for (int line = range.x; line < range.y; ++line) {
          const int from = lead + i0 * args.pitch[0] + line * args.pitch[1];
          const auto tap = [&](int i2) {
            if (indices[from + i2] != position) return;
            ++matches;
            total.value += widen(x[from + i2]);
          };
#if TAPS
#pragma unroll
          for (int t = 0; t < TAPS; ++t) {
            if (column.start2 + t < column.stop2) tap(column.start2 + t);
          }
#else
#pragma unroll 4
          for (int i2 = column.start2; i2 < column.stop2; ++i2) tap(i2);
#endif
        }
      }
#elif LINES
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
      T* const y = static_cast<T*>(windows.y) + to + position;
#if KIND == 1
      if (windows.indices != nullptr) {
        static_cast<INDEX*>(windows.indices)[to + position] = total.where;
      }
      if (windows.y != nullptr) *y = total.stored;
#elif KIND == 2
      *y = narrow<T>(total.value);
#else
      if (windows.by_outputs) {
        by = across * static_cast<S>(windows.counted[1].size(box.base[1] + i));
        reciprocal = S(1) / by;
      }
      *y = narrow<T>(divided(total.value, by, reciprocal));
#endif
    }
  }
#if KIND == 2
  const i64 x_plane = static_cast<i64>(windows.x_size[0]) * windows.x_size[1] * windows.x_size[2];
  if (windows.bad != nullptr) count_missing(matches, windows.bad, x_plane * windows.batch);
#endif
}
