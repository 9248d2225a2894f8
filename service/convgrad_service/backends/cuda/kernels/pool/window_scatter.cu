// Scatter of elements by indices, for windows of any kind: the gradient of max pooling from the indices of
// the maxima, and max unpooling. Launched by window_scatter.py.
//
// y[i] = sum of x[o] over the windows o that contain i and whose index is i; with MOVE, the last of
// them, bit by bit; 0 if there are none. An index outside its window sets bad[MOVE] unless `bad` is
// null.
// A block has a cell in shared memory for each position of a tile of y, in whole planes or in adjacent
// elements of `inner`. A position is in at most `phases` adjacent windows along each axis, so windows whose
// numbers are equal modulo `phases` share no cell. A thread loads `rounds` windows of each phase, and adds
// those that have their index in the tile to their cells, with a barrier after each phase.
// It does so for `repeats` groups of `planes` planes, one after another.
// With MOVE a cell is the number of the last window. SLICED: planes of several slices. SIMPLE: windows slide
// by whole positions.
// Block: at least as many threads as a round has windows, 128 to 256. Dynamic shared memory: the cells, the positions of
// windows along each axis, and of each round how far its windows are from the first round's.
// VECTOR: adjacent elements of `inner` of a thread, aligned. SOURCE: the type of x.
// Deterministic, no atomics: the order of additions follows from the windows' numbers, however the tile is
// chosen. Memory-safe for any index. Preconditions: if `inner` is 1, cells are in the order of y's elements.
// Index limits: elements of an image of x and of y below 2^31; offsets in 64 bits.
#include "pool/windows.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared_element.cuh"

using namespace convgrad;

namespace {

using T = ELEMENT;
using S = ElementAccumulator<T>;

struct ScatterArgs {
  WindowArgs windows;
  int tile[3];      // positions of y
  int tiles[3];     // of a plane, along each axis
  int planes;       // of a block, at once
  int repeats;      // of a block, for planes after planes
  int channels;     // of `inner`, of a block
  int chunks;       // of `inner`
  int vectors;      // whether cells of 16 bytes of adjacent channels are stored at once
  int phases[3];    // the most windows that contain a position
  int grid[3];      // threads
  int rounds;       // windows of a phase, of a thread
  int round[3];     // the distance between these
  int box[3];       // the most windows of a tile
  int cells;        // bytes; the positions of windows follow
  int steps_at;     // bytes, in shared memory
  Divider by_tiles[3], by_chunks;
  Divider by_channels, by_grid[3];  // of threads
  Divider by_stores, by_tile[3];        // of cells
  Divider by_y_size[3];
};

// What a cell receives, and how it meets others; zero bits: nothing yet.
#if MOVE
using Content = int;
struct Cell {
  Content content;  // one more than the number of the last window in the plane
  __device__ __forceinline__ void meet(SOURCE, int number) { content = max(content, number + 1); }
};
#else
using Content = S;
struct Cell {
  Content content;  // the sum
  __device__ __forceinline__ void meet(SOURCE value, int) { content += widen(value); }
};
#endif

constexpr int kChunk = 16 / sizeof(T);
// Windows of a thread that are loaded before the first is added.
constexpr int kSeveral = 4 / VECTOR;
constexpr u32 kNone = ~0u;  // no cell

// Along an axis: the positions of the tile, [base, base + count) of y; its windows; the first phase's first window
// among these.
struct Side {
  int base, count, first, extent, lead;
};

}  // namespace

// Compilers for other GPUs need more registers.
constexpr int kBlocks = sizeof(T) == 8 || MOVE || (SLICED && !SIMPLE) || __CUDA_ARCH__ != 900 ? 4 : 5;

