// Words of adjacent channels, as kernels that compute in registers load them.
#pragma once

#include "core/divider.cuh"
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

// The offset of channel `c`, of tensors whose channels are `stride` apart if threads have one of them.
template <int kVector>
__device__ __forceinline__ auto channel_offset(int c, [[maybe_unused]] i64 stride) {
  if constexpr (kVector == 1) {
    return c * stride;
  } else {
    return c;
  }
}

// A thread's place in a block, and its vector of channels: adjacent threads have adjacent vectors or, in
// planes, adjacent places. Threads past the last vector have the place `places`.
struct PlaceVector {
  int place, vector;
  __device__ __forceinline__ PlaceVector(int thread, int places, int vectors, Divider by_vectors,
                                         bool in_planes, Divider by_places) {
    if (!in_planes) {
      place = divide(thread, by_vectors), vector = thread - place * vectors;
      return;
    }
    vector = divide(thread, by_places), place = thread - vector * places;
    if (vector >= vectors) vector = 0, place = places;
  }
};

}  // namespace convgrad
