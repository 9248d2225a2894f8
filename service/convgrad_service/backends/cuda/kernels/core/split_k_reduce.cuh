// Split-K reduction of one tile's accumulators over the blocks of a cluster, in the order of their ranks.
//
// Each block owns a contiguous run of every warp's fragments (16 x 8, in mma's and wgmma's layout); the same
// warp of the other blocks stores theirs from registers into its shared memory (st.async), counted by its
// mbarrier. A block that is not in a cluster owns all; its accumulators only pass through shared memory.
#pragma once

#include "ptx/st_async.cuh"

namespace convgrad {

template <int kFragments, int kWarps>
class SplitKReduce {
 public:
  static constexpr int kFragmentBytes = 512;

  // `smem` has kWarps * blocks * owned * kFragmentBytes; in a cluster no block may use it for anything else.
  // `owned` is the number of each warp's fragments that a block owns (the last blocks own fewer).
  __device__ __forceinline__ SplitKReduce(char* smem, u32 barrier, int rank, int blocks, int owned)
      : smem_(smem),
        barrier_(barrier),
        rank_(rank),
        blocks_(blocks),
        owned_(owned),
        count_(min(owned, max(kFragments - rank * owned, 0))) {}

  // The first of each warp's fragments that this block owns, and their number.
  __device__ __forceinline__ int first_fragment() const { return rank_ * owned_; }
  __device__ __forceinline__ int fragment_count() const { return count_; }

  // By one thread, before all threads of the cluster arrive at its barrier; after that, blocks may store.
  __device__ __forceinline__ void prepare() const {
    mbarrier_init(barrier_, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect_tx(barrier_, (blocks_ - 1) * count_ * kWarps * kFragmentBytes);
  }

  // By all threads of the warps that hold accumulators, once the whole cluster has arrived. Afterwards
  // `load_rows` gives this block's part.
  template <int kParts, int kColumns>
  __device__ __forceinline__ void exchange(const float (&accum)[kParts][kColumns][4]) const {
    static_assert(kParts * kColumns == kFragments, "a warp's fragments");
    const int lane = threadIdx.x & 31;
    // 16-byte chunks are swizzled so that neither stores nor loads have bank conflicts.
    const int lane_offset = lane / 4 * 64 + ((lane % 4) ^ (lane / 8)) * 16;
    int owner = 0, fragment = 0;
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
      const float(&fragment_sums)[4] = accum[f / kColumns][f % kColumns];
      const int to = slot(rank_, fragment) + lane_offset;
      if (owner == rank_) {
        *reinterpret_cast<float4*>(smem_ + to) = {fragment_sums[0], fragment_sums[1], fragment_sums[2],
                                                  fragment_sums[3]};
      } else {
        st_async(shared_address(smem_) + to, fragment_sums, barrier_, owner);
      }
      if (++fragment == owned_) fragment = 0, ++owner;
    }
    __syncwarp();
    if (blocks_ > 1) mbarrier_wait(barrier_, 0);
  }

  // The reduced sums of rows `row` (below 8) and row + 8 of one of this warp's owned fragments.
  __device__ __forceinline__ void load_rows(int fragment, int row, float (&accum)[2][8]) const {
    load(slot(0, fragment), row, accum);
#pragma unroll 1
    for (int rank = 1; rank < blocks_; ++rank) {
      float peer[2][8];
      load(slot(rank, fragment), row, peer);
#pragma unroll
      for (int e = 0; e < 16; ++e) accum[e / 8][e % 8] += peer[e / 8][e % 8];
    }
  }

 private:
  __device__ __forceinline__ int slot(int rank, int fragment) const {
    const int warp = threadIdx.x / 32;
    return ((warp * blocks_ + rank) * owned_ + fragment) * kFragmentBytes;
  }
  __device__ __forceinline__ void load(int from, int row, float (&to)[2][8]) const {
#pragma unroll
    for (int lane = 0; lane < 4; ++lane) {
      const int chunk = lane ^ (row / 2);
      const float4 four = *reinterpret_cast<const float4*>(smem_ + from + row * 64 + chunk * 16);
      to[0][lane * 2] = four.x, to[0][lane * 2 + 1] = four.y;
      to[1][lane * 2] = four.z, to[1][lane * 2 + 1] = four.w;
    }
  }

  char* const smem_;
  const u32 barrier_;
  const int rank_, blocks_, owned_, count_;
};

}  // namespace convgrad
