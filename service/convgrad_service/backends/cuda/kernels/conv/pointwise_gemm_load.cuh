// The tile shapes, shared-memory layout, work distribution and producer warps of pointwise_gemm.cu.
#pragma once

#include "conv/pointwise_gemm.cuh"
#include "conv/pointwise_gemm_shift.cuh"
#include "conv/pointwise_gemm_unaligned.cuh"
#include "conv/tf32_products.cuh"
#include "core/result_run.cuh"
#include "core/split_k_reduce.cuh"
#include "core/staging.cuh"

using namespace convgrad;

namespace {

using T = ELEMENT;
// Whether K is pixels of planes, one per row of A and of B, of several images. No k-tile spans two images.
constexpr bool kImages = IMAGES != 0;
using OperandA = GemmOperand<T, A_MN != 0, A_BYTES, BM, DEPTH, kImages>;
using OperandB = GemmOperand<T, B_MN != 0, B_BYTES, BN, DEPTH, kImages>;
// Whether two warpgroups take alternate tiles, so that one's epilogue overlaps the other's mainloop.
constexpr bool kPingPong = PINGPONG != 0;
constexpr int kWarpgroupRows = BM / (kPingPong ? 1 : CONSUMERS), kMmasM = kWarpgroupRows / 64, kFragmentsN = BN / 8;
// Rows from one warpgroup's part of a tile to the next one's, and the warps that read a stage.
constexpr int kNextRows = kPingPong ? 0 : kWarpgroupRows, kTileWarps = kPingPong ? 4 : CONSUMERS * 4;
// Whether planes do not start at multiples of 16 bytes; other warps then align what the producers copy.
constexpr bool kShifted = SHIFTED != 0, kShiftsA = kShifted && kImages;
static_assert(!kShifted || (sizeof(T) == 2 && (kImages || (PLANES && TRANSPOSED))), "operands that can be shifted");
// Of planes, pixels are along K or along N.
constexpr int kPixelBoxes = kShifted ? (kImages ? DEPTH / 64 : BN / kBoxPixels) : 1;
constexpr int kPixelChunks = kShifted ? (kImages ? DEPTH : BN) / 8 : 8;
static_assert(!kShifted || kImages || BN % kBoxPixels == 0, "whole boxes");
using ShiftedA = ShiftedPlanes<T, kShiftsA ? BM : 64, kPixelBoxes, kPixelChunks>;
using ShiftedB = ShiftedPlanes<T, kShifted ? (kImages ? BN : DEPTH) : 64, kPixelBoxes, kPixelChunks>;
// Pixels of an image in a k-tile (IMAGES).
constexpr int kTilePixels = kShifted ? kPixelBoxes * kBoxPixels : DEPTH;
// Whether rows of A or B do not start at multiples of 16 bytes, and whether some are an odd number of elements.
constexpr bool kUnaligned = UNALIGNED != 0, kStraddles = UNALIGNED == 2;
using UnalignedA = UnalignedRows<T, A_MN != 0, kUnaligned ? (A_MN ? DEPTH : BM) : 8, kUnaligned ? (A_MN ? BM : DEPTH) : 16>;
using UnalignedB = UnalignedRows<T, B_MN != 0, kUnaligned ? (B_MN ? DEPTH : BN) : 8, kUnaligned ? (B_MN ? BN : DEPTH) : 16>;
static_assert(!kUnaligned || !(sizeof(T) != 2 || kShifted || RESIDENT || MULTICAST || PINGPONG || PLANES != TRANSPOSED),
              "ways to load unaligned rows");
// Warps that load an operand, of which two share what is shifted, and threads that align it, or load unaligned rows.
constexpr int kParts = kShifted ? 2 : 1, kProducers = kUnaligned ? 0 : kParts * 64;
constexpr int kAligners = kShifted || kUnaligned ? 128 : 0;
constexpr int kConsumers = CONSUMERS * 128, kThreads = kConsumers + kProducers + kAligners;
constexpr int kProducerA = CONSUMERS * 4, kProducerB = kProducerA + 1;
// A stage: operands as wgmma reads them, then as they were copied where they are shifted.
constexpr u32 kABytes = kUnaligned ? UnalignedA::kBytes : OperandA::kBytes;
constexpr u32 kOperandBytes = kABytes + (RESIDENT ? 0 : kUnaligned ? UnalignedB::kBytes : OperandB::kBytes);
constexpr u32 kShiftedABytes = kShiftsA ? ShiftedA::kBytes : 0;
constexpr u32 kShiftedBytes = kShiftedABytes + (kShifted ? ShiftedB::kBytes : 0);
constexpr u32 kStageBytes = kOperandBytes + kShiftedBytes;
static_assert(!kShifted || kOperandBytes % 1024 == 0, "swizzle atoms");
// Whether the result's columns are contiguous; blocks then are persistent over N.
constexpr bool kTransposed = TRANSPOSED != 0;
// Whether rows (TRANSPOSED: columns) are pixels of planes, one per element of K and per column (row) of the result, of
// several images.
constexpr bool kPlanes = PLANES != 0;
// Whether columns of the result are stored, whose rows are contiguous.
constexpr bool kStoresColumns = kTransposed != kPlanes;
// Staging buffer of a warp's 16 rows and STORED columns: boxes of D_BYTES per row, swizzled by that width (0: one
// box). Where columns are stored, of a warpgroup's 64 rows: one box of 128 bytes per column.
constexpr int kStoredColumns = STORED;
constexpr u32 kStagingBytes = (kStoresColumns ? 64 : 16) * kStoredColumns * sizeof(T);
// Staging buffers of a warp, or of a warpgroup that stores columns.
constexpr int kStagingBuffers = BUFFERS;
constexpr u32 kAllStagingBytes = IN_TF32 ? 0 : kStagingBuffers * kStagingBytes * CONSUMERS * (kStoresColumns ? 1 : 4);
constexpr int kBoxColumns = D_BYTES && !kStoresColumns ? D_BYTES / static_cast<int>(sizeof(T)) : kStoredColumns;
constexpr u32 kBoxBytes = 16 * kBoxColumns * sizeof(T);
static_assert(BN % kStoredColumns == 0 && kStoredColumns % kBoxColumns == 0, "whole blocks");
using Accumulators = float[kMmasM][kFragmentsN][4];
using Reduce = SplitKReduce<kMmasM * kFragmentsN, CONSUMERS * 4>;
// How a tile's K is split: among the blocks of clusters, or of the grid.
constexpr bool kClusterSplit = REDUCE == 1, kGridSplit = REDUCE == 2;
// Whether the blocks of a cluster, whose tiles have the same columns (transposed: rows), share that operand.
constexpr bool kMulticast = MULTICAST != 0;
static_assert(!kMulticast || !(kClusterSplit || RESIDENT), "operands that all blocks load");
// Of float32: whether products are mma.sync's, as neither operand has K contiguous; or wgmma's with A in registers, as
// B has (tf32_products.cuh).
constexpr bool kTf32 = IN_TF32 != 0, kMmaSync = kTf32 && A_MN && B_MN, kRegistersA = kTf32 && A_MN && !B_MN;
static_assert(kTf32 == (sizeof(T) == 4), "float32 is multiplied as TF32");
// Whether each 16 columns (rows) of a tile are in the order of UnalignedProducts.
constexpr bool kMixesColumns = kUnaligned && B_MN, kMixesRows = kUnaligned && A_MN;
static_assert(!kTf32 || !((A_MN && A_BYTES != 128) || (kMmaSync && !REDUCE) || RESIDENT || PINGPONG), "of float32");

// Of the two rows that a lane has of a fragment: the first one, in its 64 rows, and how far the second one is from it.
constexpr int kRowStep = kMixesRows || kRegistersA ? 1 : 8;
__device__ __forceinline__ int fragment_row(int warp, int group) {
  if constexpr (kRegistersA) return Tf32Rows<DEPTH>::row(warp, group);
  return warp * 16 + (kMixesRows ? group * 2 : group);
}

// Swizzle atoms of 128-byte rows start at multiples of 1,024.
__device__ __forceinline__ u32 align_to_swizzle_atom(u32 address) { return (address + 1023) & ~1023u; }

// Shared-memory addresses.
struct SharedLayout {
  u32 stage0, resident, staging, barriers;
  char* base;  // `stage0` as a pointer
  int stages, sharing;  // blocks that share an operand

