// A 1x1 convolution of stride 1, channels last, as a matrix product on Hopper: TMA and wgmma. Host
// side: pointwise_gemm.py.
//
//              rows (M)          columns (N)        reduction (K)      a, b lie along
//   fprop      pixels            output channels    input channels     K, K
//   dgrad      pixels            input channels     output channels    K, N
//   wgrad      output channels   input channels     pixels             M, N (or rows and columns swapped)
//
// Block: a tile of BM x BN. A thread starts the copies of a's boxes, another one those of b, into a ring
// of steps of DEPTH; the first before anything else happens. CONSUMERS warpgroups
// multiply, BM / CONSUMERS rows each.
//
// REDUCE 0: blocks keep their columns and take row tiles blockIdx.x, + gridDim.x, ...; with RESIDENT
// b is copied once, all of it. A warp rounds its sums and stores 16 rows at a time by the copy engine,
// through one of BUFFERS buffers, so that the next tile's copies and products go on.
// REDUCE 1: one tile; its reduction is split among the blocks of a cluster, which add up through
// distributed shared memory in the order of ranks, and (parts > 1) among clusters, which leave their
// sums in a workspace: the last one adds them up, in order. Any epilogue, strides and type of result.
//
// Dynamic shared memory, from a multiple of 1,024: the ring; b where RESIDENT; buffers of results, or
// what SplitKReduce needs; barriers.
// Relies on its launcher for the grid: (row tiles or fewer, column tiles), or with REDUCE (cluster x parts, column tiles, row tiles); for counters that are zero. Needs sm_90a.
// Deterministic: one order of additions, which the launch decides.
// Index limits: rows, columns and the reduction below 2^31; 64-bit offsets.
#include "conv/pointwise_gemm.cuh"
#include "core/result_run.cuh"
#include "core/split_k_reduce.cuh"

using namespace convgrad;

namespace {

using T = ELEMENT;
using SideA = GemmSide<T, A_MN != 0, A_BYTES, BM, DEPTH>;
using SideB = GemmSide<T, B_MN != 0, B_BYTES, BN, DEPTH>;
constexpr int kRowsOf = BM / CONSUMERS, kParts = kRowsOf / 64, kColumns = BN / 8;
constexpr int kConsumers = CONSUMERS * 128, kThreads = kConsumers + 64;
constexpr int kProducerA = CONSUMERS * 4, kProducerB = kProducerA + 1;
constexpr u32 kStageBytes = SideA::kBytes + (RESIDENT ? 0 : SideB::kBytes);
// Of results on their way, a warp's 16 rows: columns side by side, swizzled in blocks of D_BYTES.
constexpr u32 kSlabBytes = 16 * BN * sizeof(T);
constexpr int kBlockColumns = D_BYTES ? D_BYTES / static_cast<int>(sizeof(T)) : BN;
constexpr u32 kBlockBytes = 16 * kBlockColumns * sizeof(T);
static_assert(BN % kBlockColumns == 0, "whole blocks");
using Sums = float[kParts][kColumns][4];
using Reduce = SplitKReduce<kParts * kColumns, CONSUMERS * 4>;

// Addresses that swizzled boxes may start at.
__device__ __forceinline__ u32 in_whole_patterns(u32 address) { return (address + 1023) & ~1023u; }

struct Place {
  u32 ring, resident, results, barriers;
  char* shared;  // `ring` as a pointer
  int stages;

  __device__ __forceinline__ char* pointer(u32 address) const { return shared + (address - ring); }

  __device__ __forceinline__ u32 a(int stage) const { return ring + stage * kStageBytes; }
  __device__ __forceinline__ u32 b(int stage) const { return a(stage) + SideA::kBytes; }
  __device__ __forceinline__ u32 filled(int stage) const { return barriers + stage * 8; }
  __device__ __forceinline__ u32 read(int stage) const { return barriers + (stages + stage) * 8; }
  __device__ __forceinline__ u32 joined() const { return barriers + 2 * stages * 8; }
};

// What this block has to do: row tiles from `row` on, one tile of columns, and of the reduction `steps`
// from `begin` on.
struct Share {
  int row, row_step, column, begin, steps;

  __device__ __forceinline__ explicit Share(const PointwiseGemmArgs& args) {
    column = blockIdx.y * BN;
    if constexpr (REDUCE) {
      row = blockIdx.z, row_step = args.row_tiles;
      begin = blockIdx.x * args.steps_each;
      steps = max(min(args.steps_each, args.steps - begin), 0);
    } else {
      row = blockIdx.x, row_step = gridDim.x;
      begin = 0, steps = args.steps;
    }
  }
};

// One thread starts all copies of an operand, stage after stage.
template <class Side, bool kRows>
struct Loads {
  const TensorMap& map;
  const Share& share;
  const int row_tiles, whole;
  int row, step = 0;
  RingPlace ring{1};

