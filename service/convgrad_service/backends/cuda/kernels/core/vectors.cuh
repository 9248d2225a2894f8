// Short vectors of neighbouring channels: one load or store each.
#pragma once

#include "ptx/load_store.cuh"

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
  // At once where it is `whole`, else each element e that exists(e).
  template <class Exists>
  __device__ __forceinline__ void store_part(T* to, bool whole, const Exists& exists) const {
    if (whole) {
      store(to);
    } else {
#pragma unroll
      for (int e = 0; e < V; ++e) {
        if (exists(e)) to[e] = at[e];
      }
    }
  }
};

__host__ __device__ constexpr int positive_mod(int a, int b) { return ((a % b) + b) % b; }

}  // namespace convgrad
