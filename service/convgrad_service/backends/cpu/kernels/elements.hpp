// Element types: storage type, accumulator type, and scalar and vector conversions between them.
//
//   F16   IEEE binary16   accumulated in float    round to nearest even, overflow to Inf
//   BF16  bfloat16        accumulated in float    round to nearest even
//   F32   float           accumulated in float
//   F64   double          accumulated in double
//
// Conversions preserve NaN and subnormals. A vector of accumulators has 64 bytes with AVX-512, 32
// with AVX and 16 otherwise (SSE2, NEON). The number of lanes is a compile-time constant, so the
// order of summation depends on the instruction-set level.
//
// Requires clang's vector extensions and no -ffast-math. Does not use the standard library.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace convgrad {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = __UINT64_TYPE__;
using i32 = int;
using i64 = __INT64_TYPE__;

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define CONVGRAD_AVX512 1
inline constexpr int kVectorBytes = 64;
inline constexpr int kVectorRegisters = 32;
#elif defined(__AVX__)
inline constexpr int kVectorBytes = 32;
inline constexpr int kVectorRegisters = 16;
#elif defined(__aarch64__)
inline constexpr int kVectorBytes = 16;
inline constexpr int kVectorRegisters = 32;
#else
inline constexpr int kVectorBytes = 16;
inline constexpr int kVectorRegisters = 16;
#endif

#define CONVGRAD_INLINE inline __attribute__((always_inline))

template <class T>
inline constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(T));

namespace detail {
template <class T, int n>
struct VectorOf {
  typedef T type __attribute__((ext_vector_type(n)));
};
template <class T>
struct MaskElement;
template <>
struct MaskElement<float> {
  using type = i32;
};
template <>
struct MaskElement<double> {
  using type = i64;
};
}  // namespace detail

// n elements of T, and a full vector of accumulators (float or double).
template <class T, int n>
using VecN = typename detail::VectorOf<T, n>::type;
template <class T>
using Vec = VecN<T, kLanes<T>>;
// The result of comparing two Vec<T>: all bits set if true.
template <class T>
using Mask = VecN<typename detail::MaskElement<T>::type, kLanes<T>>;

CONVGRAD_INLINE i64 least(i64 a, i64 b) { return a < b ? a : b; }
CONVGRAD_INLINE i64 most(i64 a, i64 b) { return a > b ? a : b; }

template <class V, class T>
CONVGRAD_INLINE V load_raw(const T* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof(V));
  return v;
}
template <class V, class T>
CONVGRAD_INLINE void store_raw(T* p, V v) {
  __builtin_memcpy(p, &v, sizeof(V));
}

