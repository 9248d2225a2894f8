// Where implicit_gemm.cu's sums go: a few neighbours of a row at a time.
#pragma once

#include "conv/implicit_gemm_loaders.cuh"
#include "epilogue.cuh"
#include "vectors.cuh"

namespace convgrad {

// So many results of one row: where the first is, how far apart they lie, how many exist, and the
// channel of the first for a bias.
struct ResultRun {
  i64 at, step;
  int count, channel;
};

// kRun neighbouring columns from `column` on (a multiple of kRun) of row `row`, in the largest run
// that has one tap.
template <Operation kOperation, class T, int kRun>
__device__ __forceinline__ ResultRun result_run(const ImplicitGemmArgs& args, const Phases& phases,
                                                int group, int row, int row_end, int column) {
  ResultRun run;
  if constexpr (kOperation == Operation::kWgrad) {
    const TapChunk<T> chunk(args, phases.taps(), column / (16 / static_cast<int>(sizeof(T))));
    const Tap tap(phases, chunk.tap);
    run.step = args.result_stride[2];
    run.channel = chunk.channel;
    run.count = chunk.real / static_cast<int>(sizeof(T));
    run.at = group * args.result_stride[0] + row * args.result_stride[1] +
             chunk.channel * run.step + tap.d * args.result_stride[3] +
             tap.h * args.result_stride[4] + tap.w * args.result_stride[5];
  } else {
    const Position at(phases, row);
    run.step = args.result_stride[2];
    run.channel = group * args.result_channels + column;
    run.count = args.result_channels - column;
    run.at = at.n * args.result_stride[0] + group * args.result_stride[1] + column * run.step +
             (phases.d->y0 + at.d * args.axis[0].y_step) * args.result_stride[3] +
             (phases.h->y0 + at.h * args.axis[1].y_step) * args.result_stride[4] +
             (phases.w->y0 + at.w * args.axis[2].y_step) * args.result_stride[5];
  }
  run.count = row < row_end ? min(run.count, kRun) : 0;
  return run;
}

// A result, or what accumulates into it, of type T or (`wide`) float32.
template <class T>
struct ResultMemory {
  char* at;
  bool wide;

  __device__ __forceinline__ float load(i64 index) const {
    return wide ? reinterpret_cast<const float*>(at)[index]
                : widen(reinterpret_cast<const T*>(at)[index]);
  }
  __device__ __forceinline__ void store(i64 index, float value) const {
    if (wide) {
      reinterpret_cast<float*>(at)[index] = value;
    } else {
      reinterpret_cast<T*>(at)[index] = narrow<T>(value);
    }
  }
  // kCount neighbours, aligned to all of their bytes, or to 16 of them.
  template <int kCount>
  __device__ __forceinline__ void store_vector(i64 index, const float (&values)[kCount]) const {
    if (wide) {
      auto* const to = reinterpret_cast<float4*>(reinterpret_cast<float*>(at) + index);
#pragma unroll
      for (int e = 0; e < kCount; e += 4) {
        to[e / 4] = {values[e], values[e + 1], values[e + 2], values[e + 3]};
      }
    } else {
      Vector<T, kCount> vector;
#pragma unroll
      for (int e = 0; e < kCount; ++e) vector.at[e] = narrow<T>(values[e]);
      vector.store(reinterpret_cast<T*>(at) + index);
    }
  }
};

// activation(alpha * sum + beta * accumulate + bias), rounded and stored.
template <class T, int kRun>
__device__ __forceinline__ void finish_run(const ImplicitGemmArgs& args, const ResultRun& run,
                                           float (&sums)[kRun]) {
  const ResultMemory<T> result{static_cast<char*>(args.result), args.wide_result != 0};
#pragma unroll
  for (int e = 0; e < kRun; ++e) sums[e] *= args.alpha;
  if (args.accumulate != nullptr) {
    // Only read.
    char* const at = static_cast<char*>(const_cast<void*>(args.accumulate));
    const ResultMemory<T> before{at, result.wide};
#pragma unroll
    for (int e = 0; e < kRun; ++e) {
      if (e < run.count) sums[e] += args.beta * before.load(run.at + e * run.step);
    }
  }
  if (args.bias != nullptr) {
    const T* const bias = static_cast<const T*>(args.bias) + run.channel;
#pragma unroll
    for (int e = 0; e < kRun; ++e) {
      if (e < run.count) sums[e] += widen(bias[e]);
    }
  }
  if (args.activation != kNone) {
#pragma unroll
    for (int e = 0; e < kRun; ++e) sums[e] = activate(sums[e], args.activation);
  }
  if (args.result_in_vectors && run.count == kRun) {
    result.store_vector(run.at, sums);
  } else {
#pragma unroll
    for (int e = 0; e < kRun; ++e) {
      if (e < run.count) result.store(run.at + e * run.step, sums[e]);
    }
  }
}

}  // namespace convgrad
