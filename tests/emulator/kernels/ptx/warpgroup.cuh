// The emulator's ptx/warpgroup.cuh.
#pragma once

#include "ptx/wgmma.cuh"

namespace convgrad {

static inline void fence_proxy_async() {}
static inline void named_barrier_sync(int barrier, int threads) {
  emulator::come_to(barrier, threads, true);
}
static inline void named_barrier_arrive(int barrier, int threads) {
  emulator::come_to(barrier, threads, false);
}
template <int kRegisters>
static inline void setmaxnreg_inc() {}
template <int kRegisters>
static inline void setmaxnreg_dec() {}
static inline void wgmma_fence() {}
static inline void wgmma_commit() { ++products_of[emulator::current].group; }
template <int kPending>
static inline void wgmma_wait() {
  finish_products(kPending);
}
template <int kFragments>
static inline void fence_accumulators(float (&)[kFragments][4]) {}
template <int kM, int kN>
static inline void fence_accumulators(float (&)[kM][kN][4]) {}
template <int kCount>
static inline void fence_registers(u32 (&)[kCount]) {}

// The same bits as on the GPU.
template <int kBytes>
static inline u64 descriptor_swizzle() {
  static_assert(kBytes == 128 || kBytes == 64 || kBytes == 32, "what TMA and wgmma swizzle by");
  return static_cast<u64>(kBytes == 128 ? 1 : kBytes == 64 ? 2 : 3) << 62;
}
static inline u64 smem_descriptor(u32 address, u32 leading_bytes, u32 stride_bytes) {
  if (address >= 1 << 18 || leading_bytes >= 1 << 18 || stride_bytes >= 1 << 18) {
    emulator::fail("an operand whose descriptor has no room for its address or steps");
  }
  return static_cast<u64>(stride_bytes >> 4) << 32 | static_cast<u64>(leading_bytes >> 4) << 16 |
         address >> 4;
}
template <int kBytes>
static inline u64 k_major_descriptor(u32 address, u32 eight_rows = 8 * kBytes) {
  return descriptor_swizzle<kBytes>() | smem_descriptor(address, 16, eight_rows);
}
template <int kBytes>
static inline u64 mn_major_descriptor(u32 address, u32 next_box = 0, u32 eight_rows = 8 * kBytes) {
  return descriptor_swizzle<kBytes>() | smem_descriptor(address, next_box, eight_rows);
}
static inline u64 advance_descriptor(u64 operand, u32 bytes) { return operand + (bytes >> 4); }
static inline u64 sw128_k_major_descriptor(u32 address) {
  if (address % 1024 != 0) emulator::fail("rows of an operand that do not start at a multiple of 1024");
  return k_major_descriptor<128>(address);
}
static inline u64 sw128_k_major_descriptor_at_row(u32 address, int row) {
  return advance_descriptor(sw128_k_major_descriptor(address), row * 128);
}

}  // namespace convgrad
