// The gradient of max pooling from the indices of the maxima, channels last, for windows of KERNEL x
// KERNEL that are STRIDE apart, and of any kind along the axis before. Launched by route_strips.py.
//
// y[i] = sum of x[o] over the windows o that contain i and whose index is i, window column by column, in
// each column plane by plane, and in each plane from the first row on. If `bad` is given, an index outside its window sets bad[0].
// A thread owns ROWS rows of a strip of y, in WIDTH adjacent channels, and walks along W from window to
// window. It holds the sums of its rows in the window's columns, and the next windows are loaded ahead.
// Block: 64 threads; shared memory: none. Deterministic, no atomics. Memory-safe for any index.
// Preconditions: aligned vectors; every window contains a position. Index limits: planes below 2^31,
// offsets in 64 bits.
#include "pool/windows.cuh"

using namespace convgrad;

namespace {

using T = ELEMENT;
using S = ElementAccumulator<T>;
using Values = Vector<T, WIDTH>;

constexpr int kThreads = 64;
constexpr int kBefore = (KERNEL - 1) / STRIDE;      // windows before a row's last one
constexpr int kWindows = kBefore + ROWS / STRIDE;  // in a column, that contain own rows
// The position of rows and of columns that do not exist: no index is near it, nor near its sum with any
// column or row that does.
constexpr int kNowhere = -(1 << 30);
static_assert(ROWS % STRIDE == 0, "tiles start at windows");

struct StripArgs {
  const void* x;
  void* y;
  const void* indices;
  u64* bad;       // or null
  i64 threads;
  WindowRange window, counted;  // along D: of y, of windows
  int x_size[3];  // windows
  int y_size[3];
  int pad[2];  // H W
  int inner;
  int tiles;   // along H
  int strips;  // along W
  int strip;   // windows
  int wide_indices;  // of 64 bits, else of 32
  Divider by_plane;  // of y
};

// A column of windows as it is in memory, and which rows of it exist.
struct Column {
  Indices<WIDTH> indices[kWindows];
  Values values[kWindows];
  bool there;
};

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads) route_strips(const __grid_constant__ StripArgs args) {
  i64 index = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= args.threads) return;
  i64 vector, strip, tile, plane;
  index = divide(index, args.inner / WIDTH, vector);
  index = divide(index, args.tiles, tile);
  index = divide(index, args.y_size[0], plane);
  const i64 image = divide(index, args.strips, strip);
  const int size[2] = {args.y_size[1], args.y_size[2]}, windows[2] = {args.x_size[1], args.x_size[2]};
  const int d = static_cast<int>(plane), plane_size = size[0] * size[1];
  const int start0 = window_start(args.window, d), stop0 = window_stop(args.window, d);
  const int planes = max(1, stop0 - start0);  // of windows, which may be none
  const int h0 = static_cast<int>(tile) * ROWS - args.pad[0];
  const int top = static_cast<int>(tile) * (ROWS / STRIDE) - kBefore;  // row of windows
  const int q0 = static_cast<int>(strip) * args.strip;
  const int q1 = min(q0 + args.strip, (size[1] + args.pad[1] + STRIDE - 1) / STRIDE);
  // Rows of windows, the column that is fetched next, and rows of y at the column that is stored next.
  const i64 x_row = static_cast<i64>(windows[1]) * args.inner, x_plane = x_row * windows[0];
  const i64 y_row = static_cast<i64>(size[1]) * args.inner;
  const T* x[kWindows];
  const int* indices[kWindows];
  bool there[kWindows];
#pragma unroll
  for (int w = 0; w < kWindows; ++w) {
    const i64 from = (image * args.x_size[0] + start0) * x_plane + (top + w) * x_row + vector * WIDTH +
                     static_cast<i64>(q0 - kBefore) * args.inner;
    x[w] = static_cast<const T*>(args.x) + from;
    indices[w] = static_cast<const int*>(args.indices) + (from << args.wide_indices);
    there[w] = top + w >= 0 && top + w < windows[0] && start0 < stop0;
  }
  T* y[ROWS];
  int row_at[ROWS];  // the position before a row's first column
  bool stored[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const i64 column = static_cast<i64>(q0) * STRIDE - args.pad[1];
    y[r] = static_cast<T*>(args.y) + ((image * args.y_size[0] + d) * size[0] + h0 + r) * y_row + column * args.inner + vector * WIDTH;
    stored[r] = h0 + r >= 0 && h0 + r < size[0];
    row_at[r] = stored[r] ? d * plane_size + (h0 + r) * size[1] : kNowhere;
  }
  int first_at[ROWS / STRIDE][KERNEL];  // the same of own windows' rows, in their plane
