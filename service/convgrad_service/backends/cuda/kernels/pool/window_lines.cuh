// Averages over windows of any size, channels first: sums of each line's part of the windows, in shared memory.
#pragma once

#include "pool/window_box.cuh"
#include "ptx/shared_element.cuh"

namespace convgrad {

// Adds up the elements of each line of the box, whose first one is at `x`, that are in each of the tile's windows
// along axis 2. The sums at `to` are [planes, box[0], box[1], tile[2]]. With kWeighted an element is multiplied by
// the weights of its column and slice; those of lines are between them. Called by all threads.
template <class T, bool kWeighted, class S = ElementAccumulator<T>>
__device__ __forceinline__ void sum_lines(const BoxArgs& args, const Box& box, u32 x, u32 to,
                                          [[maybe_unused]] const S* column_weights) {
  constexpr int kBytes = sizeof(T), kSumBytes = sizeof(S);
  [[maybe_unused]] const S* const slice_weights = column_weights + args.box[2] + args.box[1];
  const WindowRange& columns = args.windows.window[2];
  const int runs = (args.box[1] + kLineRun - 1) / kLineRun;
  const int items = box.planes * args.box[0] * runs * args.tile[2];
  for (int item = static_cast<int>(threadIdx.x); item < items; item += kBoxThreads) {
    const int above = divide(item, args.by_columns), at2 = item - above * args.tile[2];
    const int outer = divide(above, args.by_line_runs), first = (above - outer * runs) * kLineRun;
    const int plane = divide(outer, args.by_slices), slice = outer - plane * args.box[0];
    const int lines = min(kLineRun, box.extent[1] - first);
    if (at2 >= box.count[2] || slice >= box.extent[0] || lines <= 0) continue;
    const int start = window_start(columns, box.base[2] + at2) - box.first[2];
    const int stop = window_stop(columns, box.base[2] + at2) - box.first[2];
    u32 from[kLineRun];
#pragma unroll
    for (int l = 0; l < kLineRun; ++l) {
      const int line = first + min(l, lines - 1);
      from[l] = x + (plane * args.pitch[0] + slice * args.pitch[1] + line * args.pitch[2] + start) * kBytes;
    }
    S sums[kLineRun] = {};
#pragma unroll 2
    for (int t = start; t < stop; ++t) {
#pragma unroll
      for (int l = 0; l < kLineRun; ++l) {
        const S element = widen(element_at<T>(from[l]));
        from[l] += kBytes;
        sums[l] = kWeighted ? multiply_add(element, column_weights[t] * slice_weights[slice], sums[l]) : sums[l] + element;
      }
    }
    const int row = (plane * args.box[0] + slice) * args.box[1] + first;
#pragma unroll
    for (int l = 0; l < kLineRun; ++l) {
      if (l < lines) store_element(to + ((row + l) * args.tile[2] + at2) * kSumBytes, sums[l]);
    }
  }
}

}  // namespace convgrad
