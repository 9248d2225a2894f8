// The argmax of windows, for one vector of channels at a time.
//
// A value replaces the running maximum if it is greater or NaN. So the first of equal maxima wins,
// and the last of several NaNs. The initial position is the window's first tap inside the input,
// with value -Inf. Padding is -Inf, so it never replaces the maximum.
#pragma once

#include "blocked_box.hpp"
#include "pool_args.hpp"

namespace convgrad {

// The branch avoids a division for b = 1, the usual dilation, in every row.
CONVGRAD_INLINE i64 ceil_quotient(i64 a, i64 b) {
  if (a <= 0) return 0;
  return b == 1 ? a : (a + b - 1) / b;
}

// A window's first tap inside the input, in one dimension.
CONVGRAD_INLINE i64 first_tap_inside(const PoolArgs& args, int d, i64 window) {
  return ceil_quotient(args.pad[d] - window * args.stride[d], args.dilation[d]);
}

CONVGRAD_INLINE i64 coordinate(const PoolArgs& args, int d, i64 window, i64 tap) {
  return window * args.stride[d] + tap * args.dilation[d] - args.pad[d];
}

CONVGRAD_INLINE i64 flat_index(const PoolArgs& args, i64 i0, i64 i1, i64 i2) {
  return (i0 * args.input[1] + i1) * args.input[2] + i2;
}

template <class T>
CONVGRAD_INLINE Vec<T> minus_infinity() {
  return splat(static_cast<T>(-__builtin_inf()));
}

// A block of windows, and the extent of the input block that they read.
struct Windows {
  i64 first[3];   // may lie outside the output
  i64 count[3];
  i64 extent[3];  // of the input block, which starts at tap 0 of window `first`

