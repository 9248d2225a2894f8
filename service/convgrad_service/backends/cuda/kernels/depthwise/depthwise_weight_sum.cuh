// Sums over a block's slots, and over the blocks that share a result: through the shared memory of a
// cluster if there are at most 8, else through global memory. Deterministic: slots are added in order,
// then blocks in order (without a cluster by the last block to arrive, every n-th by one thread, then
// those).
#pragma once

#include "core/partial_sums.cuh"
#include "ptx/st_async.cuh"

namespace convgrad {

template <int kThreads>
class BlockSums {
 public:
  static constexpr int kMostCluster = 8;

  // `sums` are [slot][quad], four sums in each. If the blocks are a cluster, `received` has quads +
  // blocks float4 that nothing else uses, and `barrier` is this block's mbarrier.
  __device__ __forceinline__ BlockSums(float4* sums, float4* received, u64* barrier, int slots, int quads,
                                       int block, int blocks)
      : sums_(sums),
        received_(received),
        barrier_(shared_address(barrier)),
        slots_(slots),
        quads_(quads),
        block_(block),
        blocks_(blocks) {}

  // Before the main loop, by all threads.
  __device__ __forceinline__ void begin() const {
#if __CUDA_ARCH__ >= 900
    if (!clustered()) return;
    if (threadIdx.x == 0) {
      mbarrier_init(barrier_, 1);
      fence_mbarrier_init();
      mbarrier_arrive_expect_tx(barrier_, blocks_ * own_quads() * 16);
    }
    __syncwarp();
    cluster_arrive();
#endif
  }

  // After the block's sums were stored and its threads have met: calls `put` with the number of each
  // result that this block completes, and the result. `partials` has room for all blocks' sums, and
  // `arrived` is 0 before and after; neither is used in a cluster.
  template <class Put>
  __device__ __forceinline__ void finish(float4* partials, unsigned* arrived, bool& last,
                                         const Put& put) const {
    // To be added: `terms` sums, `apart` quads from one to the next, of quads first, first + step, ...
    const float4* from = sums_;
    int count = quads_, first = 0, step = 1, terms = slots_, apart = quads_;
    if (blocks_ > 1) {
#if __CUDA_ARCH__ >= 900
      if (clustered()) cluster_wait();
#endif
#pragma unroll 1
      for (int quad = threadIdx.x; quad < quads_; quad += kThreads) {
        float4 sum = {0, 0, 0, 0};
#pragma unroll 4
        for (int i = 0; i < slots_; ++i) add(sum, sums_[i * quads_ + quad]);
#if __CUDA_ARCH__ >= 900
        if (clustered()) {
          // Quad i of all blocks goes to block i % blocks.
          const float values[4] = {sum.x, sum.y, sum.z, sum.w};
          const int own = quad / blocks_;
          st_async(shared_address(received_ + block_ * most_own() + own), values, barrier_,
                   quad - own * blocks_);
          continue;
        }
#endif
        partials[static_cast<i64>(block_) * quads_ + quad] = sum;
      }
#if __CUDA_ARCH__ >= 900
      if (clustered()) {
        mbarrier_wait(barrier_, 0);
        from = received_;
        count = own_quads(), first = block_, step = blocks_, terms = blocks_, apart = most_own();
      }
#endif
      if (from == sums_) {
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) last = atomicInc(arrived, blocks_ - 1) == blocks_ - 1;
        __syncthreads();
        if (!last) return;
        __threadfence();
        terms = max(1, min(kThreads / quads_, slots_));
        for (int i = threadIdx.x; i < quads_ * terms; i += kThreads) {
          const int of = i / quads_;
          sums_[i] = strided_sum(partials + (i - of * quads_), of, terms, blocks_, quads_);
        }
        __syncthreads();
      }
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < count * 4; i += kThreads) {
      float sum = 0;
#pragma unroll 4
      for (int term = 0; term < terms; ++term) {
        sum += reinterpret_cast<const float*>(from)[term * apart * 4 + i];
      }
      put((i / 4 * step + first) * 4 + i % 4, sum);
    }
  }

 private:
  __device__ __forceinline__ bool clustered() const { return blocks_ > 1 && blocks_ <= kMostCluster; }
  __device__ __forceinline__ int own_quads() const { return (quads_ - 1 - block_ + blocks_) / blocks_; }
  __device__ __forceinline__ int most_own() const { return (quads_ + blocks_ - 1) / blocks_; }

  float4 *const sums_, *const received_;
  const u32 barrier_;
  const int slots_, quads_, block_, blocks_;
};

// The sums of a tile of channels over all its blocks, by the last of them to arrive. `own(i)` is the
// block's sum number i of `part`, a multiple of 4; `partials` has room for all blocks' sums, `shared` for
// a float4 of each of the `threads` that call this, and for `part` sums. The
// order depends on the number of blocks alone: every n-th by one thread, then those.
template <class Own, class Put>
__device__ __forceinline__ void add_blocks(int threads, float* partials, unsigned* arrived, int block,
                                           int blocks, int part, float* shared, bool& last,
                                           const Own& own, const Put& put) {
  const int thread = threadIdx.x;
  for (int i = thread; i < part; i += threads) {
    if (blocks == 1) {
      put(i, own(i));
    } else {
      partials[static_cast<i64>(block) * part + i] = own(i);
    }
  }
  if (blocks == 1) return;
  __threadfence();
  __syncthreads();
  if (thread == 0) last = atomicInc(arrived, blocks - 1) == blocks - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  const int quads = part / 4, shares = max(1, min(threads / quads, blocks));
  for (int i = thread; i < quads * shares; i += threads) {
    reinterpret_cast<float4*>(shared)[i] = strided_sum(
        reinterpret_cast<const float4*>(partials) + i % quads, i / quads, shares, blocks, quads);
  }
  __syncthreads();
  for (int i = thread; i < part; i += threads) {
    float sum = 0;
    for (int share = 0; share < shares; ++share) sum += shared[share * part + i];
    put(i, sum);
  }
}

}  // namespace convgrad
