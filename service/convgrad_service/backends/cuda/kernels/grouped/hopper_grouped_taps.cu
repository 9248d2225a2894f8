// The gradient of a grouped convolution's weight on Hopper, 32 adjacent channels of x and 32 or 64 of y
// at once: whole groups, or a part of one. Launched by hopper_grouped_taps.py.
//
// w[k, c, tap] = sum over pixels (n, o) of y[n, o, k] * x[n, o * stride + tap * dilation - pad, c] for k
// and c of one group; other products are discarded.
// GEMM: K = 16 pixels, two eights of adjacent columns; M = 32 channels of x at two taps, at any distance;
// N = channels of y. Either K are pixels of y, and each tap is one of M; or, with a stride of 1 along H,
// pixels of a row of x, and N are the channels of all ROWS rows of y that it meets, one for each tap along H.
// A stride along W becomes as many boxes of x, each with every stride-th column, so that the pixels of an
// eight are adjacent at each tap; a dilation along W becomes phases with their own boxes.
//
// Block: a slice of channels, at most ten taps (all, or those of one position along D, or along D and H),
// and a share of the boxes. A producer thread copies (TMA tiles of C W H D N) into a ring of `stages`
// boxes; the steps of a box alternate between two consumer warpgroups, with all sums in registers. At the
// end they are added through shared memory, and over blocks that share a slice through `partials`, each
// block adding a part of the results (weight_sums.cuh).
// Dynamic shared memory: 1,024 bytes for alignment; the ring, later a slab of sums for each warp; the
// offsets of steps and of rows.
// Grid: splits (at most 255), slices, positions of taps.
// Preconditions: channels, of all groups, are contiguous, with pixels at multiples of 16 bytes. Needs sm_90a.
// Deterministic: one order of additions for each result and share. Pixels outside are read as zeros.
// Index limits: positions below 2^31; 64-bit offsets in w.
#include "grouped/hopper_grouped_taps.cuh"

using namespace convgrad;

namespace {

using T = ELEMENT;
constexpr int kBytes = kWidth * 2, kYBytes = NF * 16;
constexpr int kGroups = 2, kThreads = kSummers + 128, kMostStages = 8;
static_assert(WARPS == kGroups * 4);

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    hopper_grouped_taps(const __grid_constant__ HopperGroupedTapsArgs args) {
  extern __shared__ uint4 shared[];
  __shared__ u64 barriers[2 * kMostStages + 1];
  const u32 full = shared_address(barriers), empty = full + 8 * kMostStages,
            received_barrier = empty + 8 * kMostStages;
  char* const base = reinterpret_cast<char*>(shared) + (-shared_address(shared) & 1023);
  const u32 ring = shared_address(base);
  const int thread = threadIdx.x, lane = thread & 31;
  // Uniform in a warp; a shuffle tells the compiler so.
  const int warp = __shfl_sync(0xffffffff, thread / 32, 0);
  const int split = blockIdx.x, splits = gridDim.x;
  const BlockPart part(args.walk, blockIdx.z, split);
  const Slice slice(args);
  if (warp >= WARPS) {
    setmaxnreg_dec<56>();
    const bool copies = warp == WARPS && elect_one();
    int index = part.begin;
    Boxes box(args.walk, part);
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
        if (index >= part.end) continue;
        if (i > 0) box.next();
        copy(i);
        ++index;
      }
    }
    __syncwarp();
    if (args.in_cluster) cluster_arrive();
    __syncthreads();
    if (copies) {
      int stage = 0;
      u32 parity = 0;
#pragma unroll 1
      for (; index < part.end; ++index) {
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
  u64 a_first[PAIRS];
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) {
    // For a missing tap, any pixels do.
    const int first = args.tap[i * 2].x;
    const int apart = i * 2 + 1 < args.taps ? args.tap[i * 2 + 1].x - first : kBytes;
    a_first[i] = mn_major_descriptor<kBytes>(ring + first, apart, args.x_eight);
  }
  const u64 b_first = mn_major_descriptor<kYBytes>(ring + args.y_at, args.y_tap, args.y_eight);
  float sum[PAIRS][ROWS * NF][4] = {};
  auto hold = [&] {
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) fence_accumulators(sum[i]);
  };
  __syncthreads();
  hold();
  int stage = 0, last = -1;
  u32 parity = 0;
  auto release = [&](int of) {
    if (lane == 0) mbarrier_arrive(empty + of * 8);
  };
#pragma unroll 1
  for (int index = part.begin; index < part.end; ++index) {
    const u32 at = stage * args.stage_bytes >> 4;
    mbarrier_wait(full + stage * 8, parity);
    wgmma_fence();
    // The steps of consecutive boxes alternate too, since their number may be odd.
#pragma unroll 1
    for (int i = (group + index * args.steps) & 1; i < args.steps; i += kGroups) {
      const Step step = step_at[i];
      const u64 b = b_first + (at + step.y);
#pragma unroll
      for (int pair = 0; pair < PAIRS; ++pair) {
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
  u32 begun = 0;
  if (thread == 0 && meets) begun = rendezvous_begun(word);
  wgmma_wait<0>();
  hold();
  named_barrier_sync(1, kSummers);

  float* const slabs = reinterpret_cast<float*>(base);
  leave_sums<Sums>(sum, slabs, warp);
  named_barrier_sync(1, kSummers);
  const i64(&stride)[6] = args.result.w_stride;
  const i64 block_w = slice.first_group * stride[0] + slice.y * stride[1] + slice.x * stride[2] +
                      part.t * stride[3] + part.r * stride[4];
  const Item item = {0, number * kRows, 0, true};
  const Meeting met = {split, splits, args.in_cluster != 0, received_barrier,
                       reinterpret_cast<float4*>(base + args.received_at), word, begun};
  sum_items<T, Sums>(args.result, item, number, group, kGroups, row_at, block_w, slabs, met);
}
