// Routing of elements by indices, for windows of any kind: the gradient of max pooling from the
// indices of the maxima, and max unpooling. The host's side is window_routes.py.
//
// CHECK 0: y[i] = sum of x[o] over the windows o that contain i and whose index is i; with MOVE, the
// last of them, bit by bit. It is a gather without atomics, in the order of the windows.
// Deterministic. Memory-safe for any index: indices are compared, never dereferenced.
// CHECK 1: checks that the index of each window, one per thread, is in the window (`counted`). If not,
// sets bad[0]; with MOVE, sets bad[1] if the index is at least in the plane.
// A thread computes WIDTH adjacent elements of `inner` at one position, in PLANES planes. If a
// position is in at most ROWS by COLUMNS windows, their indices are loaded at once. Block: 128
// threads; shared memory: none. Relies on its launcher for the grid (chunks of the batch along y) and
// aligned vectors. Index limits: extents, planes and a chunk's threads below 2^31; offsets in 64 bits.
#include "pool/windows.cuh"

using namespace convgrad;

namespace {

using T = ELEMENT;
using S = ElementAccumulator<T>;
using Values = Vector<T, WIDTH>;

// The indices of WIDTH adjacent windows; -1 for none.
struct Found {
  INDEX at[WIDTH];

  __device__ __forceinline__ void load(const INDEX* from, bool there) {
    constexpr int kAtOnce = WIDTH * sizeof(INDEX) >= 16 ? 16 / sizeof(INDEX) : WIDTH;
#pragma unroll
    for (int v = 0; v < WIDTH; ++v) at[v] = static_cast<INDEX>(-1);
    if (!there) return;
#pragma unroll
    for (int v = 0; v < WIDTH; v += kAtOnce) {
      const auto some = Vector<INDEX, kAtOnce>::load(from + v);
#pragma unroll
      for (int e = 0; e < kAtOnce; ++e) at[v + e] = some.at[e];
    }
  }
};

// What WIDTH adjacent positions receive.
struct Route {
#if MOVE
  Values moved;
#else
  S sum[WIDTH];
#endif

  __device__ __forceinline__ void clear() {
#if MOVE
    moved = Values::zero();
#else
#pragma unroll
    for (int v = 0; v < WIDTH; ++v) sum[v] = S(0);
#endif
  }
  // Values are read only if the index matches, which is rare.
  __device__ __forceinline__ void take(const Found& found, const T* from, int position) {
    bool any = false;
#pragma unroll
    for (int v = 0; v < WIDTH; ++v) any |= found.at[v] == position;
    if (!any) return;
    const Values values = Values::load(from);
#pragma unroll
    for (int v = 0; v < WIDTH; ++v) {
      if (found.at[v] != position) continue;
#if MOVE
      moved.at[v] = values.at[v];
#else
      sum[v] += widen(values.at[v]);
#endif
    }
  }
  __device__ __forceinline__ Values result() const {
#if MOVE
    return moved;
#else
    Values values;
#pragma unroll
    for (int v = 0; v < WIDTH; ++v) values.at[v] = narrow<T>(sum[v]);
    return values;
#endif
  }
};

}  // namespace

