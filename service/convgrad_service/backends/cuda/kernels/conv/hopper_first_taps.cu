// wgrad of a first layer (few input channels) on Hopper (TMA, wgmma). Launched by hopper_first_taps.py.
// Needs sm_90a.
//
//   w[k, c, r] = sum over pixels (n, o) of y[n, k, o] * x[n, c, o*stride + r - pad].
// M = kernel rows of a tap along D x the elements of a window in a row of x (S * C rounded up to an even number), N = 64
// channels of y, K = columns of a row of y, 16 per wgmma. With channels last, the taps of a kernel row are
// consecutive elements of a row of x. Rows of x are in shared memory unchanged; the A operand is read from
// them into registers, two consecutive elements of a window at a time: the two rows that a lane holds.
//
// Grid: groups of tiles (fastest), taps along D, blocks of channels; shares of the rows of y.
// Block: 64 channels, some 64-row tiles of a tap's M, and a share of all rows of y. A step is a segment of a row of y
//   and the rows of x that it adds; where a walk down an image begins, rows of x alone. One consumer
//   warpgroup holds a tile's accumulators; `parts` warpgroups may share a tile, each with PRODUCTS wgmmas of
//   a row. Two producer threads load rows of y (channels contiguous) and of x. Partial sums go to the block's
//   part of `partials`, ordered (k, t, r, s, c); first_sum.cu reduces them.
// Threads: 128 per consumer warpgroup, and 64.
// Shared memory (dynamic): 1,024 bytes of alignment, stages of rows of y and of x, at the end the sums; counted
//   by hopper_first_taps.py.
// Preconditions: no dilation, rows of whole 16 bytes, an even number of elements between windows (with ODD an
//   odd one). Positions outside the input are zeros.
// Determinism: one order of additions per result and number of shares.
// Limits: rows of y and elements of a row below 2^31; 64-bit offsets elsewhere.
#include "conv/hopper_first_taps.cuh"
#include "ptx/pdl.cuh"
#include "ptx/warpgroup.cuh"

using namespace convgrad;

