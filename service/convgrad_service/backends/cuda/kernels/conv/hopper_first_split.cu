// wgrad of a first layer (few input channels) on Hopper in float32 (TMA, wgmma on bfloat16 parts). Launched
// by hopper_first_taps.py. Needs sm_90a.
//
// The GEMM and its steps are those of hopper_first_taps.cu, with N = CHANNELS channels of y, 32 or 64. Each
// element is split into PARTS bfloat16 parts. PARTS 3: float32 accuracy from six products, which keeps all
// terms of at least 2^-25 of the largest; the largest products are accumulated in float32 every few steps,
// because tensor cores truncate each of their sums. PARTS 2: three products, more accurate than TF32.
// Power-of-two scales (core/split_floats.cuh), one per row of y and one for the elements of x that a warp
// reads there, keep the split exact for tiny and huge values.
//
// Grid: groups of tiles (fastest), taps along D, blocks of channels; shares of the rows of y.
// Block: CHANNELS channels of y, some 64-row tiles of a tap's M, and a share of all rows of y. Two producer threads load
//   rows of y and of x; one warpgroup splits y's rows into parts in shared memory, x's parts are made in
//   registers; the other warpgroups run wgmma, each on a tile, or on a part of a row's columns of a tile
//   that two share. Partial sums go to the block's part of `partials`, ordered (k, t, r, s, c); first_sum.cu
//   reduces them.
// Threads: 128 per consumer warpgroup, and 256.
// Shared memory (dynamic): 1,024 bytes of alignment, stages of rows of y, of their parts, and of rows of x, at
//   the end the sums; counted by hopper_first_taps.py.
// Preconditions: no dilation, rows of whole 16 bytes, an even number of elements between windows (with ODD an
//   odd one). Positions outside the input are zeros.
// Determinism: one order of additions per result and number of shares.
// Limits: rows of y and elements of a row below 2^31; 64-bit offsets elsewhere.
#include "ptx/load_store.cuh"
#include "conv/hopper_first_sums.cuh"
#include "ptx/pdl.cuh"
#include "core/split_floats.cuh"
#include "ptx/warpgroup.cuh"

using namespace convgrad;

namespace {

using T = ELEMENT;
using Steps = StepsOf<T>;
constexpr int kMostStages = 16, kMostThreads = 640, kMadeStages = 2;
constexpr int kSums = 1, kSplit = 2;  // named barriers
constexpr bool kExact = PARTS == 3;
constexpr int kChannels = CHANNELS, kFragments = kChannels / 8, kSubs = kChannels / 32;
constexpr int kRowBytes = kChannels * 2;       // bytes of a bfloat16 part of a column
constexpr u32 kDepthBytes = 16 * kRowBytes;    // bytes of a part per wgmma
constexpr int kHalf = (PRODUCTS + 1) / 2;      // half of the wgmmas of a row

// The scale of a row of y: its exponent, and the biased exponent of the largest scaled element.
struct Scaled {
  int lift, most;
};

}  // namespace

