// The emulator's ptx/mma.cuh. Asynchronous copies happen when they are waited for and no sooner; a warp's
// collective operation happens when its last lane arrives.
#pragma once

#include "core/elements.cuh"

namespace convgrad {

static inline u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

template <int kBytes>
static inline void cp_async(u32 to, const void* from, int real = kBytes) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "what cp.async copies");
  emulator::Copies& own = emulator::copies_of[emulator::current];
  if (real < 0 || real > kBytes) emulator::fail("a copy of more bytes than it has room for");
  if (real > 0) emulator::check_global(from, real, kBytes);
  if (own.count == emulator::Copies::kMost)
    emulator::fail("more copies under way than the emulator has room for");
  char* const at = emulator::in_shared(to, kBytes, kBytes);
  // Either may come last.
  for (u32 i = 0; i < own.count; ++i) {
    if (own.all[i].to < at + kBytes && at < own.all[i].to + own.all[i].bytes)
      emulator::fail("a copy to where another one is under way");
  }
  own.all[own.count++] = {at, from, kBytes, real, own.group};
}
static inline void cp_async_zfill(u32 to, const void* from, bool pred) {
  cp_async<16>(to, from, pred ? 16 : 0);
}
static inline void cp_async_commit() { ++emulator::copies_of[emulator::current].group; }
template <int kPending>
static inline void cp_async_wait() {
  emulator::Copies& own = emulator::copies_of[emulator::current];
  u32 left = 0;
  for (u32 i = 0; i < own.count; ++i) {
    const auto& copy = own.all[i];
    if (copy.group + kPending >= own.group) {
      own.all[left++] = copy;
      continue;
    }
    if (copy.real > 0) memcpy(copy.to, copy.from, copy.real);
    memset(copy.to + copy.real, 0, copy.bytes - copy.real);
  }
  own.count = left;
}

template <int kCount, bool kTransposed>
static inline void matrices(u32 (&to)[kCount], u32 from) {
  emulator::Lane& own = emulator::all_lanes[emulator::current];
  own.given[0] = from;
  emulator::meet(~0u, [](emulator::Lane* lanes) {
    for (int i = 0; i < kCount; ++i) {
      unsigned short rows[8][8];
      for (int row = 0; row < 8; ++row) {
        memcpy(rows[row], emulator::in_shared(lanes[i * 8 + row].given[0], 16, 16), 16);
      }
      for (int lane = 0; lane < 32; ++lane) {
        const int at = lane / 4, pair = lane % 4 * 2;
        lanes[lane].taken[i] = kTransposed ? rows[pair][at] | rows[pair + 1][at] << 16
                                           : rows[at][pair] | rows[at][pair + 1] << 16;
      }
    }
  });
  memcpy(to, own.taken, sizeof to);
}
template <int kCount>
static inline void ldmatrix(u32 (&to)[kCount], u32 from) {
  matrices<kCount, false>(to, from);
}
template <int kCount>
static inline void ldmatrix_trans(u32 (&to)[kCount], u32 from) {
  matrices<kCount, true>(to, from);
}

static inline u32 movmatrix_trans(u32 matrix) {
  emulator::Lane& own = emulator::all_lanes[emulator::current];
  own.given[0] = matrix;
  emulator::meet(~0u, [](emulator::Lane* lanes) {
    for (int lane = 0; lane < 32; ++lane) {
      u32 both = 0;
      for (int i = 0; i < 2; ++i) {
        const u32 from = lanes[(lane % 4 * 2 + i) * 4 + lane / 8].given[0];
        both |= (from >> lane / 4 % 2 * 16 & 0xffff) << i * 16;
      }
      lanes[lane].taken[0] = both;
    }
  });
  return own.taken[0];
}

template <class T>
static inline void flag_nonfinite_x2(u32& flags, u32 both) {
  const u32 exponent = narrow<T>(__uint_as_float(0x7f800000)).bits;
  for (int half = 0; half < 32; half += 16) {
    if ((both >> half & exponent) == exponent) flags |= 0x7fffu << half;
  }
}

