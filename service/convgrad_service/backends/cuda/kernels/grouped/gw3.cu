// The gradient of a grouped convolution's weight on Hopper, 32 adjacent channels of x and 32 or 64 of y
// at once: whole groups, or a part of one. The host's side is hopper_grouped_weight.py.
//
// w[k, c, tap] = sum over pixels (n, o) of y[n, o, k] * x[n, o * stride + tap * dilation - pad, c] for k
// and c of one group; other products are discarded.
// GEMM: K = 16 pixels of y, two eights of adjacent columns; N = channels of y; M = 32 channels of x at two
// taps, at any distance. A stride along W becomes as many boxes of x, each with every stride-th column,
// so that the pixels of an eight are adjacent at each tap; a dilation becomes phases with their own boxes.
//
// Block: a slice of channels, at most ten taps (all, or those of one position along D, or along D and H),
// and a share of the boxes. A producer thread copies (TMA tiles of C W H D N) into a ring of `stages`
// boxes; the steps of a box alternate between two consumer warpgroups, with all sums in registers. At the
// end they are added through shared memory, and over blocks that share a slice through `partials`, each
// block adding a part of the results (grouped_weight_sums.cuh).
// Dynamic shared memory: 1,024 bytes for alignment; the ring, later a slab of sums for each warp; the
// offsets of steps and of rows.
// Relies on its launcher for the grid (at most 255 splits, slices, positions of taps), and for tensors
// whose channels, of all groups, are contiguous, with pixels at multiples of 16 bytes. Needs sm_90a.
// Deterministic: one order of additions for each result and share. Pixels outside are read as zeros.
// Index limits: positions below 2^31; 64-bit offsets in w.
#include "grouped/gw3.cuh"
#include "grouped/gw2_sums.cuh"

using namespace convgrad;

namespace {

using T = ELEMENT;
constexpr int kWidth = 32, kBytes = kWidth * 2, kYBytes = NF * 16;
constexpr int kGroups = 2, kThreads = kSummers + 128, kMostStages = 8;
static_assert(WARPS == kGroups * 4);

#ifdef STAMPS
#define STAMP(i) if (lane == 0 && (warp == 0 || warp == WARPS)) { long long t; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)); long long c; asm volatile("mov.u64 %0, %clock64;" : "=l"(c)); reinterpret_cast<long long*>(args.stamps)[((blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x) * 32 + (i) * 2] = t; reinterpret_cast<long long*>(args.stamps)[((blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x) * 32 + (i) * 2 + 1] = c; }
#else
#define STAMP(i)
#endif

// A step's offsets in a box, in units of descriptors.
struct Step {
  u32 x, y;
};

// The channels of a block: of a slice with whole groups, or of a part of one group.
struct Slice {
  int index, first_group, x, y;  // x and y: channels of the group

