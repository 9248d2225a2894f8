// Pooling over windows of any kind, channels first. Launched by window_planes.py.
//
// Averages: y[o] = (sum of x[i] over the window of o) / divisor(o); with WEIGHTED the terms are
// x[i] / size(i), for gradients of windows that differ in size.
// MAXIMA: y[o] = the maximum, indices[o] = its flat position in the plane. Of equal maxima the first
// wins; a NaN wins over any number, and of several NaNs the last. With LINES 0, x's elements may have other
// numbers than their positions.
//
// A block computes a tile of y from the box of x that its windows cover (window_box.cuh). A thread
// computes `run` adjacent positions of y along axis 1 in kTogether planes; beyond the last plane, those
// are the first again. Adjacent threads have adjacent columns.
// LINES, TAPS: windows have at most so many positions along the last two axes. 0: windows of any size.
// LINE_SUMS: averages over windows of any size, from sums of a line's part of the windows, which the block stores in
// shared memory first.
// ROLLING: one slice, and windows of LINES lines that slide by so many of them; else 0. A line is reduced
// once, for all windows of a run that contain it.
// SIMPLE: one slice, and windows that slide by whole positions.
// With `staged`, which needs whole planes, results are stored in shared memory first, and from there in
// 16-byte chunks.
// Block: 256 threads. Dynamic shared memory: the box of x, staged results or sums of lines, the windows along axis 1
// of the tile, with WEIGHTED a weight per column, line and slice of the box. Deterministic: the order of
// additions follows from the windows, however the tile is chosen. Relies on windows that contain a
// position for maxima. Index limits: planes, and elements of a tile, below 2^31; offsets in 64 bits.
#include "pool/maximum.cuh"
#include "pool/window_box.cuh"
#include "pool/window_lines.cuh"
#include "ptx/shared_element.cuh"

using namespace convgrad;

namespace {

using T = ELEMENT;
using S = ElementAccumulator<T>;
constexpr int kBytes = sizeof(T), kTogether = kBytes == 8 || (MAXIMA && LINES == 3) ? 2 : 4;

#if MAXIMA
struct Part {
  Maximum<T> most;

  // Elements come in the order of their positions.
  __device__ __forceinline__ void take(T element, int position, S, bool begins, bool wanted) {
    most.take(element, position, begins, wanted);
  }
  __device__ __forceinline__ void meet(const Part& part, S, bool begins) {
    most.meet(part.most, begins);
  }
};
#else
// A sum, of which any zero counts as positive.
struct Part {
  S value = S(0);

  __device__ __forceinline__ void add(S term, S weight, bool begins, bool wanted) {
    if (begins) {
      value = WEIGHTED ? term * weight : term;
    } else if (wanted) {
      value = WEIGHTED ? multiply_add(term, weight, value) : value + term;
    }
  }
  __device__ __forceinline__ void take(T element, int, S weight, bool begins, bool wanted) {
    add(widen(element), weight, begins, wanted);
  }
  __device__ __forceinline__ void meet(const Part& part, S weight, bool begins) {
    add(part.value, weight, begins, true);
  }
};
#endif

// Of as many planes.
struct Parts {
  Part of[kTogether];

  // Adds the part of a line, for windows' first ones or for later ones.
  __device__ __forceinline__ void meet(const Parts& parts, S weight, bool begins) {
#pragma unroll
    for (int p = 0; p < kTogether; ++p) of[p].meet(parts.of[p], weight, begins);
  }
};

// What a thread reads: the columns [start, start + taps) of the box.
struct Column {
  u32 x[kTogether];  // of each plane, the first element of the first line, in shared memory
  int taps;
  int slice_pitch, line_pitch;  // bytes
  int slice_size, line_size, first;  // of x, for positions in the plane
#if WEIGHTED
  const S* weights;        // of these columns
  const S* slice_weights;
#endif

