// Short vectors of neighbouring channels: one load or store each, and the way to what is summed.
#pragma once

#include "elements.cuh"

namespace convgrad {

template <int kBytes>
struct RawOf;
template <>
struct RawOf<2> {
  using type = unsigned short;
};
template <>
struct RawOf<4> {
  using type = unsigned int;
};
template <>
struct RawOf<8> {
  using type = uint2;
};
template <>
struct RawOf<16> {
  using type = uint4;
};

// V elements as they are stored, aligned to their size.
template <class T, int V>
union Vector {
  typename RawOf<sizeof(T) * V>::type raw;
  T at[V];

  __device__ __forceinline__ static Vector zero() {
    Vector vector;
    vector.raw = {};
    return vector;
  }
  __device__ __forceinline__ static Vector load(const T* from) {
    Vector vector;
    vector.raw = *reinterpret_cast<const decltype(Vector::raw)*>(from);
    return vector;
  }
  __device__ __forceinline__ void store(T* to) const {
    *reinterpret_cast<decltype(Vector::raw)*>(to) = raw;
  }
};

__host__ __device__ // From shared memory, by its own address; in the order of asynchronous copies and their waits.
__device__ __forceinline__ void load_shared(u32 from, unsigned short& raw) {
  asm volatile("ld.shared.b16 %0, [%1];" : "=h"(raw) : "r"(from) : "memory");
}
__device__ __forceinline__ void load_shared(u32 from, unsigned int& raw) {
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(raw) : "r"(from) : "memory");
}
__device__ __forceinline__ void load_shared(u32 from, uint2& raw) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(raw.x), "=r"(raw.y) : "r"(from) : "memory");
}

// Loads and stores under a predicate and not behind a branch, which costs many times as much.
__device__ __forceinline__ void store_if(bool wanted, void* to, unsigned short raw) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; @p st.global.b16 [%0], %1;}" ::"l"(to),
               "h"(raw), "r"(static_cast<int>(wanted))
               : "memory");
}
__device__ __forceinline__ void store_if(bool wanted, void* to, unsigned int raw) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; @p st.global.b32 [%0], %1;}" ::"l"(to),
               "r"(raw), "r"(static_cast<int>(wanted))
               : "memory");
}
__device__ __forceinline__ void store_if(bool wanted, void* to, uint2 raw) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %3, 0; @p st.global.v2.b32 [%0], {%1, %2};}" ::"l"(to),
               "r"(raw.x), "r"(raw.y), "r"(static_cast<int>(wanted))
               : "memory");
}
// Zero where it is not wanted.
__device__ __forceinline__ void load_if(bool wanted, const void* from, unsigned short& raw) {
  asm("{.reg .pred p; setp.ne.b32 p, %2, 0; mov.b16 %0, 0; @p ld.global.b16 %0, [%1];}"
      : "=h"(raw)
      : "l"(from), "r"(static_cast<int>(wanted)));
}
__device__ __forceinline__ void load_if(bool wanted, const void* from, unsigned int& raw) {
  asm("{.reg .pred p; setp.ne.b32 p, %2, 0; mov.b32 %0, 0; @p ld.global.b32 %0, [%1];}"
      : "=r"(raw)
      : "l"(from), "r"(static_cast<int>(wanted)));
}

__host__ __device__ constexpr int positive_mod(int a, int b) { return ((a % b) + b) % b; }

}  // namespace convgrad
