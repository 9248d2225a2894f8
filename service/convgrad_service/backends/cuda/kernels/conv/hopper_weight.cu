// wgrad of a dense convolution on Hopper, as an implicit GEMM (TMA im2col, wgmma). Launched by
// hopper_weight.py. Needs sm_90a.
//
// M = channels of grad_output (y), N = taps x input channels, K = pixels of y:
//   w[k, c, r] = sum over pixels (n, o) of y[n, k, o] * x[n, c, o*stride + r*dilation - pad].
// A k-tile is 64 pixels: boxes of 64 channels of y, and boxes of CHANNELS channels of x, each of one tap or of
// `shared_taps` adjacent taps along W, which read the same box `dilation` rows apart. For the latter, rows
// of y are extended by `halo` zero pixels, so that consecutive pixels are adjacent along W for each tap.
// Both operands are MN-major, as in global memory. With PLANES (1x1 kernels of stride 1, channels first) an
// image is one row of y, padded by `halo`; boxes are planes of channels, 128 bytes of pixels each, and
// operands are K-major: 16-bit, or float32 as TF32 with k-tiles of 32 pixels.
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
// Determinism: one order of additions per result and number of shares. float32 by scaled halves: sums that
//   channels' lost bits may affect are recomputed by definition.
// Limits: pixels, with the halo, below 2^31; 64-bit elements and results.
#include "conv/hopper_weight_cluster_reduce.cuh"
#include "conv/hopper_weight_copies.cuh"
#include "conv/hopper_weight_grid_reduce.cuh"
#include "core/opaque.cuh"
#include "ptx/warpgroup.cuh"

using namespace convgrad;

