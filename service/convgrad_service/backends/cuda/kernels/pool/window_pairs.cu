// Averages over windows of 3 x 3 positions that slide by one, channels first, in 16-bit types. Launched by
// window_pairs.py.
//
// y[o] = (sum of x[i] over the window of o) / divisor(o); with WEIGHTED the terms are x[i] / size(i),
// for gradients of windows that differ in size.
// A block computes one tile of y after another, each from the box of x that its windows cover (window_box.cuh),
// while the next box is copied. A thread computes `run` positions along axis 1 of two adjacent columns, whose
// windows share most positions, in two planes. A line's part of a window is computed once. Results are stored
// in shared memory first, and from there in 16-byte chunks.
// Block: up to 256 threads. Dynamic shared memory: two boxes of x, results, with WEIGHTED a weight per column
// and line of the box. Deterministic: the order of additions follows from the windows, however the tile is chosen.
// Index limits: planes, and elements of a tile, below 2^31; offsets in 64 bits.
#include "pool/window_box.cuh"
#include "ptx/shared_element.cuh"

using namespace convgrad;

namespace {

using T = ELEMENT;
using S = ElementAccumulator<T>;
constexpr int kBytes = sizeof(T), kTogether = 2, kColumns = 2, kSize = 3;
constexpr int kElements = kSize + kColumns - 1;  // of a line, for the windows of a thread
constexpr int kBefore = 16;  // bytes in front of a box, where elements that do not exist are read

// Of each plane and column, the sum of a line's elements.
struct Line {
  S of[kTogether][kColumns];
};

}  // namespace

