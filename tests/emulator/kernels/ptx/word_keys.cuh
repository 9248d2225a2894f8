// The emulator's ptx/word_keys.cuh.
#pragma once

#include "ptx/mma.cuh"

namespace convgrad {

template <class T>
constexpr int kPerWord = 4 / static_cast<int>(sizeof(T));
template <int kPer>
constexpr u32 kNoKeys = kPer == 2 ? 0x80008000 : 0x80000000;

// Each key of a word on its own.
template <int kPer>
static inline int key_at(u32 word, int i) {
  return kPer == 1 ? static_cast<int>(word) : static_cast<short>(word >> 16 * i);
}
template <int kPer, class Choose>
static inline u32 each_key(u32 a, u32 b, Choose first) {
  u32 chosen = 0;
  for (int i = 0; i < kPer; ++i) {
    const u32 bits = kPer == 1 ? ~0u : 0xffffu << 16 * i;
    chosen |= (first(key_at<kPer>(a, i), key_at<kPer>(b, i)) ? a : b) & bits;
  }
  return chosen;
}
template <int kPer>
static inline u32 max_keys(u32 a, u32 b) {
  return each_key<kPer>(a, b, [](int x, int y) { return x >= y; });
}
template <int kPer>
static inline u32 max_keys(u32 a, u32 b, bool (&is_first)[kPer]) {
  for (int i = 0; i < kPer; ++i) is_first[i] = key_at<kPer>(a, i) >= key_at<kPer>(b, i);
  return max_keys<kPer>(a, b);
}
struct UnusedResult {
  void use() const {}
};
template <int kPer>
static inline void ge_keys(u32 a, u32 b, bool (&is_first)[kPer], UnusedResult&) {
  max_keys<kPer>(a, b, is_first);
}
template <int kPer>
static inline u32 max_keys_after(u32 a, u32 b) {
  u32 next = 0;
  for (int i = 0; i < kPer; ++i) next |= (key_at<kPer>(a, i) + 1 & (kPer == 1 ? ~0u : 0xffffu)) << 16 * i;
  return max_keys<kPer>(next, b);
}
template <int kPer>
static inline u32 min_keys(u32 a, u32 b) {
  return each_key<kPer>(a, b, [](int x, int y) { return x <= y; });
}
template <int kPer>
static inline u32 nan_of_rank(int rank) {
  return kPer == 2 ? (0x7fffu - rank) * 0x00010001u : 0x7fffffffu - rank;
}
template <int kPer>
static inline u32 rank_nan(u32 keys, int rank) {
  return min_keys<kPer>(keys, nan_of_rank<kPer>(rank));
}

template <class T>
static inline u32 keys_of(u32 word) {
  constexpr int kBits = 8 * sizeof(T);
  u32 keys = 0;
  for (int i = 0; i < kPerWord<T>; ++i) {
    T one;
    memcpy(&one, reinterpret_cast<const char*>(&word) + i * sizeof(T), sizeof(T));
    const float value = widen(one);
    u32 bits = word >> kBits * i % 32 & (~0u >> (32 - kBits));
    const u32 sign = 1u << (kBits - 1);
    if (value != value) {
      bits = sign - 1;
    } else if (value == 0) {
      bits = 0;
    } else if (bits & sign) {
      bits ^= sign - 1;
    }
    keys |= bits << kBits * i % 32;
  }
  return keys;
}
template <class T>
static inline void widen_word(u32 word, float (&wide)[kPerWord<T>]) {
  for (int i = 0; i < kPerWord<T>; ++i) {
    T one;
    memcpy(&one, reinterpret_cast<const char*>(&word) + i * sizeof(T), sizeof(T));
    wide[i] = widen(one);
  }
}
template <class T>
static inline u32 narrow_word(const float (&wide)[kPerWord<T>]) {
  u32 word;
  for (int i = 0; i < kPerWord<T>; ++i) {
    const T one = narrow<T>(wide[i]);
    memcpy(reinterpret_cast<char*>(&word) + i * sizeof(T), &one, sizeof(T));
  }
  return word;
}

static inline void load_if_any(u32 mask, const void* from, u32& word) {
  word = 0;
  if (!mask) return;
  emulator::check_global(from, 4, 4);
  memcpy(&word, from, 4);
}
static inline void store_if_any(u32 mask, void* to, u32 word) {
  if (!mask) return;
  emulator::check_global(to, 4, 4);
  memcpy(to, &word, 4);
}
static inline int opaque_one(int) { return 1; }
template <class Pointer>
static inline void advance_pointer(Pointer& place, int step, int one) {
  place += static_cast<i64>(step) * one;
}

}  // namespace convgrad
