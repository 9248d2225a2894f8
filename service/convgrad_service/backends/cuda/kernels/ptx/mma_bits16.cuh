// mma and the rounding of its results for a 16-bit type that the launch decides (core/bits16.cuh): bfloat16, or
// float16 where `bfloat16` is 0. It must be uniform in a warp. Each costs an issue slot more than with a known type.
#pragma once

#include "ptx/mma.cuh"

namespace convgrad {

// As mma of the type. One statement, so that sums stay in their registers.
__device__ __forceinline__ void mma(int bfloat16, float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("{.reg .pred p; setp.ne.s32 p, %10, 0;\n"
      "@p mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      "@!p mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};}"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(bfloat16));
}
__device__ __forceinline__ void mma(int bfloat16, float (&c)[4], const u32 (&a)[2], u32 b) {
  asm("{.reg .pred p; setp.ne.s32 p, %7, 0;\n"
      "@p mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};\n"
      "@!p mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};}"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(b), "r"(bfloat16));
}
// Of a type that is known, or of Bits16.
template <class T, int kCount, class... B>
__device__ __forceinline__ void mma_of(int bfloat16, float (&c)[4], const u32 (&a)[kCount], B... b) {
  if constexpr (sizeof(T) == 2) {
    mma(bfloat16, c, a, b...);
  } else {
    mma<T>(c, a, b...);
  }
}
// As narrow_x2 of the type.
__device__ __forceinline__ u32 narrow_x2(int bfloat16, float first, float second) {
  return bfloat16 ? narrow_x2<bf16>(first, second) : narrow_x2<f16>(first, second);
}

}  // namespace convgrad
