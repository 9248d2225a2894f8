// Scatter of elements by indices, for windows of any kind: the gradient of max pooling from the indices of
// the maxima, and max unpooling. Launched by window_scatter.py.
//
// y[i] = sum of x[o] over the windows o that contain i and whose index is i; with MOVE, the last of
// them, bit by bit; 0 if there are none. An index outside its window sets bad[MOVE] unless `bad` is
// null.
// A block has a cell in shared memory for each position of a tile of y, in whole planes or in adjacent
// elements of `inner`. A position is in at most `phases` adjacent windows along each axis, so windows whose
// numbers are equal modulo `phases` share no cell. A thread loads a window of each phase, and adds those
// that have their index in the tile to their cells, with a barrier after each phase.
// With MOVE a cell is the number of the last window.
// Block: as many threads as a phase has windows, at most 512. Dynamic shared memory: the cells.
// Deterministic, no atomics: the order of additions follows from the windows' numbers, however the tile is
// chosen. Memory-safe for any index. Preconditions: if `inner` is 1, cells are in the order of y's elements.
// Index limits: planes, and elements of an image of y, below 2^31; offsets in 64 bits.
#include "pool/windows.cuh"

using namespace convgrad;

namespace {

using T = ELEMENT;
using S = ElementAccumulator<T>;

struct ScatterArgs {
  WindowArgs windows;
  int tile[3];      // positions of y
  int tiles[3];     // of a plane, along each axis
  int planes;       // of a block
  int channels;     // of `inner`, of a block
  int chunks;       // of `inner`
  int vectors;      // whether cells of 16 bytes of adjacent channels are stored at once
  int phases[3];    // the most windows that contain a position
  int in_phase[3];  // windows of a phase
  int cells;        // bytes
  Divider by_tiles[3], by_chunks;
  Divider by_channels, by_in_phase[3];  // of threads
  Divider by_stores, by_tile[3];        // of cells
  Divider by_y_size[3];
};

// What a cell receives, and how it meets others; zero bits: nothing yet.
#if MOVE
struct Cell {
  int last;  // one more than the number of the window in the plane
  __device__ __forceinline__ void meet(T, int number) { last = max(last, number + 1); }
};
#else
struct Cell {
  S sum;
  __device__ __forceinline__ void meet(T value, int) { sum += widen(value); }
};
#endif

constexpr int kChunk = 16 / sizeof(T);
// Windows of a thread that are loaded before the first is added.
constexpr int kBatch = 4;

// The windows of a phase: the first of them along each axis, counted from that of the tile, and how many phases
// follow before the axis starts again.
struct Phase {
  int at[3], left[3];

