// A 1x1 convolution of stride 1 as a GEMM on Hopper (TMA, wgmma). Launched by pointwise_gemm.py. Needs sm_90a.
//
//           M                 N                K                 A major, B major
//   fprop   pixels            output channels  input channels    K, K
//   dgrad   pixels            input channels   output channels   K, N
//   wgrad   output channels   input channels   pixels            M, N
// or with A and B, and M and N, exchanged: TRANSPOSED where REDUCE is 0. Channels first, with PLANES, fprop and dgrad:
// A is M-major, and tiles of M are pixels of an image (TRANSPOSED: B and N); with IMAGES, wgrad: A and B are K-major,
// and k-tiles are pixels of an image.
//
// float32 is multiplied as TF32, whose operands wgmma reads from shared memory with K contiguous only. An A that is
// M-major is in registers: dgrad, TRANSPOSED or REDUCE 1, and with PLANES fprop, and dgrad of a weight that was
// transposed. If B is N-major too, products are mma.sync's: wgrad, REDUCE 1 or 2 (tf32_products.cuh). With REDUCE 0,
// results are stored from registers.
//
// Block: a BM x BN tile; CONSUMERS warpgroups of BM / CONSUMERS rows each and two producer warps, one
// thread for A's loads and one for B's, through a pipeline of `stages` k-tiles of DEPTH elements. A's
// producer initialises the pipeline's mbarriers and issues its first load before the block synchronises.
// REDUCE 0: persistent over M: grid (row tiles or fewer, column tiles). A block keeps its column tile and
//   takes row tiles blockIdx.x, + gridDim.x, ...; with RESIDENT all of B is loaded once. Each warp stores
//   16 rows of STORED columns at a time by TMA through one of BUFFERS staging buffers, which overlaps the next
//   mainloop. With TRANSPOSED, rows and columns change places: a block keeps its row tile. With either TRANSPOSED
//   or PLANES, each warpgroup stores 64 rows, which are contiguous in the result.
// PINGPONG (REDUCE 0): the block's two warpgroups take its tiles in turn, BM rows each, so that one's epilogue
//   overlaps the other's mainloop. A mainloop starts once the other's wgmmas are issued: otherwise a warpgroup could
//   take an earlier k-tile's arrival for that of its own, as mbarriers tell two phases apart. Same sums as without.
// REDUCE 1: split-K: grid (cluster x parts, column tiles, row tiles). One tile per cluster, whose blocks
//   reduce through distributed shared memory (SplitKReduce); with parts > 1 clusters leave partial sums in
//   a workspace, and the last one to arrive reduces them. Any epilogue, strides and result type.
// REDUCE 2: split-K: grid (tiles, parts), at most a block per multiprocessor. Blocks leave partial sums in a
//   workspace, and those of a tile each reduce a part of it (pointwise_gemm_grid_reduce.cuh). As REDUCE 1.
// MULTICAST (REDUCE 0 or 2): `cluster` adjacent blocks, whose tiles have the same columns (TRANSPOSED: rows),
//   share that operand's k-tiles: they take turns to load one for all. Same sums as without.
// Shared memory (dynamic, from a multiple of 1,024): pipeline stages; B where RESIDENT; staging buffers or
//   a reduction's fragments; mbarriers.
// Preconditions: `counters` are zero.
// Determinism: one order of additions, decided by the launch: K, cluster ranks, clusters.
// Limits: M, N and K below 2^31; 64-bit offsets.
#include "conv/pointwise_gemm_grid_reduce.cuh"
#include "conv/pointwise_gemm_mainloop.cuh"
#include "conv/pointwise_gemm_store.cuh"

using namespace convgrad;

