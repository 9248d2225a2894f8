// One spatial dimension of dense_gather.cpp: the tiling, and the source coordinate that a result
// coordinate reads at a tap.
#pragma once

#include "conv_args.hpp"
#include "matrix_copy.hpp"

namespace convgrad {

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
  bool backward;

  i64 slab() const { return (tile - 1) * step + highest - lowest + 1; }
  // Returns false if the tap does not belong to the phase.
  CONVGRAD_INLINE bool base(i64 phase, i64 tap, i64* value) const {
    if (!backward) {
      *value = tap * dilation - pad;
      return true;
    }
    const i64 numerator = phase + pad - tap * dilation;
    if (phases == 1) {
      *value = numerator;
      return true;
    }
    *value = numerator / phases;
    return *value * phases == numerator;
  }
};

CONVGRAD_INLINE i64 floor_div(i64 a, i64 b) { return a >= 0 ? a / b : -((-a + b - 1) / b); }

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
