// Reduces the accumulators of one tile over the blocks of a cluster, in the order of their ranks.
//
// Each block owns a part of every warp's mma fragments, a power of two of them: the same warp of the other
// blocks stores theirs from registers into its shared memory (st.async). A block that is not in a cluster
// owns all; its accumulators only pass through shared memory. See split_k_reduce.cuh for parts of any size.
#pragma once

#include "ptx/st_async.cuh"

namespace convgrad {

template <class Gemm>
class ClusterReduce {
 public:
  static constexpr int kFragments = Gemm::kFragmentsM * Gemm::kFragmentsN;  // per warp
  // Padded so that a lane's sums of four fragments and two rows are in different banks.
  static constexpr int kFragmentBytes = 512 + 16;
  static constexpr int kBytes = Gemm::kWarps * kFragments * kFragmentBytes;

  // `smem` has kBytes; in a cluster no block may use it for anything else.
  __device__ __forceinline__ ClusterReduce(char* smem, u32 barrier, u32 rank, int cluster_log)
      : smem_(smem),
        barrier_(barrier),
        rank_(rank),
        log_(cluster_log),
        owned_log_(log_of(kFragments) - cluster_log) {}

  // log2 of the number of each warp's fragments that this block owns, and the first of them.
  __device__ __forceinline__ int owned_log() const { return owned_log_; }
  __device__ __forceinline__ int first_fragment() const { return rank_ << owned_log_; }
  __device__ __forceinline__ static constexpr int log_of(int power) {
    return power <= 1 ? 0 : 1 + log_of(power / 2);
  }

  // Before the mainloop: other blocks may store once the whole cluster has called this.
  __device__ __forceinline__ void prepare() const {
#if __CUDA_ARCH__ >= 900
    if (log_ == 0) return;
    if (threadIdx.x == 0) {
      mbarrier_init(barrier_, 1);
      fence_mbarrier_init();
      const int others = (1 << log_) - 1;
      mbarrier_arrive_expect_tx(barrier_, (others << owned_log_) * Gemm::kWarps * 512);
    }
    __syncwarp();
    cluster_arrive();
#endif
  }

  // After the mainloop; afterwards `load_rows` gives this block's part.
  __device__ __forceinline__ void exchange(const typename Gemm::Accumulators& accum) const {
    char* const lane_smem = smem_ + (threadIdx.x & 31) * 16;
    if (log_ == 0) {
#pragma unroll
      for (int f = 0; f < kFragments; ++f)
        store(lane_smem + slot(0, f) * kFragmentBytes, fragment_of(accum, f));
    }
#if __CUDA_ARCH__ >= 900
    if (log_ > 0) {
      cluster_wait();
      const u32 lane_address = shared_address(lane_smem);
#pragma unroll
      for (int f = 0; f < kFragments; ++f) {
        const u32 owner = f >> owned_log_;
        const int to = slot(rank_, f - (owner << owned_log_)) * kFragmentBytes;
        if (owner == rank_) {
          store(lane_smem + to, fragment_of(accum, f));
        } else {
          st_async(lane_address + to, fragment_of(accum, f), barrier_, owner);
        }
      }
    }
#endif
    __syncwarp();
#if __CUDA_ARCH__ >= 900
    if (log_ > 0) mbarrier_wait(barrier_, 0);
#endif
  }

  // The reduced sums of rows `row` (below 8) and row + 8 of one of this warp's owned fragments.
  __device__ __forceinline__ void load_rows(int fragment, int row, float (&accum)[2][8]) const {
    const char* from = smem_ + slot(0, fragment) * kFragmentBytes + row * 64;
    load(from, accum);
#pragma unroll 1
    for (int rank = 1; rank < 1 << log_; ++rank) {
      from += kFragmentBytes << owned_log_;
      float peer[2][8];
      load(from, peer);
#pragma unroll
      for (int e = 0; e < 16; ++e) accum[e / 8][e % 8] += peer[e / 8][e % 8];
    }
  }

 private:
  __device__ __forceinline__ int slot(int rank, int fragment) const {
    return threadIdx.x / 32 * kFragments + (rank << owned_log_) + fragment;
  }
  __device__ static __forceinline__ const float (&fragment_of(const typename Gemm::Accumulators& accum,
                                                              int f))[4] {
    return accum[f / Gemm::kFragmentsN][f % Gemm::kFragmentsN];
  }
  __device__ static __forceinline__ void store(char* to, const float (&sum)[4]) {
    *reinterpret_cast<float4*>(to) = {sum[0], sum[1], sum[2], sum[3]};
  }
  __device__ static __forceinline__ void load(const char* from, float (&to)[2][8]) {
#pragma unroll
    for (int lane = 0; lane < 4; ++lane) {
      const float4 four = *reinterpret_cast<const float4*>(from + lane * 16);
      to[0][lane * 2] = four.x, to[0][lane * 2 + 1] = four.y;
      to[1][lane * 2] = four.z, to[1][lane * 2 + 1] = four.w;
    }
  }

  char* const smem_;
  const u32 barrier_, rank_;
  const int log_, owned_log_;
};

}  // namespace convgrad
