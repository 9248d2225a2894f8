// Hopper's TMA copies, mbarriers and clusters, one small function per instruction. The emulator's twin is
// tests/emulator/kernels/ptx/tma.cuh; wgmma is in warpgroup.cuh.
//
// Needs sm_90. Shared-memory addresses are those of shared_address (mma.cuh). Tensor maps are made by
// core/tensor_maps.py and reach a kernel as members of its __grid_constant__ argument. Coordinates are
// innermost first. The innermost one times the element size must be a multiple of 16 bytes, or TMA
// faults. Boxes may exceed the tensor: elements outside are read as zero and not written, but the
// coordinates of a store must not be negative. Each function is called by one thread unless it says
// otherwise.
#pragma once

#include "ptx/mma.cuh"
#include "core/bounded_wait.cuh"

namespace convgrad {

struct alignas(64) TensorMap {
  u64 words[16];
};

// ---- mbarriers: 8 bytes of shared memory each, aligned to 8. A phase completes once as many arrivals
// have come as the mbarrier was initialised with, and all expected transaction bytes. Phase parities are
// 0, 1, 0, ...: waiting for parity p blocks while the current phase has parity p, so on a fresh mbarrier
// a wait for parity 1 returns at once.

__device__ __forceinline__ void mbarrier_init(u32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// After a thread's last mbarrier_init, before the block (or cluster) synchronises.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives once all copies by cp.async that this thread has started are complete.
__device__ __forceinline__ void mbarrier_arrive_after_copies(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
// Arrives and adds `bytes` to the transaction bytes that the current phase expects.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// Arrives on the mbarrier at the same address in another block of the cluster. Signals that shared memory
// has been read; it does not make this thread's writes visible there (that would take a device-wide
// fence, measured at four times the cost of a copy).
__device__ __forceinline__ void mbarrier_arrive_cluster(u32 barrier, u32 block) {
  asm volatile(
      "{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; "
      "mbarrier.arrive.shared::cluster.b64 _, [there];}" ::"r"(barrier),
      "r"(block)
      : "memory");
}
// Potentially blocking test of whether the phase of this parity is complete.
__device__ __forceinline__ bool mbarrier_try_wait(u32 barrier, u32 parity) {
  u32 passed;
  asm volatile(
      "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
      : "=r"(passed)
      : "r"(barrier), "r"(parity)
      : "memory");
  return passed != 0;
}
// The same, non-blocking.
__device__ __forceinline__ int mbarrier_test_wait(u32 barrier, u32 parity) {
  int passed;
  asm volatile(
      "{.reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.s32 %0, 1, 0, p;}"
      : "=r"(passed)
      : "r"(barrier), "r"(parity)
      : "memory");
  return passed;
}
// Blocks until the phase of this parity is complete.
__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity) {
#ifdef BOUNDED_WAITS
  for (const BoundedWait wait; !mbarrier_try_wait(barrier, parity);) wait.check();
#else
  asm volatile(
      "{.reg .pred p;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@!p bra again;}" ::"r"(barrier),
      "r"(parity)
      : "memory");
#endif
}

// ---- Copies to shared memory. They complete transaction bytes on `barrier`, elements outside the tensor
// included: always the whole box (tiled), or `channels` * `pixels` elements (im2col).

// L2 cache hints, encoded as createpolicy would.
constexpr u64 kEvictNormal = 0x1000000000000000, kEvictLast = 0x14f0000000000000;

__device__ __forceinline__ void prefetch_tensor_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Inline assembly numbers its operands: %0 to %4 are those named below, coordinates and im2col offsets follow.
#define CONVGRAD_COORD1 "r"(coord[0])
#define CONVGRAD_COORD2 CONVGRAD_COORD1, "r"(coord[1])
#define CONVGRAD_COORD3 CONVGRAD_COORD2, "r"(coord[2])
#define CONVGRAD_COORD4 CONVGRAD_COORD3, "r"(coord[3])
#define CONVGRAD_COORD5 CONVGRAD_COORD4, "r"(coord[4])
#define CONVGRAD_OFFSET1 "h"(static_cast<unsigned short>(offset[0]))
#define CONVGRAD_OFFSET2 CONVGRAD_OFFSET1, "h"(static_cast<unsigned short>(offset[1]))
#define CONVGRAD_OFFSET3 CONVGRAD_OFFSET2, "h"(static_cast<unsigned short>(offset[2]))
#define CONVGRAD_COPY(DIMS, MODE, COORD, OFFSET, MULTICAST, MASK, ...)                                   \
  asm volatile("cp.async.bulk.tensor." #DIMS "d.shared::cluster.global" MODE                             \
               ".mbarrier::complete_tx::bytes" MULTICAST ".L2::cache_hint [%0], [%1, {" COORD "}], [%2]" \
               OFFSET MASK ", %3;" ::"r"(to), "l"(&map), "r"(barrier), "l"(cache_hint), __VA_ARGS__      \
               : "memory")
#define CONVGRAD_LOAD(DIMS, MODE, COORD, OFFSET, ...)                       \
  if constexpr (kDims == DIMS && kMulticast) {                              \
    CONVGRAD_COPY(DIMS, MODE, COORD, OFFSET, ".multicast::cluster", ", %4", \
                  "h"(static_cast<unsigned short>(cta_mask)), __VA_ARGS__); \
  } else if constexpr (kDims == DIMS) {                                     \
    CONVGRAD_COPY(DIMS, MODE, COORD, OFFSET, "", "", "n"(0), __VA_ARGS__);  \
  }
// Tiled: the box whose first element is at `coord`, rows of its innermost dimension consecutive and
// swizzled as the map says. `to` is a multiple of 128, or of the swizzle atom (256, 512 or 1024 for
// swizzles of 32, 64 or 128 bytes). With kMulticast, to the same address in each block of the cluster
// whose bit in `cta_mask` is set; the mbarrier at the same address in each of those blocks counts the
// bytes. Without, to this block.
template <int kDims, bool kMulticast = true>
__device__ __forceinline__ void tma_load_multicast(u32 cta_mask, u32 to, const TensorMap& map, u32 barrier,
                                                   const int (&coord)[kDims], u64 cache_hint = kEvictNormal) {
  static_assert(1 <= kDims && kDims <= 5);
  CONVGRAD_LOAD(1, "", "%5", "", CONVGRAD_COORD1)
  CONVGRAD_LOAD(2, "", "%5, %6", "", CONVGRAD_COORD2)
  CONVGRAD_LOAD(3, "", "%5, %6, %7", "", CONVGRAD_COORD3)
  CONVGRAD_LOAD(4, "", "%5, %6, %7, %8", "", CONVGRAD_COORD4)
  CONVGRAD_LOAD(5, "", "%5, %6, %7, %8, %9", "", CONVGRAD_COORD5)
}
template <int kDims>
__device__ __forceinline__ void tma_load(u32 to, const TensorMap& map, u32 barrier, const int (&coord)[kDims],
                                         u64 cache_hint = kEvictNormal) {
  tma_load_multicast<kDims, false>(0, to, map, barrier, coord, cache_hint);
}
// Im2col: `pixels` rows of `channels` elements. `coord` (c, w, h, d, n, as many as the tensor has) is the
// first pixel; `offset` (w, h, d; not negative) is the filter tap times its dilation and is added to
// every pixel. Pixels advance by the map's steps within the bounding box between its corners, row by
// row, plane by plane, image by image. Coordinates are those of the bounding box: the first pixel of an
// image is at the lower corner, negative with padding. Multicast as above.
template <int kDims, bool kMulticast = true>
__device__ __forceinline__ void tma_load_im2col_multicast(u32 cta_mask, u32 to, const TensorMap& map,
                                                          u32 barrier, const int (&coord)[kDims],
                                                          const int (&offset)[kDims - 2],
                                                          u64 cache_hint = kEvictNormal) {
  static_assert(3 <= kDims && kDims <= 5);
  CONVGRAD_LOAD(3, ".im2col", "%5, %6, %7", ", {%8}", CONVGRAD_COORD3, CONVGRAD_OFFSET1)
  CONVGRAD_LOAD(4, ".im2col", "%5, %6, %7, %8", ", {%9, %10}", CONVGRAD_COORD4, CONVGRAD_OFFSET2)
  CONVGRAD_LOAD(5, ".im2col", "%5, %6, %7, %8, %9", ", {%10, %11, %12}", CONVGRAD_COORD5, CONVGRAD_OFFSET3)
}
template <int kDims>
__device__ __forceinline__ void tma_load_im2col(u32 to, const TensorMap& map, u32 barrier,
                                                const int (&coord)[kDims], const int (&offset)[kDims - 2],
                                                u64 cache_hint = kEvictNormal) {
  tma_load_im2col_multicast<kDims, false>(0, to, map, barrier, coord, offset, cache_hint);
}

// `bytes` contiguous bytes, without a tensor map; the size and both addresses are multiples of 16.
__device__ __forceinline__ void bulk_load(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier)
      : "memory");
}

