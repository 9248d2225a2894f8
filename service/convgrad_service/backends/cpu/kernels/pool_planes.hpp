// Shared by the plane-wise pooling kernels: arguments, and the search for the maxima of a plane.
//
// With contiguous columns, vectors run over windows. A plane is packed into padded planes of equal
// pitch, one for each stride phase (as in planar_plan.hpp), so that a tap is a constant offset for
// all windows. Padding is -Inf, so it never replaces a maximum.
#pragma once

#include "planar_plan.hpp"
#include "pool.hpp"

namespace convgrad {

// `planar` describes the windows as a depthwise forward convolution whose tile is the whole plane.
// A tap's `weight` is its flat index relative to tap 0. Mirrored in ../pool_planes.py.
struct PoolPlanesArgs {
  PlanarArgs planar;
  PoolArgs pool;
};

// Vectors of windows per register block, whose comparisons overlap to hide latency.
inline constexpr int kRun = 4;

// Computes the maximum best[t] of each window and its position at[t], relative to the window's tap
// 0; -1 if all elements are -Inf. Without NaNs, one comparison per tap is enough.
template <class T, int V, bool nans>
CONVGRAD_INLINE void search_run(const T* x, const i64* offset, const PlanarTap* taps, i64 count,
                                T* best, typename detail::MaskElement<T>::type* at) {
  constexpr int L = kLanes<T>;
  using I = Mask<T>;
  using Lane = typename detail::MaskElement<T>::type;
  Vec<T> most[V];
  I where[V];
#pragma clang loop unroll(full)
  for (int v = 0; v < V; ++v) {
    most[v] = minus_infinity<T>();
    where[v] = I(Lane(-1));
  }
  for (i64 j = 0; j < count; ++j) {
    const I here = I(static_cast<Lane>(taps[j].weight));
#pragma clang loop unroll(full)
    for (int v = 0; v < V; ++v) {
      const Vec<T> value = load_raw<Vec<T>>(x + offset[j] + v * L);
      I replaces = value > most[v];
      if constexpr (nans) replaces |= value != value;
      most[v] = replaces ? value : most[v];
      where[v] = replaces ? here : where[v];
    }
  }
#pragma clang loop unroll(full)
  for (int v = 0; v < V; ++v) {
    store_raw(best + v * L, most[v]);
    store_raw(at + v * L, where[v]);
  }
}

template <class T, bool nans>
void search(const T* x, const i64* offset, const PlanarArgs& args, i64 vectors, T* best,
            typename detail::MaskElement<T>::type* at) {
  constexpr int L = kLanes<T>;
  i64 v = 0;
  for (; v + kRun <= vectors; v += kRun) {
    search_run<T, kRun, nans>(x + v * L, offset, args.tap, args.taps, best + v * L, at + v * L);
  }
  for (; v < vectors; ++v) {
    search_run<T, 1, nans>(x + v * L, offset, args.tap, args.taps, best + v * L, at + v * L);
  }
}

template <class T>
bool has_nan(const T* x, i64 n) {
  constexpr int L = kLanes<T>;
  Mask<T> seen = Mask<T>{};
  i64 i = 0;
  for (; i + L <= n; i += L) {
    const Vec<T> v = load_raw<Vec<T>>(x + i);
    seen |= v != v;
  }
  bool found = __builtin_reduce_or(seen) != 0;
  for (; i < n; ++i) found |= x[i] != x[i];
  return found;
}

// The first tap inside the input, relative to tap 0: the argmax if all elements are -Inf.
CONVGRAD_INLINE i64 first_inside(const PoolArgs& args, i64 o0, i64 o1, i64 o2) {
  return tap_flat(args, first_tap_inside(args, 0, o0), first_tap_inside(args, 1, o1),
                  first_tap_inside(args, 2, o2));
}

// Flat index of tap 0 of window (o0, o1, 0).
CONVGRAD_INLINE i64 row_base(const PoolArgs& args, i64 o0, i64 o1) {
  return flat_index(args, coordinate(args, 0, o0, 0), coordinate(args, 1, o1, 0),
                    coordinate(args, 2, 0, 0));
}

// Packs and unpacks one row of any stride.
template <class E>
CONVGRAD_INLINE void read_line(const typename E::Storage* p, i64 stride, i64 n,
                               typename E::Acc* out) {
  using T = typename E::Acc;
  constexpr int L = kLanes<T>;
  if (stride != 1) {
    for (i64 i = 0; i < n; ++i) out[i] = load_one<E>(p + i * stride);
    return;
  }
  i64 i = 0;
  for (; i + L <= n; i += L) store_raw(out + i, load<E>(p + i));
  if (i < n) {
    const int rest = static_cast<int>(n - i);
    store_raw_first<T, L>(out + i, load_first<E>(p + i, rest), rest);
  }
}
template <class E>
CONVGRAD_INLINE void write_line(typename E::Storage* p, i64 stride, i64 n,
                                const typename E::Acc* in) {
  using T = typename E::Acc;
  constexpr int L = kLanes<T>;
  if (stride != 1) {
    for (i64 i = 0; i < n; ++i) store_one<E>(p + i * stride, in[i]);
    return;
  }
  i64 i = 0;
  for (; i + L <= n; i += L) store<E>(p + i, load_raw<Vec<T>>(in + i));
  if (i < n) {
    const int rest = static_cast<int>(n - i);
    store_first<E>(p + i, load_raw_first<T, L>(in + i, rest), rest);
  }
}

}  // namespace convgrad