  __device__ __forceinline__ void advance(int lines) {
#pragma unroll
    for (int p = 0; p < kTogether; ++p) convgrad::advance(x[p], lines * line_pitch);
    first += lines * line_size;
  }
  // The part of a line, in the slices [first0, last0).
  __device__ __forceinline__ Parts line(int at, int first0, int last0) const {
#if LINE_SUMS
    Parts sums;
#pragma unroll
    for (int p = 0; p < kTogether; ++p) {
      sums.of[p].value = element_at<S>(x[p] + first0 * slice_pitch + at * line_pitch);
    }
    return sums;
#endif
    constexpr bool kBegins = SIMPLE || MAXIMA;
    Parts parts;
#pragma unroll 1
    for (int slice = first0; slice < (SIMPLE ? first0 + 1 : last0); ++slice) {
      const int offset = slice * slice_pitch + at * line_pitch;
      [[maybe_unused]] const int position = first + slice * slice_size + at * line_size;
      [[maybe_unused]] S by_slice = S(1);
#if WEIGHTED
      by_slice = slice_weights[slice];
#endif
      const auto tap = [&](int t) {
        const bool begins = kBegins && t == 0, wanted = begins || t < taps;
        S weight = S(1);
#if WEIGHTED
        weight = weights[t] * by_slice;
#endif
#pragma unroll
        for (int p = 0; p < kTogether; ++p) {
          const T element = element_at<T>(x[p] + offset + t * kBytes);
          parts.of[p].take(element, position + t, weight, begins, wanted);
        }
      };
#if TAPS
      // What follows the last line of the box is in shared memory too.
#pragma unroll
      for (int t = 0; t < TAPS; ++t) tap(t);
#else
      tap(0);
#pragma unroll 2
      for (int t = 1; t < taps; ++t) tap(t);
#endif
    }
    return parts;
  }
};

}  // namespace

// Large windows' maxima need more registers on other GPUs.
#if __CUDA_ARCH__ == 900
constexpr int kBlocks = sizeof(T) == 8 ? 3 : MAXIMA && LINES == 3 ? 5 : 4;
#else
constexpr int kBlocks = sizeof(T) == 8 || (MAXIMA && !LINES) ? 3 : 4;
#endif