  __device__ __forceinline__ void advance(const int (&phases)[3]) {
#pragma unroll
    for (int axis = 2; axis >= 0; --axis) {
      if (++at[axis] == phases[axis]) at[axis] = 0;
      if (--left[axis] > 0) return;
      left[axis] = phases[axis];
    }
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(512, 2)
    window_scatter(const __grid_constant__ ScatterArgs args) {
  extern __shared__ __align__(16) unsigned char shared[];
  const WindowArgs& windows = args.windows;
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int(&size)[3] = windows.y_size;
  // The tile, its first window along each axis and how many there are.
  int base[3], count[3], first[3], extent[3];
  int rest = static_cast<int>(blockIdx.x);
  const int group = divide(rest, args.by_chunks), lead_channel = (rest - group * args.chunks) * args.channels;
  rest = group;
#pragma unroll
  for (int axis = 2; axis >= 0; --axis) {
    const int outer = divide(rest, args.by_tiles[axis]);
    base[axis] = (rest - outer * args.tiles[axis]) * args.tile[axis];
    rest = outer;
    count[axis] = min(args.tile[axis], size[axis] - base[axis]);
    first[axis] = window_start(windows.window[axis], base[axis]);
    extent[axis] = window_stop(windows.window[axis], base[axis] + count[axis] - 1) - first[axis];
  }
  const int plane = rest * args.planes, planes = min(args.planes, windows.batch - plane);
  const int channels = min(args.channels, windows.inner - lead_channel);

  // A thread's window among those of a phase, whose numbers are zero modulo `phases` here.
  int own[3], own_plane = divide(thread, args.by_channels);
  const int channel = thread - own_plane * args.channels;
#pragma unroll
  for (int axis = 2; axis >= 0; --axis) {
    const int outer = divide(own_plane, args.by_in_phase[axis]);
    own[axis] = (own_plane - outer * args.in_phase[axis]) * args.phases[axis];
    own_plane = outer;
  }
  const bool mine = own_plane < planes && channel < channels;
  const i64 x_plane = static_cast<i64>(windows.x_plane) * windows.inner;
  const i64 image = (plane + own_plane) * x_plane + lead_channel + channel;
  Phase loading;
#pragma unroll
  for (int axis = 0; axis < 3; ++axis) {
    const int n = args.phases[axis];
    loading.at[axis] = first[axis] == 0 ? 0 : n - 1 - (first[axis] + n - 1) % n;
    loading.left[axis] = n;
  }
  Phase adding = loading;
  // The thread's window of a phase; false if there is none.
  const auto window_of = [&](const Phase& phase, int (&at)[3]) {
    bool there = mine;
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) {
      const int from_first = own[axis] + phase.at[axis];
      there &= from_first < extent[axis];
      at[axis] = first[axis] + from_first;
    }
    return there;
  };
  const auto number_of = [&](const int (&at)[3]) {
    return (at[0] * windows.x_size[1] + at[1]) * windows.x_size[2] + at[2];
  };
  const int phases = args.phases[0] * args.phases[1] * args.phases[2];
  Indices<1> indices[kBatch];
  T values[kBatch];
  const auto load = [&](int loaded) {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (loaded + b >= phases) break;
      int at[3];
      if (window_of(loading, at)) {
        const i64 from = image + static_cast<i64>(number_of(at)) * windows.inner;
        indices[b].load(windows.indices, from, windows.wide_indices);
        if (!MOVE) values[b] = static_cast<const T*>(windows.x)[from];
      }
      loading.advance(args.phases);
    }
  };
  load(0);
  for (int at = thread * 16; at < args.cells; at += threads * 16) {
    *reinterpret_cast<uint4*>(shared + at) = {};
  }
  // The first position of the tile in y, of the first plane.
  const int position = (base[0] * size[1] + base[1]) * size[2] + base[2];
  const i64 y_plane = static_cast<i64>(size[0]) * size[1] * size[2];
  const i64 begin = (plane * y_plane + position) * windows.inner + lead_channel;
  // If `inner` is 1, cells have the misalignment of y's elements.
  const int head = windows.inner == 1 ? static_cast<int>(begin % kChunk) : 0;
  Cell* const cells = reinterpret_cast<Cell*>(shared) + head;
  __syncthreads();

