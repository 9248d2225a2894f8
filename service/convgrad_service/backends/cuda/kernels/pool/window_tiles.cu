// Gradients of poolings whose windows are adjacent, and max unpooling: each position of y is in at
// most one window. Launched by window_tiles.py.
//
// y[i] = x[window of i] / divisor, the gradient of average pooling; with MOVE x[window of i] if the window's
// index is i, else 0: the gradient of max pooling, and max unpooling.
// A window has `tile` positions along each axis; positions past the last window get zero. If `bad` is
// not null, the thread with a window's first position checks its index: one beyond the plane sets it, another
// outside the window sets `misplaced`.
// KIND 0, channels last: a thread reads WIDTH channels of a window once and stores them to the
// window's positions, or to a part of them along the last axis, which blockIdx.z selects.
// KIND 1, channels first: WIDTH adjacent positions of a row, in all rows of their windows, in TOGETHER
// planes. With EACH every window has as many positions of a row, of which WIDTH is a multiple, and
// windows are loaded as vectors; 0 for any.
// KIND 2, channels first and one window per plane: WIDTH adjacent elements of all planes, which are
// contiguous.
// Block: 128 threads; shared memory: none. Deterministic: nothing is added. Grid: y = chunks of the batch.
// Preconditions: aligned vectors.
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
  u64* misplaced;
  int tile[3];
  int x_size[3];
  int y_size[3];
  int items[3];  // threads along each axis
  int inner;
  int batch;
  int chunk;    // of the batch
  int threads;  // in a chunk
  int wide_indices;  // of 64 bits, else of 32
  int part;     // KIND 0: positions of a tile along the last axis that a thread stores to
  Divider by_vectors, by_items[3];
  Divider by_tile;     // along the last axis
  Divider by_size[3];  // y's
  double divisor, reciprocal;
};

// An element of a window: its value and its target.
struct Given {
  T value;
  int index;

  // What a position of the window receives.
  __device__ __forceinline__ T at(const TilesArgs& args, int position) const {
    if constexpr (MOVE) return index == position ? value : T{};
    const S by = static_cast<S>(args.divisor), reciprocal = static_cast<S>(args.reciprocal);
    return narrow<T>(divided<T>(widen(value), by, reciprocal));
  }
};

__device__ __forceinline__ void check(const TilesArgs& args, int index, const int (&window)[3]) {
  if (!MOVE || args.bad == nullptr) return;
  const i64 plane = static_cast<i64>(args.y_size[0]) * args.y_size[1] * args.y_size[2];
  const bool exists = index >= 0 && index < plane;
  bool good = exists;
  int rest = exists ? index : 0;
#pragma unroll
  for (int axis = 2; axis >= 0; --axis) {
    const int outer = divide(rest, args.by_size[axis]);
    const int into = rest - outer * args.y_size[axis] - window[axis] * args.tile[axis];
    good &= into >= 0 && into < args.tile[axis];
    rest = outer;
  }
  if (!good) *(exists ? args.misplaced : args.bad) = 1;  // all writers write the same value
}

// Elements of adjacent windows as they are in memory, so that all are loaded before the first is used.
template <int kCount>
struct Loaded {
  Vector<T, kCount> values;
  Indices<kCount> indices;

  __device__ __forceinline__ void load(const TilesArgs& args, i64 at) {
    values = Vector<T, kCount>::load(static_cast<const T*>(args.x) + at);
    if constexpr (MOVE) indices.load(args.indices, at, args.wide_indices);
  }
  __device__ __forceinline__ Given given(const TilesArgs& args, int e, bool there) const {
    if (!there) return {T{}, -1};
    return {values.at[e], MOVE ? indices.at(e, args.wide_indices) : -1};
  }
};

}  // namespace

#if KIND == 2
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
  Values values;
  Loaded<1> loaded;
  loaded.load(args, first + image);
  Given now = loaded.given(args, 0, true);