  __device__ __forceinline__ char* pointer(u32 address) const { return base + (address - stage0); }

  __device__ __forceinline__ u32 a(int stage) const { return stage0 + stage * kStageBytes; }
  __device__ __forceinline__ u32 b(int stage) const { return a(stage) + kABytes; }
  __device__ __forceinline__ u32 full_barrier(int stage) const { return barriers + stage * 8; }
  __device__ __forceinline__ u32 empty_barrier(int stage) const { return barriers + (stages + stage) * 8; }
  __device__ __forceinline__ u32 reduce_barrier() const { return barriers + 2 * stages * 8; }
  // Of what is copied, to be aligned.
  __device__ __forceinline__ u32 shifted_a(int stage) const { return a(stage) + kOperandBytes; }
  __device__ __forceinline__ u32 shifted_b(int stage) const { return shifted_a(stage) + kShiftedABytes; }
  __device__ __forceinline__ u32 copied_barrier(int stage) const { return reduce_barrier() + 16 + stage * 8; }
  __device__ __forceinline__ u32 aligned_barrier(int stage) const { return copied_barrier(stages + stage); }
  // Of two warpgroups that take alternate tiles: completed when the other one has issued its tile's wgmmas.
  __device__ __forceinline__ u32 order_barrier(int warpgroup) const { return reduce_barrier() + warpgroup * 8; }
  // By `sharing` lanes of each warp whose wgmmas have read a stage: frees it for the blocks that load it.
  __device__ __forceinline__ void release(int stage, int lane) const {
    if constexpr (kMulticast) {
      mbarrier_arrive_cluster(empty_barrier(stage), lane);
    } else {
      mbarrier_arrive(empty_barrier(stage));
    }
  }
};

// The work of this block: row tiles row, row + row_step, ... of one column tile, and `steps` k-tiles: begin,
// begin + k_step, ... Where transposed, `row` counts column tiles, and `column` is the first row of the rows' tile.
struct BlockWork {
  int row, row_step, column, begin, steps, k_step = 1;
  int image_tiles;  // of planes: row tiles of an image
  int rank = 0;     // among the blocks that share an operand

