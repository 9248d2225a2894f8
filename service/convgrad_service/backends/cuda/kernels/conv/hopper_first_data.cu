// dgrad of a first layer (few input channels) on Hopper, by groups of positions (TMA, wgmma). Launched by
// hopper_first_data.py. Needs sm_90a.
//
//   x[n, c, i] = sum over k and taps r with an o: y[n, k, o] * w[k, c, r], i = o*stride + r - pad.
// M = groups of `stride` positions along W, N = kernel rows x 8 * EIGHTS columns (a group's positions x
// channels), K = taps along D x steps along W x channels of y; see hopper_first_data.cuh. One wgmma adds a
// row of y to all rows of x that it contributes to: its columns for kernel row r belong to row
// p*stride - pad + r of x, and `stride` rows are complete each time y advances by a row.
//
// Grid: segments of groups (fastest), segments of rows of x, planes d, images n; blockIdx.y is the first
//   kernel row.
// Block: one segment, with all kernel rows or every `stride`-th (those of one residue of x's rows). One
//   thread loads rows of y by TMA; each consumer warpgroup has 64 groups and waits for the loads only. In
//   shared memory a position is rows of 128 bytes: of 64 16-bit channels each, or of 32 in float32. Each of
//   the steps along W is the same rows from one position further on.
// float32 is rounded to TF32, or with SPLIT taken as three bfloat16 parts: six products, which keeps all terms
//   of at least 2^-25 of the largest. The weights' parts are in shared memory, y's are made in registers.
//   The largest products are accumulated in float32 every few steps, because tensor cores truncate each of
//   their sums. Power-of-two scales (core/split_floats.cuh), one for the weights and one per warp's part of
//   a row of y, keep the split exact for tiny and huge values.
// Threads: 128 for each 64 groups, and 32 (with SPLIT 128).
// Shared memory (dynamic): 1,024 bytes of alignment, STAGES rows of y, and the weights of each tap along D and
//   step, all columns by as many channels; counted by hopper_first_data.py. Initially the end of the stages holds the weights
//   as loaded.
// Preconditions: dilation 1, one group, at most ROWS kernel rows per block and TAPS steps, 16 * STEPS
//   channels of y, stride*C at most 8 * EIGHTS along W; with EIGHTS 1 a row of y completes at most two rows
//   of x. Positions outside y are zeros.
// Determinism: one order of additions per result, however x is divided among blocks.
// Limits: element offsets along a row of x and y below 2^31; 64-bit elsewhere.
#include "conv/hopper_first_data.cuh"
#include "ptx/warpgroup.cuh"

using namespace convgrad;

using T = FirstElement;

