// What the kernels' ptx/warpgroup.cuh does, on the CPU.
#pragma once

#include "ptx/wgmma.cuh"

namespace convgrad {

static inline void publish_shared() {}
static inline void wait_at(int barrier, int threads) { emulator::come_to(barrier, threads, true); }
static inline void pass_by(int barrier, int threads) { emulator::come_to(barrier, threads, false); }
template <int kRegisters>
static inline void take_registers() {}
template <int kRegisters>
static inline void leave_registers() {}
static inline void begin_products() {}
static inline void commit_products() { ++products_of[emulator::current].group; }
template <int kPending>
static inline void wait_products() {
  finish_products(kPending);
}
template <int kFragments>
static inline void hold_sums(float (&)[kFragments][4]) {}
template <int kCount>
static inline void hold_words(u32 (&)[kCount]) {}

// The same bits as on the GPU.
template <int kBytes>
static inline u64 swizzled_by() {
  static_assert(kBytes == 128 || kBytes == 64 || kBytes == 32, "what TMA and wgmma swizzle by");
  return static_cast<u64>(kBytes == 128 ? 1 : kBytes == 64 ? 2 : 3) << 62;
}
static inline u64 operand_at(u32 address, u32 leading_bytes, u32 stride_bytes) {
  if (address >= 1 << 18 || leading_bytes >= 1 << 18 || stride_bytes >= 1 << 18) {
    emulator::fail("an operand whose descriptor has no room for its address or steps");
  }
  return static_cast<u64>(stride_bytes >> 4) << 32 | static_cast<u64>(leading_bytes >> 4) << 16 |
         address >> 4;
}
template <int kBytes>
static inline u64 operand_along_k(u32 address, u32 eight_rows = 8 * kBytes) {
  return swizzled_by<kBytes>() | operand_at(address, 16, eight_rows);
}
template <int kBytes>
static inline u64 operand_along_mn(u32 address, u32 next_box = 0, u32 eight_rows = 8 * kBytes) {
  return swizzled_by<kBytes>() | operand_at(address, next_box, eight_rows);
}
static inline u64 advance(u64 operand, u32 bytes) { return operand + (bytes >> 4); }
static inline u64 rows_of_128_bytes(u32 address) {
  if (address % 1024 != 0) emulator::fail("rows of an operand that do not start at a multiple of 1024");
  return operand_along_k<128>(address);
}
static inline u64 shifted_rows_of_128_bytes(u32 address, int row) {
  return advance(rows_of_128_bytes(address), row * 128);
}

}  // namespace convgrad