  __device__ __forceinline__ Loads(const PointwiseGemmArgs& args, const Share& share)
      : map(kRows ? args.a_map : args.b_map),
        share(share),
        row_tiles(args.row_tiles),
        whole(kRows ? args.a_whole : args.b_whole),
        row(share.row) {}
  __device__ __forceinline__ bool left() const { return row < row_tiles && share.steps > 0; }
  __device__ __forceinline__ void next(const Place& place) {
    const u32 to = kRows ? place.a(ring.at) : place.b(ring.at), barrier = place.filled(ring.at);
    mbarrier_arrive_expect_tx(barrier, Side::kBytes);
    Side::load(to, map, barrier, kRows ? row * BM : share.column, share.begin + step, whole);
    if (++step == share.steps) step = 0, row += share.row_step;
    ring.step(place.stages);
  }
};

// All threads, once the barriers are made: before others use them.
__device__ __forceinline__ void meet() {
  __syncwarp();
  __syncthreads();
  if (REDUCE) cluster_arrive();
}

// A producer warp. The one of a makes the ring's barriers, and starts its first copy right after,
// before the block meets.
template <class Side, bool kRows>
__device__ __forceinline__ void produce(const PointwiseGemmArgs& args, const Place& place,
                                        const Share& share) {
  Loads<Side, kRows> loads(args, share);
  const bool chosen = elect_one();
  if (chosen) {
    if constexpr (kRows) {
      for (int i = 0; i < place.stages; ++i) {
        mbarrier_init(place.filled(i), RESIDENT ? 1 : 2);
        mbarrier_init(place.read(i), CONSUMERS * 4);
      }
      fence_mbarrier_init();
      fence_proxy_async();
    } else {
      prefetch_tensor_map(args.b_map);
    }
    wait_on_dependent_grids();
    if (kRows && loads.left()) loads.next(place);
  }
  meet();
  if (chosen) {
#pragma unroll 1
    while (loads.left()) {
      mbarrier_wait(place.read(loads.ring.at), loads.ring.parity);
      loads.next(place);
    }
  }
  __syncwarp();
  if (REDUCE) cluster_wait();
}

__device__ __forceinline__ void clear(Sums& sums) {
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[part][j][e] = 0.0f;
    }
  }
}

// A warpgroup's sums of one tile.
__device__ __forceinline__ void multiply_steps(const Place& place, RingPlace& ring,
                                               int steps, Sums& sums) {
  const int first_row = CONSUMERS == 1 ? 0 : static_cast<int>(threadIdx.x / 128) * kRowsOf;
  const int lane = threadIdx.x & 31;
  int before = -1;  // the stage whose products are under way
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    mbarrier_wait(place.filled(ring.at), ring.parity);
    const u32 b_from = RESIDENT ? place.resident + step * SideB::kBytes : place.b(ring.at);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < DEPTH / 16; ++i) {
      const u64 b = SideB::operand(b_from, 0, i);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const u64 a = SideA::operand(place.a(ring.at), first_row + part * 64, i);
        wgmma<T, SideA::kMajor, SideB::kMajor>(sums[part], a, b, i > 0 || step > 0);
      }
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (before >= 0 && lane == 0) mbarrier_arrive(place.read(before));
    before = ring.at;
    ring.step(place.stages);
  }
  wgmma_wait<0>();
#pragma unroll
  for (int part = 0; part < kParts; ++part) fence_accumulators(sums[part]);
  if (before >= 0 && lane == 0) mbarrier_arrive(place.read(before));
}

// Where 16 bytes of a warp's results lie: columns 8 * chunk and on.
__device__ __forceinline__ u32 staged(u32 slab, int row, int chunk) {
  if constexpr (D_BYTES == 128) {
    return slab + chunk / 8 * kBlockBytes + row * 128 + ((chunk % 8) ^ (row & 7)) * 16;
  } else if constexpr (D_BYTES == 64) {
    return slab + chunk / 4 * kBlockBytes + row * 64 + ((chunk % 4) ^ (row >> 1 & 3)) * 16;
  } else {
    return slab + row * (BN * static_cast<int>(sizeof(T))) + chunk * 16;
  }
}