extern "C" __global__ void __launch_bounds__(256, kBlocks)
    window_scatter(const __grid_constant__ ScatterArgs args) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ Side sides[3];
  const WindowArgs& windows = args.windows;
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int(&size)[3] = windows.y_size;
  int tile = divide(static_cast<int>(blockIdx.x), args.by_chunks);
  const int lead_channel = (static_cast<int>(blockIdx.x) - tile * args.chunks) * args.channels;
  int tiles[3];
#pragma unroll
  for (int axis = 2; axis >= 0; --axis) {
    const int outer = divide(tile, args.by_tiles[axis]);
    tiles[axis] = tile - outer * args.tiles[axis];
    tile = outer;
  }
  const int first_plane = tile * args.repeats * args.planes;
  const int channels = min(args.channels, windows.inner - lead_channel);
  if (thread % 32 == 0 && thread < 96) {
    const int axis = thread / 32;
    Side side;
    side.base = tiles[axis] * args.tile[axis];
    side.count = min(args.tile[axis], size[axis] - side.base);
    side.first = window_start(windows.window[axis], side.base);
    side.extent = window_stop(windows.window[axis], side.base + side.count - 1) - side.first;
    const int n = args.phases[axis];
    side.lead = side.first == 0 ? 0 : n - 1 - (side.first + n - 1) % n;
    sides[axis] = side;
  }
  // A thread's window of a phase, if that is the first window of the tile.
  int own[3], own_plane = divide(thread, args.by_channels);
  const int channel = (thread - own_plane * (args.channels / VECTOR)) * VECTOR;
#pragma unroll
  for (int axis = 2; axis >= 0; --axis) {
    const int outer = divide(own_plane, args.by_grid[axis]);
    own[axis] = (own_plane - outer * args.grid[axis]) * args.phases[axis];
    own_plane = outer;
  }
  __syncthreads();

  // The windows' first positions, which may be outside of y, and lengths, axis by axis.
  [[maybe_unused]] int2* const ranges = reinterpret_cast<int2*>(shared + args.cells);
  int4* const step_at = reinterpret_cast<int4*>(shared + args.steps_at);
#if !SIMPLE
  int ranges_at[3] = {args.box[2] + args.box[1], args.box[2], 0};
#pragma unroll
  for (int axis = 2; axis >= 0; --axis) {
    if (axis == 0 && !SLICED) continue;
#pragma unroll 1
    for (int i = thread; i < sides[axis].extent; i += threads) {
      const WindowRange& range = windows.counted[axis];
      const int low = window_bound(range, sides[axis].first + i, range.first);
      const int high = window_bound(range, sides[axis].first + i, range.last);
      ranges[ranges_at[axis] + i] = make_int2(low, high - low);
    }
  }
#endif
  // A thread's windows: of each phase, `rounds` of them.
  // Their distances along an axis are in positions of y with SIMPLE, else in windows.
  int unit[3];
#pragma unroll
  for (int axis = 0; axis < 3; ++axis) unit[axis] = SIMPLE ? windows.counted[axis].whole : 1;
  const int steps = args.phases[0] * args.phases[1] * args.phases[2] * args.rounds;
#pragma unroll 1
  for (int step = thread; step < steps; step += threads) {
    int at[3], outer = step / args.rounds;
    const int round = step - outer * args.rounds;
#pragma unroll
    for (int axis = 2; axis >= 0; --axis) {
      const int n = args.phases[axis], above = outer / n;
      at[axis] = outer - above * n + sides[axis].lead;
      if (at[axis] >= n) at[axis] -= n;
      at[axis] += round * args.round[axis];
      outer = above;
    }
    const int number = (at[0] * windows.x_size[1] + at[1]) * windows.x_size[2] + at[2];
    step_at[step] = make_int4(at[0] * unit[0], at[1] * unit[1], at[2] * unit[2], number * windows.inner);
  }
  int extent[3];
