// The instructions that C++ has no words for, each a small function: matrix products of a warp,
// loads of their fragments, asynchronous copies to shared memory. Kernels have no assembly of their
// own for these, so that tests/emulator can stand in for this header and run them without a GPU.
//
// Needs sm_80. Functions that say "warp" must be reached by all 32 lanes together. Addresses in
// shared memory are those of shared_address.
#pragma once

#include "core/elements.cuh"

namespace convgrad {

__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// kBytes (4, 8 or 16, both sides aligned to them) from global to shared memory, once this thread's
// group of copies is waited for. Only the first `real` bytes are read, the others become zeros.
template <int kBytes>
__device__ __forceinline__ void copy_async(u32 to, const void* from, int real = kBytes) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "what cp.async copies");
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(real)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(kBytes),
                 "r"(real)
                 : "memory");
  }
}
// 16 bytes, for who will copy the 128 bytes around them soon; zeros, and no read, where `there` is
// false.
__device__ __forceinline__ void copy_chunk(u32 to, const void* from, bool there) {
  const int real = there ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(real)
               : "memory");
}
// Ends a group: the copies that this thread has started since the last one.
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until at most `kPending` of this thread's groups are still under way. Other threads see
// what was copied after a barrier.
template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Warp: 8 x 8 matrices of 16-bit elements, one a register. Lanes 8i to 8i + 7 say where the rows of
// matrix i are, 16 bytes each; lane l gets elements 2(l % 4) and the next of row l / 4.
__device__ __forceinline__ void load_matrices(u32 (&to)[1], u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(to[0]) : "r"(from));
}
__device__ __forceinline__ void load_matrices(u32 (&to)[2], u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
               : "=r"(to[0]), "=r"(to[1])
               : "r"(from));
}
__device__ __forceinline__ void load_matrices(u32 (&to)[4], u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from));
}
// The same, with lane l getting elements l / 4 of rows 2(l % 4) and the next.
__device__ __forceinline__ void load_matrices_transposed(u32 (&to)[1], u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
               : "=r"(to[0])
               : "r"(from));
}
__device__ __forceinline__ void load_matrices_transposed(u32 (&to)[2], u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
               : "=r"(to[0]), "=r"(to[1])
               : "r"(from));
}
__device__ __forceinline__ void load_matrices_transposed(u32 (&to)[4], u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from));
}

// Warp: such a matrix, of which each lane has two elements of a row as after load_matrices, turned.
__device__ __forceinline__ u32 transposed(u32 matrix) {
  u32 turned;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(matrix));
  return turned;
}

// One word from shared memory, or four there or back, in the order of the copies and their waits.
__device__ __forceinline__ u32 load_word(u32 from) {
  u32 word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(from));
  return word;
}
__device__ __forceinline__ void load_words(u32 (&to)[4], u32 from) {
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from));
}
__device__ __forceinline__ void store_words(u32 to, const u32 (&words)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(words[0]), "r"(words[1]),
               "r"(words[2]), "r"(words[3])
               : "memory");
}

// To the nearest TF32: mma would cut the low bits off.
__device__ __forceinline__ u32 to_tf32(u32 word) {
  u32 rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(__uint_as_float(word)));
  return rounded;
}

// Two neighbours rounded to T, the first in the low half, as they lie in memory.
template <class T>
__device__ __forceinline__ u32 narrow_two(float first, float second);
template <>
__device__ __forceinline__ u32 narrow_two<bf16>(float first, float second) {
  u32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
  return both;
}
template <>
__device__ __forceinline__ u32 narrow_two<f16>(float first, float second) {
  u32 both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
  return both;
}

// Two neighbours times zero, added to what is marked, which starts as zeros: it stays so while all are
// finite.
template <class T>
__device__ __forceinline__ void mark_odd(u32& marked, u32 both);
template <>
__device__ __forceinline__ void mark_odd<f16>(u32& marked, u32 both) {
  asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(marked) : "r"(both), "r"(0));
}
template <>
__device__ __forceinline__ void mark_odd<bf16>(u32& marked, u32 both) {
  asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(marked) : "r"(both), "r"(0));
}

// Warp: c += a * b, with c 16 x 8 in float32, rows of a and columns of b along the reduction: of 16
// 16-bit elements, or 8 of float32 taken as TF32. The fragments are PTX's for m16n8k16 (m16n8k8):
// with g = lane / 4 and t = lane % 4,
//   c: rows g, g, g + 8, g + 8; columns 2t, 2t + 1, twice;
//   a: rows g, g + 8, g, g + 8, in the first half of the reduction twice, then in the second;
//   b: column g, in the first half of the reduction, then in the second;
// where in a half it is element pair t of 16-bit types, element t of TF32.
// The other form has half the depth: a has the first two registers, b the first one.
template <class T>
__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1);
template <class T>
__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[2], u32 b);
#define CONVGRAD_MMA(TYPE, DEEP, SHALLOW, NAME)                                                 \
  template <>                                                                                   \
  __device__ __forceinline__ void mma<TYPE>(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { \
    asm("mma.sync.aligned." DEEP ".row.col.f32." NAME "." NAME                                  \
        ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                            \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                        \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                        \
  }                                                                                             \
  template <>                                                                                   \
  __device__ __forceinline__ void mma<TYPE>(float (&c)[4], const u32 (&a)[2], u32 b) {          \
    asm("mma.sync.aligned." SHALLOW ".row.col.f32." NAME "." NAME                               \
        ".f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"                                     \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                        \
        : "r"(a[0]), "r"(a[1]), "r"(b));                                                        \
  }
CONVGRAD_MMA(f16, "m16n8k16", "m16n8k8", "f16")
CONVGRAD_MMA(bf16, "m16n8k16", "m16n8k8", "bf16")
CONVGRAD_MMA(float, "m16n8k8", "m16n8k4", "tf32")
#undef CONVGRAD_MMA

}  // namespace convgrad
