// How blocks that share a tile's reduction add up their partial sums, in the order of their ranks.
//
// Of each warp's fragments (16 x 8 sums, as mma and wgmma leave them) every block of the cluster owns
// a run; the same warp of the others sends it theirs, from registers to its shared memory (DSMEM), where
// they count at its barrier. A block alone owns all: its sums only pass through there.
#pragma once

#include "ptx/st_async.cuh"

namespace convgrad {

template <int kFragments, int kWarps>
class SplitKReduce {
 public:
  static constexpr int kFragmentBytes = 512;

  // `room` has bytes_of(blocks, owned), and where blocks are more than one, no block may use it for
  // anything else. `owned` is how many fragments of a warp a block owns, the last ones fewer.
  __device__ __forceinline__ SplitKReduce(char* room, u32 barrier, int rank, int blocks, int owned)
      : room_(room),
        barrier_(barrier),
        rank_(rank),
        blocks_(blocks),
        owned_(owned),
        count_(min(owned, max(kFragments - rank * owned, 0))) {}

  // Of each warp's fragments, the first that this block owns, and how many follow.
  __device__ __forceinline__ int first() const { return rank_ * owned_; }
  __device__ __forceinline__ int count() const { return count_; }

  // One thread, before others may send: then all threads of the cluster arrive.
  __device__ __forceinline__ void prepare() const {
    init_barrier(barrier_, 1);
    fence_barrier_init();
    arrive_and_expect_tx(barrier_, (blocks_ - 1) * count_ * kWarps * kFragmentBytes);
  }

  // All threads of the warps that have sums, once all of the cluster arrived. Afterwards `rows_of`
  // finds this block's part.
  template <int kParts, int kColumns>
  __device__ __forceinline__ void exchange(const float (&sums)[kParts][kColumns][4]) const {
    static_assert(kParts * kColumns == kFragments, "a warp's fragments");
    const int lane = threadIdx.x & 31;
    // Chunks of 16 bytes are swapped so that neither who writes nor who reads meets a bank twice.
    const int within = lane / 4 * 64 + ((lane % 4) ^ (lane / 8)) * 16;
    int owner = 0, fragment = 0;
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
      const float(&four)[4] = sums[f / kColumns][f % kColumns];
      const int to = slot(rank_, fragment) + within;
      if (owner == rank_) {
        *reinterpret_cast<float4*>(room_ + to) = {four[0], four[1], four[2], four[3]};
      } else {
        store_async(shared_address(room_) + to, four, barrier_, owner);
      }
      if (++fragment == owned_) fragment = 0, ++owner;
    }
    __syncwarp();
    if (blocks_ > 1) wait_barrier(barrier_, 0);
  }

  // Eight neighbouring sums of row `row` (of 8), and of the eighth below, of one of this warp's owned
  // fragments.
  __device__ __forceinline__ void rows_of(int fragment, int row, float (&sums)[2][8]) const {
    read(slot(0, fragment), row, sums);
#pragma unroll 1
    for (int rank = 1; rank < blocks_; ++rank) {
      float more[2][8];
      read(slot(rank, fragment), row, more);
#pragma unroll
      for (int e = 0; e < 16; ++e) sums[e / 8][e % 8] += more[e / 8][e % 8];
    }
  }

 private:
  __device__ __forceinline__ int slot(int rank, int fragment) const {
    const int warp = threadIdx.x / 32;
    return ((warp * blocks_ + rank) * owned_ + fragment) * kFragmentBytes;
  }
  __device__ __forceinline__ void read(int from, int row, float (&to)[2][8]) const {
#pragma unroll
    for (int lane = 0; lane < 4; ++lane) {
      const int chunk = lane ^ (row / 2);
      const float4 four = *reinterpret_cast<const float4*>(room_ + from + row * 64 + chunk * 16);
      to[0][lane * 2] = four.x, to[0][lane * 2 + 1] = four.y;
      to[1][lane * 2] = four.z, to[1][lane * 2 + 1] = four.w;
    }
  }

  char* const room_;
  const u32 barrier_;
  const int rank_, blocks_, owned_, count_;
};

}  // namespace convgrad
