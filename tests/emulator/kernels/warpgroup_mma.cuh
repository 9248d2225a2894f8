// What the kernels' warpgroup_mma.cuh does, on the CPU: products read their operands, and sums
// change, when they are waited for, a warp at a time.
#pragma once

#include "tensor_core.cuh"

namespace convgrad {

enum Major : int { kAlongK = 0, kAlongMn = 1 };

// One thread's part of a product that was started.
struct StartedProduct {
  void (*finish)(const StartedProduct* lanes[32], unsigned warp);
  void* sums;
  u64 a, b;
  u32 words[4];  // of a, where it comes from registers
  int add;
  unsigned group;
};
struct StartedProducts {
  static constexpr unsigned kMost = 256;
  StartedProduct all[kMost];
  unsigned count, group;
};
static StartedProducts products_of[emulator::kMostThreads];

// An operand in shared memory, by its descriptor.
template <class T>
struct Operand {
  u32 start, leading, stride, row_bytes;

  explicit Operand(u64 bits) {
    const unsigned swizzle = bits >> 62;
    if (swizzle == 0) emulator::fail("an operand that is not swizzled");
    start = (bits & 0x3fff) << 4;
    leading = (bits >> 16 & 0x3fff) << 4;
    stride = (bits >> 32 & 0x3fff) << 4;
    row_bytes = 256 >> swizzle;
  }
  // Element `k` of the reduction in row (column) `row`.
  float at(Major major, u32 row, u32 k) const {
    u32 address = start;
    if (major == kAlongK) {
      address += row / 8 * stride + row % 8 * row_bytes + k * sizeof(T);
    } else {
      const u32 wide = row_bytes / sizeof(T);
      address += row / wide * leading + row % wide * sizeof(T) + k / 8 * stride + k % 8 * row_bytes;
    }
    address ^= (address >> 7 & (row_bytes / 16 - 1)) << 4;
    T element;
    memcpy(&element, emulator::in_shared(address, sizeof(T), sizeof(T)), sizeof(T));
    return widen(element);
  }
};

template <class T, int kFragments, Major kA, Major kB, bool kRegisters>
static void finish_product(const StartedProduct* lanes[32], unsigned warp) {
  constexpr int kDepth = 32 / sizeof(T), kColumns = 8 * kFragments;
  // TF32's low bits are cut off.
  const auto factor = [](float value) {
    return sizeof(T) == 4 ? __uint_as_float(__float_as_uint(value) & ~0x1fffu) : value;
  };
  double a[16][kDepth];
  static double b[kDepth][kColumns];
  for (int k = 0; k < kDepth; ++k) {
    for (int row = 0; row < 16; ++row) {
      if (!kRegisters) a[row][k] = factor(Operand<T>(lanes[0]->a).at(kA, warp % 4 * 16 + row, k));
    }
    for (int column = 0; column < kColumns; ++column) {
      b[k][column] = factor(Operand<T>(lanes[0]->b).at(kB, column, k));
    }
  }
  for (int lane = 0; kRegisters && lane < 32; ++lane) {
    constexpr int kPer = Packed<T>::kPer;
    for (int i = 0; i < 4; ++i) {
      for (int e = 0; e < kPer; ++e) {
        a[lane / 4 + i % 2 * 8][(i / 2 * 4 + lane % 4) * kPer + e] =
            Packed<T>::at(lanes[lane]->words[i], e);
      }
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    auto& c = *static_cast<float(*)[kFragments][4]>(lanes[lane]->sums);
    for (int j = 0; j < kFragments; ++j) {
      for (int e = 0; e < 4; ++e) {
        const int row = e / 2 * 8 + lane / 4, column = j * 8 + lane % 4 * 2 + e % 2;
        double sum = lanes[lane]->add ? c[j][e] : 0.0;
        for (int k = 0; k < kDepth; ++k) sum += a[row][k] * b[k][column];
        c[j][e] = cut(sum);
      }
    }
  }
}

static inline void start_product(const StartedProduct& product) {
  StartedProducts& own = products_of[emulator::current];
  if (own.count == StartedProducts::kMost) {
    emulator::fail("more products under way than the emulator has room for");
  }
  own.all[own.count] = product;
  own.all[own.count++].group = own.group;
}
template <class T, int kFragments>
struct WarpgroupMma {
  template <Major kA = kAlongK, Major kB = kAlongK>
  static inline void start(float (&c)[kFragments][4], u64 a, u64 b, int add) {
    start_product({finish_product<T, kFragments, kA, kB, false>, &c, a, b, {}, add});
  }
  template <Major kB = kAlongK>
  static inline void start(float (&c)[kFragments][4], const u32 (&a)[4], u64 b, int add) {
    start_product({finish_product<T, kFragments, kAlongK, kB, true>, &c, 0, b,
                   {a[0], a[1], a[2], a[3]}, add});
  }
};
template <class T, Major kA = kAlongK, Major kB = kAlongK, int kFragments>
static inline void multiply(float (&c)[kFragments][4], u64 a, u64 b, int add) {
  static_assert(sizeof(T) == 2 || (kA == kAlongK && kB == kAlongK), "TF32 lies along K");
  WarpgroupMma<T, kFragments>::template start<kA, kB>(c, a, b, add);
}
template <class T, Major kB = kAlongK, int kFragments>
static inline void multiply(float (&c)[kFragments][4], const u32 (&a)[4], u64 b, int add) {
  static_assert(sizeof(T) == 2 || kB == kAlongK, "TF32 lies along K");
  WarpgroupMma<T, kFragments>::template start<kB>(c, a, b, add);
}

// The products of a warp in all but `pending` of its groups.
static inline void finish_products(unsigned pending) {
  emulator::all_lanes[emulator::current].given[0] = pending;
  emulator::meet(~0u, [](emulator::Lane* lanes) {
    const unsigned warp = (lanes - emulator::all_lanes) / emulator::kLanes;
    StartedProducts* const own = products_of + warp * emulator::kLanes;
    unsigned done = 0;
    for (; done < own->count && own->all[done].group + lanes->given[0] < own->group; ++done) {
      const StartedProduct* together[32];
      for (unsigned i = 0; i < 32; ++i) {
        const StartedProduct& one = own[i].all[done];
        together[i] = &one;
        if (done >= own[i].count || one.finish != own->all[done].finish ||
            one.a != own->all[done].a || one.b != own->all[done].b) {
          emulator::fail("lanes of a warp start different products");
        }
      }
      own->all[done].finish(together, threadIdx.x / 32);
    }
    for (unsigned i = 0; i < 32; ++i) {
      own[i].count -= done;
      memmove(own[i].all, own[i].all + done, own[i].count * sizeof(StartedProduct));
    }
  });
}

}  // namespace convgrad