// alpha * sum + bias, of a warp's rows.
__device__ __forceinline__ void finish_sums(const PointwiseGemmArgs& args, int column, Sums& sums) {
  const T* const bias = static_cast<const T*>(args.bias);
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int j = 0; j < kColumns; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int at = column + j * 8 + lane % 4 * 2 + e;
      const float add = bias != nullptr && at < args.columns ? widen(bias[at]) : 0.0f;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        sums[part][j][e] = sums[part][j][e] * args.alpha + add;
        sums[part][j][e + 2] = sums[part][j][e + 2] * args.alpha + add;
      }
    }
  }
}

// A warp's 16 rows of a part, rounded, by the copy engine. Its buffer is free.
__device__ __forceinline__ void store_rows(const PointwiseGemmArgs& args, u32 slab, int row,
                                           int column, const float (&sums)[kColumns][4]) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int j = 0; j + 1 < kColumns; j += 2) {
    const u32 words[4] = {narrow_x2<T>(sums[j][0], sums[j][1]),
                          narrow_x2<T>(sums[j][2], sums[j][3]),
                          narrow_x2<T>(sums[j + 1][0], sums[j + 1][1]),
                          narrow_x2<T>(sums[j + 1][2], sums[j + 1][3])};
    stmatrix(staged(slab, lane % 16, j + lane / 16), words);
  }
  if constexpr (kColumns % 2) {
    constexpr int j = kColumns - 1;
    const u32 at = lane % 4 * 4;
    st_shared_u32(staged(slab, lane / 4, j) + at, narrow_x2<T>(sums[j][0], sums[j][1]));
    st_shared_u32(staged(slab, lane / 4 + 8, j) + at, narrow_x2<T>(sums[j][2], sums[j][3]));
  }
  fence_proxy_async();
  __syncwarp();
  if (lane == 0) {
#pragma unroll
    for (int block = 0; block < BN / kBlockColumns; ++block) {
      tma_store<2>(args.d_map, slab + block * kBlockBytes, {column + block * kBlockColumns, row});
    }
    tma_store_commit();
  }
}

__device__ __forceinline__ void consume_tiles(const PointwiseGemmArgs& args, const Place& place,
                                              const Share& share) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  const u32 slabs = place.results + warp * (BUFFERS * kParts * kSlabBytes);
  RingPlace ring(0);
  int buffer = 0;
  if constexpr (RESIDENT) {
    SideB::load_all(place.resident, static_cast<const T*>(args.b), args.b_pitch, share.column,
                    args.columns, args.depth, args.steps, threadIdx.x, kConsumers);
    cp_async_commit();
    cp_async_wait<0>();
    fence_proxy_async();
    named_barrier_sync(1, kConsumers);
  }
#pragma unroll 1
  for (int tile = share.row; tile < args.row_tiles; tile += share.row_step) {
    Sums sums;
    multiply_steps(place, ring, share.steps, sums);
    if (!args.plain) finish_sums(args, share.column, sums);
    if (lane == 0) tma_store_wait_read<(BUFFERS - 1) * kParts>();
    __syncwarp();
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      store_rows(args, slabs + (buffer * kParts + part) * kSlabBytes,
                 tile * BM + warp / 4 * kRowsOf + part * 64 + warp % 4 * 16, share.column, sums[part]);
    }
    if (++buffer == BUFFERS) buffer = 0;
  }
  if (lane == 0) tma_store_wait_read<0>();
}

// This thread's results: eight neighbouring columns of two rows of an owned fragment, rows `row` and
// `row` + 8 of its tile. `each` gets their number within the block, the fragment, the row in it, and
// their place in the tile.
template <class Each>
__device__ __forceinline__ void for_each_pair(const Reduce& reduce, Each each) {
  const int warp = threadIdx.x / 32;
#pragma unroll 1
  for (int i = threadIdx.x & 31; i < reduce.fragment_count() * 8; i += 32) {
    const int row = i & 7, fragment = i >> 3, f = reduce.first_fragment() + fragment;
    each(warp * reduce.fragment_count() * 8 + i, fragment, row,
         warp / 4 * kRowsOf + f / kColumns * 64 + warp % 4 * 16 + row, f % kColumns * 8);
  }
}

// A thread's partial sums, in the order of clusters.
__device__ __forceinline__ void add_up(const float4* from, int count, float (&sums)[2][8]) {
#pragma unroll
  for (int e = 0; e < 16; ++e) sums[e / 8][e % 8] = 0;
#pragma unroll 4
  for (int p = 0; p < count; ++p, from += BM * BN / 4) {
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const float4 four = __ldcg(from + q);
      float(&to)[8] = sums[q / 2];
      const int e = q % 2 * 4;
      to[e] += four.x, to[e + 1] += four.y, to[e + 2] += four.z, to[e + 3] += four.w;
    }
  }
}