extern "C" __global__ void __launch_bounds__(kBoxThreads, kBlocks)
    window_planes(const __grid_constant__ BoxArgs args) {
  extern __shared__ __align__(16) unsigned char shared[];
  const WindowArgs& windows = args.windows;
  const Box box(args);
  const u32 x = shared_address(box.load<T>(args, windows.x, shared));
#if !ROLLING
  int2* const ranges = reinterpret_cast<int2*>(shared + args.ranges_at);
  for (int i = static_cast<int>(threadIdx.x); i < box.count[1]; i += kBoxThreads) {
    const int o = box.base[1] + i;
    ranges[i] = make_int2(window_start<SIMPLE>(windows.window[1], o) - box.first[1],
                          window_stop<SIMPLE>(windows.window[1], o) - box.first[1]);
  }
#endif
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
#if LINE_SUMS
  const u32 line_sums = shared_address(shared + args.y_at);
  sum_lines<T, WEIGHTED>(args, box, x, line_sums, reinterpret_cast<const S*>(shared + args.weights_at));
  __syncthreads();
#endif

  const int runs = (args.tile[1] + windows.run - 1) / windows.run;
  const int groups = (box.planes + kTogether - 1) / kTogether;
  const int items = groups * args.tile[0] * runs * args.tile[2];
  // Elements of y are numbered from the block's first plane on.
  const i64 outputs = static_cast<i64>(windows.y_size[0]) * windows.y_size[1] * windows.y_size[2];
  const i64 begin = box.plane * outputs;
  T* y = static_cast<T*>(windows.y) + begin;
  if (args.staged) y = reinterpret_cast<T*>(shared + args.y_at) + static_cast<int>(begin % (16 / kBytes));
#if MAXIMA
  const bool wide = windows.wide_indices && !args.staged;
  void* places = static_cast<char*>(windows.indices) + begin * (wide ? 8 : 4);
  if (args.staged) {
    const int lead = static_cast<int>(begin % (windows.wide_indices ? 2 : 4));
    places = reinterpret_cast<int*>(shared + args.places_at) + lead;
  }
#endif
  for (int item = static_cast<int>(threadIdx.x); item < items; item += kBoxThreads) {
    const int above = divide(item, args.by_tile[2]), at2 = item - above * args.tile[2];
    const int outer = divide(above, args.by_tile[1]), at1 = (above - outer * runs) * windows.run;
    const int group = SIMPLE ? outer : divide(outer, args.by_tile[0]);
    const int at0 = outer - group * args.tile[0], plane = group * kTogether;
    if (at0 >= box.count[0] || at1 >= box.count[1] || at2 >= box.count[2]) continue;
    const int o0 = box.base[0] + at0, o2 = box.base[2] + at2;
    const int start0 = SIMPLE ? 0 : window_start(windows.window[0], o0) - box.first[0];
    const int stop0 = SIMPLE ? 1 : window_stop(windows.window[0], o0) - box.first[0];
    const int start2 = window_start<SIMPLE>(windows.window[2], o2) - box.first[2];
    Column column;
    column.taps = window_stop<SIMPLE>(windows.window[2], o2) - box.first[2] - start2;
#if LINE_SUMS
    column.line_pitch = args.tile[2] * static_cast<int>(sizeof(S));
    column.slice_pitch = args.box[1] * column.line_pitch;
#else
    column.slice_pitch = args.pitch[1] * kBytes;
    column.line_pitch = args.pitch[2] * kBytes;
#endif
    column.line_size = windows.x_size[2];
    column.slice_size = windows.x_size[1] * windows.x_size[2];
    column.first = (box.first[0] * windows.x_size[1] + box.first[1]) * windows.x_size[2] +
                   box.first[2] + start2;
#if WEIGHTED
    const S* const column_weights = reinterpret_cast<const S*>(shared + args.weights_at);
    const S* const line_weights = column_weights + args.box[2];
    column.weights = column_weights + start2;
    column.slice_weights = line_weights + args.box[1];
#endif
    u32 target[kTogether];  // of each plane
    const int position = (o0 * windows.y_size[1] + box.base[1] + at1) * windows.y_size[2] + o2;
#pragma unroll
    for (int p = 0; p < kTogether; ++p) {
      const int own = plane + p < box.planes ? plane + p : plane;
#if LINE_SUMS
      column.x[p] = line_sums + own * args.box[0] * column.slice_pitch + at2 * static_cast<int>(sizeof(S));
#else
      column.x[p] = x + (own * args.pitch[0] + start2) * kBytes;
#endif
      target[p] = static_cast<u32>(own * outputs) + position;
    }
    const int end = min(at1 + windows.run, box.count[1]);
#if MAXIMA
    const auto finish = [&](int, Parts& total) {
#if !LINES
      if (windows.carried != nullptr) {
#pragma unroll
        for (int p = 0; p < kTogether; ++p) {
          const i64 own = box.plane + (plane + p < box.planes ? plane + p : plane);
          int& where = total.of[p].most.where;
          where = windows.carried[own * windows.x_plane + where];
        }
      }
#endif
      if (windows.y != nullptr) {
#pragma unroll
        for (int p = 0; p < kTogether; ++p) y[target[p]] = total.of[p].most.element();
      }
      if (windows.indices != nullptr && wide) {
#pragma unroll
        for (int p = 0; p < kTogether; ++p) static_cast<i64*>(places)[target[p]] = total.of[p].most.where;
      } else if (windows.indices != nullptr) {
#pragma unroll
        for (int p = 0; p < kTogether; ++p) static_cast<int*>(places)[target[p]] = total.of[p].most.where;
      }
#pragma unroll
      for (int p = 0; p < kTogether; ++p) advance(target[p], windows.y_size[2]);
    };
#else
    DividedBy<T, SIMPLE> division(windows, o0, box.base[1] + at1, o2);
    int size1 = window_size<SIMPLE>(windows.counted[1], box.base[1] + at1);
    const auto finish = [&](int i, const Parts& total) {
      if (windows.by_outputs) {
        const int size = window_size<SIMPLE>(windows.counted[1], box.base[1] + i);
        if (size != size1) division = DividedBy<T, SIMPLE>(windows, o0, box.base[1] + i, o2);
        size1 = size;
      }
#pragma unroll
      for (int p = 0; p < kTogether; ++p) {
        const S sum = total.of[p].value;
        // A sum of negative zeros is zero: that of a product with it, as of `divided`'s corrections.
        const S mean = sizeof(T) == 2 ? multiply_add(sum, division.reciprocal, S(0)) : division(sum);
        y[target[p]] = narrow<T>(mean);
        advance(target[p], windows.y_size[2]);
      }
    };
#endif
#if ROLLING
    const WindowRange& sliding = windows.window[1];
    // The next line of the box, and how many there are, both from the first one that exists.
    int next = (box.base[1] + at1) * ROLLING + sliding.first - sliding.low;
    const int lines = column.taps > 0 ? sliding.high - sliding.low : 0;
    column.advance((MAXIMA ? max(next, 0) : next) + sliding.low - box.first[1]);
    Parts kept[LINES];
    const auto keep = [&](int as) {
#if MAXIMA
      // Beside the lines that exist, the nearest of them, which is in the window as well.
      kept[as] = column.line(0, 0, 1);
      if (next >= 0 && next + 1 < lines) column.advance(1);
#else
      if (static_cast<u32>(next) < static_cast<u32>(lines)) {
        kept[as] = column.line(0, 0, 1);
      } else {
        kept[as] = {};
      }
      column.advance(1);
#endif
      ++next;
    };
#pragma unroll
    for (int l = 0; l + ROLLING < LINES; ++l) keep(l);
    for (int i = at1; i < end;) {
#pragma unroll
      for (int turn = 0; turn < LINES; ++turn) {
        if (i >= end) break;
#pragma unroll
        for (int l = LINES - ROLLING; l < LINES; ++l) keep((turn * ROLLING + l) % LINES);
        Parts total;
#pragma unroll
        for (int l = 0; l < LINES; ++l) {
          const int own = (turn * ROLLING + l) % LINES;
          total.meet(kept[own], S(1), l == 0);
        }
        finish(i++, total);
      }
    }
#else
    for (int i = at1; i < end; ++i) {
      const int2 range = ranges[i];
      Parts total;
      [[maybe_unused]] const auto weight_of = [&](int line) {
#if WEIGHTED
        return line_weights[line];
#else
        return S(1);
#endif
      };
#if LINES
      // Maxima come in the order of their positions; sums are of lines in all slices.
#pragma unroll 1
      for (int i0 = start0; i0 < (SIMPLE || !MAXIMA ? start0 + 1 : stop0); ++i0) {
#pragma unroll
        for (int l = 0; l < LINES; ++l) {
          const int line = range.x + l;
          const bool begins = l == 0 && (SIMPLE || !MAXIMA || i0 == start0);
          if (!(MAXIMA && l == 0) && (line >= range.y || column.taps <= 0)) continue;
          total.meet(column.line(line, i0, MAXIMA ? i0 + 1 : stop0), weight_of(line), begins);
        }
      }
#else
      for (int i0 = start0; i0 < stop0; ++i0) {
        for (int line = range.x; line < range.y; ++line) {
          if (!MAXIMA && column.taps <= 0) continue;
          const bool begins = MAXIMA && i0 == start0 && line == range.x;
          total.meet(column.line(line, i0, i0 + 1), weight_of(line), begins);
        }
      }
#endif
      finish(i, total);
    }
#endif
  }
  if (!args.staged) return;
  __syncthreads();
  const auto same = [](auto cell) { return cell; };
  if (windows.y != nullptr) box.store<T>(args, windows.y, y, same);
#if MAXIMA
  if (windows.indices == nullptr) return;
  if (windows.wide_indices) {
    box.store<i64>(args, windows.indices, static_cast<const int*>(places), same);
  } else {
    box.store<int>(args, windows.indices, static_cast<const int*>(places), same);
  }
#endif
}
