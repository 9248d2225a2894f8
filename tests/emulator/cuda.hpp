// CUDA's words as far as the kernels use them, see emulator.hpp.
#pragma once

#include "transfers.hpp"

#define __CUDA_ARCH__ 900
#define __device__
#define __host__
#define __global__
// All in one section, which launch.hpp spoils before each block.
#define __shared__ __attribute__((section("convgrad_shared"))) static
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __restrict__

struct Index3 {
  unsigned x, y, z;
};
static Index3 blockIdx, threadIdx, blockDim, gridDim;

#define CONVGRAD_VECTORS(TYPE, NAME)                                                          \
  struct alignas(2 * sizeof(TYPE)) NAME##2 {                                                  \
    TYPE x, y;                                                                                \
  };                                                                                          \
  struct NAME##3 {                                                                            \
    TYPE x, y, z;                                                                             \
  };                                                                                          \
  struct alignas(sizeof(TYPE) < 8 ? 4 * sizeof(TYPE) : 16) NAME##4 {                          \
    TYPE x, y, z, w;                                                                          \
  };                                                                                          \
  static inline NAME##2 make_##NAME##2(TYPE x, TYPE y) { return {x, y}; }                     \
  static inline NAME##3 make_##NAME##3(TYPE x, TYPE y, TYPE z) { return {x, y, z}; }          \
  static inline NAME##4 make_##NAME##4(TYPE x, TYPE y, TYPE z, TYPE w) { return {x, y, z, w}; }
CONVGRAD_VECTORS(short, short)
CONVGRAD_VECTORS(unsigned short, ushort)
CONVGRAD_VECTORS(int, int)
CONVGRAD_VECTORS(unsigned, uint)
CONVGRAD_VECTORS(long long, longlong)
CONVGRAD_VECTORS(unsigned long long, ulonglong)
CONVGRAD_VECTORS(float, float)
CONVGRAD_VECTORS(double, double)
#undef CONVGRAD_VECTORS

static inline void __syncthreads() { emulator::wait_for_block(); }
static inline int __syncthreads_count(int vote) {
  emulator::votes[emulator::current_block()] += vote != 0;
  emulator::wait_for_block();
  return emulator::decided[emulator::current_block()];
}
static inline int __syncthreads_or(int vote) { return __syncthreads_count(vote) != 0; }
static inline int __syncthreads_and(int vote) { return __syncthreads_count(vote == 0) == 0; }

static inline void __syncwarp(unsigned mask = ~0u) {
  emulator::meet(mask, [](emulator::Lane*) {});
}

template <class T>
static inline T __shfl_sync(unsigned mask, T value, int from, int width = 32) {
  return emulator::shuffled(mask, value, width,
                  [&](int, int first) { return first + (from & (width - 1)); });
}
template <class T>
static inline T __shfl_xor_sync(unsigned mask, T value, int flip, int width = 32) {
  return emulator::shuffled(mask, value, width, [&](int lane, int) { return lane ^ flip; });
}
template <class T>
static inline T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32) {
  return emulator::shuffled(mask, value, width, [&](int lane, int) { return lane + static_cast<int>(by); });
}
template <class T>
static inline T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32) {
  return emulator::shuffled(mask, value, width, [&](int lane, int) { return lane - static_cast<int>(by); });
}
static inline unsigned __ballot_sync(unsigned mask, int vote) {
  emulator::all_lanes[emulator::current].given[0] = vote != 0;
  emulator::meet(mask, [&](emulator::Lane* lanes) {
    unsigned ballot = 0;
    for (unsigned i = 0; i < emulator::kLanes; ++i) {
      if (mask >> i & 1) ballot |= lanes[i].given[0] << i;
    }
    for (unsigned i = 0; i < emulator::kLanes; ++i) {
      if (mask >> i & 1) lanes[i].taken[0] = ballot;
    }
  });
  return emulator::all_lanes[emulator::current].taken[0];
}
template <class T>
static inline unsigned __match_any_sync(unsigned mask, T value) {
  unsigned alike = 0;
  for (int lane = 0; lane < 32; ++lane) {
    alike |= (__shfl_sync(mask, value, lane) == value ? 1u : 0u) << lane;
  }
  return alike;
}
static inline int __any_sync(unsigned mask, int vote) { return __ballot_sync(mask, vote) != 0; }
static inline int __all_sync(unsigned mask, int vote) { return __ballot_sync(mask, vote) == mask; }

// ---- Memory. Threads take turns, so an atomic operation is an ordinary one.

static inline size_t __cvta_generic_to_shared(const void* pointer) {
  return static_cast<const char*>(pointer) - emulator::shared_window;
}
static inline void __threadfence() {}
static inline void __threadfence_block() {}
template <class T>
static inline T __ldg(const T* from) { return *from; }
template <class T>
static inline T __ldcg(const T* from) { return *from; }
template <class T>
static inline T __ldcs(const T* from) { return *from; }
template <class T>
static inline void __stcg(T* to, T value) { *to = value; }
template <class T>
static inline void __stcs(T* to, T value) { *to = value; }

template <class T>
static inline T atomicAdd(T* at, T by) { return emulator::changed(at, [&](T v) { return static_cast<T>(v + by); }); }
template <class T>
static inline T atomicOr(T* at, T bits) { return emulator::changed(at, [&](T v) { return v | bits; }); }
template <class T>
static inline T atomicAnd(T* at, T bits) { return emulator::changed(at, [&](T v) { return v & bits; }); }
template <class T>
static inline T atomicMax(T* at, T with) { return emulator::changed(at, [&](T v) { return v > with ? v : with; }); }
template <class T>
static inline T atomicMin(T* at, T with) { return emulator::changed(at, [&](T v) { return v < with ? v : with; }); }
template <class T>
static inline T atomicExch(T* at, T with) { return emulator::changed(at, [&](T) { return with; }); }
template <class T>
static inline T atomicCAS(T* at, T expected, T with) {
  return emulator::changed(at, [&](T v) { return v == expected ? with : v; });
}
static inline unsigned atomicInc(unsigned* at, unsigned last) {
  return emulator::changed(at, [&](unsigned v) { return v >= last ? 0u : v + 1; });
}

// ---- Arithmetic.

static inline float __uint_as_float(unsigned bits) { return emulator::bits_as<float>(bits); }
static inline float __int_as_float(int bits) { return emulator::bits_as<float>(bits); }
static inline unsigned __float_as_uint(float value) { return emulator::bits_as<unsigned>(value); }
static inline int __float_as_int(float value) { return emulator::bits_as<int>(value); }
static inline double __longlong_as_double(long long bits) { return emulator::bits_as<double>(bits); }
static inline long long __double_as_longlong(double value) { return emulator::bits_as<long long>(value); }
static inline float __fdividef(float a, float b) { return a / b; }
static inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<unsigned long long>(a) * b >> 32);
}
static inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
static inline int __popcll(unsigned long long bits) { return __builtin_popcountll(bits); }
static inline int __ffs(int bits) { return __builtin_ffs(bits); }
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
static inline int __clz(int bits) { return bits == 0 ? 32 : __builtin_clz(bits); }
static inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const unsigned long long both = static_cast<unsigned long long>(high) << 32 | low;
  unsigned chosen = 0;
  for (int i = 0; i < 4; ++i) {
    chosen |= static_cast<unsigned>(both >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  }
  return chosen;
}
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
template <class A, class B>
static inline auto min(A a, B b) -> decltype(a + b) {
  return a < b ? a : b;
}
template <class A, class B>
static inline auto max(A a, B b) -> decltype(a + b) {
  return a > b ? a : b;
}
