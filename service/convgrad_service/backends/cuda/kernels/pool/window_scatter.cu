// Scatter of elements by indices, for windows of any kind, channels first: the gradient of max pooling
// from the indices of the maxima, and max unpooling. Launched by window_scatter.py.
//
// y[i] = sum of x[o] over the windows o that contain i and whose index is i; with MOVE, the last of
// them, bit by bit; 0 if there are none. An index outside its window sets bad[MOVE] unless `bad` is
// null.
// A block clears the cells of a tile of y in shared memory, copies the box of x and indices
// (window_box.cuh), lets one thread for each window add to the cell of its index, and stores the
// cells. A position is in at most `phases` adjacent windows along each axis; windows whose numbers are
// equal modulo `phases` are added between two barriers, so no two threads have the same cell.
// With MOVE a cell is the number of the last window. SIMPLE: planes of one slice, and windows that slide
// by whole positions.
// Block: 256 threads. Dynamic shared memory: x, indices, cells, unless SIMPLE the ranges of
// windows along axes 1 and 2. Deterministic, no atomics: the order
// of additions follows from the windows' numbers. Memory-safe for any index. Index limits: planes, and
// elements of a box, below 2^31; offsets in 64 bits.
#include "pool/window_box.cuh"

using namespace convgrad;

namespace {

using T = ELEMENT;
using S = ElementAccumulator<T>;

// The target of a window, and how it meets others; zero bits: nothing yet.
#if MOVE
struct Cell {
  int last;  // one more than the number of the window in the box
  __device__ __forceinline__ void meet(const T*, int own) { last = max(last, own + 1); }
  __device__ __forceinline__ T element(const T* x) const { return last ? x[last - 1] : T{}; }
};
#else
struct Cell {
  S sum;
  __device__ __forceinline__ void meet(const T* x, int own) { sum += widen(x[own]); }
  __device__ __forceinline__ T element(const T*) const { return narrow<T>(sum); }
};
#endif

__device__ __forceinline__ int2 range_of(const BoxArgs& args, const Box& box, int axis, int o) {
  const WindowRange& range = args.windows.counted[axis];
  const int window = box.first[axis] + o;
  return make_int2(window_start<SIMPLE>(range, window), window_stop<SIMPLE>(range, window));
}

}  // namespace

// More blocks hide more latency; compilers for other GPUs need more registers.
#if __CUDA_ARCH__ == 900
constexpr int kBlocks = sizeof(T) == 8 ? 5 : 6;
#else
constexpr int kBlocks = 4;
#endif

