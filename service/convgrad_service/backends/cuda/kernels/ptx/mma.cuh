// sm_80 instructions, one small function each: mma.sync, ldmatrix, movmatrix, cp.async. Kernels contain
// no inline assembly for these, so that the emulator's twin (tests/emulator/kernels/ptx/mma.cuh) can
// run them without a GPU.
//
// Functions marked "Warp" must be called by all 32 lanes together. Shared-memory addresses are those
// of shared_address.
#pragma once

#include "core/elements.cuh"

namespace convgrad {

__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// Copies kBytes (4, 8 or 16, both addresses aligned to them) from global to shared memory; complete
// once this thread's copy group has been waited for. Reads only the first `src_bytes` bytes and fills
// the rest with zeros.
template <int kBytes>
__device__ __forceinline__ void cp_async(u32 to, const void* from, int src_bytes = kBytes) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "what cp.async copies");
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(src_bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(kBytes),
                 "r"(src_bytes)
                 : "memory");
  }
}
// Copies 16 bytes and prefetches the 128-byte line around them into L2; where `pred` is false reads
// nothing and writes zeros.
__device__ __forceinline__ void cp_async_zfill(u32 to, const void* from, bool pred) {
  const int src_bytes = pred ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(src_bytes)
               : "memory");
}
// Closes a copy group: the copies that this thread has started since the previous one.
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until at most `kPending` of this thread's copy groups are pending. Other threads see the
// copied data after a barrier.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Warp: loads 8 x 8 matrices of 16-bit elements, one per register. Lanes 8i to 8i + 7 pass the
// addresses of the rows of matrix i, 16 bytes each; lane l receives elements 2(l % 4) and
// 2(l % 4) + 1 of row l / 4.
// ldmatrix_trans, transposed: lane l receives element l / 4 of rows 2(l % 4) and 2(l % 4) + 1.
#define CONVGRAD_LDMATRIX(NAME, COUNT, SHAPE, WORDS, FROM, ...)                             \
  __device__ __forceinline__ void NAME(u32 (&to)[COUNT], u32 from) {                        \
    asm volatile("ldmatrix.sync.aligned.m8n8." SHAPE ".shared.b16 {" WORDS "}, [" FROM "];" \
                 : __VA_ARGS__                                                              \
                 : "r"(from));                                                              \
  }
#define CONVGRAD_LDMATRIX_EACH(NAME, TRANS)                                       \
  CONVGRAD_LDMATRIX(NAME, 1, "x1" TRANS, "%0", "%1", "=r"(to[0]))                 \
  CONVGRAD_LDMATRIX(NAME, 2, "x2" TRANS, "%0,%1", "%2", "=r"(to[0]), "=r"(to[1])) \
  CONVGRAD_LDMATRIX(NAME, 4, "x4" TRANS, "%0,%1,%2,%3", "%4", "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]))
CONVGRAD_LDMATRIX_EACH(ldmatrix, "")
CONVGRAD_LDMATRIX_EACH(ldmatrix_trans, ".trans")

// Warp: transposes an 8 x 8 matrix that is distributed as by ldmatrix.
__device__ __forceinline__ u32 movmatrix_trans(u32 matrix) {
  u32 result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(matrix));
  return result;
}

// Shared-memory loads and stores of one and of four words, ordered with the copies and their waits.
__device__ __forceinline__ u32 ld_shared_u32(u32 from) {
  u32 word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(from));
  return word;
}
__device__ __forceinline__ void ld_shared_v4(u32 (&to)[4], u32 from) {
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from));
}
__device__ __forceinline__ void st_shared_v4(u32 to, const u32 (&words)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(words[0]), "r"(words[1]),
               "r"(words[2]), "r"(words[3])
               : "memory");
}

// Rounds to the nearest TF32; mma itself would truncate.
__device__ __forceinline__ u32 to_tf32(u32 word) {
  u32 rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(__uint_as_float(word)));
  return rounded;
}

// Rounds two values to T and packs them, the first in the low half: memory order.
template <class T>
__device__ __forceinline__ u32 narrow_x2(float first, float second);
// flags += pair * 0, element by element: `flags` starts as zero and stays zero while all values are
// finite.
template <class T>
__device__ __forceinline__ void flag_nonfinite_x2(u32& flags, u32 pair);
#define CONVGRAD_PAIRS(TYPE, NAME)                                                   \
  template <>                                                                        \
  __device__ __forceinline__ u32 narrow_x2<TYPE>(float first, float second) {        \
    u32 both;                                                                        \
    asm("cvt.rn." NAME "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first)); \
    return both;                                                                     \
  }                                                                                  \
  template <>                                                                        \
  __device__ __forceinline__ void flag_nonfinite_x2<TYPE>(u32& flags, u32 pair) {    \
    asm("fma.rn." NAME "x2 %0, %1, %2, %0;" : "+r"(flags) : "r"(pair), "r"(0));      \
  }
CONVGRAD_PAIRS(f16, "f16")
CONVGRAD_PAIRS(bf16, "bf16")

// Warp: c += a * b with a 16 x 8 accumulator in float32, a row-major, b column-major, K = 16 for 16-bit
// types and 8 for TF32 (m16n8k16, m16n8k8). PTX's fragment layout, with g = lane / 4 and t = lane % 4:
//   c: rows g, g, g + 8, g + 8; columns 2t, 2t + 1, 2t, 2t + 1;
//   a: rows g, g + 8, g, g + 8; the first half of K twice, then the second half twice;
//   b: column g; the first half of K, then the second.
// Within a half of K a register holds element pair t of 16-bit types, or element t of TF32.
// The overload with a[2] and one b register has half of K (m16n8k8, m16n8k4).
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

}  // namespace convgrad
