// Poolings over windows that are ranges of positions, sliding or adaptive. Host side:
// window_form.py.
#pragma once

#include "core/divider.cuh"
#include "core/vectors.cuh"

namespace convgrad {

// Window o has the positions [start, stop), see WindowAxis.
struct WindowRange {
  int whole, step;  // of positions an output: whole units, and the rest
  int first, last;
  int low, high;
  Divider by_unit;
  int wide_shift;
  u64 wide_factor;  // by_unit for products of more than 31 bits; 0 where there are none
};

// A negative bound is clamped to `low`, unless the unit is 1.
__device__ __forceinline__ int window_bound(const WindowRange& range, int o, int add) {
  if (range.by_unit.factor == 0) return o * range.whole + add;
  const int whole_units = o * range.whole;
  if (range.wide_factor != 0) {
    const i64 n = static_cast<i64>(o) * range.step + add;
    const u64 quotient = __umul64hi(static_cast<u64>(max(n, 0ll)), range.wide_factor) >> range.wide_shift;
    return whole_units + static_cast<int>(quotient);
  }
  const int n = o * range.step + add;
  return whole_units + (n <= 0 ? n : divide(n, range.by_unit));
}
// kWhole: windows that slide by whole positions, so that nothing is divided.
template <bool kWhole = false>
__device__ __forceinline__ int window_start(const WindowRange& range, int o) {
  return max(range.low, kWhole ? o * range.whole + range.first : window_bound(range, o, range.first));
}
template <bool kWhole = false>
__device__ __forceinline__ int window_stop(const WindowRange& range, int o) {
  return min(range.high, kWhole ? o * range.whole + range.last : window_bound(range, o, range.last));
}
template <bool kWhole = false>
__device__ __forceinline__ int window_size(const WindowRange& range, int o) {
  return window_stop<kWhole>(range, o) - window_start<kWhole>(range, o);
}

// x is [batch, x_size, inner], y and indices are [batch, y_size, inner], all contiguous. Threads are
// numbered within a chunk of the batch, which blockIdx.y selects, so that numbers fit in 31 bits.
struct WindowArgs {
  const void* x;
  void* y;        // or null for maxima
  void* indices;  // or null, except for routes
  const int* carried;  // maxima: numbers of x's elements, for `indices`; null: their positions
  u64* bad;       // routes: counts invalid indices; null if they are valid by construction
  WindowRange window[3];   // from positions of y to those of x
  WindowRange counted[3];  // sizes of windows: of y, of x (window_sums with WEIGHTED), of routes' x
  int x_size[3];
  int y_size[3];
  int x_plane;  // positions of a plane of x
  int inner;
  int batch;
  int chunk;    // items of the batch in a chunk
  int threads;  // in a chunk
  Divider by_vectors, by_items[3];  // of threads: along inner and y's axes
  int wide_indices;  // of 64 bits, else of 32
  int by_outputs;                   // whether y's sums are divided by `counted`, else by `divisor`
  int lanes_log;  // log2: of a window's lanes along its last axis, of a line's or a row's threads
  int window_log;  // window_reduce: log2 of a window's lanes
  int run;        // positions of y of a thread along an axis
  int dilation[3];  // maxima and routes: distances of taps, which start at `first`
  int dilated;
  double divisor, reciprocal;
};

// Position i less the first tap of window o along an axis, which may be outside the input. It is a tap if
// this is a multiple of the dilation.
__device__ __forceinline__ int window_reach(const WindowRange& range, int o, int i) {
  return i - (o * range.whole + range.first);
}
// The first tap inside the input; windows with a dilation slide by whole positions.
__device__ __forceinline__ int window_first(const WindowArgs& args, int axis, int o) {
  const int start = window_start(args.window[axis], o), step = args.dilation[axis];
  if (step == 1) return start;
  const int beyond = window_reach(args.window[axis], o, start) % step;
  return beyond == 0 ? start : start + step - beyond;
}

// What a thread computes: its coordinates among a chunk's threads.
struct WindowItem {
  int vector, at[3], group;
};

template <class Args>
__device__ __forceinline__ WindowItem item_of(const Args& args, int thread, const int (&items)[3],
                                              int vectors) {
  WindowItem item;
  int rest = divide(thread, args.by_vectors);
  item.vector = thread - rest * vectors;
#pragma unroll
  for (int axis = 2; axis >= 0; --axis) {
    const int outer = divide(rest, args.by_items[axis]);
    item.at[axis] = rest - outer * items[axis];
    rest = outer;
  }
  item.group = static_cast<int>(blockIdx.y) * args.chunk + rest;
  return item;
}

// Indices of kCount adjacent windows as they are in memory: of 64 bits (`wide`), else of 32.
template <int kCount>
struct Indices {
  int words[2 * kCount];

  __device__ __forceinline__ void load(const void* indices, i64 at, bool wide) {
    const int* const from = static_cast<const int*>(indices);
    if (wide) {
      load_words<2 * kCount>(from + 2 * at);
    } else {
      load_words<kCount>(from + at);
    }
  }
  // A position in a plane; negative if it is in none.
  __device__ __forceinline__ int at(int e, bool wide) const {
    if (!wide) return words[e];
    return words[2 * e + 1] == 0 ? words[2 * e] : -1;
  }

