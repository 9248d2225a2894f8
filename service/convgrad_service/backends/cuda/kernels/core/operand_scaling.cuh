// Power-of-two scaling of a stage's float32 operands in shared memory before each element is split into two
// TF32 parts, so that the split is exact over float32's whole range: the low part of an element below
// 2^-102 may be subnormal, and the high part of one within a factor 1 - 2^-12 of the largest rounds to
// infinity.
//
// A block has one scale for A and one for B, initially 1, and multiplies a k-tile's sums by their inverses
// when it adds them to its accumulators. Each thread inspects the chunks that it copied, one k-tile ahead
// and overlapped with the mma. If all elements are in the range that the scales cover, nothing else
// happens; with scales other than 1 each thread scales its own chunks, before the barrier between two
// k-tiles. If a k-tile leaves the range, new scales are chosen, at the cost of two barriers, and stay until
// another k-tile leaves their range: homogeneous data pays for it once. NaN and infinities are ignored.
//
// Tiny elements keep all bits in k-tiles whose largest element is below 2^13, and beyond that where the
// other operand leaves headroom. Over a wider range, elements below 2^-102 may lose bits; the loss is below
// 2^-126, at most about 2^-139 of the k-tile's largest element.
#pragma once

#include "core/extremes.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared_element.cuh"

namespace convgrad {

// Per block, in shared memory.
struct ScalingFlags {
  u32 out_of_range[2];  // some thread found elements that the scales do not cover; k-tiles alternate
  Extremes of[2];       // of A and B in the k-tile
};

// Each thread owns kACopies vectors of kAWords elements of a stage, and then kBCopies of kBWords of B.
template <int kACopies, int kBCopies, int kAWords = 4, int kBWords = 4>
struct OperandScaling {
  static constexpr int kCopies = kACopies + kBCopies;
  static constexpr u32 kTiny = (127 - 102) << 23;  // below this the low part loses bits
  static constexpr u32 kRoundsUp = 0x7f7ff000;     // from here on the high part is an infinity
  // Exponents of the scales: kScaleUp for 2^-149 to 2^-101 unless that takes the largest beyond 2^61;
  // kScaleDown for the largest magnitudes.
  static constexpr int kScaleUp = 48, kScaledUpMax = 127 + 60, kScaleDown = -8;
  // Bound on the sum of the largest elements' biased exponents, so that a k-tile's sums do not overflow.
  static constexpr int kMaxProduct = 127 + 127 + 118;

  float scale[2], unscale;  // scales of A and B; the factor that undoes both on the sums
  u32 low[2];               // the covered range, in the encoding of `Extremes`
  int high[2];
  Extremes seen[2];
  u32 parity = 0;

  // Before the first inspect.
  __device__ __forceinline__ void init(ScalingFlags* flags) {
    if (threadIdx.x == 0) *flags = {{0, 0}, {Extremes::none(), Extremes::none()}};
#pragma unroll
    for (int of = 0; of < 2; ++of) {
      scale[of] = 1;
      low[of] = Extremes::low(kTiny), high[of] = Extremes::high(kRoundsUp) - 1;
    }
    unscale = 1;
    reset_seen();
    __syncthreads();
  }
  __device__ __forceinline__ void reset_seen() {
#pragma unroll
    for (int of = 0; of < 2; ++of) seen[of] = Extremes::none();
  }
  // This thread's vector i, at shared address `at`.
  __device__ __forceinline__ void inspect(int i, u32 at) {
    if (i < kACopies) {
      inspect<kAWords>(seen[0], at);
    } else {
      inspect<kBWords>(seen[1], at);
    }
  }
  // All of a stage's; own(i) is vector i's offset in the stage.
  template <class Own>
  __device__ __forceinline__ void inspect_all(u32 stage, const Own& own) {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) inspect(i, stage + own(i));
  }
  __device__ __forceinline__ bool covered() const {
    return seen[0].least >= low[0] && seen[0].most <= high[0] && seen[1].least >= low[1] &&
           seen[1].most <= high[1];
  }
  // After inspecting all of its vectors, before the barrier.
  template <class Own>
  __device__ __forceinline__ void apply(ScalingFlags* flags, u32 stage, const Own& own) {
    if (!covered()) {
      *const_cast<volatile u32*>(&flags->out_of_range[parity]) = 1;
    } else if (scale[0] != 1 || scale[1] != 1) {
      scale_chunks(stage, own, scale[0], scale[1]);
    }
  }
  // After the barrier. Chooses new scales if any thread found the range exceeded.
  template <class Own>
  __device__ __forceinline__ void update(ScalingFlags* flags, u32 stage, const Own& own) {
    if (*const_cast<const volatile u32*>(&flags->out_of_range[parity]) != 0)
      choose_scales(flags, stage, own);
    parity ^= 1;
    reset_seen();
  }

