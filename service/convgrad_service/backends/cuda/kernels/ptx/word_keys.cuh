// Packed integer keys for comparing the values of a 32-bit word (two 16-bit values or one 32-bit value) at
// once; from sm_90 on one instruction does it for 16-bit values. The emulator's twin is
// tests/emulator/kernels/ptx/word_keys.cuh.
//
// A key is a signed integer of the value's size with the canonical order as the values: -0 and +0 are equal,
// NaN is the largest integer, kNoKeys is below every key. At least 127 integers lie between the largest
// number's key and NaN's, so that the last of several NaN can be made the greatest: see rank_nan.
#pragma once

#include "ptx/mma.cuh"

namespace convgrad {

template <class T>
constexpr int kPerWord = 4 / static_cast<int>(sizeof(T));

template <int kPer>
constexpr u32 kNoKeys = kPer == 2 ? 0x80008000 : 0x80000000;

// The greater (max_keys) or smaller (min_keys) of each two keys.
#if __CUDA_ARCH__ >= 900
#define CONVGRAD_KEYS_X2(OF) asm(#OF ".s16x2 %0, %1, %2;" : "=r"(both) : "r"(a), "r"(b))
#else
#define CONVGRAD_KEYS_X2(OF)                                                               \
  both = __byte_perm(OF(static_cast<int>(a << 16) >> 16, static_cast<int>(b << 16) >> 16), \
                     OF(static_cast<int>(a) >> 16, static_cast<int>(b) >> 16), 0x5410)
#endif
#define CONVGRAD_KEYS(NAME, OF)                                                                     \
  template <int kPer>                                                                               \
  __device__ __forceinline__ u32 NAME(u32 a, u32 b) {                                               \
    if constexpr (kPer == 1) return static_cast<u32>(OF(static_cast<int>(a), static_cast<int>(b))); \
    u32 both;                                                                                       \
    CONVGRAD_KEYS_X2(OF);                                                                           \
    return both;                                                                                    \
  }
CONVGRAD_KEYS(max_keys, max)
CONVGRAD_KEYS(min_keys, min)
// Also sets is_first[i] where a's key is at least b's. The returned maximum must be used: if it is not,
// ptxas 13.0 treats its register as free although the instruction writes it, and corrupts another value
// that lives in half of it (seen with f16). See `ge_keys`.
template <int kPer>
__device__ __forceinline__ u32 max_keys(u32 a, u32 b, bool (&is_first)[kPer]) {
  if constexpr (kPer == 1) {
    is_first[0] = static_cast<int>(a) >= static_cast<int>(b);
    return max_keys<1>(a, b);
  } else {
#if __CUDA_ARCH__ >= 900
    // ptxas fuses this sequence into one instruction.
    u32 most;
    int low, high;
    asm("{.reg .pred p, q; .reg .s16 a0, a1, m0, m1; max.s16x2 %0, %3, %4; mov.b32 {m0, m1}, %0; "
        "mov.b32 {a0, a1}, %3; setp.eq.s16 p, m0, a0; setp.eq.s16 q, m1, a1; selp.s32 %1, 1, 0, p; "
        "selp.s32 %2, 1, 0, q;}"
        : "=r"(most), "=r"(low), "=r"(high)
        : "r"(a), "r"(b));
    is_first[0] = low;
    is_first[1] = high;
    return most;
#else
    is_first[0] = static_cast<int>(a << 16) >= static_cast<int>(b << 16);
    is_first[1] = static_cast<int>(a) >> 16 >= static_cast<int>(b) >> 16;
    return max_keys<2>(a, b);
#endif
  }
}
// Consumes results that are not needed, on an otherwise idle pipe.
class UnusedResult {
 public:
  __device__ __forceinline__ void add(u32 word) { sum_ = word * 5 + sum_; }
  // Call once at the end; a sleep of zero time at most.
  __device__ __forceinline__ void use() const {
    asm volatile("{.reg .pred p; setp.eq.u32 p, %0, 0x12345679; @p nanosleep.u32 0;}" ::"r"(sum_));
  }