namespace {

#if !REDUCE
__device__ __forceinline__ void consume_row_tiles(const PointwiseGemmArgs& args, const SharedLayout& smem,
                                              const BlockWork& work) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  const u32 staging = smem.staging + (kStoresColumns ? warp / 4 : warp) * (kStagingBuffers * kStagingBytes);
  PipelineState state;
  int buffer = 0;
  if constexpr (RESIDENT) {
    OperandB::load_resident(smem.resident, static_cast<const T*>(args.b), args.b_pitch, work.column,
                    args.columns, args.depth, args.steps, threadIdx.x, kConsumers);
    cp_async_commit();
    cp_async_wait<0>();
    fence_proxy_async();
    named_barrier_sync(1, kConsumers);
  }
  constexpr int kTurns = kPingPong ? CONSUMERS : 1;
  const int turn = kPingPong ? warp / 4 : 0;
  u32 order_parity = turn ^ 1;
  if (turn > 0) state.skip(work.steps, smem.stages);
#pragma unroll 1
  for (int tile = work.row + turn * work.row_step; tile < work.row_end(args); tile += kTurns * work.row_step) {
    Accumulators accum;
    if constexpr (kPingPong) {
      mbarrier_wait(smem.order_barrier(turn), order_parity);
      order_parity ^= 1;
    }
    const int image = kUnaligned && kPlanes ? tile / args.image_tiles : 0;
    mainloop(args, smem, work, state, image, accum, smem.order_barrier(turn ^ 1));
    if (kPingPong) state.skip(work.steps, smem.stages);
    if (!kTransposed && !args.plain) apply_alpha_bias(args, work.column, accum);
    store_tile(args, work, tile, staging, buffer, accum);
  }
  if (lane == 0) tma_store_wait_read<0>();
}
#endif

// Calls each(index, fragment, fragment_row, row, column) for this thread's part of the owned fragments: eight
// consecutive columns of rows `row` and row + kRowStep of the tile. `index` numbers the parts within the block.
template <class Each>
__device__ __forceinline__ void for_each_owned(const Reduce& reduce, Each each) {
  const int warp = threadIdx.x / 32;
#pragma unroll 1
  for (int i = threadIdx.x & 31; i < reduce.fragment_count() * 8; i += 32) {
    const int row = i & 7, fragment = i >> 3, f = reduce.first_fragment() + fragment;
    each(warp * reduce.fragment_count() * 8 + i, fragment, row,
         warp / 4 * kWarpgroupRows + f / kFragmentsN * 64 + fragment_row(warp % 4, row), f % kFragmentsN * 8);
  }
}

// Adds a thread's partial sums of `count` clusters, in order.
__device__ __forceinline__ void sum_partials(const float4* from, int count, float (&accum)[2][8]) {
#pragma unroll
  for (int e = 0; e < 16; ++e) accum[e / 8][e % 8] = 0;
#pragma unroll 4
  for (int p = 0; p < count; ++p, from += BM * BN / 4) {
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const float4 four = __ldcg(from + q);
      float(&to)[8] = accum[q / 2];
      const int e = q % 2 * 4;
      to[e] += four.x, to[e + 1] += four.y, to[e + 2] += four.z, to[e + 3] += four.w;
    }
  }
}

// Finishes and stores the fragments that this block owns of the tile at (row, column): from shared memory, or
// from the partial sums of all clusters.
__device__ __forceinline__ void store_reduced(const PointwiseGemmArgs& args, int row, int column,
                                              const Reduce& reduce, const float4* partials) {
  const bool fast = args.plain && args.result_in_vectors && !args.wide_result;
  const OutputPointer<T> result{static_cast<char*>(args.result), false};
  for_each_owned(reduce, [&](int i, int fragment, int in, int r, int c) {
    float sums[2][8];
    if (partials == nullptr) {
      reduce.load_rows(fragment, in, sums);
    } else {
      sum_partials(partials + i * 4, args.parts, sums);
    }
    if (kMixesColumns) c = c / 16 * 16 + c / 8 % 2;
    const int columns_left = args.columns - column - c, left = kMixesColumns ? (columns_left + 1) / 2 : columns_left;
    if (left <= 0) return;
    i64 to = (row + r) * args.row_stride + (column + c) * args.column_stride;
    if (fast && left >= 8) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (row + r + half * kRowStep < args.rows) result.store_vector(to, sums[half]);
        to += kRowStep * args.row_stride;
      }
      return;
    }
#pragma unroll 1
    for (int half = 0; half < 2; ++half, to += kRowStep * args.row_stride) {
      if (row + r + half * kRowStep >= args.rows) continue;
      float own[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) own[e] = half == 0 ? sums[0][e] : sums[1][e];
      store_run<T, 8>(args, to, kMixesColumns ? 2 * args.column_stride : args.column_stride, left, column + c, own);
    }
  });
}