#pragma unroll
  for (int axis = 0; axis < 3; ++axis) extent[axis] = (sides[axis].extent - own[axis]) * unit[axis];
  if (own_plane >= args.planes || channel >= channels) extent[2] = 0;  // no window
  const i64 x_plane = static_cast<i64>(windows.x_plane) * windows.inner;
  const int own_number = ((sides[0].first + own[0]) * windows.x_size[1] + sides[1].first + own[1]) * windows.x_size[2] +
                         sides[2].first + own[2];
  const i64 own_element = (first_plane + own_plane) * x_plane + static_cast<i64>(own_number) * windows.inner +
                          lead_channel + channel;
  // Two numbers to the compiler, which would otherwise add up each load's address in 64 bits.
  i64 own_indices = own_element * static_cast<int>(sizeof(INDEX)), own_x = own_element * static_cast<int>(sizeof(SOURCE));
  asm volatile("" : "+l"(own_indices), "+l"(own_x));
  auto indices = reinterpret_cast<const INDEX*>(static_cast<const char*>(windows.indices) + own_indices);
  auto x = reinterpret_cast<const SOURCE*>(static_cast<const char*>(windows.x) + own_x);
#if SIMPLE
  // The first position of a thread's first window, and the length of windows.
  int low[3], length[3];
#pragma unroll
  for (int axis = 0; axis < 3; ++axis) {
    const WindowRange& range = windows.counted[axis];
    low[axis] = (sides[axis].first + own[axis]) * range.whole + range.first;
    length[axis] = range.last - range.first;
  }
#else
#pragma unroll
  for (int axis = 0; axis < 3; ++axis) ranges_at[axis] += own[axis];
#endif
  // Whether a position, of those of y along an axis, is in a window.
  const auto contains = [&](int axis, [[maybe_unused]] bool exists, int at, int position) {
#if SIMPLE
    return static_cast<u32>(position - low[axis] - at) < static_cast<u32>(length[axis]);
#else
    const int2 range = ranges[exists ? ranges_at[axis] + at : 0];
    return static_cast<u32>(position - range.x) < static_cast<u32>(range.y);
#endif
  };
  // What an index in the plane of y is in the tile; if they are not adjacent, once it is decoded.
  const int bases[3] = {sides[0].base, sides[1].base, sides[2].base};
  const int counts[3] = {sides[0].count, sides[1].count, sides[2].count};
  // The first position of the tile in y, of the first plane.
  const int position = (bases[0] * size[1] + bases[1]) * size[2] + bases[2];
  const i64 y_plane = static_cast<i64>(size[0]) * size[1] * size[2];
  // The cell of a thread's first position of y, if it were in the tile, beyond the cells' misalignment.
  const int cell_column = args.channels * static_cast<int>(sizeof(Cell));
  const int cell_row = args.tile[2] * cell_column, cell_slice = args.tile[1] * cell_row;
  const u32 lead_cell = shared_address(shared) + channel * static_cast<int>(sizeof(Cell)) +
                        (own_plane * args.tile[0] - bases[0]) * cell_slice - bases[1] * cell_row - bases[2] * cell_column;
  const auto has = [&](const int4& at) {
    return (at.z < extent[2]) & (at.y < extent[1]) & (!SLICED || at.x < extent[0]);
  };
  const u32 y_positions = static_cast<u32>(y_plane);
  bool good = true;
  // The same tile of planes after planes.