 private:
  template <int kWords>
  __device__ static __forceinline__ void inspect(Extremes& seen, u32 at) {
    u32 words[kWords];
    load(words, at);
#pragma unroll
    for (int e = 0; e < kWords; ++e) seen.add(words[e]);
  }
  __device__ static __forceinline__ void load(u32 (&words)[4], u32 at) { ld_shared_v4(words, at); }
  __device__ static __forceinline__ void load(u32 (&words)[1], u32 at) { words[0] = ld_shared_u32(at); }
  __device__ static __forceinline__ void store(u32 at, const u32 (&words)[4]) { st_shared_v4(at, words); }
  __device__ static __forceinline__ void store(u32 at, const u32 (&words)[1]) {
    store_element<u32>(at, words[0]);
  }

  // Vectors `first` to `last` of a stage; a power of two of 1 leaves them alone.
  template <int kWords, class Own>
  __device__ __forceinline__ void scale_range(u32 stage, const Own& own, int first, int last, float factor) {
    constexpr int kTogether = 4;  // their loads overlap
    if (factor == 1) return;
#pragma unroll 1
    for (; first < last; first += kTogether) {
      u32 words[kTogether][kWords];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (first + i < last) load(words[i], stage + own(first + i));
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (first + i >= last) continue;
#pragma unroll
        for (int e = 0; e < kWords; ++e) words[i][e] = __float_as_uint(__uint_as_float(words[i][e]) * factor);
        store(stage + own(first + i), words[i]);
      }
    }
  }
  template <class Own>
  __device__ __forceinline__ void scale_chunks(u32 stage, const Own& own, float scale_a, float scale_b) {
    scale_range<kAWords>(stage, own, 0, kACopies, scale_a);
    scale_range<kBWords>(stage, own, kACopies, kCopies, scale_b);
  }

  template <class Own>
  __device__ __forceinline__ void choose_scales(ScalingFlags* flags, u32 stage, const Own& own) {
    const bool scaled = covered();
#pragma unroll
    for (int of = 0; of < 2; ++of) {
      atomicMin(&flags->of[of].least, seen[of].least);
      atomicMax(&flags->of[of].most, seen[of].most);
    }
    __syncthreads();
    // Biased exponents of the largest elements, and the scales' exponents.
    int max_exponent[2], exponents[2] = {};
#pragma unroll
    for (int of = 0; of < 2; ++of) {
      max_exponent[of] = flags->of[of].exponent();
      if (flags->of[of].least < Extremes::low(kTiny))
        exponents[of] = max(min(kScaleUp, kScaledUpMax - max_exponent[of]), 0);
      if (max_exponent[of] == 254) exponents[of] = kScaleDown;
    }
    // Keep sums within float32: scale down the operand that is not scaled up, or, where both are scaled up,
    // scale both up by less.
    const int excess = max_exponent[0] + exponents[0] + max_exponent[1] + exponents[1] - kMaxProduct;
    const bool scales_up = exponents[0] > 0 || exponents[1] > 0;
    if (scales_up && excess > 0) {
      if (exponents[0] <= 0) {
        exponents[0] -= excess;
      } else if (exponents[1] <= 0) {
        exponents[1] -= excess;
      } else {
        exponents[0] = max(exponents[0] - (excess + 1) / 2, 0),
        exponents[1] = max(exponents[1] - (excess + 1) / 2, 0);
      }
    }
    const int slack =
        max(kMaxProduct - (max_exponent[0] + exponents[0] + max_exponent[1] + exponents[1]), 0) / 2;
    const float applied[2] = {scaled ? scale[0] : 1, scaled ? scale[1] : 1};
#pragma unroll
    for (int of = 0; of < 2; ++of) {
      scale[of] = power_of_two(exponents[of]);
      // Elements of this k-tile that are still below `low` would be below it with any scale: ignore them.
      const int tiny = max(127 - 102 - exponents[of], 0);
      low[of] = tiny == 0 ? 0 : Extremes::low(static_cast<u32>(tiny) << 23);
      if (flags->of[of].least < low[of]) low[of] = 0;
      const int largest = scales_up ? min(max_exponent[of] + slack, 253) : 254;
      const u32 beyond = static_cast<u32>(largest + 1) << 23;
      high[of] = Extremes::high(exponents[of] < 0 ? beyond : min(beyond, kRoundsUp)) - 1;
    }
    unscale = power_of_two(-exponents[0]) * power_of_two(-exponents[1]);
    scale_chunks(stage, own, scale[0] / applied[0], scale[1] / applied[1]);
    if (threadIdx.x == 0) flags->out_of_range[parity] = 0;
    __syncthreads();
    // All threads have read it; it is next written after another barrier.
    if (threadIdx.x < 2) flags->of[threadIdx.x] = Extremes::none();
  }
};

}  // namespace convgrad