__device__ __forceinline__ void consume_share(const PointwiseGemmArgs& args, const Place& place,
                                              const Share& share, const Reduce& reduce, int rank) {
  Sums sums;
  RingPlace ring(0);
  multiply_steps(place, ring, share.steps, sums);
  // Not before the products: zeros among their registers would have each wait for the one before.
  if (share.steps == 0) clear(sums);
  cluster_wait();
  reduce.exchange(sums);
  // Partial sums of clusters: the last block of each rank adds up its part of the tile.
  float4* partials = nullptr;
  if (args.parts > 1) {
    const i64 tile = static_cast<i64>(blockIdx.z) * gridDim.y + blockIdx.y;
    const int part = blockIdx.x / args.cluster;
    partials = reinterpret_cast<float4*>(args.partials + tile * args.parts * (BM * BN) +
                                         reduce.first_fragment() * (CONSUMERS * 4 * 128));
    float4* const own = partials + static_cast<i64>(part) * (BM * BN / 4);
    for_each_pair(reduce, [&](int i, int fragment, int in, int, int) {
      float found[2][8];
      reduce.load_rows(fragment, in, found);
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const float* const four = found[q / 2] + q % 2 * 4;
        own[i * 4 + q] = {four[0], four[1], four[2], four[3]};
      }
    });
    named_barrier_sync(1, kConsumers);
    u32* const said = reinterpret_cast<u32*>(place.pointer(place.joined() + 8));
    if (threadIdx.x == 0) {
      // For all threads, before and after: they met it at the barrier.
      __threadfence();
      *said = atomicInc(args.counters + tile * args.cluster + rank, args.parts - 1);
      __threadfence();
    }
    named_barrier_sync(1, kConsumers);
    if (*said != static_cast<u32>(args.parts) - 1) return;
  }
  const int row = share.row * BM, column = share.column;
  const bool fast = args.plain && args.result_in_vectors && !args.wide_result;
  const OutputPointer<T> result{static_cast<char*>(args.result), false};
  for_each_pair(reduce, [&](int i, int fragment, int in, int r, int c) {
    float found[2][8];
    if (partials == nullptr) {
      reduce.load_rows(fragment, in, found);
    } else {
      add_up(partials + i * 4, args.parts, found);
    }
    const int left = args.columns - column - c;
    if (left <= 0) return;
    i64 to = (row + r) * args.row_stride + (column + c) * args.column_stride;
    if (fast && left >= 8) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (row + r + half * 8 < args.rows) result.store_vector(to, found[half]);
        to += 8 * args.row_stride;
      }
      return;
    }
#pragma unroll 1
    for (int half = 0; half < 2; ++half, to += 8 * args.row_stride) {
      if (row + r + half * 8 >= args.rows) continue;
      float own[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) own[e] = half == 0 ? found[0][e] : found[1][e];
      store_run<T, 8>(args, to, args.column_stride, left, column + c, own);
    }
  });
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    pointwise_gemm(const __grid_constant__ PointwiseGemmArgs args) {
  extern __shared__ uint4 shared[];
  const u32 base = shared_address(shared), padding = in_whole_patterns(base) - base;
  Place place;
  place.ring = base + padding;
  place.shared = reinterpret_cast<char*>(shared) + padding;
  place.stages = args.stages;
  place.resident = in_whole_patterns(place.ring + args.stages * kStageBytes);
  place.results =
      in_whole_patterns(place.resident + (RESIDENT ? args.steps * SideB::kBytes : 0));
  const u32 rank = REDUCE ? cluster_rank() : 0;
  constexpr u32 kStaging = CONSUMERS * 4 * BUFFERS * kParts * kSlabBytes;
  place.barriers =
      place.results + (REDUCE ? args.cluster * args.owned * CONSUMERS * 4 * 512 : kStaging);
  const Share share(args);
  const int warp = threadIdx.x / 32;
  if (warp == kProducerA) {
    produce<SideA, true>(args, place, share);
  } else if (warp == kProducerB) {
    if constexpr (RESIDENT) {
      meet();
    } else {
      produce<SideB, false>(args, place, share);
    }
  } else {
    const Reduce reduce(place.pointer(place.results), place.joined(), rank, REDUCE ? args.cluster : 1, args.owned);
    if (threadIdx.x == 0) {
      if (REDUCE) reduce.prepare();
      if (!REDUCE) prefetch_tensor_map(args.d_map);
    }
    meet();
    launch_dependent_grids();
    if constexpr (REDUCE) {
      wait_on_dependent_grids();
      consume_share(args, place, share, reduce, rank);
    } else {
      wait_on_dependent_grids();
      consume_tiles(args, place, share);
    }
  }
}