namespace {

constexpr int kMostStages = 16, kMostThreads = 448;
constexpr int kSums = 1;  // a named barrier
constexpr int kChannels = 64;
constexpr u32 kDepthBytes = 16 * 128;  // bytes of y per wgmma

// Two elements of each of two adjacent windows, of which the first is aligned to words. With ODD the second
// is not: the words before and after its middle have them.
constexpr int kWords = ODD ? 3 : 2;
__device__ __forceinline__ void load_pair(u32 (&words)[kWords], u32 from, int apart) {
  words[0] = ld_shared_u32(from);
  words[1] = ld_shared_u32(from + apart - ODD * 2);
  if constexpr (ODD) words[2] = ld_shared_u32(from + apart + 2);
}
// Packs the first element of both windows, and the second.
__device__ __forceinline__ void pack_pair(u32& first, u32& second, const u32 (&words)[kWords]) {
  first = __byte_perm(words[0], words[1], ODD ? 0x7610 : 0x5410);
  second = __byte_perm(words[0], words[kWords - 1], ODD ? 0x5432 : 0x7632);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kMostThreads, 1)
    hopper_first_taps(const __grid_constant__ HopperFirstTapsArgs args) {
  extern __shared__ uint4 shared[];
  __shared__ u64 barriers[4 * kMostStages];
  const int thread = threadIdx.x, lane = thread & 31;
  // Warp-uniform, which the compiler infers only from a shuffle.
  const int warp = __shfl_sync(0xffffffff, thread / 32, 0);
  const int consumers = blockDim.x / 32 - 2;  // warps
  char* const base = reinterpret_cast<char*>(shared) + (-shared_address(shared) & 1023);
  const u32 ring = shared_address(base);
  const u32 y_full = shared_address(barriers), y_empty = y_full + kMostStages * 8;
  const u32 x_full = y_empty + kMostStages * 8, x_empty = x_full + kMostStages * 8;
  const BlockAt block(args, kChannels);
  if (thread == 0) {
    for (int i = 0; i < kMostStages; ++i) {
      mbarrier_init(y_full + i * 8, 1);
      mbarrier_init(y_empty + i * 8, consumers);
      mbarrier_init(x_full + i * 8, 1);
      mbarrier_init(x_empty + i * 8, consumers);
    }
    fence_mbarrier_init();
  }
  __syncthreads();

  const int tile = warp / 4 % args.tiles, part = warp / 4 / args.tiles;
  const int own = tile * 64 + warp % 4 * 16 + (lane >> 2) * 2;  // this lane's rows of M in the block
  float sum[8][4] = {};
  if (warp >= consumers) {
    // One producer thread per tensor: issuing a copy takes longer than many copies.
    const bool of_x = warp == consumers;
    if (lane == 0 && of_x) {
      copy_rows_of_x(args, block, ring, x_full, x_empty);
    } else if (lane == 0) {
      PipelineState state;
      for (Steps step(args, block); step.there(); step.next()) {
        if (!step.multiplies()) continue;
        const u32 full = y_full + state.index * 8;
        mbarrier_wait(y_empty + state.index * 8, state.parity ^ 1);
        mbarrier_arrive_expect_tx(full, args.segment * 128);
        const int corner[5] = {block.first_channel, step.segment * args.segment, step.p, step.z, step.n};
        tma_load(ring + state.index * args.y_stage, args.y_map, full, corner);
        state.advance(args.y_stages);
      }
    }
    return;
  } else {
    launch_dependent_grids();
    // Bytes between two adjacent windows. With ODD, those are an odd number of elements.
    const int apart = args.stride[2] * args.channels * static_cast<int>(sizeof(Bits16));
    const Own place(args, block.first_tile * 64 + own, apart);
    const u64 b_first = mn_major_descriptor<128>(ring);

    as_type<Bits16>(args.bfloat16, [&](auto like) {
      PipelineState state, y_state;
      int freed = 0, freed_at = 0, index = 0;  // step counters, from the block's first step
      int y_last = -1;                         // the row of y that wgmmas in flight read
      const auto free_to = [&](int until) {
        for (; freed < until; ++freed) {
          if (lane == 0) mbarrier_arrive(x_empty + freed_at * 8);
          if (++freed_at == args.x_stages) freed_at = 0;
        }
      };
      u32 a[PRODUCTS][4];
      fence_accumulators(sum);
      for (Steps step(args, block); step.there(); step.next()) {
        mbarrier_wait(x_full + state.index * 8, state.parity);
        if (step.multiplies()) {
          int stage = state.index - place.lag;
          if (stage < 0) stage += args.x_stages;
          const u32 from = ring + args.raws_at + stage * args.x_stage + place.at + step.lead +
                           part * PRODUCTS * 16 * apart;
          // Load A while the wgmmas of the previous row of y run.
          u32 words[PRODUCTS][2][kWords];
#pragma unroll
          for (int i = 0; i < 2 * PRODUCTS; ++i) load_pair(words[i / 2][i % 2], from + 8 * i * apart, apart);
          mbarrier_wait(y_full + y_state.index * 8, y_state.parity);
          wgmma_wait<0>();
          fence_accumulators(sum);
          if (y_last >= 0 && lane == 0) mbarrier_arrive(y_empty + y_last * 8);
#pragma unroll
          for (int i = 0; i < PRODUCTS; ++i) {
            fence_registers(a[i]);
            pack_pair(a[i][0], a[i][1], words[i][0]);
            pack_pair(a[i][2], a[i][3], words[i][1]);
            fence_registers(a[i]);
          }
          wgmma_fence();
          const u64 b =
              advance_descriptor(b_first, y_state.index * args.y_stage + part * PRODUCTS * kDepthBytes);
#pragma unroll
          for (int i = 0; i < PRODUCTS; ++i) {
            wgmma<decltype(like), kMajorMn>(sum, a[i], advance_descriptor(b, i * kDepthBytes), 1);
          }
          wgmma_commit();
          y_last = y_state.index;
          y_state.advance(args.y_stages);
          __syncwarp();
          // Release the rows of x that no later row of y reads.
          free_to(index - args.before + 1);
        } else if (step.begins()) {
          __syncwarp();
          free_to(index);
        }
        ++index;
        state.advance(args.x_stages);
      }
      wgmma_wait<0>();
      fence_accumulators(sum);
    });
  }
  named_barrier_sync(kSums, consumers * 32);
  // All copies have arrived. Warpgroups that share a tile add their accumulators one after another.
  const int pitch = args.tiles * 64 + 4;
  float* const sums = reinterpret_cast<float*>(base);
  for (int turn = 0; turn < args.parts; ++turn) {
    if (part == turn) {
      leave_sums(sums + (lane & 3) * 2 * pitch + own, sum, pitch, turn == 0);
    }
    named_barrier_sync(kSums, consumers * 32);
  }

  put_partials<kChannels>(args, block, sums, pitch, warp, consumers, lane);
}
