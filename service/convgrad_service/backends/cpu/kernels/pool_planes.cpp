// Max pooling, forward and backward, for contiguous columns: one (n, c) plane at a time.
//
// A task is a few planes of one image. Forward: the search of pool_planes.hpp, then values and flat
// indices are written row by row. Backward: the same search, then each window's gradient is added at
// its maximum, in window order, in a plane of accumulators that stays in the cache (for float32, the
// result itself), and rounded once.
//
// Requires: PoolPlanesArgs from ../pool_planes.py. Deterministic: one thread processes a plane.
// Indices within a plane are 32-bit for float accumulators.
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

// Finds the maxima of plane g of the packed block.
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
    read_source<E>(planar, tile, planes.plane, s.source, -__builtin_inf());
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

// Writes the flat indices of the maxima found in one row of windows to position.
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

// One past the last position that the windows (o0, o1, any o2) may add to.
CONVGRAD_INLINE i64 past_window(const PoolArgs& args, i64 o0, i64 o1) {
  const i64 i0 = coordinate(args, 0, o0, args.kernel[0] - 1);
  const i64 i1 = coordinate(args, 1, o1, args.kernel[1] - 1);
  const i64 last0 = i0 < args.input[0] ? i0 : args.input[0] - 1;
  const i64 last1 = i1 < args.input[1] ? i1 : args.input[1] - 1;
  return (last0 * args.input[1] + last1 + 1) * args.input[2];
}

template <class E>
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
    read_source<E>(planar, tile, planes.plane, s.source, -__builtin_inf());
    for (i64 g = 0; g < tile.groups; ++g) {
      const i64 channel = tile.group + g;
      search_plane<T>(planar, planes, g, s);
      S* target = static_cast<S*>(result.data) + tile.batch * result.stride[0] +
                  channel * result.stride[1];
      T* sums = in_place ? reinterpret_cast<T*>(target) : s.sums;
      i64 cleared = 0;
      for (i64 o0 = 0; o0 < pool.output[0]; ++o0) {
        for (i64 o1 = 0; o1 < pool.output[1]; ++o1) {
          const auto at = [&](const View& view) {
            return tile.batch * view.stride[0] + channel * view.stride[1] + o0 * view.stride[2] +
                   o1 * view.stride[3];
          };
          // Clearing just ahead of use keeps the data in L1, even if the plane is larger.
          const i64 reached = past_window(pool, o0, o1);
          if (reached > cleared) {
            fill_zero(sums + cleared, reached - cleared);
            cleared = reached;
          }
          found_row(pool, o0, o1, s.at + (o0 * planar.box[1] + o1) * planar.box[2], s.position);
          const S* y = static_cast<const S*>(pool.y.data) + at(pool.y);
          const T* gradient = s.row;
          if constexpr (sizeof(S) == sizeof(T)) {
            if (pool.y.stride[4] == 1) gradient = reinterpret_cast<const T*>(y);
          }
          if (gradient == s.row) read_line<E>(y, pool.y.stride[4], pool.output[2], s.row);
          for (i64 o2 = 0; o2 < pool.output[2]; ++o2) sums[s.position[o2]] += gradient[o2];
        }
      }
      if (cleared < size) fill_zero(sums + cleared, size - cleared);
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
  if (backward) {
    backward_planes<E>(args, control, scratch);
  } else if (args.pool.index_bytes == 4) {
    forward_planes<E, i32>(args, control, scratch);
  } else {
    forward_planes<E, i64>(args, control, scratch);
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
