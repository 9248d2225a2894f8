// The epilogue of one element: everything between the accumulator and its single rounding.
#pragma once

#include "core/elements.cuh"

namespace convgrad {

enum Activation : int { kNone = 0, kRelu = 1, kRelu6 = 2, kSilu = 3 };

__device__ __forceinline__ float exponential(float x) { return expf(x); }
__device__ __forceinline__ double exponential(double x) { return exp(x); }

// NaN passes through every activation. silu(x) = x / (1 + exp(-x)), with exp of -|x| alone so that
// it cannot overflow: x < 0 gives x * e / (1 + e).
template <class S>
__device__ __forceinline__ S activate(S v, int activation) {
  if (activation == kNone) return v;
  if (activation == kSilu) {
    const S e = exponential(v < S(0) ? v : -v);
    return (v < S(0) ? v * e : v) / (S(1) + e);
  }
  const S rectified = v < S(0) ? S(0) : v;
  if (activation == kRelu) return rectified;
  return rectified > S(6) ? S(6) : rectified;
}

// activation(alpha * sum + beta * accumulate + bias); a null pointer leaves its term out.
template <class T, class S>
__device__ __forceinline__ S finish(S sum, S alpha, S beta, const T* accumulate, const T* bias,
                                    int activation) {
  sum *= alpha;
  if (accumulate != nullptr) sum += beta * widen(*accumulate);
  if (bias != nullptr) sum += widen(*bias);
  return activate(sum, activation);
}

}  // namespace convgrad
