// A block's mainloop: a multistage cp.async pipeline, kStages - 1 k-tiles ahead of mma.sync.
#pragma once

#include "core/shared_tile.cuh"
#include "core/opaque.cuh"

namespace convgrad {

// Block tile kM x kN, warp tile kWarpM x kWarpN; operands are K-major or MN-major. A k-tile is 128 bytes
// along K.
template <class T_, int kM_, int kN_, int kWarpM_, int kWarpN_, int kStages_, bool kMnMajorA_,
          bool kMnMajorB_>
struct MmaMultistage {
  using T = T_;
  static constexpr int kM = kM_, kN = kN_, kWarpM = kWarpM_, kWarpN = kWarpN_, kStages = kStages_;
  static constexpr bool kMnMajorA = kMnMajorA_, kMnMajorB = kMnMajorB_;
  static constexpr int kChunk = 16 / static_cast<int>(sizeof(T));  // elements
  static constexpr int kTileK = 8 * kChunk;                         // elements of a k-tile
  static constexpr int kWarps = kM / kWarpM * (kN / kWarpN), kThreads = kWarps * 32;
  static constexpr int kFragmentsM = kWarpM / 16, kFragmentsN = kWarpN / 8;
  static_assert(kWarpM % 16 == 0 && kWarpN % 16 == 0, "whole fragments, columns in pairs");

  template <int kExtent, bool kMnMajor>
  using OperandTile = SharedTile<kMnMajor ? kTileK : kExtent, kMnMajor ? kExtent / kChunk : 8>;
  using TileA = OperandTile<kM, kMnMajorA>;
  using TileB = OperandTile<kN, kMnMajorB>;
  static constexpr int kStageBytes = TileA::kBytes + TileB::kBytes;
  static constexpr int kPipelineBytes = kStages * kStageBytes;
  using Accumulators = float[kFragmentsM][kFragmentsN][4];

  __device__ static __forceinline__ int warp_row() {
    return threadIdx.x / 32 / (kN / kWarpN) * kWarpM;
  }
  __device__ static __forceinline__ int warp_column() {
    return threadIdx.x / 32 % (kN / kWarpN) * kWarpN;
  }

  // accum += A * B over `k_tiles` k-tiles. `load(stage)` starts this thread's copies of the next k-tile into
  // a stage. `pipeline` is the shared memory of the stages, kPipelineBytes, free for reuse afterwards.
  template <class Load>
  __device__ static __forceinline__ void run(Accumulators& accum, u32 pipeline, int k_tiles, Load& load) {
    constexpr int kPrefetch = kStages - 1;
    // Opaque, or the compiler recomputes them for every k-tile.
    const u32 lane_a = opaque_value(FragmentsA::lane_offset(warp_row()));
    const u32 lane_b = opaque_value(TileA::kBytes + FragmentsB::lane_offset(warp_column()));
    u32 write_stage = pipeline, read_stage = pipeline;
    WarpFragments operands[2];
    // Prologue and steady state share one loop body: less code for a launch to fetch. The next copies are
    // started after the k-tile's first mma are issued.
#pragma unroll 1
    for (int k_tile = -kPrefetch; k_tile < k_tiles; ++k_tile) {
      const u32 a = read_stage + lane_a, b = read_stage + lane_b;
      if (k_tile >= 0) {
        cp_async_wait<kPrefetch - 1>();
        __syncthreads();
        operands[0].load(a, b, 0);
        operands[1].load(a, b, 1);
        multiply(accum, operands[0]);
      }
      if (k_tile + kPrefetch < k_tiles) load(write_stage);
      cp_async_commit();
      write_stage = next_stage(write_stage, pipeline);
      if (k_tile >= 0) {
        operands[0].load(a, b, 2);
        multiply(accum, operands[1]);
        operands[1].load(a, b, 3);
        multiply(accum, operands[0]);
        multiply(accum, operands[1]);
        read_stage = next_stage(read_stage, pipeline);
      }
    }
    cp_async_wait<0>();
    __syncthreads();
  }

 private:
  using FragmentsA = Fragments<T, TileA, kMnMajorA, true>;
  using FragmentsB = Fragments<T, TileB, kMnMajorB, false>;
  struct WarpFragments {
    u32 a[kFragmentsM][4], b[kFragmentsN / 2][4];

    __device__ __forceinline__ void load(u32 from_a, u32 from_b, int k) {
#pragma unroll
      for (int i = 0; i < kFragmentsM; ++i) FragmentsA::load(a[i], from_a, i, k);
#pragma unroll
      for (int j = 0; j < kFragmentsN / 2; ++j) FragmentsB::load(b[j], from_b, j, k);
    }
  };
  __device__ static __forceinline__ u32 next_stage(u32 stage, u32 pipeline) {
    return stage + kStageBytes == pipeline + kPipelineBytes ? pipeline : stage + kStageBytes;
  }
  __device__ static __forceinline__ void multiply(Accumulators& accum, const WarpFragments& from) {
#pragma unroll
    for (int i = 0; i < kFragmentsM; ++i) {
#pragma unroll
      for (int j = 0; j < kFragmentsN; ++j) {
        mma<T>(accum[i][j], from.a[i], from.b[j / 2][j % 2 * 2], from.b[j / 2][j % 2 * 2 + 1]);
      }
    }
  }
};

}  // namespace convgrad