// ---- Copies from shared memory. Threads that wrote the data call fence_proxy_async and synchronise with
// the thread that starts the copy.

#define CONVGRAD_STORE(DIMS, COORD, ...)                                                 \
  if constexpr (kDims == DIMS) {                                                         \
    asm volatile("cp.async.bulk.tensor." #DIMS                                           \
                 "d.global.shared::cta.bulk_group [%0, {" COORD "}], [%1];" ::"l"(&map), \
                 "r"(from), __VA_ARGS__                                                  \
                 : "memory");                                                            \
  }
// Stores the box at `coord`, clipped to the tensor.
template <int kDims>
__device__ __forceinline__ void tma_store(const TensorMap& map, u32 from, const int (&coord)[kDims]) {
  static_assert(1 <= kDims && kDims <= 5);
  CONVGRAD_STORE(1, "%2", CONVGRAD_COORD1)
  CONVGRAD_STORE(2, "%2, %3", CONVGRAD_COORD2)
  CONVGRAD_STORE(3, "%2, %3, %4", CONVGRAD_COORD3)
  CONVGRAD_STORE(4, "%2, %3, %4, %5", CONVGRAD_COORD4)
  CONVGRAD_STORE(5, "%2, %3, %4, %5, %6", CONVGRAD_COORD5)
}

