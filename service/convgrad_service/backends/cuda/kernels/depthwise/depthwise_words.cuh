// Words of adjacent channels, as kernels that compute in registers load them.
#pragma once

#include "core/vectors.cuh"

namespace convgrad {

// Widens the elements of a word in one instruction each.
template <class T>
__device__ __forceinline__ void widen_word(u32 word, float (&wide)[2]) {
  wide[0] = widen(T{static_cast<unsigned short>(word)});
  wide[1] = widen(T{static_cast<unsigned short>(word >> 16)});
}
template <>
__device__ __forceinline__ void widen_word<bf16>(u32 word, float (&wide)[2]) {
  wide[0] = __uint_as_float(word << 16);
  wide[1] = __uint_as_float(word & 0xffff0000u);
}
template <class T>
__device__ __forceinline__ void widen_word(unsigned short word, float (&wide)[1]) {
  wide[0] = widen(T{word});
}
template <class T>
__device__ __forceinline__ void widen_word(u32 word, float (&wide)[1]) {
  wide[0] = __uint_as_float(word);
}

}  // namespace convgrad
