// Where implicit_gemm.cu's sums go: a few neighbours of a row at a time.
#pragma once

#include "conv/implicit_gemm_loaders.cuh"
#include "core/epilogue.cuh"
#include "core/vectors.cuh"

namespace convgrad {

// kRun neighbouring columns, in all rows: where they are from a row's place on, how many exist, and the
// channel of the first for a bias.
template <Operation kOperation, class T>
struct ResultColumns {
  i64 at;
  int count, channel;

  __device__ __forceinline__ ResultColumns(const ImplicitGemmArgs& args, const Phases& phases,
                                           int group, int column) {
    if constexpr (kOperation == Operation::kWgrad) {
      // A chunk has one tap.
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

// activation(alpha * sum + beta * accumulate + bias), rounded and stored: `count` of the sums at most.
template <class T, int kRun>
__device__ __forceinline__ void finish_run(const ImplicitGemmArgs& args, i64 at, int count,
                                           int channel, float (&sums)[kRun]) {
  const ResultMemory<T> result{static_cast<char*>(args.result), args.wide_result != 0};
  const i64 step = args.result_stride[2];
  if (!args.plain) {
#pragma unroll
    for (int e = 0; e < kRun; ++e) sums[e] *= args.alpha;
    if (args.accumulate != nullptr) {
      // Only read.
      char* const from = static_cast<char*>(const_cast<void*>(args.accumulate));
      const ResultMemory<T> before{from, result.wide};
#pragma unroll
      for (int e = 0; e < kRun; ++e) {
        if (e < count) sums[e] += args.beta * before.load(at + e * step);
      }
    }
    if (args.bias != nullptr) {
      const T* const bias = static_cast<const T*>(args.bias) + channel;
#pragma unroll
      for (int e = 0; e < kRun; ++e) {
        if (e < count) sums[e] += widen(bias[e]);
      }
    }
#pragma unroll
    for (int e = 0; e < kRun; ++e) sums[e] = activate(sums[e], args.activation);
  }
  if (args.result_in_vectors && count >= kRun) {
    result.store_vector(at, sums);
  } else {
#pragma unroll
    for (int e = 0; e < kRun; ++e) {
      if (e < count) result.store(at + e * step, sums[e]);
    }
  }
}

}  // namespace convgrad