#pragma unroll
  for (int e = 0; e < WIDTH; ++e) {
    if (position == plane) {
      position = 0;
      ++image;
      const bool there = first + image < args.batch;
      if (there) loaded.load(args, first + image);
      now = loaded.given(args, 0, there);
    }
    if (position == 0 && element + e < end) check(args, now.index, {0, 0, 0});
    values.at[e] = now.at(args, position);
    ++position;
  }
  T* const y = static_cast<T*>(args.y) + first * plane + element;
  values.store_part(y, element + WIDTH <= end, [&](int e) { return element + e < end; });
}
#elif KIND == 1
extern "C" __global__ void __launch_bounds__(128)
    window_tiles(const __grid_constant__ TilesArgs args) {
  const int thread = static_cast<int>(blockIdx.x) * 128 + static_cast<int>(threadIdx.x);
  if (thread >= args.threads) return;
  const WindowItem item = item_of(args, thread, args.items, 1);
  const i64 first = static_cast<i64>(item.group) * TOGETHER;
  if (first >= args.batch) return;
  const int planes = static_cast<int>(min(static_cast<i64>(TOGETHER), args.batch - first));

  const int column = item.at[2] * WIDTH;
  const bool row_there = item.at[0] < args.x_size[0] && item.at[1] < args.x_size[1];
  const i64 sources = static_cast<i64>(args.x_size[0]) * args.x_size[1] * args.x_size[2];
  const int row = min(item.at[0], args.x_size[0] - 1) * args.x_size[1] +
                  min(item.at[1], args.x_size[1] - 1);
  const i64 from = first * sources + static_cast<i64>(row) * args.x_size[2];
  // All loads first, because of their latency.
#if EACH
  constexpr int kWindows = WIDTH / EACH;
  const int own = column / EACH;
  Given found[TOGETHER][kWindows];
  Loaded<kWindows> loaded[TOGETHER];
  if (row_there) {
#pragma unroll
    for (int p = 0; p < TOGETHER; ++p) loaded[p].load(args, from + min(p, planes - 1) * sources + own);
  }
#pragma unroll
  for (int p = 0; p < TOGETHER; ++p) {
#pragma unroll
    for (int w = 0; w < kWindows; ++w) {
      found[p][w] = loaded[p].given(args, w, row_there);
      if (p < planes && row_there) {
        check(args, found[p][w].index, {item.at[0], item.at[1], own + w});
      }
    }
  }
#else
  // The windows of the row's positions.
  int own = divide(column, args.by_tile), into = column - own * args.tile[2];
  int offset[WIDTH];
  u32 there = 0, starts = 0;
#pragma unroll
  for (int e = 0; e < WIDTH; ++e) {
    offset[e] = min(own, args.x_size[2] - 1);
    if (row_there && own < args.x_size[2]) {
      there |= 1u << e;
      starts |= static_cast<u32>(into == 0) << e;
    }
    if (++into == args.tile[2]) {
      into = 0;
      ++own;
    }
  }
  Given found[TOGETHER][WIDTH];
  Loaded<1> loaded[TOGETHER][WIDTH];
#pragma unroll
  for (int p = 0; p < TOGETHER; ++p) {
    const i64 plane = from + min(p, planes - 1) * sources;
#pragma unroll
    for (int e = 0; e < WIDTH; ++e) loaded[p][e].load(args, plane + offset[e]);
  }
#pragma unroll
  for (int p = 0; p < TOGETHER; ++p) {
#pragma unroll
    for (int e = 0; e < WIDTH; ++e) {
      found[p][e] = loaded[p][e].given(args, 0, there >> e & 1);
      if (p < planes && (starts >> e & 1)) {
        check(args, found[p][e].index, {item.at[0], item.at[1], offset[e]});
      }
    }
  }
#endif
  const i64 plane = static_cast<i64>(args.y_size[0]) * args.y_size[1] * args.y_size[2];
  T* const y = static_cast<T*>(args.y) + first * plane;
  const int stop0 = min(args.tile[0], args.y_size[0] - item.at[0] * args.tile[0]);
  const int stop1 = min(args.tile[1], args.y_size[1] - item.at[1] * args.tile[1]);
  for (int i0 = 0; i0 < stop0; ++i0) {
    for (int i1 = 0; i1 < stop1; ++i1) {
      const int line = (item.at[0] * args.tile[0] + i0) * args.y_size[1] +
                       item.at[1] * args.tile[1] + i1;
      const int position = line * args.y_size[2] + column;
#pragma unroll
      for (int p = 0; p < TOGETHER; ++p) {
        if (p == planes) break;
        Values values;
#pragma unroll
        for (int e = 0; e < WIDTH; ++e) {
          values.at[e] = found[p][EACH ? e / max(1, EACH) : e].at(args, position + e);
        }
        values.store(y + p * plane + position);
      }
    }
  }
}
#else
extern "C" __global__ void __launch_bounds__(128)
    window_tiles(const __grid_constant__ TilesArgs args) {
  const int thread = static_cast<int>(blockIdx.x) * 128 + static_cast<int>(threadIdx.x);
  if (thread >= args.threads) return;
  const WindowItem item = item_of(args, thread, args.items, args.inner / WIDTH);
  if (item.group >= args.batch) return;
  const int column = item.at[2] * args.tile[2] + static_cast<int>(blockIdx.z) * args.part;
  const i64 sources = static_cast<i64>(args.x_size[0]) * args.x_size[1] * args.x_size[2];
  const bool there = item.at[0] < args.x_size[0] && item.at[1] < args.x_size[1] &&
                     item.at[2] < args.x_size[2];
  const i64 from = item.group * sources +
                   (static_cast<i64>(item.at[0]) * args.x_size[1] + item.at[1]) * args.x_size[2] +
                   item.at[2];
  Given found[WIDTH];
  Loaded<WIDTH> loaded;
  if (there) loaded.load(args, from * args.inner + item.vector * WIDTH);
#pragma unroll
  for (int e = 0; e < WIDTH; ++e) {
    found[e] = loaded.given(args, e, there);
    if (there && blockIdx.z == 0) check(args, found[e].index, item.at);
  }
  const int columns = min(min(args.part, args.tile[2] - static_cast<int>(blockIdx.z) * args.part),
                          args.y_size[2] - column);
  const i64 plane = static_cast<i64>(args.y_size[0]) * args.y_size[1] * args.y_size[2];
  T* const y = static_cast<T*>(args.y) + item.group * plane * args.inner + item.vector * WIDTH;
  const int stop0 = min(args.tile[0], args.y_size[0] - item.at[0] * args.tile[0]);
  const int stop1 = min(args.tile[1], args.y_size[1] - item.at[1] * args.tile[1]);
  for (int i0 = 0; i0 < stop0; ++i0) {
    for (int i1 = 0; i1 < stop1; ++i1) {
      const int row = (item.at[0] * args.tile[0] + i0) * args.y_size[1] +
                      item.at[1] * args.tile[1] + i1;
      int position = row * args.y_size[2] + column;
#pragma unroll 4
      for (int i2 = 0; i2 < columns; ++i2, ++position) {
        Values values;
#pragma unroll
        for (int e = 0; e < WIDTH; ++e) values.at[e] = found[e].at(args, position);
        values.store(y + static_cast<i64>(position) * args.inner);
      }
    }
  }
}
#endif
