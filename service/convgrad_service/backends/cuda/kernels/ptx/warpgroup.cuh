// Hopper's matrix products of a warpgroup: four warps whose first has a number divisible by four.
// They run beside what the warps do meanwhile, and read their operands from shared memory, the first
// one from registers if it is there. The products themselves are in wgmma.cuh.
//
// Needs sm_90a. All 128 threads must reach each function of products together.
#pragma once

#include "ptx/wgmma.cuh"

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

// The same for registers that hold an operand: after they were written and before the product, and
// again after it was waited for, before they are written anew.
template <int kCount>
__device__ __forceinline__ void hold_words(u32 (&a)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(a[i])::"memory");
}

// ---- Descriptors of operands in shared memory. An operand lies as TMA lays out a box: rows of
// kBytes (128, 64 or 32) one after another, and with that swizzle: the 16-byte chunk of a row is
// stored at its number ^ (bits 7.. of its address), of which a swizzle of 128 bytes takes three bits,
// 64 two and 32 one. So eight rows (of 32 bytes: 8, the pattern repeats after 256 bytes) are one
// pattern, and what starts at a multiple of 8 * kBytes starts one. The tensor cores too take those
// bits of the address, so an operand may start in the midst of a pattern (`advance`).
//
// The hardware's two offsets, by what lies side by side in a row:
// - along K: a row is one of a's rows (b's columns), and holds kBytes of the reduction. SBO is the
//   way from eight rows to the next eight; LBO is not read. One product takes 32 bytes of each row:
//   the next ones along K are 32 bytes on.
// - along M or N: a row is one step of the reduction (a pixel, say), and holds kBytes of a's rows
//   (b's columns): 64 of 16 bits with 128. SBO is the way from eight steps of the reduction to the
//   next eight; LBO that from these kBytes of rows to the next, for a product that is wider: a box
//   beside the first one. One product takes 16 steps: the next ones are 16 rows, 16 * kBytes, on.
// Both are counted in 16 bytes, 14 bits of each.
template <int kBytes>
__device__ __forceinline__ u64 swizzled_by() {
  static_assert(kBytes == 128 || kBytes == 64 || kBytes == 32, "what TMA and wgmma swizzle by");
  return static_cast<u64>(kBytes == 128 ? 1 : kBytes == 64 ? 2 : 3) << 62;
}
__device__ __forceinline__ u64 operand_at(u32 address, u32 leading_bytes, u32 stride_bytes) {
  return static_cast<u64>(stride_bytes >> 4) << 32 | static_cast<u64>(leading_bytes >> 4) << 16 |
         (address & 0x3ffff) >> 4;
}
// Elements along K side by side.
template <int kBytes>
__device__ __forceinline__ u64 operand_along_k(u32 address, u32 eight_rows = 8 * kBytes) {
  return swizzled_by<kBytes>() | operand_at(address, 16, eight_rows);
}
// Elements along M or N side by side; `next_box` is where those beyond the first kBytes are.
template <int kBytes>
__device__ __forceinline__ u64 operand_along_mn(u32 address, u32 next_box = 0,
                                                u32 eight_rows = 8 * kBytes) {
  return swizzled_by<kBytes>() | operand_at(address, next_box, eight_rows);
}
// The same operand from so many bytes on: of a shared address, not of what is stored there.
__device__ __forceinline__ u64 advance(u64 operand, u32 bytes) { return operand + (bytes >> 4); }

// Rows of 128 bytes along the reduction, from an address that is a multiple of 1024.
__device__ __forceinline__ u64 rows_of_128_bytes(u32 address) {
  return operand_along_k<128>(address);
}
// The same from one of its rows on, not only every eighth: chunks are where they are in the whole.
__device__ __forceinline__ u64 shifted_rows_of_128_bytes(u32 address, int row) {
  return advance(rows_of_128_bytes(address), row * 128);
}

}  // namespace convgrad