// Closes a bulk group: the stores that this thread has started since the previous one.
__device__ __forceinline__ void tma_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until all but `kPending` of this thread's groups have read shared memory, which may be reused.
template <int kPending>
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// Waits until all but `kPending` groups are complete.
template <int kPending>
__device__ __forceinline__ void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---- Ordinary stores to shared memory.

// Warp: stores four 8 x 8 matrices of 16-bit elements in mma's layout, one per register; lanes 8i to
// 8i + 7 pass the addresses of the rows of matrix i, 16 bytes each.
__device__ __forceinline__ void stmatrix(u32 to, const u32 (&from)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(to),
               "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3])
               : "memory");
}
// Transposed: lanes pass the addresses of columns.
__device__ __forceinline__ void stmatrix_trans(u32 to, const u32 (&from)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(to),
               "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3])
               : "memory");
}
__device__ __forceinline__ void stmatrix_trans(u32 to, const u32 (&from)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};" ::"r"(to),
               "r"(from[0]), "r"(from[1])
               : "memory");
}
__device__ __forceinline__ void st_shared_u32(u32 to, u32 word) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
}
__device__ __forceinline__ void st_shared_f32(u32 to, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(value) : "memory");
}
// `to` is a multiple of 8.
__device__ __forceinline__ void st_shared_v2(u32 to, float first, float second) {
  asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(to), "f"(first), "f"(second) : "memory");
}

// ---- Clusters.

__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// Barrier of all threads of the cluster that makes their shared-memory writes visible to each other.
__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

// A split cluster barrier without memory ordering (whole warps): enough where a block must not overwrite
// memory that another one still reads. Ordering would cost a device-wide fence.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}

// Copies `bytes` from this block's shared memory to block `block`'s (DSMEM), where its mbarrier at address
// `barrier` counts them; the size and both addresses are multiples of 16. Threads that wrote the data
// call fence_proxy_async first. Nothing signals this block that the source has been read.
__device__ __forceinline__ void bulk_copy_to_peer(u32 to, u32 from, u32 bytes, u32 barrier, u32 block) {
  asm volatile(
      "{.reg .b32 there, met; mapa.shared::cluster.u32 there, %0, %4; "
      "mapa.shared::cluster.u32 met, %3, %4; "
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [there], [%1], %2, "
      "[met];}" ::"r"(to),
      "r"(from), "r"(bytes), "r"(barrier), "r"(block)
      : "memory");
}

// Warp, converged: true in one lane, always the same.
__device__ __forceinline__ bool elect_one() {
  u32 elected;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(elected));
  return elected != 0;
}

}  // namespace convgrad
