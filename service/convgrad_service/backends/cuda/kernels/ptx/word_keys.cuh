// Words of four bytes as they lie in memory, two neighbouring values of 16 bits or one of 32, made
// keys that are compared all at once: for 16 bits that takes one instruction from sm_90 on. Kernels
// have no assembly of their own for these, so that tests/emulator can stand in for it.
//
// A key is a signed integer of the value's size, in the order of the values: -0 and +0 are equal,
// NaN is the largest integer, and kNoKeys is below all keys. Above all numbers there is room for 127
// keys at least, so that of several NaN the last can be made the greatest: see rank_nan.
#pragma once

#include "ptx/mma.cuh"

namespace convgrad {

template <class T>
constexpr int kPerWord = 4 / static_cast<int>(sizeof(T));

template <int kPer>
constexpr u32 kNoKeys = kPer == 2 ? 0x80008000 : 0x80000000;

template <int kPer>
__device__ __forceinline__ u32 larger(u32 a, u32 b) {
  if constexpr (kPer == 1) {
    return static_cast<u32>(max(static_cast<int>(a), static_cast<int>(b)));
  } else {
#if __CUDA_ARCH__ >= 900
    u32 most;
    asm("max.s16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
    return most;
#else
    const int high = max(static_cast<int>(a) >> 16, static_cast<int>(b) >> 16);
    const int low = max(static_cast<int>(a << 16) >> 16, static_cast<int>(b << 16) >> 16);
    return __byte_perm(low, high, 0x5410);
#endif
  }
}
// The same, and of which keys a's is at least b's. The maximum must be used: where it is not, ptxas
// 13.0 takes its register for free although the instruction writes it, and what half of that still
// holds of another value is lost (seen with f16). See `compare`.
template <int kPer>
__device__ __forceinline__ u32 larger(u32 a, u32 b, bool (&is_first)[kPer]) {
  if constexpr (kPer == 1) {
    is_first[0] = static_cast<int>(a) >= static_cast<int>(b);
    return larger<1>(a, b);
  } else {
#if __CUDA_ARCH__ >= 900
    // The form that ptxas makes one instruction of.
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
    return larger<2>(a, b);
#endif
  }
}
// Uses what nobody needs, with an instruction of a pipe that has time.
class Unneeded {
 public:
  __device__ __forceinline__ void add(u32 word) { sum_ = word * 5 + sum_; }
  // Once, at the end; sleeps for no time, if at all.
  __device__ __forceinline__ void use() const {
    asm volatile("{.reg .pred p; setp.eq.u32 p, %0, 0x12345679; @p nanosleep.u32 0;}" ::"r"(sum_));
  }

 private:
  u32 sum_ = 0;
};
// Of which keys a's is at least b's, and no more.
template <int kPer>
__device__ __forceinline__ void compare(u32 a, u32 b, bool (&is_first)[kPer], Unneeded& unneeded) {
  const u32 most = larger<kPer>(a, b, is_first);
  if constexpr (kPer == 2) unneeded.add(most);
}
// The larger of what comes next after a, which is not the largest integer, and b: a key is at least
// that if it is larger than a and at least b.
template <int kPer>
__device__ __forceinline__ u32 larger_of_next(u32 a, u32 b) {
#if __CUDA_ARCH__ >= 900
  if constexpr (kPer == 2) {
    u32 most;
    asm("{.reg .b32 next; add.s16x2 next, %1, %3; max.s16x2 %0, next, %2;}"
        : "=r"(most)
        : "r"(a), "r"(b), "r"(0x00010001));
    return most;
  }
#endif
  // The lower half's carry is stopped by its sign.
  return larger<kPer>(kPer == 1 ? a + 1 : ((a & 0x7fff7fff) + 0x00010001) ^ (a & 0x80008000), b);
}
template <int kPer>
__device__ __forceinline__ u32 smaller(u32 a, u32 b) {
  if constexpr (kPer == 1) {
    return static_cast<u32>(min(static_cast<int>(a), static_cast<int>(b)));
  } else {
#if __CUDA_ARCH__ >= 900
    u32 least;
    asm("min.s16x2 %0, %1, %2;" : "=r"(least) : "r"(a), "r"(b));
    return least;
#else
    const int high = min(static_cast<int>(a) >> 16, static_cast<int>(b) >> 16);
    const int low = min(static_cast<int>(a << 16) >> 16, static_cast<int>(b << 16) >> 16);
    return __byte_perm(low, high, 0x5410);
#endif
  }
}

// Keys of which NaN's are the `rank` next ones below its own. Where the rank falls from position to
// position, the last of several NaN is the greatest.
template <int kPer>
__device__ __forceinline__ u32 nan_of_rank(int rank) {
  return kPer == 2 ? (0x7fffu - rank) * 0x00010001u : 0x7fffffffu - rank;
}
template <int kPer>
__device__ __forceinline__ u32 rank_nan(u32 keys, int rank) {
  return rank == 0 ? keys : smaller<kPer>(keys, nan_of_rank<kPer>(rank));
}

// A word's values as keys. Adding zero makes -0 +0, and every NaN the one whose bits but the sign are
// all set; signs go over all bits of a value.
template <class T>
__device__ __forceinline__ u32 keys_of(u32 word);
template <>
__device__ __forceinline__ u32 keys_of<bf16>(u32 word) {
  u32 same, signs;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(same) : "r"(word), "r"(0x3f803f80), "r"(0));
  asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(signs) : "r"(same));
  return same ^ (signs & 0x7fff7fff);
}
template <>
__device__ __forceinline__ u32 keys_of<f16>(u32 word) {
  u32 same, signs;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(same) : "r"(word), "r"(0));
  asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(signs) : "r"(same));
  return same ^ (signs & 0x7fff7fff);
}
template <>
__device__ __forceinline__ u32 keys_of<float>(u32 word) {
  u32 same;
  asm("add.rn.f32 %0, %1, 0f00000000;" : "=r"(same) : "r"(word));
  return same ^ (static_cast<u32>(static_cast<int>(same) >> 31) & 0x7fffffff);
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
    return narrow_two<T>(wide[0], wide[1]);
  }
}

// Where any bit of `wanted` is set; zero where none is.
__device__ __forceinline__ void load_where(u32 wanted, const void* from, u32& word) {
  asm("{.reg .pred p; setp.ne.b32 p, %2, 0; mov.b32 %0, 0; @p ld.global.b32 %0, [%1];}"
      : "=r"(word)
      : "l"(from), "r"(wanted));
}
__device__ __forceinline__ void store_where(u32 wanted, void* to, u32 word) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; @p st.global.b32 [%0], %1;}" ::"l"(to),
               "r"(word), "r"(wanted)
               : "memory");
}

// 1, of which the compiler knows neither that, nor that all threads have the same; `size` is not
// negative.
__device__ __forceinline__ int make_one(int size) {
  return 1 + (static_cast<int>(threadIdx.x) & size >> 31);
}
// Moves a pointer on by `step` bytes; `one` is make_one's. A product is added up half on the pipe of
// multiplications: comparisons need the other, which would do all of it for a plain sum.
template <class Pointer>
__device__ __forceinline__ void move_on(Pointer& place, int step, int one) {
  place += static_cast<i64>(step) * one;
}

}  // namespace convgrad
