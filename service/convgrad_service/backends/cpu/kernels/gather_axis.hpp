// One spatial dimension of dense_gather.cpp: the tiling, and the source coordinate that a result
// coordinate reads at a tap.
#pragma once

#include "conv_args.hpp"
#include "matrix_copy.hpp"

namespace convgrad {

// The taps of one phase, and the value of `base` for each: arithmetic progressions.
struct Progression {
  i64 count;
  i64 tap;
  i64 tap_step;
  i64 base;
  i64 base_step;
  CONVGRAD_INLINE void advance() {
    --count;
    tap += tap_step;
    base += base_step;
  }
  CONVGRAD_INLINE bool same(const Progression& other) const {
    return count == other.count && tap == other.tap && base == other.base;
  }
};

// One spatial dimension of a gather. At tap t, result coordinate u = phase + phases * j reads
// source coordinate j * step + base.
struct Axis {
  i64 result;  // extents
  i64 source;
  i64 taps;
  i64 phases;
  i64 step;
  i64 tile;     // in j
  i64 tiles;
  i64 lowest;   // minimum and maximum base over all phases and taps
  i64 highest;
  i64 dilation;
  i64 pad;
  i64 period;  // of the taps of a phase
  bool backward;

  i64 slab() const { return (tile - 1) * step + highest - lowest + 1; }
  // Returns the taps of a phase, in the order of the coordinates that they read.
  CONVGRAD_INLINE Progression taps_of(i64 phase) const {
    if (!backward) return {taps, 0, 1, -pad, dilation};
    i64 first = 0;
    while (first < taps && (phase + pad - first * dilation) % phases != 0) ++first;
    // After that, every phases / gcd(phases, dilation)-th.
    const i64 count = (taps - first + period - 1) / period;
    const i64 last = first + (count - 1) * period;
    return {count, last, -period, (phase + pad - last * dilation) / phases, apart()};
  }
  // Returns the distance of the source coordinates of two taps of a phase.
  i64 apart() const { return backward ? dilation * period / phases : dilation; }
  // Returns those that read the source, not padding, at step j: adjacent ones.
  CONVGRAD_INLINE Progression inside(Progression tap, i64 j) const {
    const auto outside = [&](i64 base) {
      return static_cast<u64>(j * step + base) >= static_cast<u64>(source);
    };
    while (tap.count > 0 && outside(tap.base)) tap.advance();
    while (tap.count > 0 && outside(tap.base + (tap.count - 1) * tap.base_step)) --tap.count;
    return tap;
  }
  // Returns the next step, after j, at which a tap enters or leaves the source.
  CONVGRAD_INLINE i64 unchanged(Progression tap, i64 j) const {
    i64 next = j + result;
    const i64 edges[] = {0, source};
    for (; tap.count > 0; tap.advance()) {
      for (const i64 edge : edges) {
        const i64 first = (edge - tap.base + step - 1) / step;
        if (first > j) next = least(next, first);
      }
    }
    return next;
  }
  // Whether a tile reads the source coordinate at a distance from its first; a tile that is
  // smaller than the dilation leaves gaps.
  bool reads(i64 distance) const {
    if (dilation <= tile) return true;
    for (i64 phase = 0; phase < least(phases, result); ++phase) {
      for (Progression tap = taps_of(phase); tap.count > 0; tap.advance()) {
        const i64 steps = distance + lowest - tap.base;
        if (steps >= 0 && steps < tile * step && steps % step == 0) return true;
      }
    }
    return false;
  }
};

CONVGRAD_INLINE i64 floor_div(i64 a, i64 b) { return a >= 0 ? a / b : -((-a + b - 1) / b); }

CONVGRAD_INLINE i64 common_divisor(i64 a, i64 b) {
  while (b != 0) {
    const i64 rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}

inline Axis make_axis(const ConvArgs& args, int d, bool backward) {
  Axis axis;
  axis.backward = backward;
  axis.result = backward ? args.input[d] : args.output[d];
  axis.source = backward ? args.output[d] : args.input[d];
  axis.taps = args.kernel[d];
  axis.phases = backward ? args.stride[d] : 1;
  axis.step = backward ? 1 : args.stride[d];
  axis.dilation = args.dilation[d];
  axis.pad = args.pad[d];
  axis.period = axis.phases / common_divisor(axis.phases, axis.dilation);
  const i64 steps = (axis.result + axis.phases - 1) / axis.phases;
  axis.tile = least(args.block[d], steps);
  axis.tiles = (steps + axis.tile - 1) / axis.tile;
  // Bounds of (phase + pad - tap * dilation) / stride (backward), tap * dilation - pad (forward).
  const i64 reach = (axis.taps - 1) * axis.dilation;
  if (backward) {
    const i64 last_phase = least(axis.phases, axis.result) - 1;
    axis.lowest = -floor_div(reach - axis.pad, axis.phases);
    axis.highest = floor_div(last_phase + axis.pad, axis.phases);
    if (axis.highest < axis.lowest) axis.highest = axis.lowest;  // no taps
  } else {
    axis.lowest = -axis.pad;
    axis.highest = reach - axis.pad;
  }
  return axis;
}

}  // namespace convgrad
