// Elements of a 16-bit type that the launch decides, in kernels which only pass them to MMAs or convert them: one
// instance then serves both types. Where it is asked for, `bfloat16` is not 0 for bfloat16, and uniform.
#pragma once

#include "core/elements.cuh"

namespace convgrad {

struct Bits16 {
  unsigned short bits;
};

template <class T>
constexpr bool kDecidedByLaunch = false;
template <>
constexpr bool kDecidedByLaunch<Bits16> = true;

// Calls `each` with an element of type T or, for Bits16, of the launch's type.
template <class T, class Each>
__device__ __forceinline__ void as_type(int bfloat16, Each each) {
  if constexpr (!kDecidedByLaunch<T>) {
    each(T{});
  } else if (bfloat16) {
    each(bf16{});
  } else {
    each(f16{});
  }
}

}  // namespace convgrad
