// Keys: unique integers, ordered like the elements of a window in max pooling.
//
// The upper bits of a key are the value as an integer of the same order, the lower bits the position,
// such that of equal values the first has the larger key. NaN is greater than every number, and of
// several NaNs the last is the greatest. -0 and +0 are equal. Because no two keys are equal, their
// maximum can be taken along one dimension after another, and it contains its position.
#pragma once

#include "core/elements.cuh"

namespace convgrad {

// 16-bit types: the value in the upper half, so positions below 2^16.
template <class T>
struct Keys {
  using type = int;
  static constexpr int kNone = -0x7fffffff - 1;  // less than every value
  static __device__ __forceinline__ int of(T value, int position) {
    constexpr int kInfinity = sizeof(T) == 2 ? infinity(T{}) : 0;
    const int bits = static_cast<int>(static_cast<u32>(value.bits) << 16);
    const int sign = bits >> 31, magnitude = bits & 0x7fffffff;
    const int number = (magnitude ^ sign) - sign + (0xffff - position);
    return magnitude > kInfinity ? 0x7fff0000 + position : number;
  }
  static __device__ __forceinline__ bool same(int a, int b) { return a == b; }
  // Not for kNone.
  static __device__ __forceinline__ int position(int key) {
    const int low = key & 0xffff;
    return key >= 0x7fff0000 ? low : 0xffff - low;
  }

 private:
  static constexpr __host__ __device__ int infinity(bf16) { return 0x7f800000; }
  static constexpr __host__ __device__ int infinity(f16) { return 0x7c000000; }
};

template <>
struct Keys<float> {
  using type = i64;
  static constexpr i64 kNone = -0x7fffffffffffffffll - 1;
  static __device__ __forceinline__ i64 of(float value, int position) {
    const int bits = __float_as_int(value);
    const int sign = bits >> 31, magnitude = bits & 0x7fffffff;
    const bool nan = magnitude > 0x7f800000;
    const int upper = nan ? 0x7fffffff : (magnitude ^ sign) - sign;
    const u32 lower = nan ? 0x80000000u | position : 0x7fffffffu - position;
    return static_cast<i64>((static_cast<u64>(static_cast<u32>(upper)) << 32) | lower);
  }
  // The lower halves hold the positions; that of kNone is 0, which no position has.
  static __device__ __forceinline__ bool same(i64 a, i64 b) {
    return static_cast<u32>(a) == static_cast<u32>(b);
  }
  static __device__ __forceinline__ int position(i64 key) {
    const u32 low = static_cast<u32>(key);
    return static_cast<int>(low >= 0x80000000u ? low - 0x80000000u : 0x7fffffffu - low);
  }
};

}  // namespace convgrad