extern "C" __global__ void __launch_bounds__(kBoxThreads, kBlocks)
    window_scatter(const __grid_constant__ BoxArgs args) {
  extern __shared__ __align__(16) unsigned char shared[];
  const WindowArgs& windows = args.windows;
  const Box box(args);
  const T* const x = box.load<T>(args, windows.x, shared);
  const INDEX* const indices = box.load<INDEX>(args, windows.indices, shared + args.indices_at);
  const int thread = static_cast<int>(threadIdx.x);
  for (int at = args.y_at + thread * 16; at < args.ranges_at; at += kBoxThreads * 16) {
    *reinterpret_cast<uint4*>(shared + at) = {};
  }
  constexpr int kChunk = 16 / sizeof(T);
  Cell* const cells = reinterpret_cast<Cell*>(shared + args.y_at) +
                      static_cast<int>(box.y_begin(windows) % kChunk);
  // Of lines, and of columns unless they are many.
  [[maybe_unused]] int2* const ranges = reinterpret_cast<int2*>(shared + args.ranges_at);
  for (int i = thread; i < args.ranges; i += kBoxThreads) {
    const int column = i - args.box[1];
    ranges[i] = column < 0 ? range_of(args, box, 1, i) : range_of(args, box, 2, column);
  }
  const auto lines_of = [&](int at1) { return SIMPLE ? range_of(args, box, 1, at1) : ranges[at1]; };
  const auto columns_of = [&](int at2) {
    if (SIMPLE || args.ranges <= args.box[1]) return range_of(args, box, 2, at2);
    return ranges[args.box[1] + at2];
  };
  cp_async_wait<0>();
  __syncthreads();

  const int size1 = windows.y_size[1], size2 = windows.y_size[2];
  const int plane_size = windows.y_size[0] * size1 * size2;
  // The positions of a plane in the tile; unless `by_lines`, they are adjacent.
  const int tile_first = (box.base[0] * size1 + box.base[1]) * size2;
  const int tile_size = args.whole ? plane_size : box.count[1] * size2;
  // Adds a window to the cell of its index; false if that is not in the window.
  const auto add = [&](int plane, int own, int2 range0, int2 range1, int2 range2) {
    const INDEX index = indices[own];
    if (sizeof(INDEX) > 4 && static_cast<i64>(index) >> 32 != 0) return false;
    // From the first position of the window; all of its lines are in one slice if SIMPLE.
    const int position = static_cast<int>(index);
    const int from_first = position - (range0.x * size1 + range1.x) * size2 - range2.x;
    int i1 = divide(from_first, args.by_y_size[2]);
    const int i2 = from_first - i1 * size2;
    int i0 = 0;
    if constexpr (!SIMPLE) {
      i0 = divide(i1, args.by_y_size[1]);
      i1 -= i0 * size1;
    }
    const auto below = [](int i, int2 range) {
      return static_cast<u32>(i) < static_cast<u32>(range.y - range.x);
    };
    if (!below(i0, range0) || !below(i1, range1) || !below(i2, range2)) return false;
    int cell = position - tile_first;
    bool mine = static_cast<u32>(cell) < static_cast<u32>(tile_size);
    cell += plane * plane_size;
    if (args.by_lines) {
      const int y1 = range1.x + i1 - box.base[1], y2 = range2.x + i2 - box.base[2];
      mine = range0.x + i0 == box.base[0] && y1 >= 0 && y1 < box.count[1] && y2 >= 0 && y2 < box.count[2];
      cell = y1 * args.y_pitch + y2;
    }
    if (mine) cells[cell].meet(x, own);  // else another block's
    return true;
  };
  const int phases = args.phases[0] * args.phases[1] * args.phases[2];
  int lead[3];  // of windows with number 0 modulo `phases`
#pragma unroll
  for (int axis = 0; axis < 3; ++axis) {
    const int n = args.phases[axis];
    lead[axis] = box.first[axis] == 0 ? 0 : n - 1 - (box.first[axis] + n - 1) % n;
  }
  // A phase's lines, of which a thread has every `together`-th, and there its column or every 256th.
  const int columns = args.in_phase[2], own_line = divide(thread, args.by_phase[2]);
  const int together = max(1, divide(kBoxThreads, args.by_phase[2]));
  const int lines = own_line < together ? box.planes * args.in_phase[0] * args.in_phase[1] : 0;
  bool good = true;
  int phase[3] = {0, 0, 0};
#pragma unroll 1
  for (int p = 0; p < phases; ++p) {
    int first[3];
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) {
      first[axis] = lead[axis] + phase[axis];
      if (first[axis] >= args.phases[axis]) first[axis] -= args.phases[axis];
    }
    const auto add_line = [&](int line, int at2, int2 range2) {
      const int slice = divide(line, args.by_phase[1]);
      const int at1 = first[1] + (line - slice * args.in_phase[1]) * args.phases[1];
      const int plane = SIMPLE ? slice : divide(slice, args.by_phase[0]);
      const int at0 = SIMPLE ? 0 : first[0] + (slice - plane * args.in_phase[0]) * args.phases[0];
      if (at1 >= box.extent[1] || (!SIMPLE && at0 >= box.extent[0])) return;
      const int2 range0 = SIMPLE ? make_int2(0, 1) : range_of(args, box, 0, at0), range1 = lines_of(at1);
      const int own = plane * args.pitch[0] + (SIMPLE ? 0 : at0 * args.pitch[1]) + at1 * args.pitch[2];
      if (columns <= kBoxThreads) {
        good &= add(plane, own + at2, range0, range1, range2);
        return;
      }
      for (; at2 < box.extent[2]; at2 += kBoxThreads * args.phases[2]) {
        good &= add(plane, own + at2, range0, range1, columns_of(at2));
      }
    };
    const int at2 = first[2] + (thread - own_line * columns) * args.phases[2];
    if (at2 < box.extent[2]) {
      const int2 range2 = columns_of(at2);
#pragma unroll 1
      for (int line = own_line; line < lines; line += together) add_line(line, at2, range2);
    }
    __syncthreads();
#pragma unroll
    for (int axis = 2; axis >= 0; --axis) {
      if (++phase[axis] < args.phases[axis]) break;
      phase[axis] = 0;
    }
  }
  if (!good && windows.bad != nullptr) windows.bad[MOVE] = 1;  // all writers write the same value
  box.store<T>(args, windows.y, cells, [&](const Cell& cell) { return cell.element(x); });
}
