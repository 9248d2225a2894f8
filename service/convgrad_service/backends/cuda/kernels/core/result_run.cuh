// The epilogue of a run of consecutive elements: activation(alpha * sum + beta * accumulate + bias), rounded
// once and stored.
#pragma once

#include "core/epilogue.cuh"
#include "core/vectors.cuh"

namespace convgrad {

// An output tensor, or the one accumulated into it, of type T or (`wide`) of float32.
template <class T>
struct OutputPointer {
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
  // kCount consecutive elements, aligned to their size or to 16 bytes.
  template <int kCount>
  __device__ __forceinline__ void store_vector(i64 index, const float (&values)[kCount]) const {
    if (sizeof(T) == 4 || wide) {
      auto* const to = reinterpret_cast<float4*>(reinterpret_cast<float*>(at) + index);
#pragma unroll
      for (int e = 0; e < kCount; e += 4) {
        to[e / 4] = {values[e], values[e + 1], values[e + 2], values[e + 3]};
      }
    } else if constexpr (sizeof(T) < 4) {
      Vector<T, kCount> vector;
#pragma unroll
      for (int e = 0; e < kCount; ++e) vector.at[e] = narrow<T>(values[e]);
      vector.store(reinterpret_cast<T*>(at) + index);
    }
  }
};

// Finishes and stores the first `count` sums to elements at, at + step, ... of the result; `channel` is the
// first sum's bias index. Scalars and pointers are those of the kernel argument's ResultArgs.
template <class T, int kRun, class Args>
__device__ __forceinline__ void store_run(const Args& args, i64 at, i64 step, int count,
                                           int channel, float (&sums)[kRun]) {
  const OutputPointer<T> result{static_cast<char*>(args.result), args.wide_result != 0};
  if (!args.plain) {
#pragma unroll
    for (int e = 0; e < kRun; ++e) sums[e] *= args.alpha;
    if (args.accumulate != nullptr) {
      char* const from = static_cast<char*>(const_cast<void*>(args.accumulate));
      const OutputPointer<T> before{from, result.wide};
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