extern "C" __global__ void __launch_bounds__(kMostThreads, BLOCKS)
    hopper_first_data(const __grid_constant__ HopperFirstDataArgs args) {
  extern __shared__ uint4 shared[];
  __shared__ u64 barriers[2 * STAGES + 1];
  __shared__ Extremes of_weights;
  const int thread = threadIdx.x, lane = thread & 31;
  // Warp-uniform, which the compiler infers only from a shuffle.
  const int warp = __shfl_sync(0xffffffff, thread / 32, 0);
  // The number of rows of x that a row of y completes, and the first kernel row's offset in x.
  const int stride_h = args.stride[1], completed = stride_h / args.row_step;
  const int first_row = static_cast<int>(blockIdx.y) - args.pad[1];
  const Share share(args);
  const int first_group = share.segment * args.warpgroups * 64;
  char* const base = reinterpret_cast<char*>(shared) + (-shared_address(shared) & 1023);
  const u32 ring = shared_address(base), stage_bytes = kSubs * args.sub_bytes;
  char* const weights = base + STAGES * stage_bytes;
  char* const as_they_come = base + kFree * stage_bytes;
  const u32 full = shared_address(barriers), empty = full + STAGES * 8, come = empty + STAGES * 8;
  if (thread == 0) {
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(full + i * 8, 1);
      mbarrier_init(empty + i * 8, args.warpgroups * 4);
    }
    mbarrier_init(come, 1);
    fence_mbarrier_init();
    of_weights = Extremes::none();
  }
  __syncthreads();

  if (warp >= args.warpgroups * 4) {
    if constexpr (kSplit) setmaxnreg_dec<40>();
    if (warp > args.warpgroups * 4 || lane > 0) return;
    if (args.w_bytes > 0) {
      mbarrier_arrive_expect_tx(come, args.w_bytes);
      bulk_load(shared_address(as_they_come), args.w, args.w_bytes, come);
    }
    int stage = 0;
    u32 parity = 0;
    for (int p = share.real0; p <= share.real1; ++p) {
      for (int j = 0; j < share.planes; ++j) {
        mbarrier_wait(empty + stage * 8, stage < kFree ? parity ^ 1 : parity);
        mbarrier_arrive_expect_tx(full + stage * 8, kSubs * args.positions * kRowBytes);
#pragma unroll
        for (int sub = 0; sub < kSubs; ++sub) {
          const int corner[5] = {sub * kSubChannels, first_group + args.first_tap, p, share.plane - j,
                                 share.n};
          tma_load(ring + stage * stage_bytes + sub * args.sub_bytes, args.y_map, full + stage * 8,
                    corner);
        }
        if (++stage == STAGES) stage = 0, parity ^= 1;
      }
    }
    return;
  }

  if constexpr (kSplit) setmaxnreg_inc<232>();
  if (args.w_bytes > 0) mbarrier_wait(come, 0);
  const T* const w =
      args.w_bytes > 0 ? reinterpret_cast<const T*>(as_they_come) : static_cast<const T*>(args.w);
  const int threads = args.warpgroups * 128;
  const Extremes seen = lay_weights(args, w, weights, thread, threads).of_warp();
  fence_proxy_async();
  [[maybe_unused]] SplitScale w_power, y_power;
  [[maybe_unused]] int w_most = 0;  // the largest weight's biased exponent, scaled
  if constexpr (kSplit) {
    if (lane == 0) {
      atomicMin(&of_weights.least, seen.least);
      atomicMax(&of_weights.most, seen.most);
    }
    named_barrier_sync(kWeightsLaid, threads);
    w_power.choose(of_weights, 0, false);
    w_most = of_weights.exponent() + w_power.exponent;
    if (w_power.exponent != 0) {
      lay_weights(args, w, weights, thread, threads, w_power.scale());
      fence_proxy_async();
    }
  }
  __syncwarp();
  if (lane == 0) {
#pragma unroll
    for (int i = kFree; i < STAGES; ++i) mbarrier_arrive(empty + i * 8);
  }
  named_barrier_sync(kWeightsLaid, threads);

  // A lane's accumulators per fragment: groups own_group and own_group + 8, columns own_column and
  // own_column + 1.
  float sum[kAll][4] = {};
  [[maybe_unused]] float finished[kMostFinished][4];
  const int tile = warp / 4;
  const i64 plane_at = share.n * args.x_stride[0] + share.d * args.x_stride[3];
  const int own_row = tile * 64 + warp % 4 * 16 + row_of(lane >> 2);
  const int own_group = first_group + own_row, own_column = (lane & 3) * 2;
  // Their offsets in a row of x, and whether they exist.
  int own_at[kEights][2];
  bool there[kEights][2][2];
