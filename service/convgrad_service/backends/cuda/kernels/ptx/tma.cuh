// Hopper's copy engine (TMA), barriers in shared memory that count what it has copied, and clusters
// of blocks. Each instruction is a small function, so that tests/emulator can stand in for this
// header. Matrix products are in warpgroup.cuh.
//
// Needs sm_90. Addresses in shared memory are those of shared_address (mma.cuh). Tensor maps
// are made by core/tensor_maps.py, and reach a kernel as members of its one __grid_constant__ argument.
// Coordinates are given innermost first; the innermost is a multiple of 16 bytes, or the copy engine
// faults. They may lie outside the tensor, where zeros come from and nothing goes to, but those of a
// store are not negative. All of these functions are for one thread unless they say otherwise.
#pragma once

#include "ptx/mma.cuh"
#include "core/bounded_wait.cuh"

namespace convgrad {

struct alignas(64) TensorMap {
  u64 words[16];
};

// ---- Barriers: 8 bytes of shared memory each, aligned to them. One completes a phase when so many
// arrivals have come as it was made with, and every byte that was announced. Phases have parities 0,
// 1, 0, ...: to wait for parity p is to wait until the current phase, if it has it, is over, so a
// wait for parity 1 passes at once at first.

__device__ __forceinline__ void init_barrier(u32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// After a thread's last init_barrier, before the block (or the cluster) synchronises.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives, and announces so many bytes of copies.
__device__ __forceinline__ void arrive_and_expect_tx(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// Arrives at the barrier that lies at the same place in another block of the cluster. Says that
// shared memory has been read; what this thread wrote need not be seen there (that would take a
// fence of the whole device, which measured four times a copy's own time).
__device__ __forceinline__ void arrive_at(u32 barrier, u32 block) {
  asm volatile(
      "{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; "
      "mbarrier.arrive.shared::cluster.b64 _, [there];}" ::"r"(barrier),
      "r"(block)
      : "memory");
}
__device__ __forceinline__ bool try_wait(u32 barrier, u32 parity) {
  u32 passed;
  asm volatile(
      "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
      : "=r"(passed)
      : "r"(barrier), "r"(parity)
      : "memory");
  return passed != 0;
}
// The same without any wait.
__device__ __forceinline__ int test_wait(u32 barrier, u32 parity) {
  int passed;
  asm volatile(
      "{.reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.s32 %0, 1, 0, p;}"
      : "=r"(passed)
      : "r"(barrier), "r"(parity)
      : "memory");
  return passed;
}
// Waits until the phase of this parity is over.
__device__ __forceinline__ void wait_barrier(u32 barrier, u32 parity) {
#ifdef BOUNDED_WAITS
  for (const Wait wait; !try_wait(barrier, parity);) wait.go_on();
#else
  asm volatile(
      "{.reg .pred p;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@!p bra again;}" ::"r"(barrier),
      "r"(parity)
      : "memory");
#endif
}

// ---- Copies to shared memory. They are counted at `barrier` in bytes, those outside the tensor
// included: always the whole box (tiled), or `channels` * `pixels` elements (im2col).

// What the L2 cache is told of the lines of a copy.
constexpr u64 kKeepAsUsual = 0x1000000000000000, kKeepMost = 0x14f0000000000000;

__device__ __forceinline__ void prefetch_tensor_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

#define CONVGRAD_AT1 "r"(at[0])
#define CONVGRAD_AT2 CONVGRAD_AT1, "r"(at[1])
#define CONVGRAD_AT3 CONVGRAD_AT2, "r"(at[2])
#define CONVGRAD_AT4 CONVGRAD_AT3, "r"(at[3])
#define CONVGRAD_AT5 CONVGRAD_AT4, "r"(at[4])
#define CONVGRAD_LOAD(DIMS, AT, ...)                                                            \
  if constexpr (kDims == DIMS) {                                                                \
    asm volatile("cp.async.bulk.tensor." #DIMS                                                  \
                 "d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [" \
                 "%1, {" AT "}], [%2], %3;" ::"r"(to),                                          \
                 "l"(&map), "r"(barrier), "l"(keep), __VA_ARGS__                                \
                 : "memory");                                                                   \
  }
// The box whose first element is at these coordinates, rows of its innermost dimension one after
// another, swizzled as the map says; `to` is a multiple of 128, with a swizzle of the repeat of its
// pattern (256, 512 or 1024 for 32, 64 or 128 bytes).
template <int kDims>
__device__ __forceinline__ void tma_load(u32 to, const TensorMap& map, u32 barrier,
                                          const int (&at)[kDims], u64 keep = kKeepAsUsual) {
  static_assert(1 <= kDims && kDims <= 5);
  CONVGRAD_LOAD(1, "%4", CONVGRAD_AT1)
  CONVGRAD_LOAD(2, "%4, %5", CONVGRAD_AT2)
  CONVGRAD_LOAD(3, "%4, %5, %6", CONVGRAD_AT3)
  CONVGRAD_LOAD(4, "%4, %5, %6, %7", CONVGRAD_AT4)
  CONVGRAD_LOAD(5, "%4, %5, %6, %7, %8", CONVGRAD_AT5)
}
#undef CONVGRAD_LOAD

#define CONVGRAD_LOAD(DIMS, AT, ...)                                                              \
  if constexpr (kDims == DIMS) {                                                                  \
    asm volatile("cp.async.bulk.tensor." #DIMS                                                    \
                 "d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"       \
                 ".L2::cache_hint [%0], [%1, {" AT "}], [%2], %4, %3;" ::"r"(to),                 \
                 "l"(&map), "r"(barrier), "l"(keep), "h"(static_cast<unsigned short>(blocks)),    \
                 __VA_ARGS__                                                                      \
                 : "memory");                                                                     \
  }
// The same, to the same place in each block of the cluster whose bit in `blocks` is set; each
// block's own barrier at that place counts it.
template <int kDims>
__device__ __forceinline__ void tma_load_multicast(u32 blocks, u32 to, const TensorMap& map, u32 barrier,
                                             const int (&at)[kDims], u64 keep = kKeepAsUsual) {
  static_assert(1 <= kDims && kDims <= 5);
  CONVGRAD_LOAD(1, "%5", CONVGRAD_AT1)
  CONVGRAD_LOAD(2, "%5, %6", CONVGRAD_AT2)
  CONVGRAD_LOAD(3, "%5, %6, %7", CONVGRAD_AT3)
  CONVGRAD_LOAD(4, "%5, %6, %7, %8", CONVGRAD_AT4)
  CONVGRAD_LOAD(5, "%5, %6, %7, %8, %9", CONVGRAD_AT5)
}
#undef CONVGRAD_LOAD

#define CONVGRAD_BY1 "h"(static_cast<unsigned short>(by[0]))
#define CONVGRAD_BY2 CONVGRAD_BY1, "h"(static_cast<unsigned short>(by[1]))
#define CONVGRAD_BY3 CONVGRAD_BY2, "h"(static_cast<unsigned short>(by[2]))
#define CONVGRAD_LOAD(DIMS, AT, BY, ...)                                                          \
  if constexpr (kDims == DIMS) {                                                                  \
    asm volatile("cp.async.bulk.tensor." #DIMS                                                    \
                 "d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes.L2::cache_hint "   \
                 "[%0], [%1, {" AT "}], [%2], {" BY "}, %3;" ::"r"(to),                           \
                 "l"(&map), "r"(barrier), "l"(keep), __VA_ARGS__                                  \
                 : "memory");                                                                     \
  }
// Im2col: `pixels` rows of `channels` elements. The first is the pixel at the coordinates (c, w, h,
// d, n, as many as the tensor has) moved by `by` (w, h, d), which is not negative: a filter's tap
// times its dilation. Pixels follow by the map's steps within the box between its corners, row by
// row, plane by plane and image by image; coordinates name pixels of that box, so the first of an
// image is at its lower corner, negative with padding.
template <int kDims>
__device__ __forceinline__ void tma_load_im2col(u32 to, const TensorMap& map, u32 barrier,
                                            const int (&at)[kDims], const int (&by)[kDims - 2],
                                            u64 keep = kKeepAsUsual) {
  static_assert(3 <= kDims && kDims <= 5);
  CONVGRAD_LOAD(3, "%4, %5, %6", "%7", CONVGRAD_AT3, CONVGRAD_BY1)
  CONVGRAD_LOAD(4, "%4, %5, %6, %7", "%8, %9", CONVGRAD_AT4, CONVGRAD_BY2)
  CONVGRAD_LOAD(5, "%4, %5, %6, %7, %8", "%9, %10, %11", CONVGRAD_AT5, CONVGRAD_BY3)
}
#undef CONVGRAD_LOAD

#define CONVGRAD_LOAD(DIMS, AT, BY, ...)                                                          \
  if constexpr (kDims == DIMS) {                                                                  \
    asm volatile("cp.async.bulk.tensor." #DIMS                                                    \
                 "d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"                   \
                 ".multicast::cluster.L2::cache_hint "                                            \
                 "[%0], [%1, {" AT "}], [%2], {" BY "}, %4, %3;" ::"r"(to),                       \
                 "l"(&map), "r"(barrier), "l"(keep), "h"(static_cast<unsigned short>(blocks)),    \
                 __VA_ARGS__                                                                      \
                 : "memory");                                                                     \
  }
// The same to several blocks of the cluster, see tma_load_multicast.
template <int kDims>
__device__ __forceinline__ void tma_load_im2col_multicast(u32 blocks, u32 to, const TensorMap& map,
                                               u32 barrier, const int (&at)[kDims],
                                               const int (&by)[kDims - 2],
                                               u64 keep = kKeepAsUsual) {
  static_assert(3 <= kDims && kDims <= 5);
  CONVGRAD_LOAD(3, "%5, %6, %7", "%8", CONVGRAD_AT3, CONVGRAD_BY1)
  CONVGRAD_LOAD(4, "%5, %6, %7, %8", "%9, %10", CONVGRAD_AT4, CONVGRAD_BY2)
  CONVGRAD_LOAD(5, "%5, %6, %7, %8, %9", "%10, %11, %12", CONVGRAD_AT5, CONVGRAD_BY3)
}
#undef CONVGRAD_LOAD
#undef CONVGRAD_BY3
#undef CONVGRAD_BY2
#undef CONVGRAD_BY1

// `bytes` side by side, a multiple of 16, as both addresses are.
__device__ __forceinline__ void bulk_load(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier)
      : "memory");
}

// ---- Copies from shared memory. What threads wrote there is published first (publish_shared, then
// a barrier of them and the thread that copies).

#define CONVGRAD_STORE(DIMS, AT, ...)                                                        \
  if constexpr (kDims == DIMS) {                                                             \
    asm volatile("cp.async.bulk.tensor." #DIMS                                               \
                 "d.global.shared::cta.bulk_group [%0, {" AT "}], [%1];" ::"l"(&map),        \
                 "r"(from), __VA_ARGS__                                                      \
                 : "memory");                                                                \
  }
// The box at these coordinates, what of it lies in the tensor.
template <int kDims>
__device__ __forceinline__ void tma_store(const TensorMap& map, u32 from, const int (&at)[kDims]) {
  static_assert(1 <= kDims && kDims <= 5);
  CONVGRAD_STORE(1, "%2", CONVGRAD_AT1)
  CONVGRAD_STORE(2, "%2, %3", CONVGRAD_AT2)
  CONVGRAD_STORE(3, "%2, %3, %4", CONVGRAD_AT3)
  CONVGRAD_STORE(4, "%2, %3, %4, %5", CONVGRAD_AT4)
  CONVGRAD_STORE(5, "%2, %3, %4, %5, %6", CONVGRAD_AT5)
}
#undef CONVGRAD_STORE
#undef CONVGRAD_AT5
#undef CONVGRAD_AT4
#undef CONVGRAD_AT3
#undef CONVGRAD_AT2
#undef CONVGRAD_AT1

// Ends a group: the stores that this thread has started since the last one.
__device__ __forceinline__ void tma_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until shared memory has been read for all but `kPending` of this thread's groups.
template <int kPending>
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// Waits until all but `kPending` groups are written.
template <int kPending>
__device__ __forceinline__ void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---- Ordinary stores to shared memory.

// Warp: four 8 x 8 matrices of 16-bit elements as mma leaves them, one a register; lanes 8i to 8i + 7
// say where the rows of matrix i go, 16 bytes each.
__device__ __forceinline__ void stmatrix(u32 to, const u32 (&from)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(to),
               "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3])
               : "memory");
}
// The same with matrices turned round: lanes say where their columns go.
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
__device__ __forceinline__ void store_word(u32 to, u32 word) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
}
__device__ __forceinline__ void store_float(u32 to, float number) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(number) : "memory");
}
// Two numbers side by side, at a multiple of 8.
__device__ __forceinline__ void store_pair(u32 to, float first, float second) {
  asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(to), "f"(first), "f"(second) : "memory");
}

// ---- Clusters.

__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// All threads of all its blocks: what each wrote to shared memory before is seen by the others after.
__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

// The same in two halves, whole warps together, and without what orders writes: that all have come so
// far, say to where nobody reads any more what another block is about to overwrite. A synchronisation
// has a fence of the whole device.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}

// Copies `bytes`, a multiple of 16, as both addresses are, from shared memory to another block's, where
// they are counted at the barrier of this address. What threads wrote there is published first, and
// nothing tells this block that it has been read.
__device__ __forceinline__ void bulk_copy_to_peer(u32 to, u32 from, u32 bytes, u32 barrier, u32 block) {
  asm volatile(
      "{.reg .b32 there, met; mapa.shared::cluster.u32 there, %0, %4; "
      "mapa.shared::cluster.u32 met, %3, %4; "
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [there], [%1], %2, "
      "[met];}" ::"r"(to),
      "r"(from), "r"(bytes), "r"(barrier), "r"(block)
      : "memory");
}

// One lane of a warp that is whole, always the same: for what one thread does.
__device__ __forceinline__ bool elect_one() {
  u32 chosen;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(chosen));
  return chosen != 0;
}

}  // namespace convgrad