#pragma unroll 1
  for (int plane = first_plane, repeat = 0; repeat < args.repeats && plane < windows.batch;
       ++repeat, plane += args.planes) {
    const int planes = min(args.planes, windows.batch - plane);
    if (own_plane >= planes) extent[2] = 0;
    const i64 begin = (plane * y_plane + position) * windows.inner + lead_channel;
    // If `inner` is 1, cells have the misalignment of y's elements.
    const int head = windows.inner == 1 ? static_cast<int>(begin % kChunk) : 0;
    Cell* const cells = reinterpret_cast<Cell*>(shared) + head;
    const u32 own_cell = lead_cell + head * static_cast<int>(sizeof(Cell));
    if (repeat > 0) __syncthreads();  // the last cells are stored
    for (int at = thread * 16; at < args.cells; at += threads * 16) {
      *reinterpret_cast<uint4*>(shared + at) = {};
    }
    __syncthreads();
    int rounds = args.rounds;  // left of a phase
    // Of windows that follow one another in step_at.
    const auto add = [&](auto batch, int first) {
      constexpr int kBatch = decltype(batch)::value;
      Vector<INDEX, VECTOR> found[kBatch];
      [[maybe_unused]] Vector<SOURCE, VECTOR> values[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int4 at = step_at[first + b];
        load_ahead_if(has(at), indices + at.w, found[b].raw);
        if (!MOVE) load_ahead_if(has(at), x + at.w, values[b].raw);
      }
      u32 targets[kBatch][VECTOR];  // cells, in shared memory
      [[maybe_unused]] int numbers[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        // Without branches.
        const int4 at = step_at[first + b];
        const bool exists = has(at);
        if (MOVE) numbers[b] = own_number + at.w / windows.inner;
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) {
          const INDEX own_index = found[b].at[v];
          const int index = static_cast<int>(own_index);
          int line = divide(index, args.by_y_size[2]);
          const int column = index - line * size[2];
          bool inside = static_cast<u32>(index) < y_positions, here = exists;
          if (sizeof(INDEX) > 4) inside &= static_cast<i64>(own_index) >> 32 == 0;
          u32 cell = own_cell + v * static_cast<int>(sizeof(Cell));
          if (SLICED) {
            const int slice = divide(line, args.by_y_size[1]);
            line -= slice * size[1];
            inside &= contains(0, exists, at.x, slice);
            here &= static_cast<u32>(slice - bases[0]) < static_cast<u32>(counts[0]);
            cell += slice * cell_slice;
          }
          inside &= contains(1, exists, at.y, line);
          inside &= contains(2, exists, at.z, column);
          here &= static_cast<u32>(line - bases[1]) < static_cast<u32>(counts[1]);
          here &= static_cast<u32>(column - bases[2]) < static_cast<u32>(counts[2]);
          cell += line * cell_row + column * cell_column;
          good &= inside | !exists;
          targets[b][v] = inside & here ? cell : kNone;
        }
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) {
          const u32 target = targets[b][v];
          if (target == kNone) continue;
          Cell cell = {element_at<Content>(target)};
          cell.meet(MOVE ? SOURCE{} : values[b].at[v], numbers[b]);
          store_element(target, cell.content);
        }
        if (--rounds > 0) continue;
        rounds = args.rounds;
        __syncthreads();
      }
    };
    int step = 0;
#pragma unroll 1
    for (; step + kSeveral <= steps; step += kSeveral) add(Constant<kSeveral>(), step);
#pragma unroll 1
    for (; step < steps; ++step) add(Constant<1>(), step);
    indices += args.planes * x_plane;
    x += args.planes * x_plane;

    // The element of a cell in the n-th plane.
    const auto element = [&](Cell cell, [[maybe_unused]] int n, [[maybe_unused]] int own_channel) {
#if MOVE
      if (cell.content == 0) return T{};
      const i64 from = (plane + n) * x_plane + static_cast<i64>(cell.content - 1) * windows.inner;
      return static_cast<const T*>(windows.x)[from + lead_channel + own_channel];
#else
      return narrow<T>(cell.content);
#endif
    };
    constexpr int kCells = 16 / sizeof(Cell);
    T* const y = static_cast<T*>(windows.y) + begin;
    if (windows.inner == 1) {
      // One run of elements.
      const int own_cells = args.tile[0] * args.tile[1] * args.tile[2];
      const int length = planes == 1 ? counts[0] * counts[1] * counts[2] : planes * own_cells;
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
      continue;
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
        there &= to[axis] < counts[axis];
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
  if (!good && windows.bad != nullptr) windows.bad[MOVE] = 1;  // all writers write the same value
}