__device__ __forceinline__ void consume_split_k(const PointwiseGemmArgs& args, const SharedLayout& smem,
                                              const BlockWork& work, const Reduce& reduce, int rank) {
  Accumulators accum;
  PipelineState state;
  mainloop(args, smem, work, state, 0, accum);
  // Not before the mainloop: initialised registers would make each wgmma wait for the one before.
  if (work.steps == 0) clear(accum);
  cluster_wait();
  reduce.exchange(accum);
  // Split among clusters: the last block of each rank to arrive reduces its part of the tile.
  float4* partials = nullptr;
  if (args.parts > 1) {
    const i64 tile = static_cast<i64>(blockIdx.z) * gridDim.y + blockIdx.y;
    const int part = blockIdx.x / args.cluster;
    partials = reinterpret_cast<float4*>(args.partials + tile * args.parts * (BM * BN) +
                                         reduce.first_fragment() * (CONSUMERS * 4 * 128));
    float4* const own = partials + static_cast<i64>(part) * (BM * BN / 4);
    for_each_owned(reduce, [&](int i, int fragment, int in, int, int) {
      float sums[2][8];
      reduce.load_rows(fragment, in, sums);
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const float* const four = sums[q / 2] + q % 2 * 4;
        own[i * 4 + q] = {four[0], four[1], four[2], four[3]};
      }
    });
    named_barrier_sync(1, kConsumers);
    u32* const arrived = reinterpret_cast<u32*>(smem.pointer(smem.reduce_barrier() + 8));
    if (threadIdx.x == 0) {
      // Fences for all threads, which synchronise with this one before and after.
      __threadfence();
      *arrived = atomicInc(args.counters + tile * args.cluster + rank, args.parts - 1);
      __threadfence();
    }
    named_barrier_sync(1, kConsumers);
    if (*arrived != static_cast<u32>(args.parts) - 1) return;
  }
  store_reduced(args, work.row * BM, work.column, reduce, partials);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    pointwise_gemm(const __grid_constant__ PointwiseGemmArgs args) {
  extern __shared__ uint4 shared[];
  const u32 base = shared_address(shared), padding = align_to_swizzle_atom(base) - base;
  SharedLayout smem;
  smem.stage0 = base + padding;
  smem.base = reinterpret_cast<char*>(shared) + padding;
  smem.stages = args.stages;
  if constexpr (kMulticast) smem.sharing = args.cluster;
  smem.resident = align_to_swizzle_atom(smem.stage0 + args.stages * kStageBytes);
  smem.staging =
      align_to_swizzle_atom(smem.resident + (RESIDENT ? args.steps * OperandB::kBytes : 0));
  const u32 rank = kClusterSplit ? cluster_rank() : 0;
  smem.barriers = smem.staging + (kClusterSplit ? args.cluster * args.owned * CONSUMERS * 4 * 512
                                  : kGridSplit  ? kGridReduceBytes
                                                : kAllStagingBytes);
  const BlockWork work(args);
  const int warp = threadIdx.x / 32;
  if (kUnaligned && warp >= kProducerA) {
    load_unaligned(args, smem, work);
  } else if (kShifted && warp >= kProducerA + kProducers / 32) {
    align_planes(args, smem, work);
  } else if (kShifted && warp == kProducerB + 1) {
    // What is not shifted is loaded by one warp.
    if constexpr (kShiftsA) {
      produce<OperandA, ShiftedA, true>(args, smem, work, 1);
    } else {
      sync_block();
    }
  } else if (kShifted && warp == kProducerB + 2) {
    produce<OperandB, ShiftedB, false>(args, smem, work, 1);
  } else if (warp == kProducerA) {
    produce<OperandA, ShiftedA, true>(args, smem, work, 0);
  } else if (warp == kProducerB) {
    if constexpr (RESIDENT) {
      sync_block();
    } else {
      produce<OperandB, ShiftedB, false>(args, smem, work, 0);
    }
  } else {
    const Reduce reduce(smem.pointer(smem.staging), smem.reduce_barrier(), rank, kClusterSplit ? args.cluster : 1,
                        args.owned);
    if (threadIdx.x == 0) {
      if (kClusterSplit) reduce.prepare();
      if (!REDUCE && !kUnaligned) prefetch_tensor_map(args.d_map);
    }
    sync_block();
    launch_dependent_grids();
    wait_on_dependent_grids();
    if constexpr (kClusterSplit) {
      consume_split_k(args, smem, work, reduce, rank);
    } else if constexpr (kGridSplit) {
      u32* const word = args.counters + blockIdx.x;
      if (threadIdx.x == 0) rendezvous_begin(word);
      const GridReduction reduction(args, work);
      Accumulators accum;
      PipelineState state;
      mainloop(args, smem, work, state, 0, accum);
      reduce_in_grid(args, smem, work, reduction, word, accum);
    } else {
#if !REDUCE
      consume_row_tiles(args, smem, work);
#endif
    }
  }
  leave_cluster();
}