#pragma unroll
  for (int w = 0; w < ROWS / STRIDE; ++w) {
#pragma unroll
    for (int r = 0; r < KERNEL; ++r) {
      const int row = h0 + w * STRIDE + r;
      first_at[w][r] = row >= 0 && row < size[0] ? row * size[1] : kNowhere;
    }
  }

  // The next windows to fetch: plane by plane, then the next column.
  int next_q = q0 - kBefore, next_plane = 0;
  const auto fetch = [&](Column& to) {
    to.there = next_q >= 0 && next_q < windows[1];
    const bool last = ++next_plane == planes;
    const i64 step = last ? args.inner - (planes - 1) * x_plane : x_plane;
#pragma unroll
    for (int w = 0; w < kWindows; ++w) {
      if (to.there && there[w]) {
        to.indices[w].load(indices[w], 0, args.wide_indices);
        to.values[w] = Values::load(x[w]);
      }
      x[w] += step;
      indices[w] += step << args.wide_indices;
    }
    if (!last) return;
    next_plane = 0;
    ++next_q;
  };

  S sums[ROWS][KERNEL][WIDTH] = {};
  bool good = true;
  int q = q0 - kBefore, at0 = start0;
  const auto step = [&](const Column& here, Column& coming) {
    if (next_q < q1) fetch(coming);
    const int column = q * STRIDE - args.pad[1];
    if (here.there) {
      int target[ROWS][KERNEL];
#pragma unroll
      for (int c = 0; c < KERNEL; ++c) {
        const int at = column + c >= 0 && column + c < size[1] ? column + c : kNowhere;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) target[r][c] = row_at[r] + at;
      }
      const int low = max(column, 0), columns = min(column + KERNEL, size[1]) - low;
      // One strip of one tile checks a window, in the first of its planes.
      const bool checks = args.bad != nullptr && q >= q0 && window_start(args.counted, at0) == d;
      const int depth = window_stop(args.counted, at0) - d;
#pragma unroll
      for (int w = 0; w < kWindows; ++w) {
        if (!there[w]) continue;
        const int first_row = (w - kBefore) * STRIDE;  // of own rows
        int at[WIDTH];
#pragma unroll
        for (int v = 0; v < WIDTH; ++v) {
          at[v] = here.indices[w].at(v, args.wide_indices);
          const S value = widen(here.values[w].at[v]);
#pragma unroll
          for (int r = 0; r < ROWS; ++r) {
            if (r < first_row || r >= first_row + KERNEL) continue;
#pragma unroll
            for (int c = 0; c < KERNEL; ++c) {
              sums[r][c][v] = at[v] == target[r][c] ? sums[r][c][v] + value : sums[r][c][v];
            }
          }
        }
        if (w < kBefore || !checks) continue;
        u32 beyond = 0;  // of the nearest row, the most of all channels
#pragma unroll
        for (int v = 0; v < WIDTH; ++v) {
          int inside = at[v] - d * plane_size;
          if (args.y_size[0] > 1) {
            const int beyond_d = divide(inside, args.by_plane);
            inside = static_cast<u32>(beyond_d) < static_cast<u32>(depth) ? inside - beyond_d * plane_size : -1;
          }
          u32 nearest = ~0u;
#pragma unroll
          for (int r = 0; r < KERNEL; ++r) {
            nearest = min(nearest, static_cast<u32>(inside) - static_cast<u32>(first_at[w < kBefore ? 0 : w - kBefore][r] + low));
          }
          beyond = max(beyond, nearest);
        }
        good &= beyond < static_cast<u32>(columns);
      }
    }
    if (++at0 < stop0) return;
    at0 = start0;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
      for (int c = 0; c < STRIDE; ++c) {
        if (q >= q0 && stored[r] && column + c >= 0 && column + c < size[1]) {
          Values some;
#pragma unroll
          for (int v = 0; v < WIDTH; ++v) some.at[v] = narrow<T>(sums[r][c][v]);
          some.store(y[r]);
        }
        if (q >= q0) y[r] += args.inner;
      }
#pragma unroll
      for (int c = 0; c < KERNEL; ++c) {
#pragma unroll
        for (int v = 0; v < WIDTH; ++v) {
          sums[r][c][v] = c + STRIDE < KERNEL ? sums[r][c + STRIDE < KERNEL ? c + STRIDE : 0][v] : S(0);
        }
      }
    }
    ++q;
  };
  Column even, odd;
  fetch(even);
#pragma unroll 1
  while (q < q1) {
    step(even, odd);
    if (q < q1) step(odd, even);
  }
  if (!good) args.bad[0] = 1;  // all writers write the same value
}
