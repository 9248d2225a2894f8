// Scatter of elements by indices, for windows of any kind: the gradient of max pooling from the indices of
// the maxima, and max unpooling. Launched by window_scatter.py.
//
// y[i] = sum of x[o] over the windows o that contain i and whose index is i; with MOVE, the last of
// them, bit by bit; 0 if there are none. An index outside its window sets bad[MOVE] unless `bad` is
// null.
// A block is a warp with a cell in shared memory for each position of a tile of y, in whole planes or in
// adjacent elements of `inner`. A position is in at most `classes` adjacent windows along the last axis, so
// windows of a row whose numbers are equal modulo `classes` share no cell. The warp adds row by row, class by
// class, each lane `rounds` windows of a class, and loads the next windows ahead.
// With MOVE a cell is the number of the last window. SLICED: planes of several slices.
// Block: 32 threads. Dynamic shared memory: the cells, the positions of windows along each axis, and how far a
// lane's windows of a row are from its first one.
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
  int planes;       // of a block
  int channels;     // of `inner`, of a block
  int chunks;       // of `inner`
  int vectors;      // whether cells of 16 bytes of adjacent channels are stored at once
  int classes;      // the most windows along the last axis that contain a position
  int lanes;        // along the last axis, for a channel of a plane
  int rounds;       // windows of a class and a row, of a lane
  int box[3];       // the most windows of a tile
  int cells;        // bytes; the positions of windows follow
  int steps_at;     // bytes, in shared memory
  Divider by_tiles[3], by_chunks;
  Divider by_channels, by_lanes;    // of threads
  Divider by_stores, by_tile[3];    // of cells
  Divider by_y_size[3];
};

// What a cell receives, and how it meets others; zero bits: nothing yet.
#if MOVE
using Content = int;
struct Cell {
  Content content;  // one more than the number of the last window in the plane
  __device__ __forceinline__ void meet(T, int number) { content = max(content, number + 1); }
};
#else
using Content = S;
struct Cell {
  Content content;  // the sum
  __device__ __forceinline__ void meet(T value, int) { content += widen(value); }
};
#endif

constexpr int kChunk = 16 / sizeof(T);
constexpr int kWarp = 32;
// Windows of a thread that are loaded at once.
constexpr int kBatch = 4;
constexpr u32 kNone = ~0u;  // no cell

// Windows of each lane in one row of windows; columns are counted from the tile's first window on.
struct Batch {
  int slice, line, count;
  int columns[kBatch];
  INDEX found[kBatch];
  T values[kBatch];
};

}  // namespace

