// Pooling over large windows, several threads (lanes) per window: averages, or with MAXIMA the maxima and their
// positions. Launched by window_reduce.py.
//
// Averages: y[o] = (sum of x[i] over the window of o) / divisor(o).
// Maxima: y[o] = the maximum, indices[o] = its flat position in the plane. Of equal maxima the first
// wins; a NaN wins over any number, and of several NaNs the last. Partial results are combined by the
// same rule on their positions, so the order does not matter.
// The lanes of a window take its positions round robin, 2^lanes_log of them along the last axis by
// the rest along the axis before. Channels first (INNER 0): lanes are adjacent threads, because
// positions are contiguous. Channels last (INNER 1): adjacent threads have WIDTH channels each, and
// lanes are as far apart as a block has windows. Each lane has several accumulators and loads in flight.
// LINE: windows have positions along the last axis only.
// With channels first, WIDTH above 1 is a vector of positions along the last axis, whose lanes are
// added at the end; windows must start and end at multiples of it.
// Block: 256 threads, 256 / lanes windows (of WIDTH channels). Shared memory: one partial result per
// thread if lanes span warps. Deterministic: the order of reduction depends on the window only.
// Grid: y = chunks of the batch. Preconditions: aligned vectors.
// Index limits: extents and a chunk's threads below 2^31; offsets in 64 bits.
#include "pool/windows.cuh"

using namespace convgrad;

namespace {

using T = ELEMENT;
using S = ElementAccumulator<T>;
using Values = Vector<T, WIDTH>;
constexpr int kAtOnce = MAXIMA ? 4 : 8;
constexpr int kParts = MAXIMA ? 4 : 2;
// Elements with separate results: channels, or with vectors of positions their lanes.
constexpr bool kAlong = !INNER && WIDTH > 1;

struct Part {
  S value[WIDTH];
#if MAXIMA
  int where[WIDTH];  // -1 before the first element
#endif

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int v = 0; v < WIDTH; ++v) {
      value[v] = S(0);
#if MAXIMA
      where[v] = -1;
#endif
    }
  }
  // Adds an element, whose position is after those before it.
  __device__ __forceinline__ void take(const Values& values, int position) {
#pragma unroll
    for (int v = 0; v < WIDTH; ++v) {
      const S found = widen(values.at[v]);
#if MAXIMA
      if (where[v] < 0 || found > value[v] || found != found) {
        value[v] = found;
        where[v] = position;
      }
#else
      value[v] += found;
#endif
    }
  }
  __device__ __forceinline__ void meet(int v, S found, int position) {
#if MAXIMA
    const bool nan = found != found, own_nan = value[v] != value[v];
    const bool wins = where[v] < 0 || (nan && own_nan ? position > where[v]
                                       : nan          ? true
                                       : own_nan      ? false
                                                      : found > value[v] || (found == value[v] &&
                                                                             position < where[v]));
    if (position >= 0 && wins) {
      value[v] = found;
      where[v] = position;
    }
#else
    value[v] += found;
#endif
  }
  __device__ __forceinline__ void meet(const Part& other) {
#pragma unroll
    for (int v = 0; v < WIDTH; ++v) {
#if MAXIMA
      meet(v, other.value[v], other.where[v]);
#else
      meet(v, other.value[v], 0);
#endif
    }
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(256, MAXIMA ? 2 : WIDTH == 8 || sizeof(T) == 8 ? 3 : 4)
    window_reduce(const __grid_constant__ WindowArgs args) {
  const int thread = static_cast<int>(threadIdx.x);
  const int lanes_log = args.window_log, lanes = 1 << lanes_log, items_log = 8 - lanes_log;
  const int lane = INNER ? thread >> items_log : thread & (lanes - 1);
  const int own = INNER ? thread & ((1 << items_log) - 1) : thread >> lanes_log;
  const int index = (static_cast<int>(blockIdx.x) << items_log) + own;
  constexpr int kStep = kAlong ? WIDTH : 1;  // positions in a vector
  const int vectors = kAlong ? 1 : args.inner / WIDTH;
  const WindowItem item = item_of(args, min(index, args.threads - 1), args.y_size, vectors);
  const bool exists = index < args.threads && item.group < args.batch;

  const i64 row = static_cast<i64>(args.x_size[2]) * args.inner;
  const i64 plane = row * args.x_size[1] * args.x_size[0];
  const i64 lead = min(item.group, args.batch - 1) * plane + item.vector * WIDTH;
  const T* const x = static_cast<const T*>(args.x) + lead;
  int start[3], stop[3];
#pragma unroll
  for (int axis = 0; axis < 3; ++axis) {
    start[axis] = window_start(args.window[axis], item.at[axis]);
    stop[axis] = window_stop(args.window[axis], item.at[axis]);
  }
  Part parts[kParts];
#pragma unroll
  for (int u = 0; u < kParts; ++u) parts[u].clear();
#if LINE
  constexpr int kStepLog = kStep == 8 ? 3 : kStep / 2;
  const int first = start[2] + lane * kStep, step = lanes * kStep;
  const int loads = max(0, stop[2] - first + step - 1) >> (lanes_log + kStepLog);
  const i64 pitch = static_cast<i64>(step) * args.inner;
  const T* from = x + static_cast<i64>(first) * args.inner;
  int next = first;
  const auto take = [&](int count) {
    Values values[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      values[u] = u < count ? Values::load(from + u * pitch) : Values::zero();
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      if (u < count) parts[u % kParts].take(values[u], next + u * step);
    }
    from += kAtOnce * pitch;
    next += kAtOnce * step;
  };
  int left = loads;
  for (; left >= kAtOnce; left -= kAtOnce) take(kAtOnce);
  if (left > 0) take(left);
#else
  const int lanes_x = 1 << args.lanes_log, lanes_y = lanes >> args.lanes_log;
  const int lane_y = lane >> args.lanes_log, lane_x = lane & (lanes_x - 1);
  for (int i0 = start[0]; i0 < stop[0]; ++i0) {
    int i1 = start[1] + lane_y, i2 = start[2] + lane_x * kStep;
    if (i2 >= stop[2]) i1 = stop[1];
    while (i1 < stop[1]) {
      Values values[kAtOnce];
      int positions[kAtOnce];
      bool there[kAtOnce];
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        there[u] = i1 < stop[1];
        positions[u] = (i0 * args.x_size[1] + i1) * args.x_size[2] + i2;
        values[u] = there[u] ? Values::load(x + static_cast<i64>(positions[u]) * args.inner)
                             : Values::zero();
        i2 += lanes_x * kStep;
        if (i2 >= stop[2]) {
          i2 = start[2] + lane_x * kStep;
          i1 += lanes_y;
        }
      }
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        if (there[u]) parts[u % kParts].take(values[u], positions[u]);
      }
    }
  }
