// Hopper's matrix products of a warpgroup: four warps whose first has a number divisible by four.
// They run beside what the warps do meanwhile, and read both operands from shared memory.
//
// Needs sm_90a. All 128 threads must reach each function of products together.
#pragma once

#include "elements.cuh"

namespace convgrad {

// Tells the copy engine and the tensor cores of what this thread has written to shared memory;
// before the barrier after which they read it.
__device__ __forceinline__ void publish_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Barriers that some threads wait at and others only pass: `threads` of both kinds together.
__device__ __forceinline__ void wait_at(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void pass_by(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// Registers of a thread of this warpgroup from here on: more, or fewer, than it was launched with.
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void leave_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
// Before the first product that reads registers written by other instructions.
__device__ __forceinline__ void begin_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
// Ends a group: the products started since the last one.
__device__ __forceinline__ void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most `kPending` of this warpgroup's groups are still under way.
template <int kPending>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving sums to other registers while products add to them.
template <int kFragments>
__device__ __forceinline__ void hold_sums(float (&c)[kFragments][4]) {
#pragma unroll
  for (int j = 0; j < kFragments; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(c[j][e])::"memory");
  }
}

// An operand whose rows are 128 bytes along the reduction, from an address in shared memory that is
// a multiple of 1024: 16-byte chunk c of row r is stored at chunk c ^ (r & 7). Sixteen 16-bit
// elements on along the reduction are 32 bytes on.
__device__ __forceinline__ u64 rows_of_128_bytes(u32 address) {
  constexpr u64 kSwizzle128 = 1ull << 62, kEightRows = static_cast<u64>(1024 >> 4) << 32;
  return kSwizzle128 | kEightRows | 1ull << 16 | (address & 0x3ffff) >> 4;
}

// The same from one of its rows on, not only every eighth: chunks are where they are in the whole.
__device__ __forceinline__ u64 shifted_rows_of_128_bytes(u32 address, int row) {
  return rows_of_128_bytes(address) + static_cast<u64>(row) * (128 >> 4);
}

// c = a * b, or c += a * b where `add`: a has 64 rows, b so many columns as c has fragments of 8.
// The warp's 16 rows of c lie as those of mma's fragments (tensor_core.cuh).
template <class T, int kFragments>
struct WarpgroupMma;

#define CONVGRAD_C(j) "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3])
#define CONVGRAD_C4(j) CONVGRAD_C(j), CONVGRAD_C(j + 1), CONVGRAD_C(j + 2), CONVGRAD_C(j + 3)
#define CONVGRAD_WGMMA(TYPE, NAME, FRAGMENTS, COLUMNS, REGISTERS, A, B, ADD, ...)                  \
  template <>                                                                                      \
  struct WarpgroupMma<TYPE, FRAGMENTS> {                                                           \
    __device__ static __forceinline__ void start(float (&c)[FRAGMENTS][4], u64 a, u64 b, int add) { \
      asm volatile("{.reg .pred p; setp.ne.b32 p, %" ADD ", 0; "                                   \
                   "wgmma.mma_async.sync.aligned.m64n" COLUMNS "k16.f32." NAME "." NAME            \
                   " {" REGISTERS "}, %" A ", %" B ", p, 1, 1, 0, 0;}"                             \
                   : __VA_ARGS__                                                                   \
                   : "l"(a), "l"(b), "r"(add));                                                    \
    }                                                                                              \
  };
#define CONVGRAD_D32                                                                     \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23," \
  "%24,%25,%26,%27,%28,%29,%30,%31"
#define CONVGRAD_D48 \
  CONVGRAD_D32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define CONVGRAD_D64 \
  CONVGRAD_D48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define CONVGRAD_WGMMAS(TYPE, NAME)                                                               \
  CONVGRAD_WGMMA(TYPE, NAME, 8, "64", CONVGRAD_D32, "32", "33", "34", CONVGRAD_C4(0),             \
                 CONVGRAD_C4(4))                                                                  \
  CONVGRAD_WGMMA(TYPE, NAME, 12, "96", CONVGRAD_D48, "48", "49", "50", CONVGRAD_C4(0),            \
                 CONVGRAD_C4(4), CONVGRAD_C4(8))                                                  \
  CONVGRAD_WGMMA(TYPE, NAME, 16, "128", CONVGRAD_D64, "64", "65", "66", CONVGRAD_C4(0),           \
                 CONVGRAD_C4(4), CONVGRAD_C4(8), CONVGRAD_C4(12))
CONVGRAD_WGMMAS(f16, "f16")
CONVGRAD_WGMMAS(bf16, "bf16")
#undef CONVGRAD_WGMMAS
#undef CONVGRAD_WGMMA
#undef CONVGRAD_D64
#undef CONVGRAD_D48
#undef CONVGRAD_D32
#undef CONVGRAD_C4
#undef CONVGRAD_C

}  // namespace convgrad
