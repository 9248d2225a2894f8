// What the depthwise kernels share: which taps a row of the result meets, and where.
#pragma once

#include "elements.hpp"
#include "planar_plan.hpp"

namespace convgrad {

// One tap for one row of the result: its source and weight at column t = 0 and channel 0, and the
// columns [low, high) at which the source has an element.
template <class S, class W>
struct RowTap {
  const S* source;
  W* weight;
  i64 low;
  i64 high;
};

// The row (t0, t1) of image n, for the taps of dst phase p; returns how many taps meet it.
// weights hold [tap][channel].
template <class S, class W>
i64 row_taps(const PlanarArgs& args, i64 n, i64 t0, i64 t1, i64 columns, i64 p, W* weights,
             RowTap<S, W>* met) {
  i64 count = 0;
  const i64 t[2] = {t0, t1};
  for (i64 i = args.first_tap[p]; i < args.first_tap[p + 1]; ++i) {
    const PlanarTap& tap = args.tap[i];
    i64 base[3];
    for (int d = 0; d < 3; ++d) {
      base[d] = (tap.offset[d] + args.origin[d]) * args.src_step[d] +
                args.src_phase[tap.src_phase * 3 + d];
    }
    const S* source = static_cast<const S*>(args.src.data) + n * args.src.stride[0];
    bool meets = true;
    for (int d = 0; d < 2; ++d) {
      const i64 u = t[d] * args.src_step[d] + base[d];
      meets &= u >= 0 && u < args.src_size[d];
      source += u * args.src.stride[3 + d];
    }
    if (!meets) continue;
    const i64 step = args.src_step[2];
    const i64 low = base[2] >= 0 ? 0 : ceil_div(-base[2], step);
    const i64 room = args.src_size[2] - 1 - base[2];
    i64 high = room < 0 ? 0 : room / step + 1;
    if (high > columns) high = columns;
    if (low >= high) continue;
    met[count++] = {source + base[2] * args.src.stride[5], weights + i * args.groups, low, high};
  }
  return count;
}

// The columns that all taps meet: [low, high), empty where low >= high.
template <class Tap>
CONVGRAD_INLINE void common_columns(const Tap* met, i64 count, i64 columns, i64& low, i64& high) {
  low = 0;
  high = columns;
  for (i64 j = 0; j < count; ++j) {
    if (met[j].low > low) low = met[j].low;
    if (met[j].high < high) high = met[j].high;
  }
}

}  // namespace convgrad
