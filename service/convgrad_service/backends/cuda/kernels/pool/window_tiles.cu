// Gradients of poolings whose windows are adjacent, and max unpooling: each position of y is in at
// most one window. The host's side is window_tiles.py.
//
// MODE 0: y[i] = x[window of i] / divisor, the gradient of average pooling.
// MODE 1: y[i] = x[window of i] if the window's index is i, else 0: the gradient of max pooling.
// MODE 2: like MODE 1, for max unpooling; invalid indices set bad[1].
// A window has `tile` positions along each axis; positions past the last window get zero. If `bad` is
// not null, the thread with a window's first position checks its index as window_routes.cu does.
// Channels last (INNER): a thread reads WIDTH channels of a window once and stores them to the window's
// positions, or to a part of them along the last axis, which blockIdx.z selects.
// Channels first: WIDTH adjacent positions of a row, in all rows of their windows, in TOGETHER planes.
// With EACH every window has as many positions of a row, of which WIDTH is a multiple, and windows are
// loaded as vectors; 0 for any.
// JOINED, of planes with one window: WIDTH adjacent elements of all planes, which are contiguous.
// Block: 128 threads; shared memory: none. Deterministic: nothing is added. Relies on its launcher for
// the grid (chunks of the batch along y) and aligned vectors.
// Index limits: planes and a chunk's threads below 2^31; offsets in 64 bits.
#include "pool/windows.cuh"

using namespace convgrad;

namespace {

using T = ELEMENT;
using S = ElementAccumulator<T>;
using Values = Vector<T, WIDTH>;

struct TilesArgs {
  const void* x;
  void* y;
  const void* indices;
  u64* bad;
  int tile[3];
  int x_size[3];
  int y_size[3];
  int items[3];  // threads along each axis
  int inner;
  int batch;
  int chunk;    // of the batch
  int threads;  // in a chunk
  int part;     // channels last: positions of a tile along the last axis that a thread stores to
  Divider by_vectors, by_items[3];
  Divider by_tile;     // along the last axis
  Divider by_size[3];  // y's
  double divisor, reciprocal;
};

// An element of a window: its value and its target.
struct Given {
  T value;
  INDEX index;

  // What a position of the window receives.
  __device__ __forceinline__ T at(const TilesArgs& args, i64 position) const {
    if constexpr (MODE != 0) return index == position ? value : T{};
    const S by = static_cast<S>(args.divisor), reciprocal = static_cast<S>(args.reciprocal);
    return narrow<T>(divided<T>(widen(value), by, reciprocal));
  }
};

__device__ __forceinline__ void check(const TilesArgs& args, i64 index, const int (&window)[3]) {
  if (MODE == 0 || args.bad == nullptr) return;
  const i64 plane = static_cast<i64>(args.y_size[0]) * args.y_size[1] * args.y_size[2];
  const bool exists = index >= 0 && index < plane;
  bool good = exists;
  int rest = exists ? static_cast<int>(index) : 0;
#pragma unroll
  for (int axis = 2; axis >= 0; --axis) {
    const int outer = divide(rest, args.by_size[axis]);
    const int into = rest - outer * args.y_size[axis] - window[axis] * args.tile[axis];
    good &= into >= 0 && into < args.tile[axis];
    rest = outer;
  }
  if (!good) args.bad[MODE == 2 && exists] = 1;  // all writers write the same value
}

// Elements of adjacent windows.
template <int kCount>
__device__ __forceinline__ void load_windows(const TilesArgs& args, i64 at, Given (&found)[kCount]) {
  const auto values = Vector<T, kCount>::load(static_cast<const T*>(args.x) + at);
#pragma unroll
  for (int e = 0; e < kCount; ++e) found[e].value = values.at[e];
  if constexpr (MODE != 0) {
    constexpr int kAtOnce = kCount * sizeof(INDEX) >= 16 ? 16 / sizeof(INDEX) : kCount;
#pragma unroll
    for (int e = 0; e < kCount; e += kAtOnce) {
      const INDEX* const from = static_cast<const INDEX*>(args.indices) + at + e;
      const auto some = Vector<INDEX, kAtOnce>::load(from);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) found[e + i].index = some.at[i];
    }
  }
}

}  // namespace