  __device__ __forceinline__ explicit BlockWork(const PointwiseGemmArgs& args) {
    column = blockIdx.y * BN;
    if constexpr (kMulticast) rank = cluster_rank();
    if constexpr (kGridSplit) {
      // Blocks of one share are neighbours and read the same rows and columns at the same time; shares
      // take k-tiles in turns, so that all blocks read adjacent memory.
      const int column_tile = blockIdx.x / args.row_tiles;
      row = blockIdx.x - column_tile * args.row_tiles, row_step = args.row_tiles;
      column = column_tile * BN;
      begin = blockIdx.y, k_step = args.parts;
      steps = (args.steps - begin + k_step - 1) / k_step;
    } else if constexpr (kClusterSplit) {
      row = blockIdx.z, row_step = args.row_tiles;
      begin = blockIdx.x * args.steps_each;
      steps = max(min(args.steps_each, args.steps - begin), 0);
    } else {
      row = blockIdx.x, row_step = gridDim.x;
      if (kPlanes) image_tiles = args.image_tiles;
      if (kTransposed) column = blockIdx.y * BM;
      begin = 0, steps = args.steps;
    }
  }
  // Blocks that share an operand have equally many row tiles: the last may lie beyond the result.
  __device__ __forceinline__ int row_end(const PointwiseGemmArgs& args) const {
    return kMulticast && !kGridSplit ? args.row_tiles + rank : args.row_tiles;
  }
};

// Where K is the pixels of several images: the image of a k-tile, and its k-tile. Steps without dividing.
struct ImageStep {
  int image, k_tile;

  __device__ __forceinline__ ImageStep(int step, int tiles) : image(step / tiles), k_tile(step - image * tiles) {}
  __device__ __forceinline__ void add(const ImageStep& other, int tiles) {
    image += other.image, k_tile += other.k_tile;
    if (k_tile >= tiles) k_tile -= tiles, ++image;
  }
};

// The producer of one operand: one thread loads k-tile after k-tile. The blocks that share the operand take
// turns to load one for all.
template <class Side, class Shifted, bool kRows>
struct Producer {
  const TensorMap& map;
  const BlockWork& work;
  const int row_tiles, single_copy, image_tiles;
  int row, step = 0;
  // With IMAGES: the first k-tile, what leads from one to the next, and the next.
  const ImageStep first, each;
  ImageStep at;
  PipelineState state{1};
  int turn = 0;
  const int part, together, pixels_stride;
  static constexpr bool kShifts = kRows ? kShiftsA : kShifted;
  static constexpr bool kShared = kMulticast && kRows == kTransposed;

