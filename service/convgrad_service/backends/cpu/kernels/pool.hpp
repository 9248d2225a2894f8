// The arg-max of windows, one vector of channels at a time.
//
// A value replaces the running maximum where it is greater or a NaN: so the first maximum wins a
// tie, and of several NaNs the last. The search starts at the window's first tap inside the input,
// with -Inf as its value; padding holds -Inf too, which never replaces anything.
#pragma once

#include "blocked_box.hpp"
#include "pool_args.hpp"

namespace convgrad {

CONVGRAD_INLINE i64 ceil_quotient(i64 a, i64 b) { return a <= 0 ? 0 : (a + b - 1) / b; }

// The first tap of a window inside the input, along one dimension.
CONVGRAD_INLINE i64 first_tap_inside(const PoolArgs& args, int d, i64 window) {
  return ceil_quotient(args.pad[d] - window * args.stride[d], args.dilation[d]);
}

CONVGRAD_INLINE i64 coordinate(const PoolArgs& args, int d, i64 window, i64 tap) {
  return window * args.stride[d] + tap * args.dilation[d] - args.pad[d];
}

CONVGRAD_INLINE i64 flat_index(const PoolArgs& args, i64 i0, i64 i1, i64 i2) {
  return (i0 * args.input[1] + i1) * args.input[2] + i2;
}

// The inputs that windows [first, first + count) may touch.
CONVGRAD_INLINE void windows_reach(const PoolArgs& args, const i64* first, const i64* count,
                                   i64* start, i64* extent) {
  for (int d = 0; d < 3; ++d) {
    start[d] = coordinate(args, d, first[d], 0);
    extent[d] = (count[d] - 1) * args.stride[d] + (args.kernel[d] - 1) * args.dilation[d] + 1;
  }
}

template <class T>
CONVGRAD_INLINE Vec<T> minus_infinity() {
  return splat(static_cast<T>(-__builtin_inf()));
}

// values[w], index[w] for the `count` windows from `first` on, from a block `x` of the inputs that
// they reach (starting at `start`, `extent` positions along each dimension). Windows outside the
// output get index -1.
template <class T>
void arg_max(const PoolArgs& args, const i64* first, const i64* count, const i64* extent,
             const T* x, T* values, T* index) {
  constexpr int L = kLanes<T>;
  using I = Mask<T>;
  using Lane = typename detail::MaskElement<T>::type;
  for (i64 w0 = 0; w0 < count[0]; ++w0) {
    for (i64 w1 = 0; w1 < count[1]; ++w1) {
      const i64 row = (w0 * count[1] + w1) * count[2];
      const i64 o0 = first[0] + w0, o1 = first[1] + w1;
      const bool rows_valid = o0 >= 0 && o0 < args.output[0] && o1 >= 0 && o1 < args.output[1];
      for (i64 w2 = 0; w2 < count[2]; ++w2) {
        const i64 o2 = first[2] + w2;
        if (!rows_valid || o2 < 0 || o2 >= args.output[2]) {
          store_raw(index + (row + w2) * L, __builtin_bit_cast(Vec<T>, I(Lane(-1))));
          continue;
        }
        Vec<T> best = minus_infinity<T>();
        I at = I(static_cast<Lane>(
            flat_index(args, coordinate(args, 0, o0, first_tap_inside(args, 0, o0)),
                       coordinate(args, 1, o1, first_tap_inside(args, 1, o1)),
                       coordinate(args, 2, o2, first_tap_inside(args, 2, o2)))));
        for (i64 r0 = 0; r0 < args.kernel[0]; ++r0) {
          const i64 v0 = w0 * args.stride[0] + r0 * args.dilation[0];
          for (i64 r1 = 0; r1 < args.kernel[1]; ++r1) {
            const i64 v1 = w1 * args.stride[1] + r1 * args.dilation[1];
            const T* p = x + ((v0 * extent[1] + v1) * extent[2] + w2 * args.stride[2]) * L;
            Lane flat = static_cast<Lane>(flat_index(args, coordinate(args, 0, o0, r0),
                                                     coordinate(args, 1, o1, r1),
                                                     coordinate(args, 2, o2, 0)));
            for (i64 r2 = 0; r2 < args.kernel[2]; ++r2) {
              const Vec<T> value = load_raw<Vec<T>>(p);
              const I replaces = (value > best) | (value != value);
              best = replaces ? value : best;
              at = replaces ? I(flat) : at;
              p += args.dilation[2] * L;
              flat += static_cast<Lane>(args.dilation[2]);
            }
          }
        }
        if (values != nullptr) store_raw(values + (row + w2) * L, best);
        store_raw(index + (row + w2) * L, __builtin_bit_cast(Vec<T>, at));
      }
    }
  }
}

struct PoolTile {
  i64 batch;
  i64 channel;
  int lanes;
  i64 start[3];
  i64 extent[3];
};

// Tasks go through the tiles of a block of channels, then the next block, then the next image.
template <class T>
CONVGRAD_INLINE PoolTile pool_tile(const PoolArgs& args, const int64_t* whole, i64 task) {
  constexpr int L = kLanes<T>;
  PoolTile tile;
  for (int d = 2; d >= 0; --d) {
    tile.start[d] = task % args.tiles[d] * args.tile[d];
    task /= args.tiles[d];
    const i64 left = whole[d] - tile.start[d];
    tile.extent[d] = left < args.tile[d] ? left : args.tile[d];
  }
  const i64 blocks = (args.channels + L - 1) / L;
  tile.channel = task % blocks * L;
  tile.batch = task / blocks;
  const i64 left = args.channels - tile.channel;
  tile.lanes = static_cast<int>(left < L ? left : L);
  return tile;
}

template <class T>
CONVGRAD_INLINE i64 pool_tasks(const PoolArgs& args) {
  const i64 blocks = (args.channels + kLanes<T> - 1) / kLanes<T>;
  return args.batch * blocks * args.tiles[0] * args.tiles[1] * args.tiles[2];
}

CONVGRAD_INLINE BlockBox block_box(const PoolTile& tile, const int64_t* size, const i64* first,
                                   const i64* extent) {
  BlockBox box;
  box.batch = tile.batch;
  box.channel = tile.channel;
  box.lanes = tile.lanes;
  for (int d = 0; d < 3; ++d) {
    box.size[d] = size[d];
    box.first[d] = first[d];
    box.extent[d] = extent[d];
  }
  return box;
}

}  // namespace convgrad
