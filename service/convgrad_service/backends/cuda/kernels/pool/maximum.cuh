// A running maximum and its position. Of equal maxima the first wins; a NaN wins over any number, and of
// several NaNs the last.
#pragma once

#include "core/vectors.cuh"

namespace convgrad {

// The element with this value, whose bits are `raw`; which is not needed where widening keeps them.
__device__ __forceinline__ f16 element_of(float, f16 raw) { return raw; }
__device__ __forceinline__ bf16 element_of(float value, bf16) {
  return {static_cast<unsigned short>(__float_as_uint(value) >> 16)};
}
__device__ __forceinline__ float element_of(float value, float) { return value; }
__device__ __forceinline__ double element_of(double value, double) { return value; }

template <class T>
struct Maximum {
  ElementAccumulator<T> value;
  T raw;
  int where;

  // Elements come in the order of their positions, which a first one begins.
  __device__ __forceinline__ void take(T element, int position, bool begins, bool wanted = true) {
    take(widen(element), element, position, begins, wanted);
  }
  __device__ __forceinline__ void meet(const Maximum& later, bool begins) {
    take(later.value, later.raw, later.where, begins, true);
  }
  // The element itself, so that a NaN keeps its bits.
  __device__ __forceinline__ T element() const { return element_of(value, raw); }

 private:
  __device__ __forceinline__ void take(ElementAccumulator<T> found, T element, int position, bool begins,
                                       bool wanted) {
    // Without branches.
    const bool taken = begins | (wanted & ((found > value) | (found != found)));
    value = taken ? found : value;
    raw = taken ? element : raw;
    where = taken ? position : where;
  }
};

}  // namespace convgrad
