// Max pooling, forward and backward, where columns are contiguous: one (n, c) plane at a time.
//
// A task is a few planes of one image. Forward: the search of pool_planes.hpp, then values and flat
// indices row by row. Backward: the same search, or given indices and their check; then each
// window's gradient is added to its maximum's position, in the windows' order, in a plane of sums
// that stays in the cache (for float32 the result's own plane) and is rounded once.
//
// Relies on: PoolPlanesArgs as ../pool_planes.py makes it. Deterministic: a plane belongs to one
// thread. An index outside its window's valid taps adds to nothing and is reported as in
// pool_backward.cpp. Indices within a plane are 32-bit for float sums.
#include "pool_planes.hpp"

namespace convgrad {
namespace {

template <class T>
struct Scratch {
  using Lane = typename detail::MaskElement<T>::type;
  i64* offsets;
  T* source;
  T* best;
  Lane* at;
  T* row;
  Lane* position;
  T* sums;
};

template <class E>
Scratch<typename E::Acc> scratch_of(const PoolPlanesArgs& args, const Planes& planes,
                                    void* scratch) {
  using T = typename E::Acc;
  using Lane = typename detail::MaskElement<T>::type;
  constexpr i64 L = kLanes<T>;
  const PlanarArgs& planar = args.planar;
  Arena arena{static_cast<char*>(scratch)};
  Scratch<T> s;
  s.offsets = arena.take<i64>(planar.taps);
  s.source = arena.take<T>(planar.group_block * planar.src_phases * planes.plane +
                           kSlackVectors * L);
  s.best = arena.take<T>(planes.vectors * L);
  s.at = arena.take<Lane>(planes.vectors * L);
  s.row = arena.take<T>(args.pool.output[2]);
  s.position = arena.take<Lane>(args.pool.output[2]);
  s.sums = arena.take<T>(args.pool.input[0] * args.pool.input[1] * args.pool.input[2]);
  tap_offsets(planar, planes.plane, s.offsets);
  return s;
}

// Finds the maxima of plane g of the block that was read.
template <class T>
void search_plane(const PlanarArgs& args, const Planes& planes, i64 g, const Scratch<T>& s) {
  const i64 size = args.src_phases * planes.plane;
  const T* x = s.source + g * size;
  if (has_nan(x, size)) {
    search<T, true>(x, s.offsets, args, planes.vectors, s.best, s.at);
  } else {
    search<T, false>(x, s.offsets, args, planes.vectors, s.best, s.at);
  }
}

template <class E, class Index>
void forward_planes(const PoolPlanesArgs& args, Control* control, void* scratch) {
  using T = typename E::Acc;
  using S = typename E::Storage;
  const PlanarArgs& planar = args.planar;
  const PoolArgs& pool = args.pool;
  const Planes planes = Planes::of<T>(planar, planar.tile);
  const Scratch<T> s = scratch_of<E>(args, planes, scratch);
  const i64 tasks = ceil_div(planar.groups, planar.group_block) * planar.batch;
  for (i64 task; (task = take_task(control, 0, tasks)) >= 0;) {
    const TileOrigin tile = tile_at(planar, task / planar.batch, task % planar.batch);
    read_source<E, false>(planar, tile, planes.plane, s.source, -__builtin_inf());
    for (i64 g = 0; g < tile.groups; ++g) {
      search_plane<T>(planar, planes, g, s);
      for (i64 o0 = 0; o0 < pool.output[0]; ++o0) {
        for (i64 o1 = 0; o1 < pool.output[1]; ++o1) {
          const i64 t = (o0 * planar.box[1] + o1) * planar.box[2];
          const auto at = [&](const View& view) {
            return tile.batch * view.stride[0] + (tile.group + g) * view.stride[1] +
                   o0 * view.stride[2] + o1 * view.stride[3];
          };
          write_line<E>(static_cast<S*>(pool.y.data) + at(pool.y), pool.y.stride[4],
                        pool.output[2], s.best + t);
          if (pool.indices.data == nullptr) continue;
          Index* to = static_cast<Index*>(pool.indices.data) + at(pool.indices);
          const i64 base = row_base(pool, o0, o1), step = pool.stride[2];
          i64 unset = 0;
          for (i64 o2 = 0; o2 < pool.output[2]; ++o2) {
            const i64 relative = s.at[t + o2];
            unset |= relative;
            to[o2 * pool.indices.stride[4]] = static_cast<Index>(base + o2 * step + relative);
          }
          for (i64 o2 = 0; unset < 0 && o2 < pool.output[2]; ++o2) {
            if (s.at[t + o2] >= 0) continue;
            to[o2 * pool.indices.stride[4]] =
                static_cast<Index>(base + o2 * step + first_inside(pool, o0, o1, o2));
          }
        }
      }
    }
  }
}

// position[o2] = the flat index of one row of windows, each held against its window. Returns whether
// all are right; one that is not becomes -1 and is reported.
template <class T, class Index>
CONVGRAD_INLINE bool check_row(const PoolArgs& args,
                               Control* control, const Index* given, i64 plane, i64 o0, i64 o1,
                               typename detail::MaskElement<T>::type* position) {
  using I = Mask<T>;
  using Lane = typename detail::MaskElement<T>::type;
  using Unsigned = __make_unsigned(Lane);
  constexpr int L = kLanes<T>;
  using U = VecN<Unsigned, L>;
  const TapRange taps0 = taps_inside(args, 0, o0), taps1 = taps_inside(args, 1, o1);
  const i64 s2 = args.stride[2], d2 = args.dilation[2], stride = args.indices.stride[4];
  const U width = U(static_cast<Unsigned>(args.input[2]));
  const U columns = U(static_cast<Unsigned>(args.kernel[2]));
  const Lane base = static_cast<Lane>(row_base(args, o0, o1));
  I lane{};
#pragma clang loop unroll(full)
  for (int i = 0; i < L; ++i) lane[i] = static_cast<Lane>(i);
  lane *= static_cast<Lane>(s2);
  I wrong{};
  for (i64 next = 0; next < args.output[2]; next += L) {
    // The last vector of a row overlaps the one before it: no partial vector, the same answer.
    const bool overlaps = next + L > args.output[2] && args.output[2] >= L;
    const i64 o2 = overlaps ? args.output[2] - L : next;
    const int n = static_cast<int>(args.output[2] - o2 < L ? args.output[2] - o2 : L);
    I flat;
    if (stride == 1 && n == L) {
      flat = __builtin_bit_cast(I, IndexLanes<T, Index>::get(given + o2));
    } else {
      Index all[L] = {};
      for (int i = 0; i < n; ++i) all[i] = given[(o2 + i) * stride];
      flat = __builtin_bit_cast(I, IndexLanes<T, Index>::get(all));
    }
    const I start = lane + static_cast<Lane>(o2 * s2);
    const I offset = flat - (start + base);
    const I first = start - static_cast<Lane>(args.pad[2]);
    I found = I(Lane(0));
    for (i64 r0 = taps0.low; r0 < taps0.high; ++r0) {
      for (i64 r1 = taps1.low; r1 < taps1.high; ++r1) {
        const I column = offset - static_cast<Lane>(tap_flat(args, r0, r1, 0));
        // As unsigned numbers, negative ones are too large.
        const I inside = __builtin_bit_cast(U, first + column) < width;
        if (d2 == 1) {
          found |= inside & (__builtin_bit_cast(U, column) < columns);
          continue;
        }
        for (i64 r2 = 0; r2 < args.kernel[2]; ++r2) {
          found |= inside & (column == static_cast<Lane>(r2 * d2));
        }
      }
    }
    found &= flat >= Lane(0);
    const I checked = found ? flat : I(Lane(-1));
    if (n == L) {
      wrong |= checked;
      store_raw(position + o2, checked);
      continue;
    }
    for (int i = 0; i < n; ++i) {
      position[o2 + i] = checked[i];
      wrong[0] |= checked[i];
    }
  }
  // A right position is not negative.
  if (__builtin_reduce_or(wrong) >= 0) return true;
  const i64 row = ((plane * args.output[0] + o0) * args.output[1] + o1) * args.output[2];
  for (i64 o2 = 0; o2 < args.output[2]; ++o2) {
    if (position[o2] < 0) report(control, row + o2);
  }
  return false;
}

// position[o2] = the flat index of the maximum that the search found for one row of windows.
template <class Lane>
CONVGRAD_INLINE void found_row(const PoolArgs& args, i64 o0, i64 o1, const Lane* relative,
                               Lane* position) {
  const Lane base = static_cast<Lane>(row_base(args, o0, o1));
  const Lane step = static_cast<Lane>(args.stride[2]);
  Lane unset = 0;
  for (i64 o2 = 0; o2 < args.output[2]; ++o2) {
    unset |= relative[o2];
    position[o2] = static_cast<Lane>(base + static_cast<Lane>(o2) * step + relative[o2]);
  }
  for (i64 o2 = 0; unset < 0 && o2 < args.output[2]; ++o2) {
    if (relative[o2] >= 0) continue;
    position[o2] = static_cast<Lane>(base + static_cast<Lane>(o2) * step +
                                     static_cast<Lane>(first_inside(args, o0, o1, o2)));
  }
}

template <class E, class Index>
void backward_planes(const PoolPlanesArgs& args, Control* control, void* scratch) {
  using T = typename E::Acc;
  using S = typename E::Storage;
  const PlanarArgs& planar = args.planar;
  const PoolArgs& pool = args.pool;
  const Planes planes = Planes::of<T>(planar, planar.tile);
  const Scratch<T> s = scratch_of<E>(args, planes, scratch);
  const i64 size = pool.input[0] * pool.input[1] * pool.input[2];
  const View& result = pool.grad_input;
  const bool in_place = sizeof(S) == sizeof(T) && result.stride[4] == 1 &&
                        (pool.input[1] == 1 || result.stride[3] == pool.input[2]) &&
                        (pool.input[0] == 1 || result.stride[2] == pool.input[1] * pool.input[2]);
  const i64 tasks = ceil_div(planar.groups, planar.group_block) * planar.batch;
  for (i64 task; (task = take_task(control, 0, tasks)) >= 0;) {
    const TileOrigin tile = tile_at(planar, task / planar.batch, task % planar.batch);
    if (!pool.from_indices) {
      read_source<E, false>(planar, tile, planes.plane, s.source, -__builtin_inf());
    }
    for (i64 g = 0; g < tile.groups; ++g) {
      const i64 channel = tile.group + g;
      if (!pool.from_indices) search_plane<T>(planar, planes, g, s);
      S* target = static_cast<S*>(result.data) + tile.batch * result.stride[0] +
                  channel * result.stride[1];
      T* sums = in_place ? reinterpret_cast<T*>(target) : s.sums;
      fill_zero(sums, size);
      for (i64 o0 = 0; o0 < pool.output[0]; ++o0) {
        for (i64 o1 = 0; o1 < pool.output[1]; ++o1) {
          const auto at = [&](const View& view) {
            return tile.batch * view.stride[0] + channel * view.stride[1] + o0 * view.stride[2] +
                   o1 * view.stride[3];
          };
          bool right = true;
          if (pool.from_indices) {
            right = check_row<T, Index>(
                pool, control, static_cast<const Index*>(pool.indices.data) + at(pool.indices),
                tile.batch * pool.channels + channel, o0, o1, s.position);
          } else {
            found_row(pool, o0, o1, s.at + (o0 * planar.box[1] + o1) * planar.box[2], s.position);
          }
          const S* y = static_cast<const S*>(pool.y.data) + at(pool.y);
          const T* gradient = s.row;
          if constexpr (sizeof(S) == sizeof(T)) {
            if (pool.y.stride[4] == 1) gradient = reinterpret_cast<const T*>(y);
          }
          if (gradient == s.row) read_line<E>(y, pool.y.stride[4], pool.output[2], s.row);
          if (right) {
            for (i64 o2 = 0; o2 < pool.output[2]; ++o2) sums[s.position[o2]] += gradient[o2];
          } else {
            for (i64 o2 = 0; o2 < pool.output[2]; ++o2) {
              if (s.position[o2] >= 0) sums[s.position[o2]] += gradient[o2];
            }
          }
        }
      }
      for (i64 i0 = 0; !in_place && i0 < pool.input[0]; ++i0) {
        for (i64 i1 = 0; i1 < pool.input[1]; ++i1) {
          write_line<E>(target + i0 * result.stride[2] + i1 * result.stride[3], result.stride[4],
                        pool.input[2], sums + flat_index(pool, i0, i1, 0));
        }
      }
    }
  }
}

template <class E>
void planes(const PoolPlanesArgs& args, Control* control, void* scratch, bool backward) {
  if (args.pool.index_bytes == 4) {
    backward ? backward_planes<E, i32>(args, control, scratch)
             : forward_planes<E, i32>(args, control, scratch);
  } else {
    backward ? backward_planes<E, i64>(args, control, scratch)
             : forward_planes<E, i64>(args, control, scratch);
  }
}

void any_planes(const PoolPlanesArgs& args, Control* control, void* scratch, bool backward) {
  switch (args.pool.dtype) {
    case kFloat16: return planes<F16>(args, control, scratch, backward);
    case kBfloat16: return planes<BF16>(args, control, scratch, backward);
    case kFloat32: return planes<F32>(args, control, scratch, backward);
    case kFloat64: return planes<F64>(args, control, scratch, backward);
  }
}

}  // namespace
}  // namespace convgrad

extern "C" CONVGRAD_EXPORT void convgrad_pool_planes_forward(const convgrad::PoolPlanesArgs* args,
                                                             convgrad::Control* control,
                                                             void* scratch) {
  convgrad::any_planes(*args, control, scratch, false);
}

extern "C" CONVGRAD_EXPORT void convgrad_pool_planes_backward(const convgrad::PoolPlanesArgs* args,
                                                              convgrad::Control* control,
                                                              void* scratch) {
  convgrad::any_planes(*args, control, scratch, true);
}
