// Pooling over windows of any kind, channels first: averages, or with MAXIMA the maxima
// and their positions. The host's side is window_planes.py.
//
// Averages: y[o] = (sum of x[i] over the window of o) / divisor(o); with WEIGHTED the terms are
// x[i] / size(i), for gradients of windows that differ in size.
// Maxima: y[o] = the maximum, indices[o] = its flat position in the plane. Of equal maxima the first
// wins; a NaN wins over any number, and of several NaNs the last.
//
// A block computes a tile of y in `planes` adjacent planes. It copies the box of x that the tile's
// windows cover to shared memory, in 16-byte chunks whatever the alignment of rows: whole planes as one
// segment, otherwise the lines of each slice along axis 0 as one segment, or with `by_rows` each line.
// A segment keeps its misalignment in shared memory. With ROW_SUMS the sum of each line over each
// window along axis 2 is computed once, and added to every window that contains the line. Otherwise
// each window is read on its own. Adjacent threads have adjacent columns.
// Block: 256 threads. Dynamic shared memory: the box, with ROW_SUMS a sum per line and column of the
// tile, with WEIGHTED a weight per column, line and slice of the box. Deterministic: terms of a line
// are added from left to right, then lines in order, however the tile is chosen.
// Relies on its launcher for x aligned to 16 bytes, pitches that are equal to those of x modulo 16
// bytes, and windows that contain a position for maxima.
// Index limits: planes, and elements of a tile, below 2^31; offsets in 64 bits.
#include "pool/windows.cuh"
#include "ptx/mma.cuh"

using namespace convgrad;

namespace {

using T = ELEMENT;
using S = ElementAccumulator<T>;
constexpr int kThreads = 256;
constexpr int kChunk = 16 / sizeof(T);

struct PlanesArgs {
  WindowArgs windows;
  int tile[3];   // positions of y
  int tiles[3];  // of a plane, along each axis
  int box[3];    // the most positions of x under a tile
  int planes;    // of a block
  int pitch[2];  // elements between slices, and between lines, in shared memory
  int whole;     // whether a block has whole planes
  int by_rows;   // whether each line is a segment
  int sums_at, weights_at;  // bytes, in shared memory
  Divider by_tile[3], by_lines;
};

// What a block computes and holds, along each axis.
struct Box {
  int base[3], count[3];    // positions of y
  int first[3], extent[3];  // positions of x
  int plane, planes;
  int lead;  // misalignment of the first segment, in elements
};

__device__ __forceinline__ Box box_of(const PlanesArgs& args) {
  Box box;
  int rest = static_cast<int>(blockIdx.x);
#pragma unroll
  for (int axis = 2; axis >= 0; --axis) {
    const int outer = rest / args.tiles[axis];
    box.base[axis] = (rest - outer * args.tiles[axis]) * args.tile[axis];
    rest = outer;
    box.count[axis] = min(args.tile[axis], args.windows.y_size[axis] - box.base[axis]);
    const WindowRange& range = args.windows.window[axis];
    box.first[axis] = range.start(box.base[axis]);
    box.extent[axis] = max(0, range.stop(box.base[axis] + box.count[axis] - 1) - box.first[axis]);
    if (args.whole || (axis == 2 && !args.by_rows)) {
      box.first[axis] = 0;
      box.extent[axis] = args.windows.x_size[axis];
    }
  }
  box.plane = rest * args.planes;
  box.planes = min(args.planes, args.windows.batch - box.plane);
  return box;
}

// Copies the box; returns the misalignment of its first segment.
__device__ __forceinline__ int stage(const PlanesArgs& args, const Box& box, u32 to) {
  const T* const x = static_cast<const T*>(args.windows.x);
  const int(&size)[3] = args.windows.x_size;
  const i64 slice = static_cast<i64>(size[1]) * size[2], plane = slice * size[0];
  const i64 all = plane * args.windows.batch;
  const i64 begin = box.plane * plane + box.first[0] * slice +
                    static_cast<i64>(box.first[1]) * size[2] + box.first[2];
  const int lead = static_cast<int>(begin % kChunk);
  int segments = box.extent[0], length = box.extent[1] * size[2], lines = 1;
  if (args.whole) {
    segments = 1;
    length = box.planes * static_cast<int>(plane);
  } else if (args.by_rows) {
    lines = box.extent[1];
    segments *= lines;
    length = box.extent[2];
  }
  for (int segment = 0; segment < segments; ++segment) {
    const int at0 = segment / lines, at1 = segment - at0 * lines;
    const i64 from = begin + at0 * slice + static_cast<i64>(at1) * size[2];
    const int into = lead + at0 * args.pitch[0] + at1 * args.pitch[1];
    const int head = into % kChunk;
    const int chunks = length > 0 ? (head + length + kChunk - 1) / kChunk : 0;
    for (int c = static_cast<int>(threadIdx.x); c < chunks; c += kThreads) {
      const i64 at = from - head + static_cast<i64>(c) * kChunk;
      const int there = static_cast<int>(min(all - at, static_cast<i64>(kChunk)));
      cp_async<16>(to + (into - head + c * kChunk) * static_cast<int>(sizeof(T)), x + at,
                   there * static_cast<int>(sizeof(T)));
    }
  }
  cp_async_commit();
  return lead;
}

// Sums of lines, with the reciprocals of the window sizes of their terms.
struct Lines {
  const T* x;
  const S* weights;  // of columns