  __device__ __forceinline__ Slice(const HopperGroupedWeightArgs& args) {
    const int above = divide(blockIdx.y, args.by_slices[0]);
    index = divide(above, args.by_slices[1]);
    y = (static_cast<int>(blockIdx.y) - above * args.slices[0]) * kColumns;
    x = (above - index * args.slices[1]) * kWidth;
    first_group = index * args.merged;
  }
};

__device__ __forceinline__ void fill_tables(const HopperGroupedWeightArgs& args, const Slice& slice,
                                            Step* step_at, Row* row_at) {
#pragma unroll 1
  for (int i = threadIdx.x; i < args.steps; i += kSummers) {
    const int rows = divide(i, args.by_steps[0]), planes = divide(rows, args.by_steps[1]);
    const int n = divide(planes, args.by_steps[2]), d = planes - n * args.step_counts[2];
    const int w = i - rows * args.step_counts[0], h = rows - planes * args.step_counts[1];
    const u32 x = n * args.x_step[0] + d * args.x_step[1] + h * args.x_step[2] + w * args.x_step[3];
    const u32 y = n * args.y_step[0] + d * args.y_step[1] + h * args.y_step[2] + w * args.y_step[3];
    step_at[i] = {x >> 4, y >> 4};
  }
  // Rows of the warps' items, four times MT fragments: two taps, two halves of the channels.
#pragma unroll 1
  for (int i = threadIdx.x; i < 4 * kRows; i += kSummers) {
    const int item = i / kRows, within = i - item * kRows;
    const int tap = within / 16 * 2 + item / 2, channel = item % 2 * 16 + within % 16;
    const int own = divide(channel, args.by_channels);
    Row row = {0, -1, 0};
    if (tap < args.taps && slice.first_group + own < args.groups) {
      row.own = own;
      row.w = own * (args.result.w_stride[0] - args.result.out_channels * args.result.w_stride[1]) +
              (channel - own * args.result.in_channels) * args.result.w_stride[2] + args.tap[tap].w;
    }
    row_at[i] = row;
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    gw3(const __grid_constant__ HopperGroupedWeightArgs args) {
  extern __shared__ uint4 shared[];
  __shared__ u64 barriers[2 * kMostStages + 1];
  const u32 full = shared_address(barriers), empty = full + 8 * kMostStages,
            received_barrier = empty + 8 * kMostStages;
  char* const base = reinterpret_cast<char*>(shared) + (-shared_address(shared) & 1023);
  const u32 ring = shared_address(base);
  const int thread = threadIdx.x, lane = thread & 31;
  // Uniform in a warp; a shuffle tells the compiler so.
  const int warp = __shfl_sync(0xffffffff, thread / 32, 0);
  STAMP(0)
  const int split = blockIdx.x, splits = gridDim.x;
  const int begin = split * args.boxes + min(split, args.more);
  const int end = begin + args.boxes + (split < args.more);
  const int tap_t = divide(blockIdx.z, args.by_plane_rows), tap_r = blockIdx.z - tap_t * args.plane_rows;
  const Slice slice(args);
  if (warp >= WARPS) {
    setmaxnreg_dec<56>();
    const bool copies = warp == WARPS && elect_one();
    int index = begin;
    Boxes box(args, begin, tap_t, tap_r);
    auto copy = [&](int stage) {
      const u32 to = ring + stage * args.stage_bytes, barrier = full + stage * 8;
      mbarrier_arrive_expect_tx(barrier, args.box_bytes);
      const int x_channel = slice.index * args.slices[1] * kWidth + slice.x;
      const int y_channel = slice.index * args.slices[0] * kColumns + slice.y;
      const int y_at[5] = {y_channel, box.y[2], box.y[1], box.y[0], box.image};
      tma_load(to + args.y_at, args.y_map, barrier, y_at);
#pragma unroll 1
      for (int i = 0; i < args.sub_boxes; ++i) {
        const int x_at[5] = {x_channel, box.x[2] + i * args.sub_next, box.x[1],
                             box.x[0], box.image};
        tma_load(to + i * args.sub_bytes, args.x_map, barrier, x_at);
      }
    };
    if (copies) {
#pragma unroll 1
      for (int i = 0; i < args.stages; ++i) {
        mbarrier_init(full + i * 8, 1);
        mbarrier_init(empty + i * 8, WARPS);
        fence_mbarrier_init();
        if (index >= end) continue;
        if (i > 0) box.next();
        copy(i);
        ++index;
      }
      STAMP(8)
    }
    __syncwarp();
    if (args.in_cluster) cluster_arrive();
    __syncthreads();
    if (copies) {
      int stage = 0;
      u32 parity = 0;
#pragma unroll 1
      for (; index < end; ++index) {
        box.next();
        mbarrier_wait(empty + stage * 8, parity);
        copy(stage);
        if (++stage == args.stages) stage = 0, parity ^= 1;
      }
    }
    __syncwarp();
    if (args.in_cluster) cluster_wait();
    return;
  }

  setmaxnreg_inc<224>();
  Step* const step_at = reinterpret_cast<Step*>(base + args.steps_at);
  Row* const row_at = reinterpret_cast<Row*>(base + args.rows_at);
  u32* const word = args.result.met + blockIdx.z * gridDim.y + blockIdx.y;
  const bool meets = splits > 1 && !args.in_cluster;
  if (thread == 0 && meets) rendezvous_begin(word);
  if (args.in_cluster) {
    if (thread == 0) {
      mbarrier_init(received_barrier, kSummers);
      fence_mbarrier_init();
    }
    __syncwarp();
    cluster_arrive();
  }
  fill_tables(args, slice, step_at, row_at);
  const int group = warp / 4, number = warp & 3;
  u64 a_first[MT];
#pragma unroll
  for (int i = 0; i < MT; ++i) {
    const int first = args.tap[i * 2].x, second = i * 2 + 1 < args.taps ? args.tap[i * 2 + 1].x : first;
    a_first[i] = mn_major_descriptor<kBytes>(ring + first, second - first, args.x_eight);
  }
  const u64 b_first = mn_major_descriptor<kYBytes>(ring + args.y_at, kYBytes, args.y_eight);
  float sum[MT][NF][4] = {};
  auto hold = [&] {
#pragma unroll
    for (int i = 0; i < MT; ++i) fence_accumulators(sum[i]);
  };
  __syncthreads();
  STAMP(3)
  hold();
  int stage = 0, last = -1;
  u32 parity = 0;
  auto release = [&](int of) {
    if (lane == 0) mbarrier_arrive(empty + of * 8);
  };
#pragma unroll 1
  for (int index = begin; index < end; ++index) {
    const u32 at = stage * args.stage_bytes >> 4;
    mbarrier_wait(full + stage * 8, parity);
    if (index == begin) { STAMP(4) }
    wgmma_fence();
    // The steps of consecutive boxes alternate too, since their number may be odd.
#pragma unroll 1
    for (int i = (group + index * args.steps) & 1; i < args.steps; i += kGroups) {
      const Step step = step_at[i];
      const u64 b = b_first + (at + step.y);
#pragma unroll
      for (int pair = 0; pair < MT; ++pair) {
        wgmma<T, kMajorMn, kMajorMn>(sum[pair], a_first[pair] + (at + step.x), b, 1);
      }
      // One wgmma group for each: a group committed after a loop would cover all of it.
      wgmma_commit();
      if (last >= 0) {
        wgmma_wait<1>();
        release(last);
        last = -1;
      }
    }
    if (last >= 0) {
      wgmma_wait<0>();
      release(last);
    }
    last = stage;
    if (++stage == args.stages) stage = 0, parity ^= 1;
  }
  STAMP(5)
  u32 begun = 0;
  if (thread == 0 && meets) begun = rendezvous_begun(word);
  wgmma_wait<0>();
  hold();
  named_barrier_sync(1, kSummers);

  // The warps' sums, transposed: rows are adjacent.
  float* const slabs = reinterpret_cast<float*>(base);
  float* const slab = slabs + warp * kSlab + lane % 4 * 2 * kSlabPitch + lane / 4;
#pragma unroll
  for (int i = 0; i < MT; ++i) {
#pragma unroll
    for (int j = 0; j < NF; ++j) {
      float* const to = slab + j * 8 * kSlabPitch + i * 16;
      to[0] = sum[i][j][0], to[kSlabPitch] = sum[i][j][1];
      to[8] = sum[i][j][2], to[kSlabPitch + 8] = sum[i][j][3];
    }
  }
  named_barrier_sync(1, kSummers);
  STAMP(6)
  const i64 block_w = slice.first_group * args.result.w_stride[0] + slice.y * args.result.w_stride[1] +
                      slice.x * args.result.w_stride[2] + tap_t * args.plane_w[0] + tap_r * args.plane_w[1];
  const Item item = {0, number * kRows, 0, true};
  const Meeting met = {split, splits, args.in_cluster != 0, received_barrier,
                       reinterpret_cast<float4*>(base + args.received_at), word, begun};
  sum_items<T>(args.result, item, number, group, kGroups, row_at, block_w, slabs, met);
  STAMP(7)
}
