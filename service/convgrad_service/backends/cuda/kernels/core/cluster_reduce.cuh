// How the blocks of a cluster add up their partial sums of one tile, in the order of their ranks.
//
// Each block owns a part of every warp's mma fragments: the same warp of the others sends it theirs,
// from registers to its shared memory. A block alone owns all; its sums only pass through there.
#pragma once

#include "ptx/st_async.cuh"

namespace convgrad {

template <class Gemm>
class ClusterReduce {
 public:
  static constexpr int kFragments = Gemm::kRowFragments * Gemm::kColumnFragments;  // of a warp
  // A fragment's rows, of 4 lanes of 16 bytes, lie apart so that eight neighbours are read from
  // different banks.
  static constexpr int kRowBytes = 80, kFragmentBytes = 8 * kRowBytes + 16;
  static constexpr int kBytes = Gemm::kWarps * kFragments * kFragmentBytes;

  // `room` has kBytes; where blocks are more than one, no block may use it for anything else.
  __device__ __forceinline__ ClusterReduce(char* room, u32 barrier, u32 rank, int cluster_log)
      : room_(room),
        barrier_(barrier),
        rank_(rank),
        log_(cluster_log),
        owned_log_(log_of(kFragments) - cluster_log) {}

  // Of each warp's fragments, how many this block owns (a power of two), and the first of them.
  __device__ __forceinline__ int owned_log() const { return owned_log_; }
  __device__ __forceinline__ int first() const { return rank_ << owned_log_; }
  __device__ __forceinline__ static constexpr int log_of(int power) {
    return power <= 1 ? 0 : 1 + log_of(power / 2);
  }

  // Before the block's products: other blocks may send once all of the cluster did this.
  __device__ __forceinline__ void prepare() const {
#if __CUDA_ARCH__ >= 900
    if (log_ == 0) return;
    if (threadIdx.x == 0) {
      make_barrier(barrier_, 1);
      publish_barriers();
      const int others = (1 << log_) - 1;
      arrive_expecting(barrier_, (others << owned_log_) * Gemm::kWarps * 512);
    }
    __syncwarp();
    arrive_at_cluster();
#endif
  }

  // Afterwards `row_of` finds this block's part.
  __device__ __forceinline__ void exchange(const typename Gemm::Sums& sums) const {
#if __CUDA_ARCH__ >= 900
    if (log_ > 0) wait_at_cluster();
#endif
    const int lane = threadIdx.x & 31;
    const u32 room = shared_address(room_) + lane / 4 * kRowBytes + lane % 4 * 16;
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
      const u32 owner = f >> owned_log_;
      const u32 to = room + slot(rank_, f - (owner << owned_log_)) * kFragmentBytes;
      const float(&sum)[4] = sums[f / Gemm::kColumnFragments][f % Gemm::kColumnFragments];
#if __CUDA_ARCH__ >= 900
      if (owner != rank_) {
        store_async(to, sum, barrier_, owner);
        continue;
      }
#endif
      store_floats(to, sum);
    }
    __syncwarp();
#if __CUDA_ARCH__ >= 900
    if (log_ > 0) wait_for(barrier_, 0);
#endif
  }

  // Eight neighbouring sums of row `row` (of 16) of the how many-th owned fragment of this warp.
  __device__ __forceinline__ void row_of(int fragment, int row, float (&sums)[8]) const {
    const char* from = room_ + slot(0, fragment) * kFragmentBytes + row % 8 * kRowBytes + row / 8 * 8;
    read(from, sums);
#pragma unroll 1
    for (int rank = 1; rank < 1 << log_; ++rank) {
      from += kFragmentBytes << owned_log_;
      float more[8];
      read(from, more);
#pragma unroll
      for (int e = 0; e < 8; ++e) sums[e] += more[e];
    }
  }

 private:
  __device__ __forceinline__ int slot(int rank, int fragment) const {
    return threadIdx.x / 32 * kFragments + (rank << owned_log_) + fragment;
  }
  __device__ static __forceinline__ void store_floats(u32 to, const float (&values)[4]) {
    store_pair(to, values[0], values[1]);
    store_pair(to + 8, values[2], values[3]);
  }
  __device__ static __forceinline__ void read(const char* from, float (&to)[8]) {
#pragma unroll
    for (int lane = 0; lane < 4; ++lane) {
      const float2 two = *reinterpret_cast<const float2*>(from + lane * 16);
      to[lane * 2] = two.x, to[lane * 2 + 1] = two.y;
    }
  }

  char* const room_;
  const u32 barrier_, rank_;
  const int log_, owned_log_;
};

}  // namespace convgrad
