// Transposes n vectors of n lanes in registers, in log2(n) rounds that interleave the first half of
// the vectors with the second. Each round rotates the bits of the index (vector, lane) by one, so
// that after log2(n) rounds vector and lane are exchanged.
#pragma once

#include "elements.hpp"

namespace convgrad {

template <class V, int n>
CONVGRAD_INLINE void interleave(V a, V b, V& low, V& high) {
  if constexpr (n == 16) {
    low = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    high = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15,
                                   31);
  } else if constexpr (n == 8) {
    low = __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
    high = __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
  } else if constexpr (n == 4) {
    low = __builtin_shufflevector(a, b, 0, 4, 1, 5);
    high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
  } else {
    static_assert(n == 2);
    low = __builtin_shufflevector(a, b, 0, 2);
    high = __builtin_shufflevector(a, b, 1, 3);
  }
}

template <class T>
CONVGRAD_INLINE void transpose(Vec<T> (&v)[kLanes<T>]) {
  constexpr int n = kLanes<T>;
#pragma clang loop unroll(full)
  for (int round = 1; round < n; round *= 2) {
    Vec<T> next[n];
#pragma clang loop unroll(full)
    for (int i = 0; i < n / 2; ++i) {
      interleave<Vec<T>, n>(v[i], v[i + n / 2], next[2 * i], next[2 * i + 1]);
    }
#pragma clang loop unroll(full)
    for (int i = 0; i < n; ++i) v[i] = next[i];
  }
}

}  // namespace convgrad