extern "C" __global__ void __launch_bounds__(kMostThreads, 1)
    hopper_first_split(const __grid_constant__ HopperFirstTapsArgs args) {
  extern __shared__ uint4 shared[];
  __shared__ u64 barriers[6 * kMostStages];
  __shared__ Scaled scaled[kMadeStages];
  __shared__ Extremes of_rows[3];  // a ring by row; each is cleared before it is reused
  const int thread = threadIdx.x, lane = thread & 31;
  // Warp-uniform, which the compiler infers only from a shuffle.
  const int warp = __shfl_sync(0xffffffff, thread / 32, 0);
  const int consumers = blockDim.x / 32 - 8;  // warps, before four that split and four that load
  char* const base = reinterpret_cast<char*>(shared) + (-shared_address(shared) & 1023);
  const u32 ring = shared_address(base);
  const u32 y_full = shared_address(barriers), y_empty = y_full + kMostStages * 8;
  const u32 x_full = y_empty + kMostStages * 8, x_empty = x_full + kMostStages * 8;
  const u32 made = x_empty + kMostStages * 8, used = made + kMostStages * 8;
  const BlockAt block(args, kChannels);
  // Bytes of 32 channels of a row of y, and of the row in one bfloat16 part.
  const u32 sub_bytes = args.segment * 128, part_bytes = args.segment * kRowBytes;
  if (thread == 0) {
    for (int i = 0; i < kMostStages; ++i) {
      mbarrier_init(y_full + i * 8, 1);
      mbarrier_init(y_empty + i * 8, 4);
      mbarrier_init(x_full + i * 8, 1);
      mbarrier_init(x_empty + i * 8, consumers);
      mbarrier_init(made + i * 8, 4);
      mbarrier_init(used + i * 8, consumers);
    }
    fence_mbarrier_init();
    for (Extremes& one : of_rows) one = Extremes::none();
  }
  __syncthreads();

  const int tile = warp / 4 % args.tiles, part = warp / 4 / args.tiles;
  const int own = tile * 64 + warp % 4 * 16 + (lane >> 2) * 2;  // this lane's rows of M in the block
  const int pitch = args.tiles * 64 + 4;
  float* const sums = reinterpret_cast<float*>(base);
  if (warp >= consumers + 4) {
    setmaxnreg_dec<40>();
    // One producer thread per tensor: issuing a copy takes longer than many copies.
    const bool of_x = warp == consumers + 4, of_y = warp == consumers + 5;
    if (lane == 0 && of_x) {
      copy_rows_of_x<T>(args, block, ring, x_full, x_empty);
    } else if (lane == 0 && of_y) {
      PipelineState state;
      for (Steps step(args, block); step.there(); step.next()) {
        if (!step.multiplies()) continue;
        const u32 full = y_full + state.index * 8;
        mbarrier_wait(y_empty + state.index * 8, state.parity ^ 1);
        mbarrier_arrive_expect_tx(full, kSubs * sub_bytes);
#pragma unroll
        for (int sub = 0; sub < kSubs; ++sub) {
          const int corner[5] = {block.first_channel + sub * 32, step.segment * args.segment,
                                 step.p, step.z, step.n};
          tma_load(ring + state.index * args.y_stage + sub * sub_bytes, args.y_map, full, corner);
        }
        state.advance(args.y_stages);
      }
    }
    return;
  } else if (warp >= consumers) {
    setmaxnreg_dec<80>();
    const int first = thread - consumers * 32;
    PipelineState y_state, state;
    SplitScale power;
    int turn = 0;
    for (Steps step(args, block); step.there(); step.next()) {
      if (!step.multiplies()) continue;
      mbarrier_wait(y_full + y_state.index * 8, y_state.parity);
      mbarrier_wait(used + state.index * 8, state.parity ^ 1);
      const u32 from = ring + y_state.index * args.y_stage;
      char* const to = base + args.made_at + state.index * PARTS * part_bytes;
      constexpr int kChunks = kRowBytes / 16;
      const auto split_row = [&](float by) {
        Extremes seen = Extremes::none();
        for (int i = first; i < args.segment * kChunks; i += 128) {
          const int q = i / kChunks, chunk = i % kChunks;
          u32 words[2][4];
#pragma unroll
          for (int two = 0; two < 2; ++two) {
            ld_shared_v4(words[two], from + chunk / 4 * sub_bytes + q * 128 +
                                       ((chunk % 4 * 2 + two) ^ (q & 7)) * 16);
          }
          u32 parts[PARTS][4];
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const u32 low = words[e / 2][e % 2 * 2], high = words[e / 2][e % 2 * 2 + 1];
            seen.add(low), seen.add(high);
            u32 some[PARTS];
            split_x2(__uint_as_float(low) * by, __uint_as_float(high) * by, some);
#pragma unroll
            for (int of = 0; of < PARTS; ++of) parts[of][e] = some[of];
          }
#pragma unroll
          for (int of = 0; of < PARTS; ++of) {
            *reinterpret_cast<uint4*>(to + of * part_bytes + q * kRowBytes +
                                      (chunk ^ (kSubs == 1 ? q >> 1 & 3 : q & 7)) * 16) =
                make_uint4(parts[of][0], parts[of][1], parts[of][2], parts[of][3]);
          }
        }
        return seen;
      };
      const Extremes seen = split_row(power.scale()).of_warp();
      const int next = turn == 2 ? 0 : turn + 1;
      if (lane == 0) {
        atomicMin(&of_rows[turn].least, seen.least);
        atomicMax(&of_rows[turn].most, seen.most);
      }
      if (first == 0) of_rows[next] = Extremes::none();
      named_barrier_sync(kSplit, 128);
      const Extremes row = of_rows[turn];
      turn = next;
      if (!power.covers(row, 0, false)) {
        power.choose(row, 0, false);
        split_row(power.scale());
      }
      if (first == 0) scaled[state.index] = {power.exponent, row.exponent() + power.exponent};
      fence_proxy_async();
      __syncwarp();
      if (lane == 0) {
        mbarrier_arrive(y_empty + y_state.index * 8);
        mbarrier_arrive(made + state.index * 8);
      }
      y_state.advance(args.y_stages);
      state.advance(kMadeStages);
    }
    return;
  } else {
    setmaxnreg_inc<120>();
    launch_dependent_grids();
    const int apart = window_step<T>(args);
    const Own place(args, block.first_tile * 64 + own, sizeof(T), apart);
    const u64 b_first = mn_major_descriptor<kRowBytes>(ring + args.made_at);

    PipelineState state, parts_state;
    int freed = 0, freed_at = 0, index = 0;  // step counters, from the block's first step
    const auto free_to = [&](int until) {
      for (; freed < until; ++freed) {
        if (lane == 0) mbarrier_arrive(x_empty + freed_at * 8);
        if (++freed_at == args.x_stages) freed_at = 0;
      }
    };
    u32 a[2][PARTS][4];
    float sum[kFragments][4] = {};
    // Accumulators of products of the largest parts, by halves of a row, if those are separate; and
    // of all other products, scaled by 2^small_lift.
    [[maybe_unused]] float large[2][kFragments][4], small[kFragments][4] = {};
    SplitScale power;
    int small_lift = 0;
    for (Steps step(args, block); step.there(); step.next()) {
      mbarrier_wait(x_full + state.index * 8, state.parity);
      if (step.multiplies()) {
        int stage = state.index - place.lag;
        if (stage < 0) stage += args.x_stages;
        const u32 from = ring + args.raws_at + stage * args.x_stage + place.at + step.lead +
                         part * PRODUCTS * 16 * apart;
        u32 words[2][4];  // columns 0, 1 and 8, 9 of a wgmma: two adjacent elements each
        const auto load = [&](int i) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            u32(&two)[4] = words[e / 2];
            const u32 at = from + (16 * i + e / 2 * 8 + e % 2) * apart;
            if constexpr (ODD) {
              two[e % 2 * 2] = ld_shared_u32(at), two[e % 2 * 2 + 1] = ld_shared_u32(at + 4);
            } else {
              uint2 both;
              ld_shared(at, both);
              two[e % 2 * 2] = both.x, two[e % 2 * 2 + 1] = both.y;
            }
          }
        };
        Extremes seen = Extremes::none();
#pragma unroll 1
        for (int i = 0; i < PRODUCTS; ++i) {
          load(i);
#pragma unroll
          for (int e = 0; e < 8; ++e) seen.add(words[e / 4][e % 4]);
        }
        load(0);
        mbarrier_wait(made + parts_state.index * 8, parts_state.parity);
        const Scaled row = scaled[parts_state.index];
        if (__any_sync(0xffffffff, !power.covers(seen, row.most, row.lift > 0))) {
          power.choose(seen.of_warp(), row.most, row.lift > 0);
        }
        const float by = power.scale();
        [[maybe_unused]] const float back = power_of_two(-power.exponent - row.lift);
        if (power.exponent + row.lift != small_lift) {
          accumulate_scaled(sum, small, power_of_two(-small_lift));
#pragma unroll
          for (int i = 0; i < 4 * kFragments; ++i) small[i / 4][i % 4] = 0;
          small_lift = power.exponent + row.lift;
        }
        const u64 b = advance_descriptor(b_first, parts_state.index * PARTS * part_bytes +
                                           part * PRODUCTS * kDepthBytes);
#pragma unroll
        for (int i = 0; i < PRODUCTS; ++i) {
          const int turn = i & 1, half = i >= kHalf;
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            u32 some[PARTS];
            split_x2(__uint_as_float(words[e / 2][e % 2]) * by,
                      __uint_as_float(words[e / 2][e % 2 + 2]) * by, some);
#pragma unroll
            for (int of = 0; of < PARTS; ++of) a[turn][of][e] = some[of];
          }
#pragma unroll
          for (int of = 0; of < PARTS; ++of) fence_registers(a[turn][of]);
          // Load the next operands while these wgmmas run.
          if (i + 1 < PRODUCTS) load(i + 1);
          wgmma_fence();
          const auto start = [&](float(&to)[kFragments][4], int of_a, int of_b, int add) {
            wgmma<bf16, kMajorMn>(to, a[turn][of_a],
                                     advance_descriptor(b, of_b * part_bytes + i * kDepthBytes), add);
          };
          if constexpr (kExact) {
            start(large[half], 0, 0, i != 0 && i != kHalf);
            start(small, 0, 1, 1);
            start(small, 1, 0, 1);
            start(small, 1, 1, 1);
            start(small, 0, PARTS - 1, 1);
            start(small, PARTS - 1, 0, 1);
          } else {
            start(small, 0, 1, 1);
            start(small, 1, 0, 1);
            start(small, 0, 0, 1);
          }
          wgmma_commit();
          wgmma_wait<1>();
#pragma unroll
          for (int of = 0; of < PARTS; ++of) fence_registers(a[turn ^ 1][of]);
          if constexpr (kExact) {
            if (i == kHalf) accumulate_scaled(sum, large[0], back);
          }
        }
        wgmma_wait<0>();
        if constexpr (kExact) {
          accumulate_scaled(sum, large[1], back);
        }
        fence_accumulators(small);
        __syncwarp();
        if (lane == 0) mbarrier_arrive(used + parts_state.index * 8);
        parts_state.advance(kMadeStages);
        // Release the rows of x that no later row of y reads.
        free_to(index - args.before + 1);
      } else if (step.begins()) {
        __syncwarp();
        free_to(index);
      }
      ++index;
      state.advance(args.x_stages);
    }
    accumulate_scaled(sum, small, power_of_two(-small_lift));
    // All copies have arrived, but other warps may still read them. Warpgroups that share a tile
    // add their accumulators one after another.
    for (int turn = 0; turn < args.parts; ++turn) {
      named_barrier_sync(kSums, consumers * 32);
      if (part != turn) continue;
      leave_sums(sums + (lane & 3) * 2 * pitch + own, sum, pitch, turn == 0);
    }
  }
  named_barrier_sync(kSums, consumers * 32);

  put_partials<kChannels>(args, block, sums, pitch, warp, consumers, lane);
}
