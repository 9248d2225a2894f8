// The emulator's ptx/tma.cuh; transfers.hpp does the copies.
#pragma once

#include "ptx/mma.cuh"

namespace convgrad {

struct alignas(64) TensorMap {
  u64 words[16];
};

static inline void mbarrier_init(u32 barrier, int arrivals) {
  emulator::make_barrier_of(barrier, arrivals);
}
static inline void fence_mbarrier_init() {}
static inline void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) {
  emulator::count_at(emulator::current_block(), barrier, 1, bytes);
}
static inline void mbarrier_arrive(u32 barrier) { mbarrier_arrive_expect_tx(barrier, 0); }
static inline void mbarrier_arrive_after_copies(u32 barrier) {
  cp_async_commit();
  cp_async_wait<0>();
  mbarrier_arrive(barrier);
}
static inline void mbarrier_arrive_cluster(u32 barrier, u32 block) {
  emulator::count_at(block, barrier, 1, 0);
}
static inline void mbarrier_wait(u32 barrier, u32 parity) {
  while (!emulator::phase_is_over(barrier, parity)) emulator::wait_for_change();
}
static inline bool mbarrier_try_wait(u32 barrier, u32 parity) {
  if (!emulator::phase_is_over(barrier, parity)) emulator::wait_for_change();
  return emulator::phase_is_over(barrier, parity);
}
static inline int mbarrier_test_wait(u32 barrier, u32 parity) {
  return emulator::phase_is_over(barrier, parity);
}

constexpr u64 kEvictNormal = 0, kEvictLast = 1;
static inline void prefetch_tensor_map(const TensorMap& map) { emulator::map_at(&map); }

template <int kDims, int kBy>
static inline void start_loads(emulator::Kind kind, u32 blocks, u32 to, const TensorMap& map,
                               u32 barrier, const int (&at)[kDims], const int (&by)[kBy]) {
  emulator::Transfer load = {kind, emulator::map_at(&map)};
  if (load.map->dims != kDims) emulator::fail("a tensor map of other dimensions");
  memcpy(load.at, at, sizeof at);
  memcpy(load.by, by, sizeof by);
  load.shared = to;
  load.barrier = barrier;
  for (load.block = 0; load.block < 32; ++load.block) {
    if (blocks >> load.block & 1) emulator::start_load(load);
  }
}
template <int kDims, bool kMulticast = true>
static inline void tma_load_multicast(u32 blocks, u32 to, const TensorMap& map, u32 barrier,
                                const int (&at)[kDims], u64 = kEvictNormal) {
  if (!kMulticast) blocks = 1u << emulator::current_block();
  start_loads(emulator::Kind::kTile, blocks, to, map, barrier, at, {0});
}
template <int kDims>
static inline void tma_load(u32 to, const TensorMap& map, u32 barrier, const int (&at)[kDims],
                             u64 = kEvictNormal) {
  tma_load_multicast<kDims, false>(0, to, map, barrier, at);
}
template <int kDims, bool kMulticast = true>
static inline void tma_load_im2col_multicast(u32 blocks, u32 to, const TensorMap& map, u32 barrier,
                                  const int (&at)[kDims], const int (&by)[kDims - 2],
                                  u64 = kEvictNormal) {
  for (int move : by) {
    if (move < 0 || move >= 1 << 16 / (kDims - 2)) emulator::fail("pixels moved too far");
  }
  if (!kMulticast) blocks = 1u << emulator::current_block();
  start_loads(emulator::Kind::kPixels, blocks, to, map, barrier, at, by);
}
template <int kDims>
static inline void tma_load_im2col(u32 to, const TensorMap& map, u32 barrier, const int (&at)[kDims],
                               const int (&by)[kDims - 2], u64 = kEvictNormal) {
  tma_load_im2col_multicast<kDims, false>(0, to, map, barrier, at, by);
}
static inline void bulk_load(u32 to, const void* from, u32 bytes, u32 barrier) {
  emulator::Transfer load = {emulator::Kind::kBytes};
  if (bytes % 16 != 0) emulator::fail("a copy of no multiple of 16 bytes");
  load.from = static_cast<const char*>(from);
  load.bytes = bytes;
  load.block = emulator::current_block();
  load.shared = to;
  load.barrier = barrier;
  emulator::start_load(load);
}

