// A block's mainloop: a multistage cp.async pipeline, kStages - 1 k-tiles ahead of mma.sync.
#pragma once

#include "core/opaque.cuh"
#include "core/operand_scaling.cuh"
#include "core/shared_tile.cuh"
#include "core/split_tf32.cuh"

namespace convgrad {

// Block tile kM x kN, warp tile kWarpM x kWarpN; operands are K-major or MN-major. A k-tile is 128 bytes
// along K. With kSplit, float32 operands are split into two TF32 numbers, else rounded to one.
template <class T_, int kM_, int kN_, int kWarpM_, int kWarpN_, int kStages_, bool kMnMajorA_,
          bool kMnMajorB_, bool kSplit_>
struct MmaMultistage {
  using T = T_;
  static constexpr int kM = kM_, kN = kN_, kWarpM = kWarpM_, kWarpN = kWarpN_, kStages = kStages_;
  static constexpr bool kMnMajorA = kMnMajorA_, kMnMajorB = kMnMajorB_, kSplit = kSplit_;
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
  // a stage; to split, it says where they go (see OperandScaling), and each thread inspects its own copies of
  // the next k-tile between the mma instructions of this one. `pipeline` is the shared memory of the stages,
  // kPipelineBytes, free for reuse afterwards.
  template <class Load>
  __device__ static __forceinline__ void run(Accumulators& accum, u32 pipeline, int k_tiles, Load& load,
                                             ScalingFlags* flags) {
    constexpr int kPrefetch = kStages - 1;
    // Parts of a large warp tile's operands leave no registers for the next ones.
    constexpr bool kLoadsAhead = !kSplit || kWarpM * kWarpN < 32 * 64;
    // Opaque, or the compiler recomputes them for every k-tile.
    const u32 lane_a = opaque_value(FragmentsA::lane_offset(warp_row()));
    const u32 lane_b = opaque_value(TileA::kBytes + FragmentsB::lane_offset(warp_column()));
    u32 write_stage = pipeline, read_stage = pipeline;
    WarpFragments operands[2];
    typename Load::Scaling scaling;
    if constexpr (kSplit) scaling.init(flags);
    const auto own = [&](int i) { return load.own(i); };
    // Prologue and steady state share one loop body: less code for a launch to fetch. The next copies are
    // started after the k-tile's first mma are issued.
#pragma unroll 1
    for (int k_tile = -kPrefetch; k_tile < k_tiles; ++k_tile) {
      const u32 a = read_stage + lane_a, b = read_stage + lane_b;
      Accumulators part = {};
      Accumulators& sums = kSplit ? part : accum;
      if (k_tile >= 0) {
        // To be inspected, this k-tile has been waited for.
        if constexpr (!kSplit) cp_async_wait<kPrefetch - 1>();
        __syncthreads();
        if constexpr (kSplit) scaling.update(flags, read_stage, own);
        operands[0].load(a, b, 0);
        if constexpr (kLoadsAhead) operands[1].load(a, b, 1);
        multiply(sums, operands[0]);
      }
      if (k_tile + kPrefetch < k_tiles) load(write_stage);
      cp_async_commit();
      write_stage = next_stage(write_stage, pipeline);
      const u32 next = k_tile < 0 ? pipeline : next_stage(read_stage, pipeline);
      const bool inspects = kSplit && k_tile >= -1 && k_tile + 1 < k_tiles;
      const float unscale = kSplit ? scaling.unscale : 1;
      if (inspects) {
        cp_async_wait<kPrefetch - 1>();
        scaling.inspect_all(next, own);
      }
      if (k_tile >= 0) {
        if constexpr (kLoadsAhead) {
          operands[0].load(a, b, 2);
          multiply(sums, operands[1]);
          operands[1].load(a, b, 3);
          multiply(sums, operands[0]);
          multiply(sums, operands[1]);
        } else {
#pragma unroll
          for (int k = 1; k < 4; ++k) {
            operands[0].load(a, b, k);
            multiply(sums, operands[0]);
          }
        }
        read_stage = next;
      }
      if (inspects) scaling.apply(flags, next, own);
      if constexpr (kSplit) promote(accum, part, unscale);
    }
    cp_async_wait<0>();
    __syncthreads();
  }

 private:
  using FragmentsA = Fragments<T, TileA, kMnMajorA, true, !kSplit>;
  using FragmentsB = Fragments<T, TileB, kMnMajorB, false, !kSplit>;
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
    if constexpr (kSplit) {
      u32 high[kFragmentsM][4], low[kFragmentsM][4];
#pragma unroll
      for (int i = 0; i < kFragmentsM; ++i) split(from.a[i], high[i], low[i]);
#pragma unroll
      for (int j = 0; j < kFragmentsN / 2; ++j) multiply_split(accum, j, high, low, from.b[j]);
    } else {
#pragma unroll
      for (int i = 0; i < kFragmentsM; ++i) {
#pragma unroll
        for (int j = 0; j < kFragmentsN; ++j) {
          mma<T>(accum[i][j], from.a[i], from.b[j / 2][j % 2 * 2], from.b[j / 2][j % 2 * 2 + 1]);
        }
      }
    }
  }
  // accum += part * unscale.
  __device__ static __forceinline__ void promote(Accumulators& accum, const Accumulators& part,
                                                 float unscale) {
#pragma unroll
    for (int i = 0; i < kFragmentsM; ++i) {
#pragma unroll
      for (int j = 0; j < kFragmentsN; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) accum[i][j][e] = fmaf(part[i][j][e], unscale, accum[i][j][e]);
      }
    }
  }
};

}  // namespace convgrad