  __device__ __forceinline__ S sum(int start, int stop) const {
    S total = S(0);
#pragma unroll 4
    for (int i = start; i < stop; ++i) {
      const S value = widen(x[i]);
      total = WEIGHTED ? multiply_add(value, weights[i], total) : total + value;
    }
    return total;
  }
};

#if WEIGHTED
__device__ __forceinline__ void weigh(const PlanesArgs& args, const Box& box, S* weights) {
#pragma unroll
  for (int axis = 2; axis >= 0; --axis) {
    for (int i = static_cast<int>(threadIdx.x); i < box.extent[axis]; i += kThreads) {
      weights[i] = S(1) / static_cast<S>(args.windows.counted[axis].size(box.first[axis] + i));
    }
    weights += args.box[axis];
  }
}
#endif

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 4)
    window_planes(const __grid_constant__ PlanesArgs args) {
  extern __shared__ __align__(16) unsigned char shared[];
  Box box = box_of(args);
  box.lead = stage(args, box, shared_address(shared));
  // Positions of x, less those before the box.
  const T* const x = reinterpret_cast<const T*>(shared) + box.lead;
#if WEIGHTED
  S* const weights = reinterpret_cast<S*>(shared + args.weights_at);
  const S* const line_weights = weights + args.box[2];
  const S* const slice_weights = line_weights + args.box[1];
  weigh(args, box, weights);
#else
  const S* const weights = nullptr;
#endif
  cp_async_wait<0>();
  __syncthreads();
  const WindowArgs& windows = args.windows;
  const int slices = box.extent[0], width = args.tile[2];

#if ROW_SUMS
  S* const sums = reinterpret_cast<S*>(shared + args.sums_at);
  const int line_items = box.planes * slices * args.box[1] * width;
  for (int item = static_cast<int>(threadIdx.x); item < line_items; item += kThreads) {
    const int line = divide(item, args.by_tile[2]), column = item - line * width;
    const int slice = divide(line, args.by_lines), at1 = line - slice * args.box[1];
    if (column >= box.count[2] || at1 >= box.extent[1]) continue;
    const WindowRange& range = windows.window[2];
    const int o2 = box.base[2] + column;
    const Lines lines{x + slice * args.pitch[0] + at1 * args.pitch[1], weights};
    sums[item] = lines.sum(range.start(o2) - box.first[2], range.stop(o2) - box.first[2]);
  }
  __syncthreads();
#endif

  const i64 outputs = static_cast<i64>(windows.y_size[0]) * windows.y_size[1] * windows.y_size[2];
  const int items = box.planes * args.tile[0] * args.tile[1] * width;
  for (int item = static_cast<int>(threadIdx.x); item < items; item += kThreads) {
    int rest = item, at[3];
#pragma unroll
    for (int axis = 2; axis >= 0; --axis) {
      const int outer = divide(rest, args.by_tile[axis]);
      at[axis] = rest - outer * args.tile[axis];
      rest = outer;
    }
    if (at[0] >= box.count[0] || at[1] >= box.count[1] || at[2] >= box.count[2]) continue;
    int start[3], stop[3];  // within the box
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) {
      const int o = box.base[axis] + at[axis];
      start[axis] = windows.window[axis].start(o) - box.first[axis];
      stop[axis] = windows.window[axis].stop(o) - box.first[axis];
    }
    const int o0 = box.base[0] + at[0], o1 = box.base[1] + at[1], o2 = box.base[2] + at[2];
    const i64 to = (box.plane + rest) * outputs +
                   (static_cast<i64>(o0) * windows.y_size[1] + o1) * windows.y_size[2] + o2;
#if MAXIMA
    T most = narrow<T>(S(0));
    int where = -1;
#else
    S total = S(0);
#endif
    for (int i0 = start[0]; i0 < stop[0]; ++i0) {
      const int slice = rest * slices + i0;
#if ROW_SUMS
      const S* const line = sums + (slice * args.box[1]) * width + at[2];
#pragma unroll 4
      for (int i1 = start[1]; i1 < stop[1]; ++i1) {
        const S part = line[i1 * width];
#if WEIGHTED
        total = multiply_add(part, line_weights[i1] * slice_weights[i0], total);
#else
        total += part;
#endif
      }
#else
      for (int i1 = start[1]; i1 < stop[1]; ++i1) {
        const T* const line = x + slice * args.pitch[0] + i1 * args.pitch[1];
#if MAXIMA
        const int first = ((box.first[0] + i0) * windows.x_size[1] + box.first[1] + i1) *
                              windows.x_size[2] + box.first[2];
#pragma unroll 4
        for (int i2 = start[2]; i2 < stop[2]; ++i2) {
          const S found = widen(line[i2]);
          if (where < 0 || found > widen(most) || found != found) {
            most = line[i2];
            where = first + i2;
          }
        }
#else
        const S part = Lines{line, weights}.sum(start[2], stop[2]);
#if WEIGHTED
        total = multiply_add(part, line_weights[i1] * slice_weights[i0], total);
#else
        total += part;
#endif
#endif
      }
#endif
    }
#if MAXIMA
    if (windows.y != nullptr) static_cast<T*>(windows.y)[to] = most;
    if (windows.indices != nullptr) static_cast<INDEX*>(windows.indices)[to] = where;
#else
    const DividedBy<S> division(windows, o0, o1, o2);
    static_cast<T*>(windows.y)[to] = narrow<T>(division(total));
#endif
  }
}
