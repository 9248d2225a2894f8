// A block's main loop: cp.async copies kStages - 1 steps ahead, products by mma.sync.
#pragma once

#include "core/shared_tile.cuh"
#include "core/opaque.cuh"

namespace convgrad {

// The shape of a block and of its warps, M x N; K-major or MN-major operands. A step is 128 bytes of
// the reduction.
template <class T_, int kM_, int kN_, int kWarpM_, int kWarpN_, int kStages_, bool kMnMajorA_,
          bool kMnMajorB_>
struct MmaMultistage {
  using T = T_;
  static constexpr int kM = kM_, kN = kN_, kWarpM = kWarpM_, kWarpN = kWarpN_, kStages = kStages_;
  static constexpr bool kMnMajorA = kMnMajorA_, kMnMajorB = kMnMajorB_;
  static constexpr int kChunk = 16 / static_cast<int>(sizeof(T));  // elements
  static constexpr int kDepth = 8 * kChunk;                        // of a step
  static constexpr int kWarps = kM / kWarpM * (kN / kWarpN), kThreads = kWarps * 32;
  static constexpr int kRowFragments = kWarpM / 16, kColumnFragments = kWarpN / 8;
  static_assert(kWarpM % 16 == 0 && kWarpN % 16 == 0, "whole fragments, columns in pairs");

  template <int kExtent, bool kMnMajor>
  using TileOf = SharedTile<kMnMajor ? kDepth : kExtent, kMnMajor ? kExtent / kChunk : 8>;
  using TileA = TileOf<kM, kMnMajorA>;
  using TileB = TileOf<kN, kMnMajorB>;
  static constexpr int kStageBytes = TileA::kBytes + TileB::kBytes;
  static constexpr int kRingBytes = kStages * kStageBytes;
  using Sums = float[kRowFragments][kColumnFragments][4];

  __device__ static __forceinline__ int warp_row() {
    return threadIdx.x / 32 / (kN / kWarpN) * kWarpM;
  }
  __device__ static __forceinline__ int warp_column() {
    return threadIdx.x / 32 % (kN / kWarpN) * kWarpN;
  }

  // All steps; `load(stage)` starts this thread's copies of the next step, kStages - 1 steps before its
  // products. The ring may be overwritten afterwards.
  template <class Load>
  __device__ static __forceinline__ void run(Sums& sums, u32 ring, int steps, Load& load) {
    constexpr int kAhead = kStages - 1;
    // Not to be found again in every step.
    const u32 lane_a = opaque_value(FragmentsA::lane_at(warp_row()));
    const u32 lane_b = opaque_value(TileA::kBytes + FragmentsB::lane_at(warp_column()));
    u32 filled = ring, used = ring;
    Operands now[2];
    // One copy of the code for the first steps and the others: a launch reads it from memory. Copies
    // are started once the step's first products are on their way.
#pragma unroll 1
    for (int step = -kAhead; step < steps; ++step) {
      const u32 a = used + lane_a, b = used + lane_b;
      if (step >= 0) {
        wait_copies<kAhead - 1>();
        __syncthreads();
        now[0].fetch(a, b, 0);
        now[1].fetch(a, b, 1);
        multiply(sums, now[0]);
      }
      if (step + kAhead < steps) load(filled);
      commit_copies();
      filled = next(filled, ring);
      if (step >= 0) {
        now[0].fetch(a, b, 2);
        multiply(sums, now[1]);
        now[1].fetch(a, b, 3);
        multiply(sums, now[0]);
        multiply(sums, now[1]);
        used = next(used, ring);
      }
    }
    wait_copies<0>();
    __syncthreads();
  }

 private:
  using FragmentsA = Fragments<T, TileA, kMnMajorA, true>;
  using FragmentsB = Fragments<T, TileB, kMnMajorB, false>;
  struct Operands {
    u32 a[kRowFragments][4], b[kColumnFragments / 2][4];

    __device__ __forceinline__ void fetch(u32 from_a, u32 from_b, int k) {
#pragma unroll
      for (int i = 0; i < kRowFragments; ++i) FragmentsA::load(a[i], from_a, i, k);
#pragma unroll
      for (int j = 0; j < kColumnFragments / 2; ++j) FragmentsB::load(b[j], from_b, j, k);
    }
  };
  __device__ static __forceinline__ u32 next(u32 stage, u32 ring) {
    return stage + kStageBytes == ring + kRingBytes ? ring : stage + kStageBytes;
  }
  __device__ static __forceinline__ void multiply(Sums& sums, const Operands& from) {
#pragma unroll
    for (int i = 0; i < kRowFragments; ++i) {
#pragma unroll
      for (int j = 0; j < kColumnFragments; ++j) {
        mma<T>(sums[i][j], from.a[i], from.b[j / 2][j % 2 * 2], from.b[j / 2][j % 2 * 2 + 1]);
      }
    }
  }
};

}  // namespace convgrad
