// The addresses of implicit_gemm.cu's results, for a run of columns at a time.
#pragma once

#include "conv/implicit_gemm_loaders.cuh"
#include "core/result_run.cuh"

namespace convgrad {

// kRun consecutive columns of every row: their offset from the start of the row, the number that
// exist, and the bias channel of the first.
template <Operation kOperation, class T, bool kPlanes>
struct ResultColumns {
  i64 at;
  int count, channel;

  __device__ __forceinline__ ResultColumns(const ImplicitGemmArgs& args, const Phases& phases,
                                           int group, int column) {
    if constexpr (kOperation == Operation::kWgrad && kPlanes) {
      channel = 0;
      count = args.columns - column;
      at = group * args.result_stride[0] + column;
    } else if constexpr (kOperation == Operation::kWgrad) {
      // A chunk belongs to a single tap.
      const TapChunk<T> chunk(args, column / TapChunk<T>::kElements);
      const int within = column % TapChunk<T>::kElements;
      const Tap tap(phases, chunk.tap);
      channel = chunk.channel + within;
      count = chunk.tap < phases.taps() ? chunk.left(args) - within : 0;
      at = group * args.result_stride[0] + channel * args.result_stride[2] +
           tap.d * args.result_stride[3] + tap.h * args.result_stride[4] +
           tap.w * args.result_stride[5];
    } else {
      channel = group * args.result_channels + column;
      count = args.result_channels - column;
      at = group * args.result_stride[1] + column * args.result_stride[2];
    }
  }
};

template <Operation kOperation>
__device__ __forceinline__ i64 result_row(const ImplicitGemmArgs& args, const Phases& phases,
                                          int row) {
  if constexpr (kOperation == Operation::kWgrad) return row * args.result_stride[1];
  if (args.linear_result) return row * args.result_stride[5];
  const Position at(phases, row);
  return at.n * args.result_stride[0] +
         (phases.d->y0 + at.d * args.axis[0].y_step) * args.result_stride[3] +
         (phases.h->y0 + at.h * args.axis[1].y_step) * args.result_stride[4] +
         (phases.w->y0 + at.w * args.axis[2].y_step) * args.result_stride[5];
}

}  // namespace convgrad
