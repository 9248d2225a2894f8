// What gradients of max pooling that compare keys of words (ptx/word_keys.cuh) share: loading and
// storing rows of words, and routing the gradient of a window to the first of its maxima. A word has
// kPer adjacent channels; a single channel of 16 bits is compared as a float.
#pragma once

#include "core/vectors.cuh"
#include "ptx/word_keys.cuh"

namespace convgrad {

// Blocks per multiprocessor, from the number on Hopper: other GPUs need more instructions, and so
// registers, to compare two keys.
__device__ constexpr int blocks_here(int on_hopper) {
#if __CUDA_ARCH__ == 900
  return on_hopper;
#else
  return on_hopper > 1 ? on_hopper - 1 : 1;
#endif
}

// The channels of a word as they are in memory, their keys and their values.
template <class T, int kPer>
struct Word {
  static constexpr bool kHalf = sizeof(T) * kPer == 2;
  typename RawOf<sizeof(T) * kPer>::type raw;

  __device__ __forceinline__ u32 keys() const {
    if constexpr (kHalf) {
      return keys_of<float>(__float_as_uint(widen(T{raw})));
    } else {
      return keys_of<T>(raw);
    }
  }
  __device__ __forceinline__ void get(float (&wide)[kPer]) const {
    if constexpr (kHalf) {
      wide[0] = widen(T{raw});
    } else {
      widen_word<T>(raw, wide);
    }
  }
  static __device__ __forceinline__ Word of(const float (&wide)[kPer]) {
    if constexpr (kHalf) {
      return {narrow<T>(wide[0]).bits};
    } else {
      return {narrow_word<T>(wide)};
    }
  }
  // Zero where no bit of `mask` is set.
  __device__ __forceinline__ void load(u32 mask, const char* from) {
    if constexpr (kHalf) {
      load_if(mask != 0, from, raw);
    } else {
      load_if_any(mask, from, raw);
    }
  }
  __device__ __forceinline__ void store(u32 mask, char* to) const {
    if constexpr (kHalf) {
      store_if(mask != 0, to, raw);
    } else {
      store_if_any(mask, to, raw);
    }
  }
};

// Bits [low, high), clamped to a word.
__device__ __forceinline__ u32 bits_between(int low, int high) {
  const auto below = [](int bit) { return bit <= 0 ? 0u : bit >= 32 ? ~0u : (1u << bit) - 1; };
  return below(high) & ~below(low);
}

// Loads a word from each row, `pitch` bytes apart; zero if the row's bit is not set. Most warps have
// all rows and take the path without predicates.
template <class Word, int kRows>
__device__ __forceinline__ void fetch_rows(u32 there, const char* from, int pitch, int one,
                                           Word (&to)[kRows]) {
  if (there == (1u << kRows) - 1) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      load_if(true, from, to[r].raw);
      advance_pointer(from, pitch, one);
    }
  } else {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      to[r].load(there & 1u << r, from);
      advance_pointer(from, pitch, one);
    }
  }
}
template <class Word, int kRows, int kPer>
__device__ __forceinline__ void store_rows(u32 wanted, char* to, int pitch, int one,
                                           const float (&sums)[kRows][kPer]) {
  if (wanted == (1u << kRows) - 1) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      store_if(true, to, Word::of(sums[r]).raw);
      advance_pointer(to, pitch, one);
    }
  } else if (wanted != 0) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      Word::of(sums[r]).store(wanted & 1u << r, to);
      advance_pointer(to, pitch, one);
    }
  }
}
// The keys of a column of words; kNoKeys if the row's bit is not set.
template <int kPer, class Word, int kRows>
__device__ __forceinline__ void keys_of_rows(u32 there, const Word (&words)[kRows],
                                             u32 (&keys)[kRows]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) keys[r] = words[r].keys();
  if (there != (1u << kRows) - 1) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if ((there & 1u << r) == 0) keys[r] = kNoKeys<kPer>;
    }
  }
}

// Routes the gradient `rest` of a window of kKeys keys, of which [begin, end) are valid, to the first
// greatest key. Calls `take(j, c, all, value)` for each key j, which receives all of it or nothing.
template <int kPer, int kKeys, class Take>
__device__ __forceinline__ void route(const u32 (&keys)[kKeys], int begin, int end,
                                      float (&rest)[kPer], UnusedResult& unneeded, Take take) {
  // For each key, whether it is the greatest from there on. Predicate registers are few, so beyond
  // kHeld of them they are recomputed.
  constexpr int kHeld = 2;
  bool here[kKeys][kPer];
  u32 most = 0;
#pragma unroll
  for (int j = kKeys - 1; j >= 0; --j) {
    if (j < begin || j >= end) continue;
    for (int c = 0; c < kPer; ++c) here[j][c] = true;
    if (j + 1 == end) {
      most = keys[j];
    } else if (j == begin) {
      ge_keys<kPer>(keys[j], most, here[j], unneeded);
    } else if (j - begin < kHeld) {
      most = max_keys<kPer>(keys[j], most, here[j]);
    } else {
      most = max_keys<kPer>(keys[j], most);
    }
  }
#pragma unroll
  for (int j = 0; j < kKeys; ++j) {
    if (j < begin || j >= end) continue;
    if (j + 1 < end && j - begin >= kHeld) {
      u32 after = keys[end - 1];
#pragma unroll
      for (int i = kKeys - 1; i > j; --i) {
        if (i < end - 1) after = max_keys<kPer>(keys[i], after);
      }
      ge_keys<kPer>(keys[j], after, here[j], unneeded);
    }
#pragma unroll
    for (int c = 0; c < kPer; ++c) {
      take(j, c, here[j][c], rest[c]);
      if (j + 1 < end && here[j][c]) rest[c] = 0;
    }
  }
}

// Adds what a key received; `first` for its first window.
__device__ __forceinline__ void add_taken(bool first, bool taken, float value, float& sum) {
  if (first) {
    sum = taken ? value : 0.0f;
  } else if (taken) {
    sum += value;
  }
}

}  // namespace convgrad