template <int kDims>
static inline void tma_store(const TensorMap& map, u32 from, const int (&at)[kDims]) {
  emulator::Transfer store = {emulator::Kind::kTile, emulator::map_at(&map)};
  if (store.map->dims != kDims) emulator::fail("a tensor map of other dimensions");
  memcpy(store.at, at, sizeof at);
  store.block = emulator::current_block();
  store.shared = from;
  emulator::start_store(store);
}
static inline void tma_store_commit() { ++emulator::store_groups[emulator::current]; }
template <int kPending>
static inline void tma_store_wait_read() {
  emulator::finish_stores(kPending);
}
template <int kPending>
static inline void tma_store_wait() {
  emulator::finish_stores(kPending);
}

// Each lane writes the two elements of each matrix that it has.
static inline void stmatrix(u32 to, const u32 (&from)[4]) {
  emulator::Lane& own = emulator::all_lanes[emulator::current];
  own.given[0] = to;
  memcpy(own.given + 1, from, sizeof from);
  emulator::meet(~0u, [](emulator::Lane* lanes) {
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const u32 row = lanes[i * 8 + lane / 4].given[0];
        memcpy(emulator::in_shared(row, 16, 16) + lane % 4 * 4, &lanes[lane].given[1 + i], 4);
      }
    }
  });
}
// Each lane's two elements are neighbours of a matrix's row, and so lie in two columns.
template <int kMatrices>
static inline void stmatrix_trans(u32 to, const u32 (&from)[kMatrices]) {
  emulator::Lane& own = emulator::all_lanes[emulator::current];
  own.given[0] = to;
  memcpy(own.given + 1, from, sizeof from);
  emulator::meet(~0u, [](emulator::Lane* lanes) {
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < kMatrices; ++i) {
        for (int half = 0; half < 2; ++half) {
          const u32 column = lanes[i * 8 + lane % 4 * 2 + half].given[0];
          const unsigned short one = lanes[lane].given[1 + i] >> half * 16;
          memcpy(emulator::in_shared(column, 16, 16) + lane / 4 * 2, &one, 2);
        }
      }
    }
  });
}
static inline void st_shared_u32(u32 to, u32 word) {
  memcpy(emulator::in_shared(to, 4, 4), &word, 4);
}
static inline void st_shared_f32(u32 to, float number) {
  memcpy(emulator::in_shared(to, 4, 4), &number, 4);
}
static inline void st_shared_v2(u32 to, float first, float second) {
  const float both[2] = {first, second};
  memcpy(emulator::in_shared(to, 8, 8), both, 8);
}

static inline u32 cluster_rank() { return emulator::current_block(); }
static inline void cluster_sync() { emulator::wait_for_cluster_threads(); }
// Whoever waits waits for all to wait, which is later than that all have come by.
static inline void cluster_arrive() {}
static inline void cluster_wait() { emulator::wait_for_cluster_threads(); }
static inline void bulk_copy_to_peer(u32 to, u32 from, u32 bytes, u32 barrier, u32 block) {
  emulator::Transfer load = {emulator::Kind::kSent};
  if (bytes % 16 != 0) emulator::fail("a copy of no multiple of 16 bytes");
  load.bytes = bytes;
  load.sender = emulator::current_block();
  load.sent = from;
  load.block = block;
  load.shared = to;
  load.barrier = barrier;
  emulator::start_load(load);
}
static inline bool elect_one() {
  emulator::meet(~0u, [](emulator::Lane*) {});
  return threadIdx.x % 32 == 0;
}

}  // namespace convgrad
