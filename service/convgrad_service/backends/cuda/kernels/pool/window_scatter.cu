// Scatter of elements by indices, for windows of any kind, channels first: the gradient of max pooling
// from the indices of the maxima, and max unpooling. The host's side is window_scatter.py.
//
// y[i] = sum of x[o] over the windows o that contain i and whose index is i; with MOVE, the last of
// them, bit by bit; 0 if there are none. An index outside its window sets bad[MOVE] unless `bad` is
// null.
// A block clears the cells of a tile of y in shared memory, copies the box of x and indices
// (window_box.cuh), lets one thread for each window add to the cell of its index, and stores the
// cells. A position is in at most `phases` adjacent windows along each axis; windows whose numbers are
// equal modulo `phases` are added between two barriers, so no two threads have the same cell. With MOVE
// a cell is the number of the last window. FLAT: planes of one slice.
// Block: 256 threads. Dynamic shared memory: x, indices, cells, the windows' ranges of lines and
// columns. Deterministic, no atomics: the order of additions follows from the windows' numbers.
// Memory-safe for any index. Index limits: planes, and elements of a box, below 2^31; offsets in 64
// bits.
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
  return make_int2(range.start(box.first[axis] + o), range.stop(box.first[axis] + o));
}
__device__ __forceinline__ bool within(int i, int2 range) { return i >= range.x && i < range.y; }

}  // namespace

extern "C" __global__ void __launch_bounds__(kBoxThreads, 4)
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
  int2* const ranges = reinterpret_cast<int2*>(shared + args.ranges_at);
  const int lines = args.box[1];
  const bool columns = args.ranges > lines;
  for (int i = thread; i < args.ranges; i += kBoxThreads) {
    ranges[i] = i < lines ? range_of(args, box, 1, i) : range_of(args, box, 2, i - lines);
  }
  cp_async_wait<0>();
  __syncthreads();

  const int size1 = windows.y_size[1], size2 = windows.y_size[2];
  const int plane_size = windows.y_size[0] * size1 * size2;
  int lead[3];  // of windows with number 0 modulo `phases`
#pragma unroll
  for (int axis = 0; axis < 3; ++axis) {
    const int n = args.phases[axis];
    lead[axis] = n - 1 - (box.first[axis] + n - 1) % n;
  }
  const int items = box.planes * args.in_phase[0] * args.in_phase[1] * args.in_phase[2];
  const int phases = args.phases[0] * args.phases[1] * args.phases[2];
  // The cell of an item's window, which is x[own]; -1 if there is none.
  const auto target = [&](int item, const int (&first)[3], int& own) {
    if (item >= items) return -1;
    const int line = divide(item, args.by_phase[2]);
    const int slice = divide(line, args.by_phase[1]);
    const int plane = FLAT ? slice : divide(slice, args.by_phase[0]);
    const int at2 = first[2] + (item - line * args.in_phase[2]) * args.phases[2];
    const int at1 = first[1] + (line - slice * args.in_phase[1]) * args.phases[1];
    const int at0 = FLAT ? 0 : first[0] + (slice - plane * args.in_phase[0]) * args.phases[0];
    if (at0 >= box.extent[0] || at1 >= box.extent[1] || at2 >= box.extent[2]) return -1;
    own = plane * args.pitch[0] + at0 * args.pitch[1] + at1 * args.pitch[2] + at2;
    const INDEX index = indices[own];
    const bool exists = index >= 0 && index < plane_size;
    const int position = exists ? static_cast<int>(index) : 0;
    const int row = divide(position, args.by_y_size[2]), i2 = position - row * size2;
    const int i0 = FLAT ? 0 : divide(row, args.by_y_size[1]), i1 = row - i0 * size1;
    const int2 range2 = columns ? ranges[lines + at2] : range_of(args, box, 2, at2);
    if (!exists || !within(i1, ranges[at1]) || !within(i2, range2) ||
        !(FLAT || within(i0, range_of(args, box, 0, at0)))) {
      if (windows.bad != nullptr) windows.bad[MOVE] = 1;  // all writers write the same value
      return -1;
    }
    const int y0 = i0 - box.base[0], y1 = i1 - box.base[1], y2 = i2 - box.base[2];
    const bool mine = y0 >= 0 && y0 < box.count[0] && y1 >= 0 && y1 < box.count[1] && y2 >= 0 &&
                      y2 < box.count[2];
    if (!mine) return -1;  // another block's
    return args.whole ? plane * plane_size + position : y1 * args.y_pitch + y2;
  };
  int phase[3] = {0, 0, 0};
#pragma unroll 1
  for (int p = 0; p < phases; ++p) {
    int first[3];
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) {
      first[axis] = lead[axis] + phase[axis];
      if (first[axis] >= args.phases[axis]) first[axis] -= args.phases[axis];
    }
    for (int item = thread; item < items; item += kBoxThreads) {
      int own;
      const int to = target(item, first, own);
      if (to >= 0) cells[to].meet(x, own);
    }
    __syncthreads();
#pragma unroll
    for (int axis = 2; axis >= 0; --axis) {
      if (++phase[axis] < args.phases[axis]) break;
      phase[axis] = 0;
    }
  }
  box.store<T>(args, cells, [&](const Cell& cell) { return cell.element(x); });
}
