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
  // Apart so that one lane's sums of four fragments and two rows lie in different banks.
  static constexpr int kFragmentBytes = 512 + 16;
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
      init_barrier(barrier_, 1);
      fence_barrier_init();
      const int others = (1 << log_) - 1;
      arrive_and_expect_tx(barrier_, (others << owned_log_) * Gemm::kWarps * 512);
    }
    __syncwarp();
    cluster_arrive();
#endif
  }

  // Afterwards `rows_of` finds this block's part.
  __device__ __forceinline__ void exchange(const typename Gemm::Sums& sums) const {
    char* const own = room_ + (threadIdx.x & 31) * 16;
    if (log_ == 0) {
#pragma unroll
      for (int f = 0; f < kFragments; ++f) keep(own + slot(0, f) * kFragmentBytes, sum_of(sums, f));
    }
#if __CUDA_ARCH__ >= 900
    if (log_ > 0) {
      cluster_wait();
      const u32 sent = shared_address(own);
#pragma unroll
      for (int f = 0; f < kFragments; ++f) {
        const u32 owner = f >> owned_log_;
        const int to = slot(rank_, f - (owner << owned_log_)) * kFragmentBytes;
        if (owner == rank_) {
          keep(own + to, sum_of(sums, f));
        } else {
          store_async(sent + to, sum_of(sums, f), barrier_, owner);
        }
      }
    }
#endif
    __syncwarp();
#if __CUDA_ARCH__ >= 900
    if (log_ > 0) wait_barrier(barrier_, 0);
#endif
  }

  // Eight neighbouring sums of row `row` (of 8), and of the eighth below, of one of this warp's owned
  // fragments.
  __device__ __forceinline__ void rows_of(int fragment, int row, float (&sums)[2][8]) const {
    const char* from = room_ + slot(0, fragment) * kFragmentBytes + row * 64;
    read(from, sums);
#pragma unroll 1
    for (int rank = 1; rank < 1 << log_; ++rank) {
      from += kFragmentBytes << owned_log_;
      float more[2][8];
      read(from, more);
#pragma unroll
      for (int e = 0; e < 16; ++e) sums[e / 8][e % 8] += more[e / 8][e % 8];
    }
  }

 private:
  __device__ __forceinline__ int slot(int rank, int fragment) const {
    return threadIdx.x / 32 * kFragments + (rank << owned_log_) + fragment;
  }
  __device__ static __forceinline__ const float (&sum_of(const typename Gemm::Sums& sums, int f))[4] {
    return sums[f / Gemm::kColumnFragments][f % Gemm::kColumnFragments];
  }
  __device__ static __forceinline__ void keep(char* to, const float (&sum)[4]) {
    *reinterpret_cast<float4*>(to) = {sum[0], sum[1], sum[2], sum[3]};
  }
  __device__ static __forceinline__ void read(const char* from, float (&to)[2][8]) {
#pragma unroll
    for (int lane = 0; lane < 4; ++lane) {
      const float4 four = *reinterpret_cast<const float4*>(from + lane * 16);
      to[0][lane * 2] = four.x, to[0][lane * 2 + 1] = four.y;
      to[1][lane * 2] = four.z, to[1][lane * 2 + 1] = four.w;
    }
  }

  char* const room_;
  const u32 barrier_, rank_;
  const int log_, owned_log_;
};

}  // namespace convgrad
