// The emulator's ptx/wgmma.cuh: a wgmma reads its operands and updates its accumulators when it is waited
// for, a warp at a time.
#pragma once

#include "ptx/mma.cuh"

namespace convgrad {

enum Major : int { kMajorK = 0, kMajorMn = 1 };

// One thread's part of a product that was started.
struct StartedProduct {
  void (*finish)(const StartedProduct* lanes[32], unsigned warp);
  float* sums;  // of each eight columns four
  unsigned fragments;
  Major a_major, b_major;
  bool registers;  // has a
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
  // Neighbours of a chunk stay beside each other: along the reduction, or along the rows (columns).
  static constexpr u32 kChunk = 16 / sizeof(T);
  u32 start, leading, stride, row_bytes;

  explicit Operand(u64 bits) {
    const unsigned swizzle = bits >> 62;
    if (swizzle == 0) emulator::fail("an operand that is not swizzled");
    start = (bits & 0x3fff) << 4;
    leading = (bits >> 16 & 0x3fff) << 4;
    stride = (bits >> 32 & 0x3fff) << 4;
    row_bytes = 256 >> swizzle;
  }
  // The chunk that begins with element `k` of the reduction in row (column) `row`.
  const T* chunk(Major major, u32 row, u32 k) const {
    u32 address = start;
    if (major == kMajorK) {
      address += row / 8 * stride + row % 8 * row_bytes + k * sizeof(T);
    } else {
      const u32 wide = row_bytes / sizeof(T);
      address += row / wide * leading + row % wide * sizeof(T) + k / 8 * stride + k % 8 * row_bytes;
    }
    address ^= (address >> 7 & (row_bytes / 16 - 1)) << 4;
    return reinterpret_cast<const T*>(emulator::in_shared(address, 16, 16));
  }
  // Element k of row i, of so many from `first` on, to `to[k * k_step + i * row_step]`.
  void read(Major major, u32 first, u32 rows, double* to, u32 k_step, u32 row_step) const {
    constexpr u32 kDepth = 32 / sizeof(T);
    const u32 by_row = major == kMajorK ? 1 : kChunk, by_k = major == kMajorK ? kChunk : 1;
    for (u32 k = 0; k < kDepth; k += by_k) {
      for (u32 row = 0; row < rows; row += by_row) {
        const T* const from = chunk(major, first + row, k);
        for (u32 i = 0; i < kChunk; ++i) {
          float value = widen(from[i]);
          // TF32's low bits are cut off.
          if (sizeof(T) == 4) value = __uint_as_float(__float_as_uint(value) & ~0x1fffu);
          to[major == kMajorK ? (k + i) * k_step + row * row_step
                              : k * k_step + (row + i) * row_step] = value;
        }
      }
    }
  }
};

// Eight columns at once, whatever the compiler makes of loops.
using Eight = double __attribute__((vector_size(64)));
using EightFloats = float __attribute__((vector_size(32)));
using EightWords = int __attribute__((vector_size(32)));
using EightLongs = long __attribute__((vector_size(64)));

// `cut` of each.
static inline EightFloats cut_eight(Eight sums) {
  const EightFloats near = __builtin_convertvector(sums, EightFloats);
  const EightLongs magnitude = EightLongs{} + 0x7fffffffffffffff;
  const EightLongs beyond = (emulator::bits_as<EightLongs>(__builtin_convertvector(near, Eight)) &
                             magnitude) > (emulator::bits_as<EightLongs>(sums) & magnitude);
  const EightWords words = emulator::bits_as<EightWords>(near);
  const EightWords finite = (words & 0x7fffffff) < 0x7f800000;
  return emulator::bits_as<EightFloats>(words + (__builtin_convertvector(beyond, EightWords) & finite));
}

// One function for products of all sizes: each is compiled with every kernel.
template <class T>
static void finish_product(const StartedProduct* lanes[32], unsigned warp) {
  constexpr u32 kDepth = 32 / sizeof(T), kPer = Packed<T>::kPer, kRows = 16, kMostFragments = 32;
  static double a[kRows][kDepth];
  static Eight b[kDepth][kMostFragments];
  static EightFloats sums[kRows][kMostFragments];
  const StartedProduct& one = *lanes[0];
  const u32 fragments = one.fragments;
  if (!one.registers) Operand<T>(one.a).read(one.a_major, warp % 4 * kRows, kRows, a[0], 1, kDepth);
  Operand<T>(one.b).read(one.b_major, 0, 8 * fragments, reinterpret_cast<double*>(b),
                         8 * kMostFragments, 1);
  for (u32 lane = 0; one.registers && lane < 32; ++lane) {
    for (u32 i = 0; i < 4; ++i) {
      for (u32 e = 0; e < kPer; ++e) {
        a[lane / 4 + i % 2 * 8][(i / 2 * 4 + lane % 4) * kPer + e] =
            Packed<T>::at(lanes[lane]->words[i], e);
      }
    }
  }
  // Each lane has two neighbours in either of two rows.
  const auto pair = [](u32 lane, u32 half, u32 j) {
    return reinterpret_cast<char*>(&sums[lane / 4 + half * 8][j]) + lane % 4 * 8;
  };
  for (u32 lane = 0; lane < 32; ++lane) {
    for (u32 i = 0; i < 2 * fragments; ++i) {
      if (lanes[lane]->add) {
        memcpy(pair(lane, i % 2, i / 2), lanes[lane]->sums + 2 * i, 8);
      } else {
        memset(pair(lane, i % 2, i / 2), 0, 8);
      }
    }
  }
  for (u32 row = 0; row < kRows; ++row) {
    for (u32 j = 0; j < fragments; ++j) {
      Eight sum = __builtin_convertvector(sums[row][j], Eight);
      for (u32 k = 0; k < kDepth; ++k) sum += a[row][k] * b[k][j];
      sums[row][j] = cut_eight(sum);
    }
  }
  for (u32 lane = 0; lane < 32; ++lane) {
    for (u32 i = 0; i < 2 * fragments; ++i) {
      memcpy(lanes[lane]->sums + 2 * i, pair(lane, i % 2, i / 2), 8);
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
struct Wgmma {
  template <Major kA = kMajorK, Major kB = kMajorK>
  static inline void issue(float (&c)[kFragments][4], u64 a, u64 b, int scale_d) {
    start_product({finish_product<T>, &c[0][0], kFragments, kA, kB, false, a, b, {}, scale_d});
  }
  template <Major kB = kMajorK>
  static inline void issue(float (&c)[kFragments][4], const u32 (&a)[4], u64 b, int scale_d) {
    start_product({finish_product<T>, &c[0][0], kFragments, kMajorK, kB, true, 0, b,
                   {a[0], a[1], a[2], a[3]}, scale_d});
  }
};
template <class T, Major kA = kMajorK, Major kB = kMajorK, int kFragments>
static inline void wgmma(float (&c)[kFragments][4], u64 a, u64 b, int scale_d) {
  static_assert(sizeof(T) == 2 || (kA == kMajorK && kB == kMajorK), "TF32 operands are K-major");
  Wgmma<T, kFragments>::template issue<kA, kB>(c, a, b, scale_d);
}
template <class T, Major kB = kMajorK, int kFragments>
static inline void wgmma(float (&c)[kFragments][4], const u32 (&a)[4], u64 b, int scale_d) {
  static_assert(sizeof(T) == 2 || kB == kMajorK, "TF32 operands are K-major");
  Wgmma<T, kFragments>::template issue<kB>(c, a, b, scale_d);
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
            one.a != own->all[done].a || one.b != own->all[done].b ||
            one.fragments != own->all[done].fragments || one.registers != own->all[done].registers ||
            one.a_major != own->all[done].a_major || one.b_major != own->all[done].b_major) {
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
