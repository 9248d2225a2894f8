// Max pooling one window at a time, without packing: for windows so large or so dilated that
// packing the input of a tile would cost more than the search.
//
// A task is one plane (n, c), whose windows are processed in order. Forward: the maximum and its
// flat index. Backward: each window's gradient is added at its maximum, in float (double for F64),
// and rounded once. F32 and F64 accumulate in grad_input, 16-bit types in scratch.
//
// Requires: PoolArgs without tiles; scratch for one plane of accumulators for 16-bit types.
// Deterministic: one thread adds in window order, which is the order of pool_backward.cpp. Invalid
// indices contribute nothing, and valid ones are counted as there.
#include "pool.hpp"

namespace convgrad {
namespace {

template <class T>
CONVGRAD_INLINE T* plane_of(const View& view, i64 n, i64 c) {
  return static_cast<T*>(view.data) + n * view.stride[0] + c * view.stride[1];
}

CONVGRAD_INLINE i64 offset(const View& view, i64 i0, i64 i1, i64 i2) {
  return i0 * view.stride[2] + i1 * view.stride[3] + i2 * view.stride[4];
}

struct Place {
  i64 at[3];
};

template <class T>
struct Found {
  T value;
  Place place;
};

// Finds the first maximum of a window, or its last NaN.
template <class E>
Found<typename E::Acc> search(const PoolArgs& args, const typename E::Storage* x, const i64* o) {
  using T = typename E::Acc;
  TapRange taps[3];
  i64 base[3];
  Found<T> found{static_cast<T>(-__builtin_inf()), {}};
  for (int d = 0; d < 3; ++d) {
    taps[d] = taps_inside(args, d, o[d]);
    base[d] = coordinate(args, d, o[d], 0);
    found.place.at[d] = base[d] + taps[d].low * args.dilation[d];
  }
  for (i64 r0 = taps[0].low; r0 < taps[0].high; ++r0) {
    for (i64 r1 = taps[1].low; r1 < taps[1].high; ++r1) {
      const i64 i0 = base[0] + r0 * args.dilation[0];
      const i64 i1 = base[1] + r1 * args.dilation[1];
      i64 i2 = base[2] + taps[2].low * args.dilation[2];
      const typename E::Storage* p = x + offset(args.x, i0, i1, i2);
      const i64 step = args.dilation[2] * args.x.stride[4];
      for (i64 r2 = taps[2].low; r2 < taps[2].high; ++r2, p += step, i2 += args.dilation[2]) {
        const T value = load_one<E>(p);
        if (value > found.value || value != value) found = {value, {{i0, i1, i2}}};
      }
    }
  }
  return found;
}

// Returns whether a flat index is a tap of window o inside the input, and if so, its coordinates.
CONVGRAD_INLINE bool located(const PoolArgs& args, const i64* o, i64 flat, Place* place) {
  if (flat < 0 || flat >= args.input[0] * args.input[1] * args.input[2]) return false;
  place->at[2] = flat % args.input[2];
  place->at[1] = flat / args.input[2] % args.input[1];
  place->at[0] = flat / args.input[2] / args.input[1];
  for (int d = 0; d < 3; ++d) {
    const i64 reach = place->at[d] - coordinate(args, d, o[d], 0);
    if (reach < 0 || reach % args.dilation[d] || reach / args.dilation[d] >= args.kernel[d]) {
      return false;
    }
  }
  return true;
}

// Calls visit(n, c, o) for every window of every plane; `before` and `after` are called around each
// plane.
template <class Before, class Visit, class After>
CONVGRAD_INLINE void each_plane(const PoolArgs& args, Control* control, Before before, Visit visit,
                                After after) {
  const i64 windows = args.output[0] * args.output[1] * args.output[2];
  for (i64 task; (task = take_task(control, 0, args.batch * args.channels)) >= 0;) {
    const i64 n = task / args.channels;
    const i64 c = task % args.channels;
    before(n, c);
    for (i64 w = 0; w < windows; ++w) {
      if (__atomic_load_n(&control->cancelled, __ATOMIC_RELAXED)) return;
      const i64 o[3] = {w / args.output[2] / args.output[1], w / args.output[2] % args.output[1],
                        w % args.output[2]};
      visit(n, c, o);
    }
    after(n, c);
  }
}

template <class E, class Index>
void forward_windows(const PoolArgs& args, Control* control, void*) {
  using Storage = typename E::Storage;
  const auto nothing = [](i64, i64) {};
  const auto visit = [&](i64 n, i64 c, const i64* o) {
    const auto found = search<E>(args, plane_of<const Storage>(args.x, n, c), o);
    store_one<E>(plane_of<Storage>(args.y, n, c) + offset(args.y, o[0], o[1], o[2]), found.value);
    if (args.indices.data == nullptr) return;
    const i64* at = found.place.at;
    plane_of<Index>(args.indices, n, c)[offset(args.indices, o[0], o[1], o[2])] =
        static_cast<Index>(flat_index(args, at[0], at[1], at[2]));
  };
  each_plane(args, control, nothing, visit, nothing);
}

template <class E, class Index>
void backward_windows(const PoolArgs& args, Control* control, void* scratch) {
  using T = typename E::Acc;
  using Storage = typename E::Storage;
  constexpr bool in_place = sizeof(Storage) == sizeof(T);
  const View& out = args.grad_input;
  const auto each_element = [&](auto&& visit) {
    for (i64 i0 = 0; i0 < args.input[0]; ++i0) {
      for (i64 i1 = 0; i1 < args.input[1]; ++i1) {
        for (i64 i2 = 0; i2 < args.input[2]; ++i2) visit(i0, i1, i2);
      }
    }
  };
  T* sums = static_cast<T*>(scratch);
  i64 valid = 0;  // given indices
  const auto sum_at = [&](i64 n, i64 c, i64 i0, i64 i1, i64 i2) -> T* {
    if constexpr (in_place) return plane_of<T>(out, n, c) + offset(out, i0, i1, i2);
    return sums + flat_index(args, i0, i1, i2);
  };
  const auto clear = [&](i64 n, i64 c) {
    each_element([&](i64 i0, i64 i1, i64 i2) { *sum_at(n, c, i0, i1, i2) = T(0); });
  };
  const auto visit = [&](i64 n, i64 c, const i64* o) {
    Place place;
    if (args.from_indices) {
      const Index flat =
          plane_of<const Index>(args.indices, n, c)[offset(args.indices, o[0], o[1], o[2])];
      if (!located(args, o, flat, &place)) return;
      ++valid;
    } else {
      place = search<E>(args, plane_of<const Storage>(args.x, n, c), o).place;
    }
    const i64* at = place.at;
    *sum_at(n, c, at[0], at[1], at[2]) +=
        load_one<E>(plane_of<const Storage>(args.y, n, c) + offset(args.y, o[0], o[1], o[2]));
  };
  const auto finish = [&](i64 n, i64 c) {
    if constexpr (!in_place) {
      each_element([&](i64 i0, i64 i1, i64 i2) {
        store_one<E>(plane_of<Storage>(out, n, c) + offset(out, i0, i1, i2),
                     *sum_at(n, c, i0, i1, i2));
      });
    }
  };
  each_plane(args, control, clear, visit, finish);
  __atomic_fetch_add(&control->done[1], valid, __ATOMIC_RELAXED);
}

template <class E>
void forward(const PoolArgs& args, Control* control, void* scratch) {
  args.index_bytes == 4 ? forward_windows<E, i32>(args, control, scratch)
                        : forward_windows<E, i64>(args, control, scratch);
}

template <class E>
void backward(const PoolArgs& args, Control* control, void* scratch) {
  args.index_bytes == 4 ? backward_windows<E, i32>(args, control, scratch)
                        : backward_windows<E, i64>(args, control, scratch);
}

}  // namespace
}  // namespace convgrad

extern "C" CONVGRAD_EXPORT void convgrad_pool_windows_forward(const convgrad::PoolArgs* args,
                                                              convgrad::Control* control,
                                                              void* scratch) {
  using namespace convgrad;
  switch (args->dtype) {
    case kFloat16: return forward<F16>(*args, control, scratch);
    case kBfloat16: return forward<BF16>(*args, control, scratch);
    case kFloat32: return forward<F32>(*args, control, scratch);
    case kFloat64: return forward<F64>(*args, control, scratch);
  }
}

extern "C" CONVGRAD_EXPORT void convgrad_pool_windows_backward(const convgrad::PoolArgs* args,
                                                               convgrad::Control* control,
                                                               void* scratch) {
  using namespace convgrad;
  switch (args->dtype) {
    case kFloat16: return backward<F16>(*args, control, scratch);
    case kBfloat16: return backward<BF16>(*args, control, scratch);
    case kFloat32: return backward<F32>(*args, control, scratch);
    case kFloat64: return backward<F64>(*args, control, scratch);
  }
}