namespace {

using Layout = Step<SPREAD ? ROWS : ROWS * WARPGROUPS, 64, sizeof(T)>;
constexpr int kRowBytes = CHANNELS * static_cast<int>(sizeof(T));  // of a pixel in a box of x
constexpr Major kMajor = PLANES ? kMajorK : kMajorMn;
// Of one product's depth, and how far on the next one's operands are.
constexpr int kDeep = 32 / static_cast<int>(sizeof(T));
constexpr u32 kNextA = PLANES ? 32 : kDeep * 128, kNextB = PLANES ? 32 : kDeep * kRowBytes;
constexpr int kFragments = COLUMNS / 8, kBlocks = COLUMNS / CHANNELS;
constexpr int kMostBoxes = kBlocks * PRODUCTS * (SPREAD ? WARPGROUPS : 1);
constexpr int kTurns = 4, kMostCopied = (Layout::kYBoxes + kMostBoxes + kTurns - 1) / kTurns;
constexpr int kThreads = (WARPGROUPS + 1) * 128;
constexpr int kArgumentWords = (sizeof(HopperWeightArgs) - sizeof(TensorMap) * 2) / 4 - 1;
// What the blocks of a cluster do together: copy what their tiles share, or sum shares of one tile.
constexpr int kCopying = CLUSTER / SUMS;
constexpr bool kSums = SUMS > 1, kCopies = kCopying > 1;
using Sums = ClusterSums<SUMS, kCopying, ROWS, PRODUCTS, kFragments>;

}  // namespace

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(kThreads, 1)
    hopper_weight(const __grid_constant__ HopperWeightArgs args) {
  extern __shared__ uint4 shared[];
  __shared__ u64 barriers[2 * kMostStages + (kSums ? Sums::kMost : 0)];
  __shared__ Copied copied[kTurns][kMostCopied];  // of each thread that copies
  const int thread = threadIdx.x, warpgroup = thread / 128, warp = thread / 32, lane = thread & 31;
  const WeightResult& of = args.result;
  // Each warp has some of the argument fetched, so that nobody waits for one line after another.
  const int ahead = reinterpret_cast<const int*>(&of)[min(warp * 16, kArgumentWords)];
  const u32 padding = -shared_address(shared) & 1023;
  char* const base = reinterpret_cast<char*>(shared) + padding;
  const u32 full = shared_address(barriers);
  Ring ring = {shared_address(base), static_cast<u32>(args.stage_bytes), full,
               full + kMostStages * 8, args.stages};
  if (thread < args.stages) {
    mbarrier_init(ring.filled(thread), 1);
    mbarrier_init(ring.emptied(thread), WARPGROUPS * 4 * kCopying);
    fence_mbarrier_init();
  }
  // Its number among the blocks that copy together, and among those that sum together.
  const int block = CLUSTER > 1 ? cluster_rank() : 0;
  const int copier = kSums ? block % kCopying : block, summer = kSums ? block / kCopying : 0;
  const int first_copier = block - copier;
  const u32 joined = full + 2 * kMostStages * 8;  // where a cluster's sums come
  if (kSums && thread == 0) {
    for (int i = 0; i < Sums::kMost; ++i) mbarrier_init(joined + i * 8, 1);
    fence_mbarrier_init();
    for (int i = 0; i < Sums::kMost; ++i) {
      mbarrier_arrive_expect_tx(joined + i * 8, Sums::kQuadBytes * (SUMS - 1));
    }
  }
  if (thread == WARPGROUPS * 128) prefetch_tensor_map(args.x_map), prefetch_tensor_map(args.y_map);
  __shared__ Box boxes[2][kMostBoxes];  // of the tiles of this unit and of the one before
  opaque_use(ahead);
  if (kCopies) {
    // What their barriers start as has been published.
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }
  launch_dependent_grids();
  wait_on_dependent_grids();
  const int steps = steps_of(args);
  const int units =
      (of.whole + (of.row_tiles * of.column_tiles - of.whole) * of.shares) / kCopying;
  auto cluster_unit_of = [&](int index) {
    return cluster_unit_at(of, index, steps, SUMS, summer, kCopying, copier);
  };
  auto unit_of = [&](int index) {
    if (!kSums) return unit_at(of, index, steps, kCopying, copier);
    const ClusterUnit unit = cluster_unit_of(index);
    return Unit{unit.all.tile, unit.all.share, unit.step, unit.end, false};
  };
  const int unit_step = gridDim.x / CLUSTER;
  // In this order the code of what copies stands first, and is fetched sooner.
  if (warpgroup < WARPGROUPS) {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    const bool shares_box = of.shared_taps > 1;
    const u32 next_box = shares_box ? args.source.dilation[2] * kRowBytes : args.box_bytes;
    const int boxes_each = shares_box ? 1 : kBlocks;  // of one product
    const int own_box = SPREAD ? warpgroup * PRODUCTS * boxes_each : 0;
    const int own_row = SPREAD ? 0 : warpgroup * ROWS;
    // Here and not among the units, or the compiler no longer sees that a warp's threads agree on
    // the ring's stages, and its products wait for the registers of single threads.
    auto last_unit = [&]() {
      int last = opaque_value(blockIdx.x) / CLUSTER;
      while (last + unit_step < units) last += unit_step;
      return unit_of(last);
    };
    const bool together = !kSums && args.met != nullptr;
    if (together && thread == 0 && !last_unit().whole) {
      rendezvous_begin(args.met + (last_unit().tile - of.whole));
    }
    int turn = 0;
    float sum[ROWS][PRODUCTS][kFragments][4];
    auto hold = [&]() {
#pragma unroll
      for (int i = 0; i < ROWS; ++i) {
#pragma unroll
        for (int j = 0; j < PRODUCTS; ++j) fence_accumulators(sum[i][j]);
      }
    };
    // A stage is free when no block of the cluster reads it any more.
    auto release = [&](int last) {
      if (last < 0) return;
      if (!kCopies) {
        if (lane == 0) mbarrier_arrive(ring.emptied(last));
      } else if (lane < kCopying) {
        mbarrier_arrive_cluster(ring.emptied(last), first_copier + lane);
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
      hold();
#pragma unroll 1
      for (int step = unit.step; step < unit.end; ++step) {
        const u32 from = ring.here();
        const u32 y_at = from + own_row * Layout::kYBoxBytes;
        const u32 x_at = from + Layout::kXAt + own_box * args.box_bytes;
        u64 a, b;
        if constexpr (PLANES) {
          a = k_major_descriptor<128>(y_at), b = k_major_descriptor<128>(x_at);
        } else {
          a = mn_major_descriptor<128>(y_at), b = mn_major_descriptor<kRowBytes>(x_at, next_box);
        }
        mbarrier_wait(ring.filled(ring.stage), ring.parity);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kPixels / kDeep; ++k) {
#pragma unroll
          for (int i = 0; i < ROWS; ++i) {
#pragma unroll
            for (int j = 0; j < PRODUCTS; ++j) {
              wgmma<T, kMajor, kMajor>(
                  sum[i][j], advance_descriptor(a, i * Layout::kYBoxBytes + k * kNextA),
                  advance_descriptor(b, j * boxes_each * args.box_bytes + k * kNextB), 1);
            }
          }
        }
        wgmma_commit();
        wgmma_wait<1>();
        // Where blocks leave without more ado, none arrives where nobody waits.
        if (!(kSums && kCopies) || step - 1 + ring.stages < unit.end) release(last);
        last = ring.stage;
        ring.next();
      }
      wgmma_wait<0>();
      hold();
      if (!(kSums && kCopies)) release(last);
      // Worked out again: the sums leave few registers.
      const Unit done = unit_of(opaque_value(index));
      turn ^= 1;
      if (thread < of.boxes) {
        boxes[turn][thread] = box_at(of, place_of(of, done.tile).column * of.boxes + thread);
      }
      // All of the block have read the ring, and the boxes of the unit before the last.
      named_barrier_sync(1, WARPGROUPS * 128);
      if constexpr (kSums) {
        cluster_arrive();
        Sums::leave(base, joined, summer, copier, sum);
      } else {
        put_sums<T>(args, done, warpgroup, thread % 128, boxes[turn], sum);
      }
    }
    if (together && !last_unit().whole) {
      add_together<ROWS, PRODUCTS, kFragments>(args, last_unit(), boxes[turn],
                                               reinterpret_cast<float4*>(base));
    }
    if constexpr (kSums) {
      Sums::add(args, cluster_unit_of(blockIdx.x / CLUSTER).all,
                reinterpret_cast<const float4*>(base), joined, summer, boxes[turn]);
    }
  } else {
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    if (elect_one()) {
      const int turn = warp % 4;
      for (int index = blockIdx.x / CLUSTER; index < units; index += unit_step) {
        copy_steps<Layout, kCopying, kTurns>(args, unit_of, index, ring, turn, copier,
                                             first_copier, args.box_bytes, copied[turn]);
      }
    }
    if (kSums) {
      __syncwarp();
      for (int i = 0; i < 2; ++i) {
        cluster_arrive();
        cluster_wait();
      }
    }
  }
  // No block ends while another may still arrive at its barriers.
  if (kCopies && !kSums) {
    __syncwarp();
    cluster_sync();
  }
}