#if JOINED
extern "C" __global__ void __launch_bounds__(128)
    window_tiles(const __grid_constant__ TilesArgs args) {
  const int thread = static_cast<int>(blockIdx.x) * 128 + static_cast<int>(threadIdx.x);
  const i64 first = static_cast<i64>(blockIdx.y) * args.chunk;
  const int plane = args.tile[2];
  const i64 end = min(static_cast<i64>(args.chunk), args.batch - first) * plane;
  const i64 element = static_cast<i64>(thread) * WIDTH;
  if (element >= end) return;
  int image = divide(static_cast<int>(element), args.by_tile);
  int position = static_cast<int>(element) - image * plane;
  const T* const x = static_cast<const T*>(args.x) + first;
  Given now = {x[image]};
  Values values;
#pragma unroll
  for (int e = 0; e < WIDTH; ++e) {
    if (position == plane) {
      position = 0;
      ++image;
      if (first + image < args.batch) now.value = x[image];
    }
    values.at[e] = now.at(args, position);
    ++position;
  }
  T* const y = static_cast<T*>(args.y) + first * plane + element;
  if (element + WIDTH <= end) {
    values.store(y);
    return;
  }
#pragma unroll
  for (int e = 0; e < WIDTH; ++e) {
    if (element + e < end) y[e] = values.at[e];
  }
}
#else
extern "C" __global__ void __launch_bounds__(128)
    window_tiles(const __grid_constant__ TilesArgs args) {
  const int thread = static_cast<int>(blockIdx.x) * 128 + static_cast<int>(threadIdx.x);
  if (thread >= args.threads) return;
  const WindowItem item = item_of(args, thread, args.items, INNER ? args.inner / WIDTH : 1);
  const i64 first = static_cast<i64>(item.group) * TOGETHER;
  if (first >= args.batch) return;
  const int planes = static_cast<int>(min(static_cast<i64>(TOGETHER), args.batch - first));
  const int before = INNER ? static_cast<int>(blockIdx.z) * args.part : 0;  // columns of the tile
  const int column = INNER ? item.at[2] * args.tile[2] + before : item.at[2] * WIDTH;

  // The windows of this thread along the last axis, whether they exist, and whether it checks them.
  constexpr int kEach = EACH ? EACH : 1, kWindows = WIDTH / kEach;
  int window[kWindows];
  u32 there = 0, checks = 0;
  const bool row_there = item.at[0] < args.x_size[0] && item.at[1] < args.x_size[1];
  int own = INNER ? item.at[2] : EACH ? column / kEach : divide(column, args.by_tile);
  int into = INNER || EACH ? before : column - own * args.tile[2];
#pragma unroll
  for (int e = 0; e < kWindows; ++e) {
    window[e] = min(own, args.x_size[2] - 1);
    if (row_there && own < args.x_size[2]) {
      there |= 1u << e;
      checks |= static_cast<u32>(into == 0) << e;
    }
    if (INNER) continue;
    if (EACH || ++into == args.tile[2]) {
      into = 0;
      ++own;
    }
  }
  const int row = min(item.at[0], args.x_size[0] - 1) * args.x_size[1] +
                  min(item.at[1], args.x_size[1] - 1);
  const i64 inner = INNER ? args.inner : 1;
  const i64 sources = static_cast<i64>(args.x_size[0]) * args.x_size[1] * args.x_size[2];
  const i64 from = first * sources + static_cast<i64>(row) * args.x_size[2];
  // All loads first, because of their latency.
  Given found[TOGETHER][kWindows];
#pragma unroll
  for (int p = 0; p < TOGETHER; ++p) {
    const i64 plane = from + min(p, planes - 1) * sources;
    if constexpr (INNER || EACH) {
      load_windows(args, (plane + window[0]) * inner + (INNER ? item.vector * WIDTH : 0), found[p]);
    } else {
#pragma unroll
      for (int e = 0; e < kWindows; ++e) {
        found[p][e].value = static_cast<const T*>(args.x)[plane + window[e]];
        if constexpr (MODE != 0) {
          found[p][e].index = static_cast<const INDEX*>(args.indices)[plane + window[e]];
        }
      }
    }
  }
#pragma unroll
  for (int p = 0; p < TOGETHER; ++p) {
#pragma unroll
    for (int e = 0; e < kWindows; ++e) {
      const int at[3] = {item.at[0], item.at[1], window[e]};
      if (p < planes && (checks >> e & 1)) check(args, found[p][e].index, at);
      if (!(there >> e & 1)) found[p][e] = {T{}, static_cast<INDEX>(-1)};
    }
  }

  const int columns =
      INNER ? min(min(args.part, args.tile[2] - before), args.y_size[2] - column) : 1;
  const i64 plane = static_cast<i64>(args.y_size[0]) * args.y_size[1] * args.y_size[2] * inner;
  T* const y = static_cast<T*>(args.y) + first * plane + (INNER ? item.vector * WIDTH : 0);
  const int stop0 = min(args.tile[0], args.y_size[0] - item.at[0] * args.tile[0]);
  const int stop1 = min(args.tile[1], args.y_size[1] - item.at[1] * args.tile[1]);
  for (int i0 = 0; i0 < stop0; ++i0) {
    for (int i1 = 0; i1 < stop1; ++i1) {
      const int line = (item.at[0] * args.tile[0] + i0) * args.y_size[1] +
                       item.at[1] * args.tile[1] + i1;
      i64 position = static_cast<i64>(line) * args.y_size[2] + column;
#pragma unroll 4
      for (int i2 = 0; i2 < columns; ++i2, ++position) {
#pragma unroll
        for (int p = 0; p < TOGETHER; ++p) {
          if (p == planes) break;
          Values values;
#pragma unroll
          for (int e = 0; e < WIDTH; ++e) {
            values.at[e] = found[p][e / kEach].at(args, position + (INNER ? 0 : e));
          }
          values.store(y + p * plane + position * inner);
        }
      }
    }
  }
}
#endif
