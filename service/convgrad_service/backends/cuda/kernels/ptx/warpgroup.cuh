// What surrounds wgmma (the instruction itself is in wgmma.cuh): fences, commit groups, named barriers,
// register reallocation, shared-memory matrix descriptors.
//
// Needs sm_90a. A warpgroup is four warps, the first with an index divisible by four; all of its 128
// threads must call the wgmma_* functions together.
#pragma once

#include "ptx/wgmma.cuh"

namespace convgrad {

// Makes this thread's writes to shared memory visible to the async proxy (TMA, wgmma); call it before
// the barrier after which they are read.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Named barriers: `threads` counts those that wait (sync) and those that only arrive.
__device__ __forceinline__ void named_barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// Registers per thread of this warpgroup from here on: more (inc) or fewer (dec) than at launch.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
// Before the first wgmma that accesses registers which other instructions have written.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
// Closes a wgmma group: those started since the previous one.
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most `kPending` of this warpgroup's wgmma groups are pending.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving accumulators to other registers while a wgmma adds to them (CUTLASS's
// warpgroup_fence_operand).
template <int kFragments>
__device__ __forceinline__ void fence_accumulators(float (&c)[kFragments][4]) {
#pragma unroll
  for (int j = 0; j < kFragments; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(c[j][e])::"memory");
  }
}
template <int kM, int kN>
__device__ __forceinline__ void fence_accumulators(float (&c)[kM][kN][4]) {
#pragma unroll
  for (int i = 0; i < kM; ++i) fence_accumulators(c[i]);
}

// The same for an A operand in registers: after writing it and before the wgmma, and again after waiting
// for the wgmma and before overwriting it.
template <int kCount>
__device__ __forceinline__ void fence_registers(u32 (&a)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(a[i])::"memory");
}

// ---- Shared-memory matrix descriptors. An operand is stored as TMA stores a box: consecutive rows of
// kBytes (128, 64 or 32) with the swizzle of that width: the 16-byte chunk index within a row is XORed
// with address bits 7 and up, three of them for 128 bytes, two for 64, one for 32. A swizzle atom is
// eight rows and starts at a multiple of 8 * kBytes. The tensor cores apply the same XOR to the address,
// so an operand may start inside an atom (`advance_descriptor`).
//
// The two byte offsets depend on the operand's major dimension:
// - K-major: a row is one row of A (column of B) and holds kBytes along K. SBO is the distance between
//   groups of eight rows; LBO is ignored. One wgmma reads 32 bytes of each row; the next K step starts 32
//   bytes further.
// - MN-major: a row is one element of K (a pixel, say) and holds kBytes of A's rows (B's columns): 64
//   16-bit elements for 128 bytes. SBO is the distance between groups of eight K elements; LBO the
//   distance to the next kBytes of rows (columns), for an operand wider than one box. One wgmma reads 16
//   elements of K; the next K step starts 16 * kBytes further.
// Both offsets are encoded in units of 16 bytes, in 14 bits.
template <int kBytes>
__device__ __forceinline__ u64 descriptor_swizzle() {
  static_assert(kBytes == 128 || kBytes == 64 || kBytes == 32, "swizzles of TMA and wgmma");
  return static_cast<u64>(kBytes == 128 ? 1 : kBytes == 64 ? 2 : 3) << 62;
}
__device__ __forceinline__ u64 smem_descriptor(u32 address, u32 leading_bytes, u32 stride_bytes) {
  return static_cast<u64>(stride_bytes >> 4) << 32 | static_cast<u64>(leading_bytes >> 4) << 16 |
         (address & 0x3ffff) >> 4;
}
template <int kBytes>
__device__ __forceinline__ u64 k_major_descriptor(u32 address, u32 stride_bytes = 8 * kBytes) {
  return descriptor_swizzle<kBytes>() | smem_descriptor(address, 16, stride_bytes);
}
template <int kBytes>
__device__ __forceinline__ u64 mn_major_descriptor(u32 address, u32 leading_bytes = 0,
                                                   u32 stride_bytes = 8 * kBytes) {
  return descriptor_swizzle<kBytes>() | smem_descriptor(address, leading_bytes, stride_bytes);
}
// The descriptor of the operand that starts `bytes` further in shared memory.
__device__ __forceinline__ u64 advance_descriptor(u64 descriptor, u32 bytes) {
  return descriptor + (bytes >> 4);
}

// K-major with the 128-byte swizzle; `address` is a multiple of 1024.
__device__ __forceinline__ u64 sw128_k_major_descriptor(u32 address) {
  return k_major_descriptor<128>(address);
}
// The same from any row on, not only from every eighth.
__device__ __forceinline__ u64 sw128_k_major_descriptor_at_row(u32 address, int row) {
  return advance_descriptor(sw128_k_major_descriptor(address), row * 128);
}

}  // namespace convgrad
