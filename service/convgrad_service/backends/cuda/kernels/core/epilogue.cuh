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

// The same with a kernel argument's scalars and pointers: element `at` of `accumulate`, and `channel` of the bias.
template <class T, class Args, class S>
__device__ __forceinline__ S finish_at(const Args& args, S sum, i64 at, i64 channel) {
  const T* accumulate = static_cast<const T*>(args.accumulate);
  if (accumulate != nullptr) accumulate += at;
  const T* bias = static_cast<const T*>(args.bias);
  if (bias != nullptr) bias += channel;
  return finish<T, S>(sum, S(args.alpha), S(args.beta), accumulate, bias, args.activation);
}
// That of a weight's gradient, which has neither bias nor activation.
template <class T, class Args, class S>
__device__ __forceinline__ S finish_at(const Args& args, S sum, i64 at) {
  const T* accumulate = static_cast<const T*>(args.accumulate);
  if (accumulate != nullptr) accumulate += at;
  const T* const no_bias = nullptr;
  return finish<T, S>(sum, S(args.alpha), S(args.beta), accumulate, no_bias, kNone);
}

}  // namespace convgrad