// bfloat16 <-> float in integer operations, since AVX512-BF16 instructions flush subnormals.
template <class U32>
CONVGRAD_INLINE U32 bf16_bits_from_float_bits(U32 bits) {
  const U32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const U32 quiet = (bits >> 16) | 0x40u;
  return (bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded;
}

// binary16 <-> float without F16C. Widening multiplies the shifted bits by 2^112, which normalises
// subnormal halves. Adding 0.5 rounds a float below 2^-14 at 2^-24, the unit of subnormal halves.
template <class U32, class F>
CONVGRAD_INLINE F float_from_f16_bits(U32 half) {
  const U32 magnitude = half & 0x7fffu;
  const F scaled = __builtin_bit_cast(F, magnitude << 13) * 0x1p112f;
  const U32 finite = __builtin_bit_cast(U32, scaled);
  const U32 bits = magnitude >= 0x7c00u ? (finite | 0x7f800000u) : finite;
  return __builtin_bit_cast(F, bits | ((half & 0x8000u) << 16));
}
template <class U32, class F>
CONVGRAD_INLINE U32 f16_bits_from_float(F value) {
  const U32 bits = __builtin_bit_cast(U32, value);
  const U32 magnitude = bits & 0x7fffffffu;
  const U32 normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
  const F shifted = __builtin_bit_cast(F, magnitude) + 0.5f;
  const U32 subnormal = __builtin_bit_cast(U32, shifted) - 0x3f000000u;
  U32 half = magnitude < 0x38800000u ? subnormal : normal;
  const U32 infinity = half * 0u + 0x7c00u;
  half = magnitude >= 0x477ff000u ? infinity : half;
  half = magnitude > 0x7f800000u ? (infinity | 0x200u) : half;
  return half | ((bits >> 16) & 0x8000u);
}

struct F32 {
  using Storage = float;
  using Acc = float;
  static CONVGRAD_INLINE Acc widen(Storage s) { return s; }
  static CONVGRAD_INLINE Storage round(Acc a) { return a; }
  static CONVGRAD_INLINE Vec<Acc> widen(Vec<Acc> s) { return s; }
  static CONVGRAD_INLINE Vec<Acc> round(Vec<Acc> a) { return a; }
};

struct F64 {
  using Storage = double;
  using Acc = double;
  static CONVGRAD_INLINE Acc widen(Storage s) { return s; }
  static CONVGRAD_INLINE Storage round(Acc a) { return a; }
  static CONVGRAD_INLINE Vec<Acc> widen(Vec<Acc> s) { return s; }
  static CONVGRAD_INLINE Vec<Acc> round(Vec<Acc> a) { return a; }
};

struct BF16 {
  using Storage = u16;
  using Acc = float;
  using StorageVec = VecN<u16, kLanes<float>>;
  using Bits = VecN<u32, kLanes<float>>;
  static CONVGRAD_INLINE Acc widen(Storage s) {
    return __builtin_bit_cast(float, static_cast<u32>(s) << 16);
  }
  static CONVGRAD_INLINE Storage round(Acc a) {
    return static_cast<u16>(bf16_bits_from_float_bits(__builtin_bit_cast(u32, a)));
  }
  static CONVGRAD_INLINE Vec<Acc> widen(StorageVec s) {
    return __builtin_bit_cast(Vec<float>, __builtin_convertvector(s, Bits) << 16);
  }
  static CONVGRAD_INLINE StorageVec round(Vec<Acc> a) {
    return __builtin_convertvector(bf16_bits_from_float_bits(__builtin_bit_cast(Bits, a)),
                                   StorageVec);
  }
};

struct F16 {
  using Storage = u16;
  using Acc = float;
  using StorageVec = VecN<u16, kLanes<float>>;
#if defined(__F16C__) || defined(__aarch64__)
  using Halves = VecN<_Float16, kLanes<float>>;
  static CONVGRAD_INLINE Acc widen(Storage s) {
    return static_cast<float>(__builtin_bit_cast(_Float16, s));
  }
  static CONVGRAD_INLINE Storage round(Acc a) {
    return __builtin_bit_cast(u16, static_cast<_Float16>(a));
  }
  static CONVGRAD_INLINE Vec<Acc> widen(StorageVec s) {
    return __builtin_convertvector(__builtin_bit_cast(Halves, s), Vec<float>);
  }
  static CONVGRAD_INLINE StorageVec round(Vec<Acc> a) {
    return __builtin_bit_cast(StorageVec, __builtin_convertvector(a, Halves));
  }
#else
  using Bits = VecN<u32, kLanes<float>>;
  static CONVGRAD_INLINE Acc widen(Storage s) {
    return float_from_f16_bits<u32, float>(static_cast<u32>(s));
  }
  static CONVGRAD_INLINE Storage round(Acc a) {
    return static_cast<u16>(f16_bits_from_float<u32, float>(a));
  }
  static CONVGRAD_INLINE Vec<Acc> widen(StorageVec s) {
    return float_from_f16_bits<Bits, Vec<float>>(__builtin_convertvector(s, Bits));
  }
  static CONVGRAD_INLINE StorageVec round(Vec<Acc> a) {
    return __builtin_convertvector(f16_bits_from_float<Bits, Vec<float>>(a), StorageVec);
  }
#endif
};

// A Vec<Acc> in storage type.
template <class E>
using StoredVec = VecN<typename E::Storage, kLanes<typename E::Acc>>;

template <class E>
CONVGRAD_INLINE typename E::Acc load_one(const typename E::Storage* p) {
  return E::widen(*p);
}
template <class E>
CONVGRAD_INLINE void store_one(typename E::Storage* p, typename E::Acc value) {
  *p = E::round(value);
}

template <class E>
CONVGRAD_INLINE Vec<typename E::Acc> load(const typename E::Storage* p) {
  return E::widen(load_raw<StoredVec<E>>(p));
}
template <class E>
CONVGRAD_INLINE void store(typename E::Storage* p, Vec<typename E::Acc> value) {
  store_raw(p, E::round(value));
}

#if defined(__AVX2__)
// The mask of the first n lanes of 256 bits.
template <class Lane, int lanes>
CONVGRAD_INLINE __m256i first_lanes(int n) {
  VecN<Lane, lanes> number;
#pragma clang loop unroll(full)
  for (int lane = 0; lane < lanes; ++lane) number[lane] = lane;
  return __builtin_bit_cast(__m256i, number < VecN<Lane, lanes>(n));
}
#endif

// Lanes [first, first + n) of a vector.
template <class T, int n, int lanes, int first>
CONVGRAD_INLINE VecN<T, n> some_lanes(VecN<T, lanes> v) {
  if constexpr (n == 8) {
    return __builtin_shufflevector(v, v, first, first + 1, first + 2, first + 3, first + 4,
                                   first + 5, first + 6, first + 7);
  } else if constexpr (n == 4) {
    return __builtin_shufflevector(v, v, first, first + 1, first + 2, first + 3);
  } else {
    static_assert(n == 2);
    return __builtin_shufflevector(v, v, first, first + 1);
  }
}

// Stores the first n lanes in parts of half as many each. Masked stores of AVX2 take tens of cycles on
// some CPUs.
template <class T, int lanes>
CONVGRAD_INLINE void store_parts(T* p, VecN<T, lanes> v, int n) {
  if (n >= lanes) {
    store_raw(p, v);
  } else if constexpr (lanes == 2) {
    if (n > 0) *p = v[0];
  } else {
    constexpr int half = lanes / 2;
    VecN<T, half> rest = some_lanes<T, half, lanes, 0>(v);
    if (n >= half) {
      store_raw(p, rest);
      rest = some_lanes<T, half, lanes, half>(v);
      p += half;
      n -= half;
    }
    store_parts<T, half>(p, rest, n);
  }
}

// Masked load and store of the first n lanes, 0 <= n <= lanes. Other lanes load as zero and are not
// stored; their memory is not accessed.
template <class T, int lanes>
CONVGRAD_INLINE VecN<T, lanes> load_raw_first(const T* p, int n) {
#if defined(CONVGRAD_AVX512)
  const u32 mask = (1u << n) - 1u;
  if constexpr (sizeof(T) == 4 && lanes == 16) {
    return __builtin_bit_cast(VecN<T, 16>, _mm512_maskz_loadu_ps(mask, p));
  } else if constexpr (sizeof(T) == 8 && lanes == 8) {
    return __builtin_bit_cast(VecN<T, 8>, _mm512_maskz_loadu_pd(mask, p));
  } else if constexpr (sizeof(T) == 2 && lanes == 16) {
    return __builtin_bit_cast(VecN<T, 16>, _mm256_maskz_loadu_epi16(mask, p));
  } else if constexpr (sizeof(T) == 8 && lanes == 16) {
    const auto low = __builtin_bit_cast(VecN<T, 8>, _mm512_maskz_loadu_epi64(mask & 0xffu, p));
    const auto high = __builtin_bit_cast(VecN<T, 8>, _mm512_maskz_loadu_epi64(mask >> 8, p + 8));
    return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  }
#elif defined(__AVX2__)
  if constexpr (sizeof(T) == 4 && lanes == 8) {
    return __builtin_bit_cast(VecN<T, 8>, _mm256_maskload_epi32(reinterpret_cast<const int*>(p),
                                                                first_lanes<i32, 8>(n)));
  } else if constexpr (sizeof(T) == 8 && lanes == 4) {
    return __builtin_bit_cast(
        VecN<T, 4>, _mm256_maskload_epi64(reinterpret_cast<const long long*>(p),
                                          first_lanes<i64, 4>(n)));
  }
#endif
  T buffer[lanes] = {};
  for (int lane = 0; lane < n; ++lane) buffer[lane] = p[lane];
  return load_raw<VecN<T, lanes>>(buffer);
}
template <class T, int lanes>
CONVGRAD_INLINE void store_raw_first(T* p, VecN<T, lanes> v, int n) {
#if defined(CONVGRAD_AVX512)
  const u32 mask = (1u << n) - 1u;
  if constexpr (sizeof(T) == 4 && lanes == 16) {
    _mm512_mask_storeu_ps(p, mask, __builtin_bit_cast(__m512, v));
    return;
  } else if constexpr (sizeof(T) == 8 && lanes == 8) {
    _mm512_mask_storeu_pd(p, mask, __builtin_bit_cast(__m512d, v));
    return;
  } else if constexpr (sizeof(T) == 2 && lanes == 16) {
    _mm256_mask_storeu_epi16(p, mask, __builtin_bit_cast(__m256i, v));
    return;
  }
#endif
  store_parts<T, lanes>(p, v, n);
}

// Stores the last n lanes alone, at the addresses that they have in the whole vector at p.
template <class T, int lanes>
CONVGRAD_INLINE void store_raw_last(T* p, VecN<T, lanes> v, int n) {
#if defined(CONVGRAD_AVX512)
  const u32 mask = ((1u << n) - 1u) << (lanes - n);
  if constexpr (sizeof(T) == 4 && lanes == 16) {
    _mm512_mask_storeu_ps(p, mask, __builtin_bit_cast(__m512, v));
    return;
  } else if constexpr (sizeof(T) == 8 && lanes == 8) {
    _mm512_mask_storeu_pd(p, mask, __builtin_bit_cast(__m512d, v));
    return;
  }
#endif
  T buffer[lanes];
  store_raw(buffer, v);
  for (int lane = lanes - n; lane < lanes; ++lane) p[lane] = buffer[lane];
}

template <class E>
CONVGRAD_INLINE Vec<typename E::Acc> load_first(const typename E::Storage* p, int n) {
  return E::widen(load_raw_first<typename E::Storage, kLanes<typename E::Acc>>(p, n));
}
template <class E>
CONVGRAD_INLINE void store_first(typename E::Storage* p, Vec<typename E::Acc> value, int n) {
  store_raw_first<typename E::Storage, kLanes<typename E::Acc>>(p, E::round(value), n);
}

template <class T>
CONVGRAD_INLINE Vec<T> splat(T value) {
  return Vec<T>(value);
}

// Keeps an accumulator in its register. Where all registers are taken, the compiler would otherwise
// exchange accumulators in every step of a loop, through memory.
template <class V>
CONVGRAD_INLINE void pin(V& sum) {
#if defined(__aarch64__)
  __asm__("" : "+w"(sum));
#else
  __asm__("" : "+v"(sum));
#endif
}

// Sums a vector's lanes in a fixed order: recursively, lane i plus lane i + n/2.
template <class T, int n>
CONVGRAD_INLINE T sum_lanes(VecN<T, n> v) {
  if constexpr (n == 2) {
    return v[0] + v[1];
  } else {
    return sum_lanes<T, n / 2>(some_lanes<T, n / 2, n, 0>(v) + some_lanes<T, n / 2, n, n / 2>(v));
  }
}
template <class T>
CONVGRAD_INLINE T sum_lanes(Vec<T> v) {
  return sum_lanes<T, kLanes<T>>(v);
}

}  // namespace convgrad
