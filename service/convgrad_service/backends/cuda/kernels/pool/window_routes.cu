// Routing of elements by indices, for windows of any kind: the gradient of max pooling from the
// indices of the maxima, and max unpooling. Launched by window_routes.py.
//
// y[i] = sum of x[o] over the windows o that contain i and whose index is i; with MOVE, the last of
// them, bit by bit. It is a gather without atomics, in the order of the windows.
// If `bad` is given, bad[MOVE] is increased by the number of windows whose index is not in them: all
// windows less those that a position matches.
// Windows with a dilation are those of all positions between their taps. With DILATED, an index that is
// none of these does not match.
// A thread computes SPAN adjacent positions along the last axis, in WIDTH adjacent elements of `inner`,
// and reads each window that contains any of them once. If `inner` is 1, it stores STORE adjacent
// positions at once. Block: 128 threads; shared memory: 4 bytes. Deterministic.
// Memory-safe for any index: indices are compared, never dereferenced. Grid: y = chunks
// of the batch. Preconditions: aligned vectors. Index limits: extents, planes and a chunk's
// threads below 2^31; offsets in 64 bits.
#include "pool/windows.cuh"

using namespace convgrad;

namespace {

using T = ELEMENT;
using S = ElementAccumulator<T>;
using Values = Vector<T, WIDTH>;
using Given = Vector<SOURCE, WIDTH>;  // of x
constexpr int kThreads = 128;

// What SPAN adjacent positions receive.
struct Route {
#if MOVE
  Values moved[SPAN];
#else
  S sum[SPAN][WIDTH];
#endif
  int matches = 0;

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int t = 0; t < SPAN; ++t) {
#if MOVE
      moved[t] = Values::zero();
#else
#pragma unroll
      for (int v = 0; v < WIDTH; ++v) sum[t][v] = S(0);
#endif
    }
  }
  // A window with the positions [low, high) of those of this thread, which begin at `position`.
  template <class IsTap>
  __device__ __forceinline__ void take(const int (&found)[WIDTH], const Given& values, int position,
                                       int low, int high, IsTap is_tap) {
#pragma unroll
    for (int v = 0; v < WIDTH; ++v) {
      const int at = static_cast<int>(static_cast<u32>(found[v]) - static_cast<u32>(position));
      const bool inside = at >= low && at < high && is_tap(at);
      matches += inside;
#pragma unroll
      for (int t = 0; t < SPAN; ++t) {
        if (!inside || at != t) continue;
#if MOVE
        moved[t].at[v] = values.at[v];
#else
        sum[t][v] += widen(values.at[v]);
#endif
      }
    }
  }
  __device__ __forceinline__ T result(int t, int v) const {
#if MOVE
    return moved[t].at[v];
#else
    return narrow<T>(sum[t][v]);
#endif
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    window_routes(const __grid_constant__ WindowArgs args) {
  const int thread = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  const int spans = (args.y_size[2] + SPAN - 1) / SPAN;
  const int items[3] = {args.y_size[0], args.y_size[1], spans};
  const WindowItem item = item_of(args, thread, items, args.inner / WIDTH);
  const i64 row = static_cast<i64>(args.x_size[2]) * args.inner;
  const i64 x_plane = row * args.x_size[1] * args.x_size[0];
  Route route;
  route.clear();
  if (thread < args.threads && item.group < args.batch) {
    const int column = item.at[2] * SPAN, columns = min(SPAN, args.y_size[2] - column);
    int start[3], stop[3];
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) {
      const int first = axis == 2 ? column : item.at[axis];
      start[axis] = window_start(args.window[axis], first);
      stop[axis] = window_stop(args.window[axis], axis == 2 ? first + columns - 1 : first);
    }
    const int line = item.at[0] * args.y_size[1] + item.at[1];
    const int position = line * args.y_size[2] + column;
    const i64 lead = item.group * x_plane + item.vector * WIDTH;
    const SOURCE* const x = static_cast<const SOURCE*>(args.x) + lead;
    for (int o0 = start[0]; o0 < stop[0]; ++o0) {
      for (int o1 = start[1]; o1 < stop[1]; ++o1) {
        const i64 line = (static_cast<i64>(o0) * args.x_size[1] + o1) * row;
        for (int o2 = start[2]; o2 < stop[2]; ++o2) {
          const i64 from = line + static_cast<i64>(o2) * args.inner;
          int low = 0, high = columns;
          if (args.bad != nullptr) {
            low = max(0, window_start(args.counted[2], o2) - column);
            high = min(columns, window_stop(args.counted[2], o2) - column);
          }
          const auto is_tap = [&]([[maybe_unused]] int at) {
            if (!DILATED) return true;
            return window_reach(args.counted[0], o0, item.at[0]) % args.dilation[0] == 0 &&
                   window_reach(args.counted[1], o1, item.at[1]) % args.dilation[1] == 0 &&
                   window_reach(args.counted[2], o2, column + at) % args.dilation[2] == 0;
          };
          const Given values = Given::load(x + from);
          Indices<WIDTH> indices;
          indices.load(args.indices, lead + from, args.wide_indices);
          int found[WIDTH];
#pragma unroll
          for (int v = 0; v < WIDTH; ++v) found[v] = indices.at(v, args.wide_indices);
          route.take(found, values, position, low, high, is_tap);
        }
      }
    }
    const i64 y_plane = static_cast<i64>(args.y_size[0]) * args.y_size[1] * args.y_size[2];
    T* const y = static_cast<T*>(args.y) + (item.group * y_plane + position) * args.inner +
                 item.vector * WIDTH;
#pragma unroll
    for (int t = 0; t < SPAN; t += STORE) {
      if (t >= columns) break;
      Vector<T, STORE * WIDTH> some;  // either is 1
#pragma unroll
      for (int e = 0; e < STORE; ++e) {
#pragma unroll
        for (int v = 0; v < WIDTH; ++v) some.at[e + v] = route.result(t + e, v);
      }
      some.store(y + static_cast<i64>(t) * args.inner);
    }
  }
  if (args.bad != nullptr) count_missing(route.matches, args.bad + MOVE, x_plane * args.batch);
}