 private:
  template <int kWords>
  __device__ __forceinline__ void load_words(const int* from) {
    constexpr int kVector = kWords < 4 ? kWords : 4;
#pragma unroll
    for (int w = 0; w < kWords; w += kVector) {
      const auto some = Vector<int, kVector>::load(from + w);
#pragma unroll
      for (int e = 0; e < kVector; ++e) words[w + e] = some.at[e];
    }
  }
};

__device__ __forceinline__ float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
__device__ __forceinline__ double multiply_add(double a, double b, double c) {
  return fma(a, b, c);
}

// sum / by from the rounded reciprocal: rounded as a division (Markstein) unless the result is rounded
// to 16 bits anyway; infinities and NaNs pass.
template <class T, class S = ElementAccumulator<T>>
__device__ __forceinline__ S divided(S sum, S by, S reciprocal) {
  const S near = sum * reciprocal;
  if (sizeof(T) == 2 || !(near - near == S(0))) return near;
  return multiply_add(multiply_add(-near, by, sum), reciprocal, near);
}

// The divisor of a window of y, and its reciprocal.
template <class T, bool kWhole = false>
struct DividedBy {
  using S = ElementAccumulator<T>;
  S by, reciprocal;
  __device__ __forceinline__ DividedBy(const WindowArgs& args, int o0, int o1, int o2) {
    if (args.by_outputs) {
      by = static_cast<S>(window_size<kWhole>(args.counted[0], o0)) * static_cast<S>(window_size<kWhole>(args.counted[1], o1)) *
           static_cast<S>(window_size<kWhole>(args.counted[2], o2));
      reciprocal = S(1) / by;
    } else {
      by = static_cast<S>(args.divisor);
      reciprocal = static_cast<S>(args.reciprocal);
    }
  }
  __device__ __forceinline__ S operator()(S sum) const { return divided<T>(sum, by, reciprocal); }
};

// Adds the windows without a match to `missing`: all windows, less the matches of every thread. Called
// by all threads of a block whose threads are whole warps.
__device__ __forceinline__ void count_missing(int matches, u64* missing, i64 windows) {
  __shared__ int all;
  if (threadIdx.x == 0) all = 0;
#pragma unroll
  for (int by = 16; by > 0; by /= 2) matches += __shfl_xor_sync(~0u, matches, by);
  __syncthreads();
  if (threadIdx.x % 32 == 0) atomicAdd(&all, matches);
  __syncthreads();
  const bool first = blockIdx.x == 0 && blockIdx.y == 0;
  if (threadIdx.x == 0) atomicAdd(missing, static_cast<u64>((first ? windows : 0) - all));
}

// Stores the positions of maxima in kWidth adjacent channels. With `pairs` lanes 2i and 2i + 1 of a warp
// have adjacent vectors, and exchange so that each store writes whole sectors.
template <class Index, int kWidth>
__device__ __forceinline__ void store_as(Index* to, const int (&where)[kWidth], bool pairs) {
  constexpr int kChunk = kWidth * sizeof(Index) >= 16 ? 16 / sizeof(Index) : kWidth;
  constexpr int kChunks = kWidth / kChunk;
  if (kChunks < 2 || !pairs) {
#pragma unroll
    for (int v = 0; v < kWidth; v += kChunk) {
      Vector<Index, kChunk> some;
#pragma unroll
      for (int e = 0; e < kChunk; ++e) some.at[e] = where[v + e];
      some.store(to + v);
    }
    return;
  }
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const bool odd = lane % 2 == 1;
  const unsigned pair = 3u << (lane - odd);
  to -= odd ? kWidth : 0;
#pragma unroll
  for (int c = 0; c + 1 < kChunks; c += 2) {
    Vector<Index, kChunk> first, second;  // of the even lane's vector and of the odd lane's
#pragma unroll
    for (int e = 0; e < kChunk; ++e) {
      const int even_chunk = where[c * kChunk + e], odd_chunk = where[(c + 1) * kChunk + e];
      const int got = __shfl_xor_sync(pair, odd ? even_chunk : odd_chunk, 1);
      first.at[e] = odd ? got : even_chunk;
      second.at[e] = odd ? odd_chunk : got;
    }
    Index* const own = to + (c + odd) * kChunk;
    first.store(own);
    second.store(own + kWidth);
  }
}

// `from` is the first position of the planes in x, `to` that of the windows in y.
template <int kWidth>
__device__ __forceinline__ void store_positions(const WindowArgs& args, i64 from, i64 to,
                                                int (&where)[kWidth], bool pairs = false) {
  if (args.indices == nullptr) return;
  if (args.carried != nullptr) {
#pragma unroll
    for (int v = 0; v < kWidth; ++v) {
      where[v] = args.carried[from + static_cast<i64>(where[v]) * args.inner + v];
    }
  }
  if (args.wide_indices) {
    store_as(static_cast<i64*>(args.indices) + to, where, pairs);
  } else {
    store_as(static_cast<int*>(args.indices) + to, where, pairs);
  }
}

}  // namespace convgrad
