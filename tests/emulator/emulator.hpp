// CUDA as far as the general kernels use it, for one thread of the CPU: threads of a block take
// turns, and __syncthreads passes the turn on.
#pragma once

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define __CUDA_ARCH__ 900
#define __device__
#define __global__
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)
#define __forceinline__ inline

struct Index3 {
  unsigned x, y, z;
};
static Index3 blockIdx, threadIdx;

static void pass_turn();
static int votes, decided;

static inline void __syncthreads() { pass_turn(); }
static inline int __syncthreads_or(int vote) {
  votes |= vote != 0;
  pass_turn();
  return decided;
}
static inline float __uint_as_float(unsigned bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
template <class A, class B>
static inline auto min(A a, B b) -> decltype(a + b) {
  return a < b ? a : b;
}
template <class A, class B>
static inline auto max(A a, B b) -> decltype(a + b) {
  return a > b ? a : b;
}

// What the instructions of elements.cuh do.
static inline float half_to_float(unsigned short bits) {
  _Float16 half;
  memcpy(&half, &bits, 2);
  return static_cast<float>(half);
}
static inline unsigned short float_to_half(float value) {
  const _Float16 half = static_cast<_Float16>(value);
  unsigned short bits;
  memcpy(&bits, &half, 2);
  return bits;
}
static inline unsigned short float_to_bfloat(float value) {
  if (value != value) return 0x7fff;
  unsigned bits;
  memcpy(&bits, &value, 4);
  return static_cast<unsigned short>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