  __device__ __forceinline__ Producer(const PointwiseGemmArgs& args, const BlockWork& work, int part)
      : map(kRows ? args.a_map : args.b_map),
        work(work),
        row_tiles(kMulticast ? work.row_end(args) : args.row_tiles),
        single_copy(kRows ? args.a_whole : args.b_whole),
        image_tiles(kImages ? args.image_tiles : 1),
        row(work.row),
        first(kImages ? work.begin : 0, image_tiles),
        each(kImages ? work.k_step : 0, image_tiles),
        at(first),
        part(part),
        together(kShifts ? args.together : 1),
        pixels_stride(kRows ? args.a_channel : args.b_channel) {}
  // Completes when the next stage may be overwritten.
  __device__ __forceinline__ u32 free_barrier(const SharedLayout& smem) const {
    return kShifts ? smem.aligned_barrier(state.index) : smem.empty_barrier(state.index);
  }
  __device__ __forceinline__ bool has_next() const { return row < row_tiles && work.steps > 0; }
  __device__ __forceinline__ void next(const SharedLayout& smem) {
    const u32 to = kShifts ? (kRows ? smem.shifted_a(state.index) : smem.shifted_b(state.index))
                           : (kRows ? smem.a(state.index) : smem.b(state.index));
    const u32 barrier = kShifts ? smem.copied_barrier(state.index) : smem.full_barrier(state.index);
    if (!kShifts) mbarrier_arrive_expect_tx(barrier, Side::kBytes);
    const int k_tile = work.begin + step * (kGridSplit ? work.k_step : 1);
    constexpr int kExtent = kRows ? BM : BN;
    if constexpr (kShifts && kImages) {
      Shifted::template load<kParts>(to, map, barrier, part, together, pixels_stride, kRows ? row * kExtent : work.column,
                                     at.k_tile * kTilePixels, at.image);
      at.add(each, image_tiles);
    } else if constexpr (kShifts) {
      const int image = row / work.image_tiles;
      Shifted::template load<kParts>(to, map, barrier, part, together, pixels_stride, k_tile * DEPTH,
                                     (row - image * work.image_tiles) * kExtent, image);
    } else if constexpr (kImages) {
      Side::load(to, map, barrier, kRows ? row * kExtent : work.column, at.k_tile, 0, at.image);
      at.add(each, image_tiles);
    } else if constexpr (kPlanes && kRows != kTransposed) {
      const int image = row / work.image_tiles;
      Side::load(to, map, barrier, (row - image * work.image_tiles) * kExtent, k_tile, 0, image);
    } else if constexpr (kShared) {
      if (turn == work.rank) {
        Side::template load<true>(to, map, barrier, work.column, k_tile, single_copy, 0, (1u << smem.sharing) - 1);
      }
      if (++turn == smem.sharing) turn = 0;
    } else {
      Side::load(to, map, barrier, kRows != kTransposed ? row * kExtent : work.column, k_tile, single_copy);
    }
    if (++step == work.steps) step = 0, row += work.row_step, at = first;
    state.advance(smem.stages);
  }
};

// All threads of the block (and cluster), between the initialisation of the mbarriers and their use.
__device__ __forceinline__ void sync_block() {
  __syncwarp();
  if constexpr (kMulticast) {
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }
  if (kClusterSplit) cluster_arrive();
}

// All threads, last: other blocks have no more use for this one's mbarriers.
__device__ __forceinline__ void leave_cluster() {
  if constexpr (kMulticast) {
    __syncwarp();
    cluster_arrive();
    cluster_wait();
  }
}

// A producer warp. A's initialises the pipeline's mbarriers and issues its first load before the block
// synchronises.
template <class Side, class Shifted, bool kRows>
__device__ __forceinline__ void produce(const PointwiseGemmArgs& args, const SharedLayout& smem,
                                        const BlockWork& work, int part) {
  Producer<Side, Shifted, kRows> producer(args, work, part);
  const bool elected = elect_one();
  if (elected) {
    if (kRows && part == 0) {
      constexpr int kCopied = RESIDENT || kShifted ? 1 : 2;
      for (int i = 0; i < smem.stages; ++i) {
        mbarrier_init(smem.full_barrier(i), kShiftsA ? kAligners / 32 : kCopied + kAligners / 32);
        if constexpr (kShifted) {
          mbarrier_init(smem.copied_barrier(i), kShiftsA ? 2 * kParts : kParts);
          mbarrier_init(smem.aligned_barrier(i), kAligners / 32);
        }
        mbarrier_init(smem.empty_barrier(i), (kMulticast ? smem.sharing : 1) * kTileWarps);
      }
      for (int i = 0; kPingPong && i < CONSUMERS; ++i) mbarrier_init(smem.order_barrier(i), kTileWarps);
      fence_mbarrier_init();
      fence_proxy_async();
    } else {
      prefetch_tensor_map(args.b_map);
    }
    wait_on_dependent_grids();
    if (kRows && part == 0 && !producer.kShared && producer.has_next()) producer.next(smem);
  }
  sync_block();
  if (elected) {
#pragma unroll 1
    while (producer.has_next()) {
      mbarrier_wait(producer.free_barrier(smem), producer.state.parity);
      producer.next(smem);
    }
  }
  __syncwarp();
  if (kClusterSplit) cluster_wait();
}

// The warps that load both operands of unaligned rows. The first thread initialises the pipeline's mbarriers.
__device__ __forceinline__ void load_unaligned(const PointwiseGemmArgs& args, const SharedLayout& smem,
                                               const BlockWork& work) {
  const int thread = threadIdx.x - kConsumers;
  if (thread == 0) {
    for (int i = 0; i < smem.stages; ++i) {
      mbarrier_init(smem.full_barrier(i), kAligners);
      mbarrier_init(smem.empty_barrier(i), kTileWarps);
    }
    fence_mbarrier_init();
  }
  sync_block();
  wait_on_dependent_grids();
  PipelineState state{1};
  const T* const a = static_cast<const T*>(args.a);
  const T* const b = static_cast<const T*>(args.b);
  const int rows = args.rows, columns = PLANES ? args.pixels : args.columns, depth = IMAGES ? args.pixels : args.depth;
  const int image_tiles = kImages ? args.image_tiles : 1;
  const ImageStep first(kImages ? work.begin : 0, image_tiles), each(kImages ? work.k_step : 0, image_tiles);
#pragma unroll 1
  for (int tile = work.row; tile < work.row_end(args); tile += work.row_step) {
    const int image = PLANES ? tile / work.image_tiles : 0, in_image = tile - image * (PLANES ? work.image_tiles : 0);
    const int m = PLANES ? work.column : tile * BM, n = PLANES ? in_image * BN : work.column;
    ImageStep at = first;
#pragma unroll 1
    for (int step = 0; step < work.steps; ++step) {
      const int k = (kImages ? at.k_tile : work.begin + step * work.k_step) * DEPTH;
      const i64 of_a = kImages ? at.image * args.a_image : 0;
      const i64 of_b = kImages ? at.image * args.b_image : PLANES ? image * args.b_image : 0;
      mbarrier_wait(smem.empty_barrier(state.index), state.parity);
      UnalignedA::load<kAligners>(smem.a(state.index), a, of_a, args.a_channel, A_MN ? k : m, A_MN ? depth : rows,
                                  A_MN ? m : k, A_MN ? rows : depth, thread);
      UnalignedB::load<kAligners>(smem.b(state.index), b, of_b, args.b_channel, B_MN ? k : n, B_MN ? depth : columns,
                                  B_MN ? n : k, B_MN ? columns : depth, thread);
      mbarrier_arrive_after_copies(smem.full_barrier(state.index));
      at.add(each, image_tiles);
      state.advance(smem.stages);
    }
  }
  if (kClusterSplit) cluster_wait();
}

// A warp that aligns what the producers copied (SHIFTED).
__device__ __forceinline__ void align_planes(const PointwiseGemmArgs& args, const SharedLayout& smem,
                                             const BlockWork& work) {
  const int thread = threadIdx.x - kConsumers - kProducers;
  const int image_tiles = kImages ? args.image_tiles : 1;
  const ImageStep first(kImages ? work.begin : 0, image_tiles), each(kImages ? work.k_step : 0, image_tiles);
  PipelineState state;
  sync_block();
#pragma unroll 1
  for (int row = work.row; row < work.row_end(args); row += work.row_step) {
    ImageStep at = first;
#pragma unroll 1
    for (int step = 0; step < work.steps; ++step) {
      mbarrier_wait(smem.copied_barrier(state.index), state.parity);
      mbarrier_wait(smem.empty_barrier(state.index), state.parity ^ 1);
      // Pixels beyond those of an image: zeros along K, unused along N.
      const int pixels = kImages ? args.pixels - at.k_tile * kTilePixels : BN;
      if constexpr (kShiftsA) {
        ShiftedA::align<kAligners>(smem.shifted_a(state.index), smem.a(state.index), args.together,
                                   args.a_channel, pixels, thread);
      }
      ShiftedB::align<kAligners>(smem.shifted_b(state.index), smem.b(state.index), args.together,
                                 args.b_channel, pixels, thread);
      fence_proxy_async();
      __syncwarp();
      if (thread % 32 == 0) {
        mbarrier_arrive(smem.aligned_barrier(state.index));
        mbarrier_arrive(smem.full_barrier(state.index));
      }
      at.add(each, image_tiles);
      state.advance(smem.stages);
    }
  }
  if (kClusterSplit) cluster_wait();
}

}  // namespace