  const bool sliced = size[0] > 1;
  bool good = true;
  for (int added = 0;;) {
    int targets[kBatch];  // cells
    [[maybe_unused]] int numbers[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      targets[b] = -1;
      if (added + b >= phases) break;
      int at[3];
      const bool there = window_of(adding, at);
      adding.advance(args.phases);
      if (!there) continue;
      numbers[b] = number_of(at);
      int low[3], beyond[3];  // the first position of the window, and that of the index from there
#pragma unroll
      for (int axis = 0; axis < 3; ++axis) {
        low[axis] = axis || sliced ? window_start(windows.counted[axis], at[axis]) : 0;
      }
      const int index = indices[b].at(0, windows.wide_indices);
      const int distance = index - (low[0] * size[1] + low[1]) * size[2] - low[2];
      bool inside = index >= 0 && distance >= 0;
      beyond[1] = divide(distance, args.by_y_size[2]);
      beyond[2] = distance - beyond[1] * size[2];
      beyond[0] = 0;
      if (sliced) {
        beyond[0] = divide(beyond[1], args.by_y_size[1]);
        beyond[1] -= beyond[0] * size[1];
      }
      bool here = true;
      int cell = own_plane;
#pragma unroll
      for (int axis = 0; axis < 3; ++axis) {
        const int to = low[axis] + beyond[axis];
        if (axis || sliced) inside &= to < window_stop(windows.counted[axis], at[axis]);
        here &= static_cast<u32>(to - base[axis]) < static_cast<u32>(count[axis]);
        cell = cell * args.tile[axis] + to - base[axis];
      }
      good &= inside;
      if (inside && here) targets[b] = cell * args.channels + channel;
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (added + b >= phases) break;
      if (targets[b] >= 0) cells[targets[b]].meet(values[b], numbers[b]);
      __syncthreads();
    }
    added += kBatch;
    if (added >= phases) break;
    load(added);
  }
  if (!good && windows.bad != nullptr) windows.bad[MOVE] = 1;  // all writers write the same value

  // The element of a cell in the n-th plane.
  const auto element = [&](Cell cell, [[maybe_unused]] int n, [[maybe_unused]] int own_channel) {
#if MOVE
    if (cell.last == 0) return T{};
    const i64 from = (plane + n) * x_plane + static_cast<i64>(cell.last - 1) * windows.inner;
    return static_cast<const T*>(windows.x)[from + lead_channel + own_channel];
#else
    return narrow<T>(cell.sum);
#endif
  };
  constexpr int kCells = 16 / sizeof(Cell);
  T* const y = static_cast<T*>(windows.y) + begin;
  if (windows.inner == 1) {
    // One run of elements.
    const int own_cells = args.tile[0] * args.tile[1] * args.tile[2];
    const int length = planes == 1 ? count[0] * count[1] * count[2] : planes * own_cells;
    const auto plane_of = [&](int at) { return MOVE && planes > 1 ? at / own_cells : 0; };
    for (int at = thread * kChunk - head; at < length; at += threads * kChunk) {
      if (at < 0 || at + kChunk > length) {
        for (int e = max(at, 0); e < min(at + kChunk, length); ++e) y[e] = element(cells[e], plane_of(e), 0);
        continue;
      }
      Vector<T, kChunk> values;
#pragma unroll
      for (int e = 0; e < kChunk; e += kCells) {
        const auto part = Vector<Cell, kCells>::load(cells + at + e);
#pragma unroll
        for (int i = 0; i < kCells; ++i) values.at[e + i] = element(part.at[i], plane_of(at + e + i), 0);
      }
      values.store(y + at);
    }
    return;
  }
  const int width = args.vectors ? kChunk : 1, a_cell = args.channels / width;
  const int items = planes * args.tile[0] * args.tile[1] * args.tile[2] * a_cell;
  for (int item = thread; item < items; item += threads) {
    int outer = divide(item, args.by_stores);
    const int from = (item - outer * a_cell) * width;
    const Cell* const own_cells = cells + outer * args.channels + from;
    int to[3];
    bool there = from < channels;
#pragma unroll
    for (int axis = 2; axis >= 0; --axis) {
      const int above = divide(outer, args.by_tile[axis]);
      to[axis] = outer - above * args.tile[axis];
      there &= to[axis] < count[axis];
      outer = above;
    }
    if (!there) continue;
    T* const target = y + (outer * y_plane + (to[0] * size[1] + to[1]) * size[2] + to[2]) * windows.inner + from;
    if (!args.vectors) {
      *target = element(*own_cells, outer, from);
      continue;
    }
    Vector<T, kChunk> values;
#pragma unroll
    for (int e = 0; e < kChunk; e += kCells) {
      const auto part = Vector<Cell, kCells>::load(own_cells + e);
#pragma unroll
      for (int i = 0; i < kCells; ++i) values.at[e + i] = element(part.at[i], outer, from + e + i);
    }
    values.store(target);
  }
}
