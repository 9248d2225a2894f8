// wgrad of a dense convolution on Hopper, as an implicit GEMM (TMA im2col, wgmma). Launched by
// hopper_weight.py. Needs sm_90a.
//
// Of each group: M = channels of grad_output (y), N = taps x input channels, K = pixels of y:
//   w[k, c, r] = sum over pixels (n, o) of y[n, k, o] * x[n, c, o*stride + r*dilation - pad].
// A k-tile is 64 pixels: boxes of 64 channels of y, and boxes of CHANNELS channels of x, each of one tap or of
// `shared_taps` adjacent taps along W, which read the same box `dilation` rows apart. For the latter, rows
// of y are extended by `halo` zero pixels, so that consecutive pixels are adjacent along W for each tap.
// Both operands are MN-major, as in global memory; float32 is multiplied as TF32 by mma.sync
// (tf32_products.cuh), in boxes of 32 channels and k-tiles of 32 pixels. With PLANES they are K-major: 16-bit, or float32 as TF32 with
// k-tiles of 32 pixels. A row of y then has the pixels (w, n) of `batch` images, n the fastest, for each channel,
// padded by `halo`, and boxes are 128 bytes of a row by channels. Rows of x are the same for positions w with one
// remainder by stride[2] each, of which dilation[1], stride[1] and pad[1] count `stride[2]` for each row of the
// input. Planes of 1x1 kernels, channels first, are such rows of one image, with images in place of rows.
//
// With PARTS, operands are float32 as so many bfloat16 parts (float_parts.cu). A stage has all parts of its 32 pixels,
// and products of parts are summed from the smallest to the largest. Those of three parts (float32 accuracy) are
// summed on the tensor cores, which truncate, over one k-tile only, and then in float32.
//
// Grid: a work unit is a tile, or a share of a tile's pixels; a block takes units blockIdx.x, + gridDim.x, ...
// Block: four producer threads and WARPGROUPS consumer warpgroups, each with 64 * ROWS rows and all columns of
//   the tile, or with SPREAD all 64 * ROWS rows and PRODUCTS x COLUMNS of the columns.
// Cluster: SUMS blocks with shares of one tile, one unit each, reduce it through distributed shared memory
//   (hopper_weight_cluster_reduce.cuh); CLUSTER / SUMS blocks with neighbouring tiles of one share load
//   their common boxes by multicast, a part each.
// Results: sums of a whole tile are final; others are partial sums. If a block has at most one of these, its
//   last unit, a tile's blocks reduce them (`met`, hopper_weight_grid_reduce.cuh); else
//   hopper_weight_sum.cu does.
// Shared memory (dynamic): 1,024 bytes of alignment; `stages` k-tiles; counted by hopper_weight_tiles.py.
// Preconditions: channels that TMA can read (rows of whole 16 bytes). For whole tiles, a plain result with
//   contiguous channels, aligned to eight of them (float32: two). Positions outside the input, and beyond a
//   row of y, are zeros.
// Determinism: one order of additions per result and number of shares.
// Limits: pixels, with the halo, below 2^31; 64-bit elements and results.
#include "conv/hopper_weight_cluster_reduce.cuh"
#include "conv/hopper_weight_copies.cuh"
#include "conv/hopper_weight_grid_reduce.cuh"
#include "conv/tf32_products.cuh"
#include "core/opaque.cuh"
#include "core/split_floats.cuh"
#include "ptx/warpgroup.cuh"

using namespace convgrad;