#pragma unroll
  for (int i = 0; i < 2 * kEights; ++i) {
    const int column = own_column + i / 2 * 8 + i % 2, b = column / args.channels;
    const int w_at = own_group * args.stride[2] + b;
    own_at[i / 2][i % 2] = static_cast<int>(w_at * args.x_stride[5] +
                                            (column - b * args.channels) * args.x_stride[2]);
    for (int more = 0; more < 2; ++more) {
      there[i / 2][i % 2][more] =
          args.plain && b < args.stride[2] && w_at + more * 8 * args.stride[2] < args.x_size[2];
    }
  }
  const int eight_groups = static_cast<int>(8 * args.stride[2] * args.x_stride[5]);
  // Stores one row of x.
  const auto write_row = [&](int h, const float(&of)[4], int beside) {
    if (h < 0 || h >= args.x_size[1]) return;
    T* const x = static_cast<T*>(args.x) + (plane_at + h * args.x_stride[4]);
#pragma unroll
    for (int more = 0; more < 2; ++more) {
      T* const to = x + more * eight_groups;
      const bool(&wanted)[2][2] = there[beside];
      if (args.plain == kInTwos) {
        put_two(wanted[0][more], to + own_at[beside][0], of[2 * more], of[2 * more + 1]);
      } else {
        put_one(wanted[0][more], to + own_at[beside][0], of[2 * more]);
        put_one(wanted[1][more], to + own_at[beside][1], of[2 * more + 1]);
      }
    }
    if (args.plain) return;
#pragma unroll 1
    for (int e = 0; e < 4; ++e) {
      const float value = e < 2 ? (e == 0 ? of[0] : of[1]) : e == 2 ? of[2] : of[3];
      convgrad::put_one<T>(args, share, h, own_group + e / 2 * 8,
                           own_column + beside * 8 + e % 2, value);
    }
  };
  const auto write_rows = [&](int p) {
    if (p < share.finish0) return;
#pragma unroll
    for (int row = 0; row < kMostFinished; ++row) {
      if (row < completed) write_row(p * stride_h + first_row + row, finished[row], 0);
    }
  };
  // Shifts the accumulators by `rows` kernel rows.
  const auto move_on = [&](auto rows) {
    constexpr int kBy = decltype(rows)::value * kEights;
#pragma unroll
    for (int i = 0; i < 4 * kAll; ++i) {
      sum[i / 4][i % 4] = i / 4 + kBy < kAll ? sum[(i / 4 + kBy) % kAll][i % 4] : 0;
    }
  };

  const u64 b_first = sw128_k_major_descriptor(shared_address(weights));
  const u32 plane_bytes = args.taps * kTapBytes;
  const u64 b_part = args.kernel[0] * plane_bytes / 16;
  const auto b_at = [&](u64 plane, int part, int tap, int product) {
    return plane + part * b_part + tap * (kTapBytes / 16) + product / 4 * (kSubBytes / 16) + product % 4 * 2;
  };

  int stage = 0;
  u32 parity = 0;
  for (int p = share.p0; p <= share.finish1; ++p) {
    const bool real = p >= share.real0 && p <= share.real1;
    if (real) {
#pragma unroll 1
      for (int j = 0; j < share.planes; ++j) {
        const u64 plane = b_first + (share.tap + j * args.stride[0]) * plane_bytes / 16;
        const u32 rows = ring + stage * stage_bytes;
        mbarrier_wait(full + stage * 8, parity);
        if constexpr (!kSplit) {
          fence_accumulators(sum);
          wgmma_fence();
          const u64 a = sw128_k_major_descriptor_at_row(rows, tile * 64);
#pragma unroll(TAPS > 0 ? TAPS : 1)
          for (int tap = 0; tap < (TAPS > 0 ? TAPS : args.taps); ++tap) {
#pragma unroll
            for (int product = 0; product < kProducts; ++product) {
              const u64 sub = product / 4 * (args.sub_bytes / 16);
              Wgmma<T, kAll>::issue(sum, a + sub + tap * (kRowBytes / 16) + product % 4 * 2,
                                    b_at(plane, 0, tap, product), 1);
            }
            if constexpr (TAPS == 0) wgmma_commit();
          }
          if constexpr (TAPS > 0) wgmma_commit();
          // Stores the rows that the previous row of y completed while wgmmas run.
          if (kLater && j == 0 && p > share.p0) write_rows(p - 1);
          wgmma_wait<0>();
          fence_accumulators(sum);
        } else {
          // Inspects the warp's part of the row: positions of the first and last step cover all of
          // it.
          Extremes seen = Extremes::none();
#pragma unroll 1
          for (int i = 0; i < 2 * STEPS; ++i) {
            const int step = i / 2, tap = i % 2 * (args.taps - 1);
            const u32 from = rows + step / 2 * args.sub_bytes +
                             chunk_at(own_row + tap, step % 2 * 4 + (lane & 3));
            u32 some[2][4];
            ld_shared_v4(some[0], from);
            ld_shared_v4(some[1], from + 8 * kRowBytes);
#pragma unroll
            for (int e = 0; e < 8; ++e) seen.add(some[e / 4][e % 4]);
          }
          if (__any_sync(0xffffffff, !y_power.covers(seen, w_most, w_power.exponent > 0))) {
            y_power.choose(seen.of_warp(), w_most, w_power.exponent > 0);
          }
          const float by = y_power.scale(), back = power_of_two(-y_power.exponent - w_power.exponent);
          // Accumulators of products of the largest parts, in two halves, and of all other products.
          float large[2][kAll][4], small[kAll][4];
          u32 parts[2][3][4];
          u32 words[2][4];
          const auto load = [&](int tap, int step) {
            const u32 from = rows + step / 2 * args.sub_bytes +
                             chunk_at(own_row + tap, step % 2 * 4 + (lane & 3));
            ld_shared_v4(words[0], from);
            ld_shared_v4(words[1], from + 8 * kRowBytes);
          };
          load(0, 0);
#pragma unroll 1
          for (int tap = 0; tap < args.taps; ++tap) {
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
              const int turn = step & 1, half = step >= STEPS / 2;
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                u32 some[3];
                split_x2(__uint_as_float(words[i & 1][i / 2 * 2]) * by,
                          __uint_as_float(words[i & 1][i / 2 * 2 + 1]) * by, some);
#pragma unroll
                for (int part = 0; part < 3; ++part) parts[turn][part][i] = some[part];
              }
#pragma unroll
              for (int part = 0; part < 3; ++part) fence_registers(parts[turn][part]);
              // Load the next operands while these wgmmas run.
              load(step + 1 < STEPS ? tap : min(tap + 1, args.taps - 1), (step + 1) % STEPS);
              wgmma_fence();
              const auto issue = [&](float(&to)[kAll][4], int of_a, int of_b, int add) {
                Wgmma<bf16, kAll>::issue(to, parts[turn][of_a], b_at(plane, of_b, tap, step), add);
              };
              issue(large[half], 0, 0, step != 0 && step != STEPS / 2);
              issue(small, 0, 1, tap + step > 0);
              issue(small, 1, 0, 1);
              issue(small, 1, 1, 1);
              issue(small, 0, 2, 1);
              issue(small, 2, 0, 1);
              wgmma_commit();
              if (step == 0 && kLater && j == 0 && tap == 0 && p > share.p0) write_rows(p - 1);
              wgmma_wait<1>();
#pragma unroll
              for (int part = 0; part < 3; ++part) fence_registers(parts[turn ^ 1][part]);
              if (step == STEPS / 2) accumulate_scaled(sum, large[0], back);
            }
            wgmma_wait<0>();
            accumulate_scaled(sum, large[1], back);
            fence_accumulators(small);
          }
          accumulate_scaled(sum, small, back);
        }
        __syncwarp();
        if (lane == 0) mbarrier_arrive(empty + stage * 8);
        if (++stage == STAGES) stage = 0, parity ^= 1;
      }
    } else if (kLater && p > share.p0) {
      write_rows(p - 1);
    }
    if constexpr (kLater) {
#pragma unroll
      for (int i = 0; i < 4 * kMostFinished; ++i) finished[i / 4][i % 4] = sum[i / 4][i % 4];
      if (completed == kMostFinished) {
        move_on(Constant<kMostFinished>{});
      } else {
        move_on(Constant<1>{});
      }
    } else {
#pragma unroll 1
      for (int row = 0; row < completed; ++row) {
        if (p >= share.finish0) {
#pragma unroll
          for (int i = 0; i < kEights; ++i) {
            write_row(p * stride_h + first_row + row, sum[i], i);
          }
        }
        move_on(Constant<1>{});
      }
    }
  }
  if (kLater) write_rows(share.finish1);
}
