// What the kernels' warpgroup.cuh does, on the CPU: products read their operands, and sums change,
// when they are waited for.
#pragma once

#include "elements.cuh"

namespace convgrad {

struct StartedProduct {
  void (*finish)(const StartedProduct&);
  void* sums;
  u64 a, b;
  int add;
};
struct StartedProducts {
  StartedProduct all[64];
  int count;
};
static StartedProducts products_of[emulator::kMostThreads];

static inline void publish_shared() {}
static inline void wait_at(int barrier, int threads) { emulator::come_to(barrier, threads, true); }
static inline void pass_by(int barrier, int threads) { emulator::come_to(barrier, threads, false); }
template <int kRegisters>
static inline void take_registers() {}
template <int kRegisters>
static inline void leave_registers() {}
static inline void begin_products() {}
static inline void commit_products() {}
template <int kPending>
static inline void wait_products() {
  static_assert(kPending == 0, "the emulator has no groups of products");
  StartedProducts& own = products_of[emulator::current];
  for (int i = 0; i < own.count; ++i) own.all[i].finish(own.all[i]);
  own.count = 0;
}
template <int kFragments>
static inline void hold_sums(float (&)[kFragments][4]) {}

static inline u64 rows_of_128_bytes(u32 address) {
  if (address % 1024 != 0) emulator::fail("rows of an operand that do not start at a multiple of 1024");
  return address >> 4;
}

static inline u64 shifted_rows_of_128_bytes(u32 address, int row) {
  return rows_of_128_bytes(address) + row * 8;
}

// Element `k` of the 16 of a product in row `row`.
template <class T>
static inline float element_of_rows(u64 operand, int row, int k) {
  const u32 straight = (static_cast<u32>(operand) << 4) + row * 128 + k * 2;
  T element;
  memcpy(&element, emulator::in_shared(straight ^ (straight >> 7 & 7) << 4, 2, 2), 2);
  return widen(element);
}

template <class T, int kFragments>
struct WarpgroupMma {
  static void finish(const StartedProduct& product) {
    auto& c = *static_cast<float(*)[kFragments][4]>(product.sums);
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32 % 4;
    for (int j = 0; j < kFragments; ++j) {
      for (int e = 0; e < 4; ++e) {
        const int row = warp * 16 + e / 2 * 8 + lane / 4, column = j * 8 + lane % 4 * 2 + e % 2;
        float sum = 0;
        for (int k = 0; k < 16; ++k) {
          sum += element_of_rows<T>(product.a, row, k) * element_of_rows<T>(product.b, column, k);
        }
        c[j][e] = product.add ? c[j][e] + sum : sum;
      }
    }
  }
  static inline void start(float (&c)[kFragments][4], u64 a, u64 b, int add) {
    StartedProducts& own = products_of[emulator::current];
    if (own.count == 64) emulator::fail("more products under way than the emulator has room for");
    own.all[own.count++] = {finish, &c, a, b, add};
  }
};

}  // namespace convgrad