extern "C" __global__ void __launch_bounds__(kWarp, sizeof(T) == 8 ? 24 : 32)
    window_scatter(const __grid_constant__ ScatterArgs args) {
  extern __shared__ __align__(16) unsigned char shared[];
  const WindowArgs& windows = args.windows;
  const int lane = static_cast<int>(threadIdx.x);
  const int(&size)[3] = windows.y_size;
  int tile = divide(static_cast<int>(blockIdx.x), args.by_chunks);
  const int lead_channel = (static_cast<int>(blockIdx.x) - tile * args.chunks) * args.channels;
  // Along an axis: the positions of the tile, [base, base + count) of y, and its windows.
  int base[3], count[3], first[3], extent[3];
#pragma unroll
  for (int axis = 2; axis >= 0; --axis) {
    base[axis] = first[axis] = 0;
    count[axis] = extent[axis] = 1;
    if (axis == 0 && !SLICED) continue;
    const int outer = divide(tile, args.by_tiles[axis]);
    base[axis] = (tile - outer * args.tiles[axis]) * args.tile[axis];
    tile = outer;
    count[axis] = min(args.tile[axis], size[axis] - base[axis]);
    first[axis] = window_start(windows.window[axis], base[axis]);
    extent[axis] = max(0, window_stop(windows.window[axis], base[axis] + count[axis] - 1) - first[axis]);
  }
  const int plane = tile * args.planes, planes = min(args.planes, windows.batch - plane);
  const int channels = min(args.channels, windows.inner - lead_channel);
  for (int at = lane * 16; at < args.cells; at += kWarp * 16) {
    *reinterpret_cast<uint4*>(shared + at) = {};
  }
  // The windows' first positions and lengths in y, axis by axis.
  int2* const ranges = reinterpret_cast<int2*>(shared + args.cells);
  int2* const axis_ranges[3] = {ranges + args.box[2] + args.box[1], ranges + args.box[2], ranges};
#pragma unroll
  for (int axis = 2; axis >= 0; --axis) {
    if (axis == 0 && !SLICED) continue;
#pragma unroll 1
    for (int i = lane; i < extent[axis]; i += kWarp) {
      const int low = window_start(windows.counted[axis], first[axis] + i);
      const int high = window_stop(windows.counted[axis], first[axis] + i);
      axis_ranges[axis][i] = make_int2(low, high - low);
    }
  }
  // Columns and elements.
  int2* const steps = reinterpret_cast<int2*>(shared + args.steps_at);
  const int a_row = args.classes * args.rounds;
#pragma unroll 1
  for (int i = lane; i < a_row; i += kWarp) {
    const int own_class = i / args.rounds;
    const int column = own_class + (i - own_class * args.rounds) * args.classes * args.lanes;
    steps[i] = make_int2(column, column * windows.inner);
  }
  // A lane's channel, plane and first window of a row, which may be before the tile's first.
  const int above = divide(lane, args.by_channels), channel = lane - above * args.channels;
  const int own_plane = divide(above, args.by_lanes), along = above - own_plane * args.lanes;
  const int own = along * args.classes - (first[2] == 0 ? 0 : first[2] % args.classes);
  const int columns = own_plane < planes && channel < channels ? extent[2] : 0;
  const i64 x_plane = static_cast<i64>(windows.x_plane) * windows.inner;
  const int own_number = (first[0] * windows.x_size[1] + first[1]) * windows.x_size[2] + first[2] + own;
  const i64 own_element = (plane + own_plane) * x_plane + static_cast<i64>(own_number) * windows.inner +
                          lead_channel + channel;
  // Two numbers to the compiler, which would otherwise add up each load's address in 64 bits.
  i64 own_indices = own_element * static_cast<int>(sizeof(INDEX)), own_x = own_element * static_cast<int>(sizeof(T));
  asm volatile("" : "+l"(own_indices), "+l"(own_x));
  const auto indices = reinterpret_cast<const INDEX*>(static_cast<const char*>(windows.indices) + own_indices);
  const auto x = reinterpret_cast<const T*>(static_cast<const char*>(windows.x) + own_x);
  // The first position of the tile in y, of the first plane.
  const int position = (base[0] * size[1] + base[1]) * size[2] + base[2];
  const i64 y_plane = static_cast<i64>(size[0]) * size[1] * size[2];
  const i64 begin = (plane * y_plane + position) * windows.inner + lead_channel;
  // If `inner` is 1, cells have the misalignment of y's elements.
  const int head = windows.inner == 1 ? static_cast<int>(begin % kChunk) : 0;
  Cell* const cells = reinterpret_cast<Cell*>(shared) + head;
  // The cell of a lane's first position of y, if it were in the tile.
  const int cell_column = args.channels * static_cast<int>(sizeof(Cell));
  const int cell_row = args.tile[2] * cell_column, cell_slice = args.tile[1] * cell_row;
  const u32 own_cell = shared_address(cells) + channel * static_cast<int>(sizeof(Cell)) +
                       (own_plane * args.tile[0] - base[0]) * cell_slice - base[1] * cell_row - base[2] * cell_column;
  __syncwarp();

  const int row = windows.x_size[2] * windows.inner;
  int left = extent[0] * extent[1];  // rows to load
  int next_slice = 0, next_line = 0, next_step = 0, next_row = 0;
  const auto load = [&](Batch& to) {
    to.slice = next_slice;
    to.line = next_line;
    to.count = left > 0 ? a_row - next_step : 0;
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (b >= to.count) break;
      const int2 step = steps[next_step + b];
      to.columns[b] = own + step.x;
      if (static_cast<u32>(to.columns[b]) >= static_cast<u32>(columns)) continue;
      to.found[b] = indices[next_row + step.y];
      if (!MOVE) to.values[b] = x[next_row + step.y];
    }
    next_step += kBatch;
    if (next_step < a_row) return;
    next_step = 0;
    --left;
    next_row += row;
    if (++next_line < extent[1]) return;
    next_line = 0;
    next_row += (windows.x_size[1] - extent[1]) * row;
    ++next_slice;
  };
  bool good = true;
  const auto add = [&](const Batch& from) {
    u32 targets[kBatch];  // cells, in shared memory
    const int2 lines = axis_ranges[1][from.line];
    [[maybe_unused]] const int2 slices = axis_ranges[0][from.slice];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      targets[b] = kNone;
      if (b >= from.count) break;
      // Without branches.
      const bool exists = static_cast<u32>(from.columns[b]) < static_cast<u32>(columns);
      const int2 across = axis_ranges[2][exists ? from.columns[b] : 0];
      const int index = static_cast<int>(from.found[b]);
      int line = divide(index, args.by_y_size[2]);
      const int column = index - line * size[2];
      bool inside = static_cast<u32>(column - across.x) < static_cast<u32>(across.y), here = exists;
      if (sizeof(INDEX) > 4) inside &= static_cast<i64>(from.found[b]) >> 32 == 0;
      u32 cell = own_cell;
      if (SLICED) {
        const int slice = divide(line, args.by_y_size[1]);
        line -= slice * size[1];
        inside &= static_cast<u32>(slice - slices.x) < static_cast<u32>(slices.y);
        here &= static_cast<u32>(slice - base[0]) < static_cast<u32>(count[0]);
        cell += slice * cell_slice;
      }
      inside &= static_cast<u32>(line - lines.x) < static_cast<u32>(lines.y);
      here &= static_cast<u32>(line - base[1]) < static_cast<u32>(count[1]);
      here &= static_cast<u32>(column - base[2]) < static_cast<u32>(count[2]);
      cell += line * cell_row + column * cell_column;
      good &= inside | !exists;
      targets[b] = inside & here ? cell : kNone;
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (b >= from.count) break;
      int number = 0;
      if (MOVE) {
        number = own_number + (from.slice * windows.x_size[1] + from.line) * windows.x_size[2] + from.columns[b] - own;
      }
      if (targets[b] != kNone) {
        Cell cell = {element_at<Content>(targets[b])};
        cell.meet(from.values[b], number);
        store_element(targets[b], cell.content);
      }
      __syncwarp();
    }
  };
  Batch even = {}, odd = {};
  load(even);
#pragma unroll 1
  while (even.count > 0) {
    load(odd);
    add(even);
    if (odd.count <= 0) break;
    load(even);
    add(odd);
  }
  if (!good && windows.bad != nullptr) windows.bad[MOVE] = 1;  // all writers write the same value

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
    const int length = planes == 1 ? count[0] * count[1] * count[2] : planes * own_cells;
    const auto plane_of = [&](int at) { return MOVE && planes > 1 ? at / own_cells : 0; };
    for (int at = lane * kChunk - head; at < length; at += kWarp * kChunk) {
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
  for (int item = lane; item < items; item += kWarp) {
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