  CONVGRAD_INLINE bool in_output(const PoolArgs& args, int d, i64 w) const {
    return first[d] + w >= 0 && first[d] + w < args.output[d];
  }
  // Flat index of a window's tap 0, which may be in the padding.
  CONVGRAD_INLINE i64 base(const PoolArgs& args, i64 w0, i64 w1, i64 w2) const {
    return flat_index(args, coordinate(args, 0, first[0] + w0, 0),
                      coordinate(args, 1, first[1] + w1, 0), coordinate(args, 2, first[2] + w2, 0));
  }
};

CONVGRAD_INLINE Windows windows_of(const PoolArgs& args, const i64* first, const i64* count) {
  Windows windows;
  for (int d = 0; d < 3; ++d) {
    windows.first[d] = first[d];
    windows.count[d] = count[d];
    windows.extent[d] =
        (count[d] - 1) * args.stride[d] + (args.kernel[d] - 1) * args.dilation[d] + 1;
  }
  return windows;
}

// Flat index of a tap relative to its window's tap 0.
CONVGRAD_INLINE i64 tap_flat(const PoolArgs& args, i64 r0, i64 r1, i64 r2) {
  return flat_index(args, r0 * args.dilation[0], r1 * args.dilation[1], r2 * args.dilation[2]);
}

// Computes W adjacent windows of a row, whose comparisons overlap to hide latency. `x` is tap 0 of
// the first. Positions are relative to the window's tap 0, so they are the same for all windows.
template <class T, int W>
CONVGRAD_INLINE void arg_max_run(const PoolArgs& args, const Windows& windows, i64 w0, i64 w1,
                                 i64 w2, const T* x, T* values, T* index) {
  constexpr int L = kLanes<T>;
  using I = Mask<T>;
  using Lane = typename detail::MaskElement<T>::type;
  const i64 step = args.stride[2] * L;
  Vec<T> best[W];
  I at[W];
#pragma clang loop unroll(full)
  for (int w = 0; w < W; ++w) {
    best[w] = minus_infinity<T>();
    at[w] = I(static_cast<Lane>(tap_flat(args, first_tap_inside(args, 0, windows.first[0] + w0),
                                         first_tap_inside(args, 1, windows.first[1] + w1),
                                         first_tap_inside(args, 2, windows.first[2] + w2 + w))));
  }
  for (i64 r0 = 0; r0 < args.kernel[0]; ++r0) {
    for (i64 r1 = 0; r1 < args.kernel[1]; ++r1) {
      const T* p = x + (r0 * args.dilation[0] * windows.extent[1] + r1 * args.dilation[1]) *
                           windows.extent[2] * L;
      Lane flat = static_cast<Lane>(tap_flat(args, r0, r1, 0));
      for (i64 r2 = 0; r2 < args.kernel[2]; ++r2) {
        const I here = I(flat);
#pragma clang loop unroll(full)
        for (int w = 0; w < W; ++w) {
          const Vec<T> value = load_raw<Vec<T>>(p + w * step);
          const I replaces = (value > best[w]) | (value != value);
          best[w] = replaces ? value : best[w];
          at[w] = replaces ? here : at[w];
        }
        p += args.dilation[2] * L;
        flat += static_cast<Lane>(args.dilation[2]);
      }
    }
  }
  const i64 base = windows.base(args, w0, w1, w2);
  const i64 row = (w0 * windows.count[1] + w1) * windows.count[2] + w2;
#pragma clang loop unroll(full)
  for (int w = 0; w < W; ++w) {
    if (values != nullptr) store_raw(values + (row + w) * L, best[w]);
    const I flat = at[w] + static_cast<Lane>(base + w * args.stride[2]);
    store_raw(index + (row + w) * L, __builtin_bit_cast(Vec<T>, flat));
  }
}

// Computes the maxima of a block of windows and their flat indices, from the input block `x`. The
// index of windows outside the output is -1.
template <class T>
void arg_max(const PoolArgs& args, const Windows& windows, const T* x, T* values, T* index) {
  constexpr int L = kLanes<T>;
  constexpr int W = 4;
  using I = Mask<T>;
  const Vec<T> none = __builtin_bit_cast(Vec<T>, I{} - 1);
  for (i64 w0 = 0; w0 < windows.count[0]; ++w0) {
    for (i64 w1 = 0; w1 < windows.count[1]; ++w1) {
      const i64 row = (w0 * windows.count[1] + w1) * windows.count[2];
      const bool valid = windows.in_output(args, 0, w0) && windows.in_output(args, 1, w1);
      const T* source = x + (w0 * args.stride[0] * windows.extent[1] + w1 * args.stride[1]) *
                                windows.extent[2] * L;
      for (i64 w2 = 0; w2 < windows.count[2];) {
        if (!valid || !windows.in_output(args, 2, w2)) {
          store_raw(index + (row + w2++) * L, none);
          continue;
        }
        const T* p = source + w2 * args.stride[2] * L;
        if (w2 + W <= windows.count[2] && windows.in_output(args, 2, w2 + W - 1)) {
          arg_max_run<T, W>(args, windows, w0, w1, w2, p, values, index);
          w2 += W;
        } else {
          arg_max_run<T, 1>(args, windows, w0, w1, w2, p, values, index);
          ++w2;
        }
      }
    }
  }
}

// The taps [low, high) of a window that are inside the input, in one dimension.
struct TapRange {
  i64 low;
  i64 high;
};
CONVGRAD_INLINE TapRange taps_inside(const PoolArgs& args, int d, i64 window) {
  TapRange taps;
  const i64 room = args.input[d] - 1 - coordinate(args, d, window, 0);
  taps.low = first_tap_inside(args, d, window);
  taps.high = room < 0 ? 0 : (args.dilation[d] == 1 ? room : room / args.dilation[d]) + 1;
  if (taps.high > args.kernel[d]) taps.high = args.kernel[d];
  return taps;
}

struct PoolTile {
  i64 batch;
  i64 channel;
  int lanes;  // channels
  i64 start[3];
  i64 extent[3];
};

// Maps a task to a tile of `vectors` vectors of channels, such that consecutive tasks access adjacent memory: channel blocks are
// innermost if channels are contiguous, otherwise tiles are.
template <class T>
CONVGRAD_INLINE PoolTile pool_tile(const PoolArgs& args, const int64_t* whole, i64 task,
                                   i64 vectors = 1) {
  const i64 L = vectors * kLanes<T>;
  PoolTile tile;
  const i64 blocks = (args.channels + L - 1) / L;
  const bool channels_first = args.y.stride[1] != 1;
  if (!channels_first) {
    tile.channel = task % blocks * L;
    task /= blocks;
  }
  for (int d = 2; d >= 0; --d) {
    tile.start[d] = task % args.tiles[d] * args.tile[d];
    task /= args.tiles[d];
    const i64 left = whole[d] - tile.start[d];
    tile.extent[d] = left < args.tile[d] ? left : args.tile[d];
  }
  if (channels_first) {
    tile.channel = task % blocks * L;
    task /= blocks;
  }
  tile.batch = task;
  const i64 left = args.channels - tile.channel;
  tile.lanes = static_cast<int>(left < L ? left : L);
  return tile;
}

template <class T>
CONVGRAD_INLINE i64 pool_tasks(const PoolArgs& args, i64 vectors = 1) {
  const i64 blocks = (args.channels + vectors * kLanes<T> - 1) / (vectors * kLanes<T>);
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