 private:
  u32 sum_ = 0;
};
// Sets is_first[i] where a's key is at least b's.
template <int kPer>
__device__ __forceinline__ void ge_keys(u32 a, u32 b, bool (&is_first)[kPer], UnusedResult& unused) {
  const u32 most = max_keys<kPer>(a, b, is_first);
  if constexpr (kPer == 2) unused.add(most);
}
// max(a + 1, b) for each key; no key of a is the largest integer. A key is at least that if it is greater
// than a's and at least b's.
template <int kPer>
__device__ __forceinline__ u32 max_keys_after(u32 a, u32 b) {
#if __CUDA_ARCH__ >= 900
  if constexpr (kPer == 2) {
    u32 most;
    asm("{.reg .b32 next; add.s16x2 next, %1, %3; max.s16x2 %0, next, %2;}"
        : "=r"(most)
        : "r"(a), "r"(b), "r"(0x00010001));
    return most;
  }
#endif
  // The sign bits are handled apart, so that the lower half does not carry into the upper one.
  return max_keys<kPer>(kPer == 1 ? a + 1 : ((a & 0x7fff7fff) + 0x00010001) ^ (a & 0x80008000), b);
}

// Lowers NaN's keys by `rank`. Where the rank decreases from position to position, the last of several
// NaN is the greatest.
template <int kPer>
__device__ __forceinline__ u32 nan_of_rank(int rank) {
  return kPer == 2 ? (0x7fffu - rank) * 0x00010001u : 0x7fffffffu - rank;
}
template <int kPer>
__device__ __forceinline__ u32 rank_nan(u32 keys, int rank) {
  return rank == 0 ? keys : min_keys<kPer>(keys, nan_of_rank<kPer>(rank));
}

// Converts a word's values to keys. Adding zero turns -0 into +0 and every NaN into the canonical one, whose
// bits below the sign are all ones; `signs` replicates each sign over all bits of its value.
template <class T>
__device__ __forceinline__ u32 keys_of(u32 word);
template <>
__device__ __forceinline__ u32 keys_of<bf16>(u32 word) {
  u32 canonical, signs;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(canonical) : "r"(word), "r"(0x3f803f80), "r"(0));
  asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(signs) : "r"(canonical));
  return canonical ^ (signs & 0x7fff7fff);
}
template <>
__device__ __forceinline__ u32 keys_of<f16>(u32 word) {
  u32 canonical, signs;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(canonical) : "r"(word), "r"(0));
  asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(signs) : "r"(canonical));
  return canonical ^ (signs & 0x7fff7fff);
}
template <>
__device__ __forceinline__ u32 keys_of<float>(u32 word) {
  u32 canonical;
  asm("add.rn.f32 %0, %1, 0f00000000;" : "=r"(canonical) : "r"(word));
  return canonical ^ (static_cast<u32>(static_cast<int>(canonical) >> 31) & 0x7fffffff);
}

template <class T>
__device__ __forceinline__ void widen_word(u32 word, float (&wide)[kPerWord<T>]) {
  if constexpr (kPerWord<T> == 1) {
    wide[0] = __uint_as_float(word);
  } else {
    wide[0] = widen(T{static_cast<unsigned short>(word & 0xffff)});
    wide[1] = widen(T{static_cast<unsigned short>(word >> 16)});
  }
}
template <class T>
__device__ __forceinline__ u32 narrow_word(const float (&wide)[kPerWord<T>]) {
  if constexpr (kPerWord<T> == 1) {
    return __float_as_uint(wide[0]);
  } else {
    return narrow_x2<T>(wide[0], wide[1]);
  }
}

// Predicated on any bit of `mask`; a load gives zero where none is set.
__device__ __forceinline__ void load_if_any(u32 mask, const void* from, u32& word) {
  asm("{.reg .pred p; setp.ne.b32 p, %2, 0; mov.b32 %0, 0; @p ld.global.b32 %0, [%1];}"
      : "=r"(word)
      : "l"(from), "r"(mask));
}
__device__ __forceinline__ void store_if_any(u32 mask, void* to, u32 word) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; @p st.global.b32 [%0], %1;}" ::"l"(to),
               "r"(word), "r"(mask)
               : "memory");
}

// 1, but the compiler knows neither that nor that it is uniform over threads; `size` is not negative.
__device__ __forceinline__ int opaque_one(int size) {
  return 1 + (static_cast<int>(threadIdx.x) & size >> 31);
}
// Advances a pointer by `step` bytes; `one` is opaque_one's. The multiply-add runs partly on the FMA pipe:
// a plain addition would run entirely on the ALU pipe, which the comparisons need.
template <class Pointer>
__device__ __forceinline__ void advance_pointer(Pointer& place, int step, int one) {
  place += static_cast<i64>(step) * one;
}

}  // namespace convgrad