#if !CHECK
extern "C" __global__ void __launch_bounds__(128, 4)
    window_routes(const __grid_constant__ WindowArgs args) {
  const int thread = static_cast<int>(blockIdx.x) * 128 + static_cast<int>(threadIdx.x);
  if (thread >= args.threads) return;
  const WindowItem item = item_of(args, thread, args.y_size, args.inner / WIDTH);
  const int plane = item.group * PLANES;
  if (plane >= args.batch) return;
  const int planes = min(PLANES, args.batch - plane);
  int start[3], stop[3];
#pragma unroll
  for (int axis = 0; axis < 3; ++axis) {
    start[axis] = args.window[axis].start(item.at[axis]);
    stop[axis] = args.window[axis].stop(item.at[axis]);
  }
  const int position = (item.at[0] * args.y_size[1] + item.at[1]) * args.y_size[2] + item.at[2];
  const i64 x_plane =
      static_cast<i64>(args.x_size[0]) * args.x_size[1] * args.x_size[2] * args.inner;
  const i64 lead = plane * x_plane + item.vector * WIDTH;
  const T* const x = static_cast<const T*>(args.x) + lead;
  const INDEX* const indices = static_cast<const INDEX*>(args.indices) + lead;

  Route route[PLANES];
#pragma unroll
  for (int p = 0; p < PLANES; ++p) route[p].clear();
  const i64 row = static_cast<i64>(args.x_size[2]) * args.inner;
  for (int o0 = start[0]; o0 < stop[0]; ++o0) {
    const i64 from = (static_cast<i64>(o0) * args.x_size[1] + start[1]) * row +
                     static_cast<i64>(start[2]) * args.inner;
#if ROWS
    Found found[ROWS][COLUMNS][PLANES];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) {
#pragma unroll
        for (int p = 0; p < PLANES; ++p) {
          const bool there = start[1] + r < stop[1] && start[2] + c < stop[2] && p < planes;
          found[r][c][p].load(indices + from + r * row + c * args.inner + p * x_plane, there);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) {
        if (start[1] + r >= stop[1] || start[2] + c >= stop[2]) continue;
#pragma unroll
        for (int p = 0; p < PLANES; ++p) {
          if (p >= planes) break;
          const T* const value = x + from + r * row + c * args.inner + p * x_plane;
          route[p].take(found[r][c][p], value, position);
        }
      }
    }
#else
    for (int o1 = start[1]; o1 < stop[1]; ++o1) {
      i64 at = from + (o1 - start[1]) * row;
      for (int o2 = start[2]; o2 < stop[2]; ++o2, at += args.inner) {
        Found found[PLANES];
#pragma unroll
        for (int p = 0; p < PLANES; ++p) found[p].load(indices + at + p * x_plane, p < planes);
#pragma unroll
        for (int p = 0; p < PLANES; ++p) {
          if (p >= planes) break;
          route[p].take(found[p], x + at + p * x_plane, position);
        }
      }
    }
#endif
  }
  const i64 y_plane =
      static_cast<i64>(args.y_size[0]) * args.y_size[1] * args.y_size[2] * args.inner;
  T* const y = static_cast<T*>(args.y) + plane * y_plane + static_cast<i64>(position) * args.inner +
               item.vector * WIDTH;
#pragma unroll
  for (int p = 0; p < PLANES; ++p) {
    if (p >= planes) break;
    route[p].result().store(y + p * y_plane);
  }
}

#else
extern "C" __global__ void __launch_bounds__(128)
    window_routes(const __grid_constant__ WindowArgs args) {
  const int thread = static_cast<int>(blockIdx.x) * 128 + static_cast<int>(threadIdx.x);
  if (thread >= args.threads) return;
  const WindowItem item = item_of(args, thread, args.x_size, args.inner);
  if (item.group >= args.batch) return;
  const i64 windows = static_cast<i64>(args.x_size[0]) * args.x_size[1] * args.x_size[2];
  const i64 window =
      (static_cast<i64>(item.at[0]) * args.x_size[1] + item.at[1]) * args.x_size[2] + item.at[2];
  const i64 index = static_cast<const INDEX*>(
      args.indices)[(item.group * windows + window) * args.inner + item.vector];
  const int plane = args.y_size[0] * args.y_size[1] * args.y_size[2];
  const bool exists = index >= 0 && index < plane;
  bool good = exists;
  int rest = exists ? static_cast<int>(index) : 0;
#pragma unroll
  for (int axis = 2; axis >= 0; --axis) {
    const int outer = rest / args.y_size[axis], at = rest - outer * args.y_size[axis];
    const WindowRange& range = args.counted[axis];
    good &= at >= range.start(item.at[axis]) && at < range.stop(item.at[axis]);
    rest = outer;
  }
  if (!good) args.bad[MOVE && exists] = 1;  // all writers write the same value
}
#endif
