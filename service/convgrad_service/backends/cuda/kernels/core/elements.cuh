// Element types, their accumulator types, and conversions between them. NVRTC has no headers, so the 16-bit
// types are defined here; conversions are single instructions.
#pragma once

namespace convgrad {

using i64 = long long;
using u32 = unsigned int;
using u64 = unsigned long long;

struct f16 {
  unsigned short bits;
};
struct bf16 {
  unsigned short bits;
};

// A compile-time constant as an argument, and one of two types.
template <int kValue>
struct Constant {
  static constexpr int value = kValue;
};
template <bool kFirst, class A, class B>
struct Conditional {
  using type = A;
};
template <class A, class B>
struct Conditional<false, A, B> {
  using type = B;
};

// The type in which elements of type T are accumulated.
template <class T>
struct AccumulatorOf {
  using type = float;
};
template <>
struct AccumulatorOf<double> {
  using type = double;
};
template <class T>
using ElementAccumulator = typename AccumulatorOf<T>::type;

__device__ __forceinline__ float widen(f16 value) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
  return wide;
}
__device__ __forceinline__ float widen(bf16 value) {
  return __uint_as_float(static_cast<u32>(value.bits) << 16);
}
__device__ __forceinline__ float widen(float value) { return value; }
__device__ __forceinline__ double widen(double value) { return value; }

// Rounds to nearest, ties to even; overflow gives infinity, NaN stays NaN, subnormals survive.
template <class T>
__device__ __forceinline__ T narrow(ElementAccumulator<T> value);
template <>
__device__ __forceinline__ f16 narrow<f16>(float value) {
  f16 narrowed;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrowed.bits) : "f"(value));
  return narrowed;
}
template <>
__device__ __forceinline__ bf16 narrow<bf16>(float value) {
  bf16 narrowed;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(narrowed.bits) : "f"(value));
  return narrowed;
}
template <>
__device__ __forceinline__ float narrow<float>(float value) {
  return value;
}
template <>
__device__ __forceinline__ double narrow<double>(double value) {
  return value;
}

__device__ __forceinline__ i64 ceil_div(i64 a, i64 b) { return (a + b - 1) / b; }

// a / b and a % b for 0 <= a and 0 < b, in 32 bits where both fit: 64-bit division is many times slower.
__device__ __forceinline__ i64 divide(i64 a, i64 b, i64& remainder) {
  if (((a | b) >> 32) == 0) {
    const u32 quotient = static_cast<u32>(a) / static_cast<u32>(b);
    remainder = static_cast<u32>(a) - quotient * static_cast<u32>(b);
    return quotient;
  }
  const i64 quotient = a / b;
  remainder = a - quotient * b;
  return quotient;
}

}  // namespace convgrad