extern "C" __global__ void __launch_bounds__(kBoxThreads, 4)
    window_pairs(const __grid_constant__ BoxArgs args) {
  extern __shared__ __align__(16) unsigned char shared[];
  const WindowArgs& windows = args.windows;
  const WindowRange &down = windows.window[1], &along = windows.window[2];
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int runs = (args.tile[1] + windows.run - 1) / windows.run;
  const int across = (args.tile[2] + kColumns - 1) / kColumns;
  const auto load = [&](int tile, int at) {
    return shared_address(Box(args, tile).load<T>(args, windows.x, shared + at + kBefore));
  };
  int here = 0, there = args.next_at;
  u32 x = load(static_cast<int>(blockIdx.x), here);
#pragma unroll 1
  for (int tile = static_cast<int>(blockIdx.x); tile < args.all; tile += static_cast<int>(gridDim.x)) {
    const Box box(args, tile);
    const int next_tile = tile + static_cast<int>(gridDim.x);
    const u32 next_x = next_tile < args.all ? load(next_tile, there) : 0;
#if WEIGHTED
    S* weights = reinterpret_cast<S*>(shared + args.weights_at);
#pragma unroll
    for (int axis = 2; axis >= 1; --axis) {
      for (int i = thread; i < box.extent[axis]; i += threads) {
        weights[i] = S(1) / static_cast<S>(window_size<true>(windows.counted[axis], box.first[axis] + i));
      }
      weights += args.box[axis];
    }
    const S* const column_weights = reinterpret_cast<const S*>(shared + args.weights_at);
    const S* const line_weights = column_weights + args.box[2];
#endif
    if (next_tile < args.all) {
      cp_async_wait<1>();
    } else {
      cp_async_wait<0>();
    }
    __syncthreads();
    // Also: results of the last tile are stored.
    T* const y = reinterpret_cast<T*>(shared + args.y_at) + static_cast<int>(box.y_begin(windows) % (16 / kBytes));
    const u32 y_at = shared_address(y);
    const int items = (box.planes + kTogether - 1) / kTogether * runs * across;
    for (int item = thread; item < items; item += threads) {
      const int above = divide(item, args.by_tile[2]), at2 = (item - above * across) * kColumns;
      const int group = divide(above, args.by_tile[1]), at1 = (above - group * runs) * windows.run;
      const int plane = group * kTogether;
      if (at1 >= box.count[1] || at2 >= box.count[2]) continue;
      const int o1 = box.base[1] + at1, o2 = box.base[2] + at2;
      const int start = o2 + along.first;  // of the elements
      u32 exists[kElements];               // all bits, or none
      [[maybe_unused]] S weight[kElements];
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        exists[e] = start + e >= along.low && start + e < along.high ? 0xffff : 0;
#if WEIGHTED
        weight[e] = exists[e] ? column_weights[start + e - box.first[2]] : S(0);
#endif
        asm volatile("" : "+r"(exists[e]));
      }
      // The next line, and the lines that exist, in the box.
      int next = o1 + down.first - box.first[1];
      const int low = down.low - box.first[1], high = down.high - box.first[1];
      const bool second = at2 + 1 < box.count[2];
      u32 from[kTogether], to[kTogether];
#pragma unroll
      for (int p = 0; p < kTogether; ++p) {
        const int own = plane + p < box.planes ? plane + p : plane;
        from[p] = x + (own * args.pitch[0] + next * args.pitch[2] + start - box.first[2]) * kBytes;
        to[p] = y_at + (own * args.y_plane + at1 * args.y_pitch + at2) * kBytes;
      }
      const auto sum_line = [&](Line& line, S& line_weight) {
        line = {};
        if (next >= low && next < high) {
#pragma unroll
          for (int p = 0; p < kTogether; ++p) {
            S term[kElements];
#pragma unroll
            for (int e = 0; e < kElements; ++e) {
              T element = element_at<T>(from[p] + e * kBytes);
              element.bits &= exists[e];
              term[e] = widen(element);
            }
#pragma unroll
            for (int c = 0; c < kColumns; ++c) {
#if WEIGHTED
              S sum = term[c] * weight[c];
#pragma unroll
              for (int t = 1; t < kSize; ++t) sum = multiply_add(term[c + t], weight[c + t], sum);
#else
              S sum = term[c];
#pragma unroll
              for (int t = 1; t < kSize; ++t) sum += term[c + t];
#endif
              line.of[p][c] = sum;
            }
          }
#if WEIGHTED
          line_weight = line_weights[next];
#endif
        }
        ++next;
#pragma unroll
        for (int p = 0; p < kTogether; ++p) advance(from[p], args.pitch[2] * kBytes);
      };
      Line kept[kSize];
      S kept_weight[kSize] = {};
#pragma unroll
      for (int l = 0; l + 1 < kSize; ++l) sum_line(kept[l], kept_weight[l]);
      S reciprocal[kColumns];
      const auto set_divisors = [&](int o) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          reciprocal[c] = DividedBy<T, true>(windows, 0, o, second ? o2 + c : o2).reciprocal;
        }
      };
      set_divisors(o1);
      int size1 = window_size<true>(windows.counted[1], o1);
      const int end = o1 + min(windows.run, box.count[1] - at1);
      for (int o = o1; o < end;) {
#pragma unroll
        for (int turn = 0; turn < kSize; ++turn) {
          if (o >= end) break;
          sum_line(kept[(turn + 2) % kSize], kept_weight[(turn + 2) % kSize]);
          if (windows.by_outputs) {
            const int size = window_size<true>(windows.counted[1], o);
            if (size != size1) set_divisors(o);
            size1 = size;
          }
#pragma unroll
          for (int p = 0; p < kTogether; ++p) {
#pragma unroll
            for (int c = 0; c < kColumns; ++c) {
#if WEIGHTED
              S sum = kept[turn].of[p][c] * kept_weight[turn];
#pragma unroll
              for (int l = 1; l < kSize; ++l) {
                sum = multiply_add(kept[(turn + l) % kSize].of[p][c], kept_weight[(turn + l) % kSize], sum);
              }
#else
              S sum = kept[turn].of[p][c];
#pragma unroll
              for (int l = 1; l < kSize; ++l) sum += kept[(turn + l) % kSize].of[p][c];
#endif
              // A sum of negative zeros is zero.
              const T mean = narrow<T>(multiply_add(sum, reciprocal[c], S(0)));
              if (c == 0 || second) store_element(to[p] + c * kBytes, mean);
            }
            advance(to[p], args.y_pitch * kBytes);
          }
          ++o;
        }
      }
    }
    __syncthreads();
    box.store<T>(args, windows.y, y, [](T cell) { return cell; });
    x = next_x;
    const int free = here;
    here = there;
    there = free;
  }
}
