// Powers of two that a tile's float32 factors are multiplied by in shared memory before each is split into
// two TF32 numbers, so that the split loses nothing at either end of float32's range: the low part of a
// factor below 2^-102 may be subnormal, and the high part of one that lies within 2^-12 of the largest
// rounds to an infinity.
//
// A block keeps one power for its A and one for its B, at first 1, and multiplies the sums of a tile by
// their inverses as it adds them to what it has. Each thread looks at the chunks that it has copied, one
// tile ahead and beside the products. Where all are in the range that the powers serve, nothing else
// happens; with powers other than 1 each thread scales its own chunks, before the barrier that lies
// between two tiles anyway. New powers are chosen, with two barriers, where a tile leaves that range: they
// serve until another one does, so data of one kind pays for it once, not once a tile. NaN and infinities
// play no part in it.
//
// Tiny factors keep all bits in tiles whose largest is below 2^13, and beyond that where the other operand
// leaves room. Where a tile's factors lie further apart, those below 2^-102 may lose bits; what is lost is
// below 2^-126, some 2^-139 of the tile's largest factor or less.
#pragma once

#include "core/extremes.cuh"
#include "ptx/mma.cuh"

namespace convgrad {

// Of a block, in shared memory.
struct FactorFlags {
  u32 found[2];  // some thread's factors are outside what the powers serve: of tiles in turn
  Extremes of[2];  // A and B in the tile
};

// kCopies chunks of each thread, the first of them of A, in stages of kABytes and then kBBytes.
template <int kCopies, int kABytes, int kBBytes>
struct FactorPowers {
  static constexpr int kACopies = kCopies * kABytes / (kABytes + kBBytes);
  static constexpr u32 kTiny = (127 - 102) << 23;  // below this the low part loses bits
  static constexpr u32 kRoundsUp = 0x7f7ff000;     // from here on the high part is an infinity
  // Powers' exponents: 2^-149 to 2^-101, unless that takes others beyond 2^61; and from the largest down.
  static constexpr int kLift = 48, kHighest = 127 + 60, kLower = -8;
  // Of the largest factors' biased exponents, so that a tile's sums do not overflow.
  static constexpr int kMostSum = 127 + 127 + 118;

  float by[2], back;   // of A and B; of their products' sums
  u32 low[2];          // the range that they serve, as `Extremes` has it
  int high[2];
  Extremes seen[2];
  u32 turn = 0;

  // Before the first look.
  __device__ __forceinline__ void begin(FactorFlags* flags) {
    if (threadIdx.x == 0) *flags = {{0, 0}, {Extremes::none(), Extremes::none()}};
#pragma unroll
    for (int of = 0; of < 2; ++of) {
      by[of] = 1;
      low[of] = Extremes::low(kTiny), high[of] = Extremes::high(kRoundsUp) - 1;
    }
    back = 1;
    forget();
    __syncthreads();
  }
  __device__ __forceinline__ void forget() {
#pragma unroll
    for (int of = 0; of < 2; ++of) seen[of] = Extremes::none();
  }
  // At this thread's copy i, which lies at `at`.
  __device__ __forceinline__ void look(int i, u32 at) {
    u32 words[4];
    load_words(words, at);
#pragma unroll
    for (int e = 0; e < 4; ++e) seen[i < kACopies ? 0 : 1].add(words[e]);
  }
  __device__ __forceinline__ bool serves() const {
    return seen[0].least >= low[0] && seen[0].most <= high[0] && seen[1].least >= low[1] &&
           seen[1].most <= high[1];
  }
  // Once it has looked at all of them, before a barrier.
  template <class Own>
  __device__ __forceinline__ void apply(FactorFlags* flags, u32 stage, const Own& own) {
    if (!serves()) {
      *const_cast<volatile u32*>(&flags->found[turn]) = 1;
    } else if (by[0] != 1 || by[1] != 1) {
      scale(stage, own, by[0], by[1]);
    }
  }
  // After the barrier.
  template <class Own>
  __device__ __forceinline__ void settle(FactorFlags* flags, u32 stage, const Own& own) {
    if (*const_cast<const volatile u32*>(&flags->found[turn]) != 0) choose(flags, stage, own);
    turn ^= 1;
    forget();
  }

 private:
  template <class Own>
  __device__ __forceinline__ void scale(u32 stage, const Own& own, float by_a, float by_b) {
#pragma unroll 1
    for (int i = 0; i < kCopies; ++i) {
      const u32 at = stage + own(i);
      const float factor = i < kACopies ? by_a : by_b;
      u32 words[4];
      load_words(words, at);
#pragma unroll
      for (int e = 0; e < 4; ++e) words[e] = __float_as_uint(__uint_as_float(words[e]) * factor);
      store_words(at, words);
    }
  }

  template <class Own>
  __device__ __forceinline__ void choose(FactorFlags* flags, u32 stage, const Own& own) {
    const bool scaled = serves();
#pragma unroll
    for (int of = 0; of < 2; ++of) {
      atomicMin(&flags->of[of].least, seen[of].least);
      atomicMax(&flags->of[of].most, seen[of].most);
    }
    __syncthreads();
    // Biased exponents of the largest factors, and the powers' exponents.
    int most[2], lift[2] = {};
#pragma unroll
    for (int of = 0; of < 2; ++of) {
      most[of] = flags->of[of].exponent();
      if (flags->of[of].least < Extremes::low(kTiny)) lift[of] = max(min(kLift, kHighest - most[of]), 0);
      if (most[of] == 254) lift[of] = kLower;
    }
    // Sums stay within float32 for the larger factors of the operand that is not lifted; where both are,
    // for less of a lift.
    const int excess = most[0] + lift[0] + most[1] + lift[1] - kMostSum;
    const bool lifts = lift[0] > 0 || lift[1] > 0;
    if (lifts && excess > 0) {
      if (lift[0] <= 0) {
        lift[0] -= excess;
      } else if (lift[1] <= 0) {
        lift[1] -= excess;
      } else {
        lift[0] = max(lift[0] - (excess + 1) / 2, 0), lift[1] = max(lift[1] - (excess + 1) / 2, 0);
      }
    }
    const int slack = max(kMostSum - (most[0] + lift[0] + most[1] + lift[1]), 0) / 2;
    const float old[2] = {scaled ? by[0] : 1, scaled ? by[1] : 1};
#pragma unroll
    for (int of = 0; of < 2; ++of) {
      by[of] = power_of_two(lift[of]);
      // What is below in this tile would be in any other power: it is not asked for again.
      const int tiny = max(127 - 102 - lift[of], 0);
      low[of] = tiny == 0 ? 0 : Extremes::low(static_cast<u32>(tiny) << 23);
      if (flags->of[of].least < low[of]) low[of] = 0;
      const int top = lifts ? min(most[of] + slack, 253) : 254;
      const u32 beyond = static_cast<u32>(top + 1) << 23;
      high[of] = Extremes::high(lift[of] < 0 ? beyond : min(beyond, kRoundsUp)) - 1;
    }
    back = power_of_two(-lift[0]) * power_of_two(-lift[1]);
    scale(stage, own, by[0] / old[0], by[1] / old[1]);
    if (threadIdx.x == 0) flags->found[turn] = 0;
    __syncthreads();
    // Read by all; wanted again after another barrier.
    if (threadIdx.x < 2) flags->of[threadIdx.x] = Extremes::none();
  }
};

}  // namespace convgrad