namespace {

// Boxes of y of 64 rows.
constexpr int kYBoxesEach = 64 / kYChannels;
using Layout = Step<kYBoxesEach * (SPREAD ? ROWS : ROWS * WARPGROUPS), kYChannels, sizeof(T)>;
constexpr int kRowBytes = CHANNELS * static_cast<int>(sizeof(T));  // bytes of a pixel in a box of x
constexpr Major kMajor = PLANES || sizeof(T) == 4 ? kMajorK : kMajorMn;
// K of one wgmma, and the distances to the next one's operands.
constexpr int kMmaK = 32 / static_cast<int>(sizeof(T));
constexpr u32 kNextA = PLANES ? 32 : kMmaK * 128, kNextB = PLANES ? 32 : kMmaK * kRowBytes;
constexpr int kFragments = COLUMNS / 8, kBlocks = COLUMNS / CHANNELS;
constexpr int kMaxBoxes = kBlocks * PRODUCTS * (SPREAD ? WARPGROUPS : 1);
constexpr int kProducers = 4, kMaxCopied = (Layout::kYBoxes + kMaxBoxes + kProducers - 1) / kProducers;
constexpr int kThreads = (WARPGROUPS + 1) * 128;
constexpr int kArgumentWords = (sizeof(HopperWeightArgs) - sizeof(TensorMap) * 2 * PARTS) / 4 - 1;
// The two roles of clusters: multicast of common boxes, and the reduction of shares of one tile.
constexpr int kLoadSharing = CLUSTER / SUMS;
constexpr bool kReduces = SUMS > 1, kMulticasts = kLoadSharing > 1;
// The products of parts, of y and of x, the smallest first.
constexpr int kPairs = PARTS * (PARTS + 1) / 2;
constexpr int kPairsOf[6][2] = {{0, 2}, {2, 0}, {1, 1}, {0, 1}, {1, 0}, {0, 0}};
constexpr bool kPromotes = PARTS == 3;
static_assert(PARTS == 1 || (!kMulticasts && !PLANES && PARTS <= 3), "of parts");
static_assert(!kMmaSync || (PRODUCTS == 1 && CHANNELS == 32), "of float32");
using Sums = ClusterReduction<SUMS, kLoadSharing, ROWS, PRODUCTS, kFragments>;

}  // namespace

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(kThreads, 1)
    hopper_weight(const __grid_constant__ HopperWeightArgs args) {
  extern __shared__ uint4 shared[];
  __shared__ u64 barriers[2 * kMaxStages + (kReduces ? Sums::kMaxQuads : 0)];
  __shared__ LoadedBox loaded_boxes[kProducers][kMaxCopied];  // per producer thread
  const int thread = threadIdx.x, warpgroup = thread / 128, warp = thread / 32, lane = thread & 31;
  const WeightResult& of = args.result;
  // Each warp prefetches a part of the kernel parameters into the constant cache.
  const int prefetched = reinterpret_cast<const int*>(&of)[min(warp * 16, kArgumentWords)];
  const u32 padding = -shared_address(shared) & 1023;
  char* const base = reinterpret_cast<char*>(shared) + padding;
  const u32 full = shared_address(barriers);
  Pipeline pipeline = {shared_address(base), static_cast<u32>(args.stage_bytes), full,
               full + kMaxStages * 8, args.stages};
  if (thread < args.stages) {
    mbarrier_init(pipeline.full_barrier(thread), 1);
    mbarrier_init(pipeline.empty_barrier(thread), WARPGROUPS * 4 * kLoadSharing);
    fence_mbarrier_init();
  }
  // This block's index among those that load together, and among those that reduce together.
  const int block = CLUSTER > 1 ? cluster_rank() : 0;
  const int load_rank = kReduces ? block % kLoadSharing : block,
            reduce_rank = kReduces ? block / kLoadSharing : 0;
  const int first_load_rank = block - load_rank;
  const u32 reduce_barriers = full + 2 * kMaxStages * 8;  // mbarriers of the cluster's reduction
  if (kReduces && thread == 0) {
    for (int i = 0; i < Sums::kMaxQuads; ++i) mbarrier_init(reduce_barriers + i * 8, 1);
    fence_mbarrier_init();
    for (int i = 0; i < Sums::kMaxQuads; ++i) {
      mbarrier_arrive_expect_tx(reduce_barriers + i * 8, Sums::kQuadBytes * (SUMS - 1));
    }
  }
  if (thread == WARPGROUPS * 128) {
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      prefetch_tensor_map(args.x_map[part]), prefetch_tensor_map(args.y_map[part]);
    }
  }
  __shared__ Box boxes[2][kMaxBoxes];  // for the tiles of this unit and of the previous one
  opaque_use(prefetched);
  if (kMulticasts) {
    // Their mbarriers are initialised.
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }
  launch_dependent_grids();
  wait_on_dependent_grids();
  const int steps = steps_of(args);
  const int units =
      (of.whole + (of.row_tiles * of.column_tiles - of.whole) * of.shares) / kLoadSharing;
  auto unit_of = [&](int index) {
    if (!kReduces) return unit_at(of, index, steps, kLoadSharing, load_rank);
    return cluster_unit_at(of, index, steps, SUMS, reduce_rank, kLoadSharing, load_rank);
  };
  const int unit_step = gridDim.x / CLUSTER;
  // In this order the producers' code comes first and is fetched sooner.
  if (warpgroup < WARPGROUPS) {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    const bool shares_box = of.shared_taps > 1;
    const u32 next_box = shares_box ? args.source.dilation[2] * kRowBytes : args.box_bytes;
    const int boxes_each = shares_box ? 1 : kBlocks;  // boxes of one product
    const int own_box = SPREAD ? warpgroup * PRODUCTS * boxes_each : 0;
    const int own_row = SPREAD ? 0 : warpgroup * ROWS;
    const u32 part_bytes = args.stage_bytes / PARTS;
    const Tf32Products<ROWS, kFragments, kPixels> by_mma(thread);
    // Here and not among the units, or the compiler no longer sees that the stage index is uniform in a
    // warp, and wgmmas wait for single threads' registers.
    auto last_unit = [&]() {
      int last = opaque_value(blockIdx.x) / CLUSTER;
      while (last + unit_step < units) last += unit_step;
      return unit_of(last);
    };
    const bool reduces_in_grid = !kReduces && args.met != nullptr;
    if (reduces_in_grid && thread == 0 && !last_unit().whole) {
      rendezvous_begin(args.met + (last_unit().tile - of.whole));
    }
    int tile_boxes = 0;
    float sum[ROWS][PRODUCTS][kFragments][4], of_step[ROWS][PRODUCTS][kFragments][4];
    auto& products = kPromotes ? of_step : sum;  // what wgmma adds to
    const float unscale = kPromotes ? *args.unscale : 1;
    auto fence_all = [&]() {
#pragma unroll
      for (int i = 0; i < ROWS; ++i) {
#pragma unroll
        for (int j = 0; j < PRODUCTS; ++j) fence_accumulators(products[i][j]);
      }
    };
    // A stage is free once no block of the cluster reads it any more.
    auto release = [&](int last) {
      if (last < 0) return;
      if (!kMulticasts) {
        if (lane == 0) mbarrier_arrive(pipeline.empty_barrier(last));
      } else if (lane < kLoadSharing) {
        mbarrier_arrive_cluster(pipeline.empty_barrier(last), first_load_rank + lane);
      }
    };
    for (int index = blockIdx.x / CLUSTER; index < units; index += unit_step) {
      const Unit unit = unit_of(index);
#pragma unroll
      for (int i = 0; i < ROWS; ++i) {
#pragma unroll
        for (int j = 0; j < PRODUCTS; ++j) {
#pragma unroll
          for (int f = 0; f < kFragments; ++f) {
#pragma unroll
            for (int e = 0; e < 4; ++e) sum[i][j][f][e] = 0;
          }
        }
      }
      int last = -1;
      fence_all();
#pragma unroll 1
      for (int step = 0; step < unit.steps; ++step) {
        const u32 from = pipeline.current_stage();
        const u32 y_at = from + own_row * (kYBoxesEach * Layout::kYBoxBytes);
        const u32 x_at = from + Layout::kXAt + own_box * args.box_bytes;
        mbarrier_wait(pipeline.full_barrier(pipeline.stage), pipeline.parity);
        // Blocks that exit without a final barrier must not signal stages that nobody waits for.
        auto release_of = [&](int of_step, int stage) {
          if (!(kReduces && kMulticasts) || of_step + pipeline.stages < unit.steps) release(stage);
        };
        if constexpr (kMmaSync) {
          by_mma.add(y_at, x_at, [&](int i, int f) -> float(&)[4] { return sum[i][0][f]; });
          __syncwarp();
          release_of(step, pipeline.stage);
        } else {
          u64 a, b;
          if constexpr (PLANES) {
            a = k_major_descriptor<128>(y_at), b = k_major_descriptor<128>(x_at);
          } else {
            a = mn_major_descriptor<128>(y_at), b = mn_major_descriptor<kRowBytes>(x_at, next_box);
          }
          wgmma_fence();
#pragma unroll
          for (int pair = 6 - kPairs; pair < 6; ++pair) {
            const u32 a_part = kPairsOf[pair][0] * part_bytes, b_part = kPairsOf[pair][1] * part_bytes;
#pragma unroll
            for (int k = 0; k < kPixels / kMmaK; ++k) {
#pragma unroll
              for (int i = 0; i < ROWS; ++i) {
#pragma unroll
                for (int j = 0; j < PRODUCTS; ++j) {
                  wgmma<T, kMajor, kMajor>(
                      products[i][j], advance_descriptor(a, a_part + i * Layout::kYBoxBytes + k * kNextA),
                      advance_descriptor(b, b_part + j * boxes_each * args.box_bytes + k * kNextB),
                      !kPromotes || pair > 0 || k > 0);
                }
              }
            }
          }
          wgmma_commit();
          if constexpr (kPromotes) {
            wgmma_wait<0>();
            release(pipeline.stage);
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
#pragma unroll
              for (int j = 0; j < PRODUCTS; ++j) accumulate_scaled(sum[i][j], of_step[i][j], unscale);
            }
          } else {
            wgmma_wait<1>();
            release_of(step - 1, last);
            last = pipeline.stage;
          }
        }
        pipeline.next();
      }
      if (!kPromotes) wgmma_wait<0>();
      fence_all();
      if (!(kReduces && kMulticasts)) release(last);
      // Recomputed, to save registers during the mainloop.
      const Unit finished = unit_of(opaque_value(index));
      tile_boxes ^= 1;
      if (thread < of.boxes) {
        boxes[tile_boxes][thread] = box_at(of, place_of(of, finished.tile).column * of.boxes + thread);
      }
      // All warpgroups have finished reading the stages, and the boxes of the unit before the previous.
      named_barrier_sync(1, WARPGROUPS * 128);
      if constexpr (kReduces) {
        cluster_arrive();
        Sums::leave(base, reduce_barriers, reduce_rank, load_rank, sum);
      } else {
        store_accumulators<T>(args, finished, warpgroup, thread % 128, boxes[tile_boxes], sum);
      }
    }
    if (reduces_in_grid && !last_unit().whole) {
      reduce_in_grid<ROWS, PRODUCTS, kFragments>(args, last_unit(), boxes[tile_boxes],
                                               reinterpret_cast<float4*>(base));
    }
    if constexpr (kReduces) {
      Sums::add(args, unit_of(blockIdx.x / CLUSTER),
                reinterpret_cast<const float4*>(base), reduce_barriers, reduce_rank, boxes[tile_boxes]);
    }
  } else {
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    if (elect_one()) {
      const int producer = warp % 4;
      for (int index = blockIdx.x / CLUSTER; index < units; index += unit_step) {
        load_unit<Layout, kLoadSharing, kProducers>(args, unit_of, index, pipeline, producer, load_rank,
                                             first_load_rank, args.box_bytes, loaded_boxes[producer]);
      }
    }
    if (kReduces) {
      __syncwarp();
      for (int i = 0; i < 2; ++i) {
        cluster_arrive();
        cluster_wait();
      }
    }
  }
  // A block must not exit while another may still arrive at its mbarriers.
  if (kMulticasts && !kReduces) {
    __syncwarp();
    cluster_sync();
  }
}