#endif
#pragma unroll
  for (int u = 1; u < kParts; ++u) parts[0].meet(parts[u]);
  Part& whole = parts[0];

  if constexpr (!INNER) {
#pragma unroll 1
    for (int flip = min(lanes, 32) / 2; flip > 0; flip /= 2) {
      Part other;
#pragma unroll
      for (int v = 0; v < WIDTH; ++v) {
        other.value[v] = __shfl_xor_sync(0xffffffffu, whole.value[v], flip);
#if MAXIMA
        other.where[v] = __shfl_xor_sync(0xffffffffu, whole.where[v], flip);
#endif
      }
      whole.meet(other);
    }
  }
  const int met = INNER ? lanes : lanes / 32;  // that have not met in a warp
  if (met > 1) {
    __shared__ Part shared[256];
    // Lanes that are left meet in pairs.
    const int apart = INNER ? 1 << items_log : 32, place = INNER ? lane : lane % 32 == 0 ? lane / 32 : met;
    if (place < met) shared[thread] = whole;
#pragma unroll 1
    for (int half = met / 2; half > 0; half /= 2) {
      __syncthreads();
      if (place >= half) continue;
      whole.meet(shared[thread + half * apart]);
      shared[thread] = whole;
    }
  }
  if (lane != 0 || !exists) return;

  const i64 outputs = static_cast<i64>(args.y_size[0]) * args.y_size[1] * args.y_size[2];
  const i64 position =
      (static_cast<i64>(item.at[0]) * args.y_size[1] + item.at[1]) * args.y_size[2] + item.at[2];
  const i64 to = (item.group * outputs + position) * args.inner + item.vector * WIDTH;
  Values values;
#if MAXIMA
#pragma unroll
  for (int v = 0; v < WIDTH; ++v) {
    values.at[v] = narrow<T>(whole.value[v]);
    // A NaN keeps its bits.
    if (whole.value[v] != whole.value[v]) values.at[v] = x[static_cast<i64>(whole.where[v]) * args.inner + v];
  }
  store_positions(args, lead, to, whole.where);
  if (args.y != nullptr) values.store(static_cast<T*>(args.y) + to);
#else
  const DividedBy<T> division(args, item.at[0], item.at[1], item.at[2]);
  if constexpr (kAlong) {
    S sum = whole.value[0];
#pragma unroll
    for (int v = 1; v < WIDTH; ++v) sum += whole.value[v];
    static_cast<T*>(args.y)[to] = narrow<T>(division(sum));
  } else {
#pragma unroll
    for (int v = 0; v < WIDTH; ++v) values.at[v] = narrow<T>(division(whole.value[v]));
    values.store(static_cast<T*>(args.y) + to);
  }
#endif
}