static inline u32 ld_shared_u32(u32 from) {
  u32 word;
  memcpy(&word, emulator::in_shared(from, 4, 4), 4);
  return word;
}
static inline void ld_shared_v4(u32 (&to)[4], u32 from) {
  memcpy(to, emulator::in_shared(from, 16, 16), 16);
}
static inline void st_shared_v4(u32 to, const u32 (&words)[4]) {
  memcpy(emulator::in_shared(to, 16, 16), words, 16);
}

// Rounds ties away from zero.
static inline u32 to_tf32(u32 word) {
  if ((word & 0x7f800000u) == 0x7f800000u) return word & 0x7fffff ? 0x7fffffffu : word;
  return (word + 0x1000u) & ~0x1fffu;
}

template <class T>
static inline u32 narrow_x2(float first, float second) {
  return narrow<T>(first).bits | static_cast<u32>(narrow<T>(second).bits) << 16;
}

// Elements of a register, as mma takes them.
template <class T>
struct Packed {
  static constexpr int kPer = 2;
  static inline float at(u32 word, int i) {
    return widen(T{static_cast<unsigned short>(word >> 16 * i)});
  }
};
template <>
struct Packed<float> {
  static constexpr int kPer = 1;
  static inline float at(u32 word, int) { return __uint_as_float(word & ~0x1fffu); }
};

// Tensor cores truncate the sum.
static inline float cut(double sum) {
  const float near = static_cast<float>(sum);
  if (!(fabs(static_cast<double>(near)) > fabs(sum)) || isinf(near)) return near;
  return __uint_as_float(__float_as_uint(near) - 1);
}

// kHalves halves of K.
template <class T, int kHalves>
static inline void product(float (&c)[4], const u32* a, const u32* b) {
  emulator::Lane& own = emulator::all_lanes[emulator::current];
  memcpy(own.given, c, 16);
  memcpy(own.given + 4, a, 8 * kHalves);
  memcpy(own.given + 8, b, 4 * kHalves);
  emulator::meet(~0u, [](emulator::Lane* lanes) {
    constexpr int kPer = Packed<T>::kPer, kDepth = 4 * kPer * kHalves;
    double rows[16][kDepth], columns[kDepth][8];
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 2 * kHalves; ++i) {
        for (int e = 0; e < kPer; ++e) {
          rows[lane / 4 + i % 2 * 8][(i / 2 * 4 + lane % 4) * kPer + e] =
              Packed<T>::at(lanes[lane].given[4 + i], e);
        }
      }
      for (int i = 0; i < kHalves; ++i) {
        for (int e = 0; e < kPer; ++e) {
          columns[(i * 4 + lane % 4) * kPer + e][lane / 4] =
              Packed<T>::at(lanes[lane].given[8 + i], e);
        }
      }
    }
    for (int row = 0; row < 16; ++row) {
      emulator::Lane* const four = lanes + row % 8 * 4;
      double sum[8];
      for (int j = 0; j < 8; ++j) {
        sum[j] = __uint_as_float(four[j / 2].given[row / 8 * 2 + j % 2]);
      }
      for (int k = 0; k < kDepth; ++k) {
        for (int j = 0; j < 8; ++j) sum[j] += rows[row][k] * columns[k][j];
      }
      for (int j = 0; j < 8; ++j) {
        four[j / 2].taken[row / 8 * 2 + j % 2] = __float_as_uint(cut(sum[j]));
      }
    }
  });
  memcpy(c, own.taken, 16);
}
template <class T>
static inline void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  const u32 b[] = {b0, b1};
  product<T, 2>(c, a, b);
}
template <class T>
static inline void mma(float (&c)[4], const u32 (&a)[2], u32 b) {
  product<T, 1>(c, a, &b);
}

}  // namespace convgrad
