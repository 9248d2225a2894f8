// Packs a dense convolution's weights into panels [tap][source channel][result channels].
#pragma once

#include "matrix_copy.hpp"

namespace convgrad {

// Packs `width` result channels of a group from `from` on, in rows of `row` elements. Taps are in the
// order in which a row of the source is read: backwards in a backward pass. `weight` has the strides
// of groups, result channels, source channels and taps.
template <class E>
void pack_weights(const typename E::Storage* from, const View& weight, const int64_t* kernel,
                  i64 source_channels, i64 width, i64 row, bool backward, typename E::Acc* to) {
  const i64 taps = kernel[0] * kernel[1] * kernel[2];
  const i64 by_result = weight.stride[1], by_source = weight.stride[2];
  const auto offset = [&](i64 tap) {
    const i64 s = tap % kernel[2], r = tap / kernel[2] % kernel[1], t = tap / kernel[2] / kernel[1];
    return t * weight.stride[3] + r * weight.stride[4] + s * weight.stride[5];
  };
  if (width < row) {
    __builtin_memset(to, 0, static_cast<u64>(taps * source_channels * row) * sizeof(*to));
  }
  const i64 tap_row = (backward ? -1 : 1) * source_channels * row;
  if (backward) to -= (taps - 1) * tap_row;
  if (weight.stride[5] == 1 && kernel[2] > 1 && by_result != 1 && by_source != 1) {
    // Taps are contiguous: transpose (taps x result channels) for each source channel, over the
    // whole kernel at once if that is contiguous.
    const bool whole =
        weight.stride[4] == kernel[2] && weight.stride[3] == kernel[2] * kernel[1];
    const i64 run = whole ? taps : kernel[2];
    for (i64 tap = 0; tap < taps; tap += run) {
      for (i64 c = 0; c < source_channels; ++c) {
        read_matrix<E>(from + offset(tap) + c * by_source, 1, by_result, run, width,
                       to + tap * tap_row + c * row, tap_row);
      }
    }
  } else {
    for (i64 tap = 0; tap < taps; ++tap) {
      read_matrix<E>(from + offset(tap), by_source, by_result, source_channels, width,
                     to + tap * tap_row, row);
    }
  }
}

}  // namespace convgrad
