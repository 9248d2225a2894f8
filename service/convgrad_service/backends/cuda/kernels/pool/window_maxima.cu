// Max pooling over windows of any kind: maxima and their positions. Launched by window_maxima.py.
//
// y[o] = the maximum of x over the window of o, indices[o] = its flat position in the plane. Of equal
// maxima the first wins; a NaN wins over any number, and of several NaNs the last.
// A thread computes WIDTH adjacent elements of `inner` at one position of y. A block has `lanes` adjacent
// vectors at the positions of a tile of one slice, so that windows that share positions meet in the L1 cache. If ROWS > 0, windows have at
// most ROWS by COLUMNS adjacent positions along their last two axes, all of which are loaded before the
// first comparison. Otherwise they have any number, and a dilation.
// Block: as many threads, at most 256; shared memory: none. Deterministic. Grid: y = chunks of the
// batch. Preconditions: aligned vectors; windows contain a position.
// Index limits: planes and a chunk's blocks below 2^31; offsets in 64 bits.
#include "pool/maximum.cuh"
#include "pool/windows.cuh"

using namespace convgrad;

namespace {

using T = ELEMENT;
using S = ElementAccumulator<T>;
using Values = Vector<T, WIDTH>;

struct MaximaArgs {
  WindowArgs windows;
  int lanes;
  int tile[2], tiles[2];  // positions of a block's tile, and tiles of a slice, along the last two axes
  int chunks;             // of vectors
  Divider by_lanes, by_columns;  // of threads
  Divider by_chunks, by_tiles[2], by_slices;
};

// Running maxima of WIDTH windows.
struct Most {
  Maximum<T> of[WIDTH];

  __device__ __forceinline__ void take(const Values& values, int position, bool first) {
#pragma unroll
    for (int v = 0; v < WIDTH; ++v) of[v].take(values.at[v], position, first);
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(256, 2)
    window_maxima(const __grid_constant__ MaximaArgs args) {
  const WindowArgs& windows = args.windows;
  const int thread = static_cast<int>(threadIdx.x), block = static_cast<int>(blockIdx.x);
  const int at = divide(thread, args.by_lanes), row_at = divide(at, args.by_columns);
  const int column_tile = divide(block, args.by_chunks), row_tile = divide(column_tile, args.by_tiles[1]);
  const int slice = divide(row_tile, args.by_tiles[0]), image = divide(slice, args.by_slices);
  WindowItem item;
  item.vector = (block - column_tile * args.chunks) * args.lanes + thread - at * args.lanes;
  item.at[2] = (column_tile - row_tile * args.tiles[1]) * args.tile[1] + at - row_at * args.tile[1];
  item.at[1] = (row_tile - slice * args.tiles[0]) * args.tile[0] + row_at;
  item.at[0] = slice - image * windows.y_size[0];
  item.group = static_cast<int>(blockIdx.y) * windows.chunk + image;
  if (row_at >= args.tile[0] || item.at[1] >= windows.y_size[1] || item.at[2] >= windows.y_size[2]) return;
  if (item.vector >= windows.inner / WIDTH || item.group >= windows.batch) return;
  int start[3], stop[3];
#pragma unroll
  for (int axis = 0; axis < 3; ++axis) {
    start[axis] = ROWS ? window_start(windows.window[axis], item.at[axis])
                       : window_first(windows, axis, item.at[axis]);
    stop[axis] = window_stop(windows.window[axis], item.at[axis]);
  }
  const i64 row = static_cast<i64>(windows.x_size[2]) * windows.inner;
  const i64 x_plane = row * windows.x_size[1] * windows.x_size[0];
  const i64 lead = item.group * x_plane + item.vector * WIDTH;
  const T* const x = static_cast<const T*>(windows.x) + lead;
  Most most;
#if ROWS
  for (int i0 = start[0]; i0 < stop[0]; ++i0) {
    const int corner = (i0 * windows.x_size[1] + start[1]) * windows.x_size[2] + start[2];
    const T* const from = x + static_cast<i64>(corner) * windows.inner;
    Values values[ROWS][COLUMNS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) {
        const bool there = start[1] + r < stop[1] && start[2] + c < stop[2];
        values[r][c] = there ? Values::load(from + r * row + c * windows.inner) : Values::zero();
      }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) {
        if (start[1] + r >= stop[1] || start[2] + c >= stop[2]) continue;
        const bool first = r == 0 && c == 0 && i0 == start[0];
        most.take(values[r][c], corner + r * windows.x_size[2] + c, first);
      }
    }
  }
#else
  const i64 step = static_cast<i64>(windows.dilation[2]) * windows.inner;
  bool first = true;
  for (int i0 = start[0]; i0 < stop[0]; i0 += windows.dilation[0]) {
    for (int i1 = start[1]; i1 < stop[1]; i1 += windows.dilation[1]) {
      int position = (i0 * windows.x_size[1] + i1) * windows.x_size[2] + start[2];
      const int end = position - start[2] + stop[2];
      const T* from = x + static_cast<i64>(position) * windows.inner;
#pragma unroll 2
      for (; position < end; position += windows.dilation[2]) {
        most.take(Values::load(from), position, first);
        first = false;
        from += step;
      }
    }
  }
#endif
  const i64 outputs = static_cast<i64>(windows.y_size[0]) * windows.y_size[1] * windows.y_size[2];
  const i64 position =
      (static_cast<i64>(item.at[0]) * windows.y_size[1] + item.at[1]) * windows.y_size[2] + item.at[2];
  const i64 to = (item.group * outputs + position) * windows.inner + item.vector * WIDTH;
  Values values;
  int where[WIDTH];
#pragma unroll
  for (int v = 0; v < WIDTH; ++v) {
    values.at[v] = most.of[v].element();
    where[v] = most.of[v].where;
  }
  if (windows.y != nullptr) values.store(static_cast<T*>(windows.y) + to);
  store_positions(windows, lead, to, where, windows.inner / WIDTH % 2 == 0 && args.lanes % 2 == 0);
}
