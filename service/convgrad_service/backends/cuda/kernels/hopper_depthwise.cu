// Depthwise convolutions on Hopper, of channels-last 16-bit tensors on tensor cores: the gradient of
// the input, and with stride 1 the result too, w read from its end.
//
// y[n, h, v, c] = sum over taps (r, s) of x[n, (h + pad - r) / STRIDE, (v + pad - s) / STRIDE, c] *
//                 w[c, r, s], where those are whole. KERNEL rows and columns.
// GEMM view, for 8 channels and two columns of the kernel: M = 16 columns of x, K = their 8 channels
// at the one tap and at the other, N = 8 channels of y; w is a diagonal for each tap. Only one product
// in eight is wanted; but operands are pixels as they lie, and results as they will lie.
// With stride 2, the results of each row and column parity are products of their own.
// Block: a tile of CHANNELS channels and a run of stages: `stage_rows` rows of x, `pairs` times 16
// columns wide, from one image into the next. One thread copies them (TMA, boxes of 64 channels), one
// takes results away (TMA), WARPS warps multiply: each has 8 channels and up to PAIRS times 16 columns
// and walks down x, with the sums of the rows of y that are not finished in registers.
// Grid: `blocks` for each tile, `last_blocks` for the last, which may have fewer channels.
// Dynamic shared memory: 1,024 bytes to align it by, a ring of `slots` stages, kResults results.
// Deterministic. Relies on its launcher for: channels in multiples of 8, aligned to 16 bytes.
// Products with what lies off the diagonals, and with the zeros outside of x, are NaN for an
// infinity: a result that is not finite is computed again from its valid taps.
// Index limits: stages below 2^31, elements 64-bit.
#include "hopper_depthwise.cuh"

using namespace convgrad;

namespace {

constexpr int kQuads = (kMet + 1) / 2;  // of matrices: 16 columns at two shifts
constexpr int kStarted = 65536 / kThreads / 8 * 8, kLeft = 24;
// Of a thread that multiplies; those that copy leave theirs to it.
constexpr int kRegisters = (kStarted * (WARPS / 4 + 1) - kLeft) / (WARPS / 4) / 8 * 8;

// Whether registers suffice to load a step ahead.
constexpr bool kAhead = KERNEL < 5 || WARPS == 8;

// Where a matrix's row lies: 16 bytes of 8 channels, which a swizzle has moved within a pixel.
__device__ __forceinline__ u32 swizzled(u32 offset, u32 chunk) {
  return (offset | chunk) ^ (offset >> 3 & kSwizzle);
}

using Sums = float[STRIDE][STRIDE][4];

// What a warp multiplies: 8 channels, of a stage's 16 columns `most` from `first` on, and where
// stages are whole images one of so many parts of the rows.
struct Warp {
  int octet, first, most, team, teams;
};

// A warp's part of a block's stages; whether this lane has had results that are not finite.
__device__ __forceinline__ bool multiply_stages(const HopperDepthwiseArgs& args,
                                                const Stages& stages, const Warp& of, u32 ring,
                                                char* results, const Barriers& barriers) {
  const int lane = threadIdx.x % 32;
  const int g = lane / 4, t = lane % 4;
  const int first = of.first, each = of.most;
  const int first_channel = stages.tile * CHANNELS + of.octet * 8;
  const u32 chunk = of.octet * 16;
  // Taps by x's rows and columns, and by the parities of y's: each a diagonal of 8 x 8.
  u32 taps[kMet][STRIDE][kMet][STRIDE];
#pragma unroll
  for (int down = 0; down < kMet; ++down) {
#pragma unroll
    for (int a = 0; a < STRIDE; ++a) {
#pragma unroll
      for (int right = 0; right < kMet; ++right) {
#pragma unroll
        for (int b = 0; b < STRIDE; ++b) {
          const int r = a + args.pad[0] - STRIDE * (args.lowest[0] + down);
          const int s = b + args.pad[1] - STRIDE * (args.lowest[1] + right);
          u32 tap = 0;
          if (t == g / 2 && r >= 0 && r < KERNEL && s >= 0 && s < KERNEL) {
            tap = static_cast<const T*>(args.w)[tap_at(args, first_channel + g, r, s)].bits;
          }
          taps[down][a][right][b] = tap << (g % 2 * 16);
        }
      }
    }
  }
  // Of a quad's matrices, this lane says a row of one: 8 columns, the next 8, then one shift on.
  const u32 x_pitch = args.x_columns * kRowBytes;
  u32 from_x[kQuads];
#pragma unroll
  for (int quad = 0; quad < kQuads; ++quad) {
    const int shift = min(2 * quad + lane / 16, kMet - 1);
    from_x[quad] = (first * 16 + lane % 16 + shift) * kRowBytes;
  }
  // Of results it has two channels of columns g and g + 8.
  const u32 y_pitch = args.pairs * (STRIDE * kPairBytes);
  u32 to_y[STRIDE];
#pragma unroll
  for (int b = 0; b < STRIDE; ++b) {
    to_y[b] = swizzled(((first * 16 + g) * STRIDE + b) * kRowBytes, chunk) + t * 4;
  }
  const int all_pairs = ((args.y_size[1] + STRIDE - 1) / STRIDE + 15) / 16;

  const int team_rows = (args.stage_rows + of.teams - 1) / of.teams;

  Sums sums[PAIRS][kMet];
  int slot = 0, result = 0;
  u32 parity = 0, result_parity = 1, odd = 0;
  // Where this lane's rows of a step's matrices lie.
  const auto places = [&](u32 (&from)[kQuads], u32 stage, int step) {
    const u32 x_row = step < 0 ? args.x_bytes + (step + kHead) * x_pitch : step * x_pitch;
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      from[quad] = stage + swizzled(from_x[quad] + x_row, chunk);
    }
  };
#pragma unroll 1
  for (StageAt at(args, stages.begin); at.index < stages.end; at.next(args)) {
    const int own = min(each, min(args.pairs, all_pairs - at.part * args.pairs) - first);
    const u32 stage = ring + slot * args.slot_bytes;
    char* const to = results + result * args.result_bytes;
    const bool starts = of.teams > 1 || at.first(stages);
    if (starts) {
#pragma unroll
      for (int pair = 0; pair < PAIRS; ++pair) {
#pragma unroll
        for (int i = 0; i < kMet * STRIDE * STRIDE * 4; ++i) (&sums[pair][0][0][0][0])[i] = 0;
      }
    }
    const int begin = of.team * team_rows, end = min(at.rows(args), begin + team_rows);
    const int head = begin < end && starts ? begin - kHead : begin;
    u32 from[kQuads], x[kQuads][4];
    places(from, stage, head);
    wait_for(barriers.stored(result), result_parity);
    wait_for(barriers.full(slot), parity);
    if (kAhead && begin < end) {
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) load_matrices(x[quad], from[quad]);
    }
#pragma unroll 1
    for (int step = head; step < end; ++step) {
      const int row = at.row + args.lowest[0] + kHead + step;
      const bool exists = static_cast<u32>(row) < static_cast<u32>(args.x_size[0]);
      u32 next[kQuads];
      places(next, stage, min(step + 1, end - 1));
#pragma unroll
      for (int pair = 0; pair < PAIRS; ++pair) {
        if (pair >= own) break;
        // What comes next is on its way while the tensor cores work.
        u32 ahead[kQuads][4];
        const bool more = pair + 1 < PAIRS && pair + 1 < own;
#pragma unroll
        for (int quad = 0; quad < kQuads; ++quad) {
          if (kAhead) {
            load_matrices(ahead[quad], more ? from[quad] + (pair + 1) * kPairBytes : next[quad]);
          } else {
            load_matrices(x[quad], from[quad] + pair * kPairBytes);
          }
        }
        if (exists) {
#pragma unroll
          for (int quad = 0; quad < kQuads; ++quad) {
            const int right = 2 * quad;
#pragma unroll
            for (int open = 0; open < kMet; ++open) {
              const int down = kMet - 1 - open;
#pragma unroll
              for (int a = 0; a < STRIDE; ++a) {
#pragma unroll
                for (int b = 0; b < STRIDE; ++b) {
                  float(&sum)[4] = sums[pair][open][a][b];
                  if (right + 1 < kMet) {
                    mma<T>(sum, x[quad], taps[down][a][right][b],
                           taps[down][a][min(right + 1, kMet - 1)][b]);
                  } else {
                    const u32 half[2] = {x[quad][0], x[quad][1]};
                    mma<T>(sum, half, taps[down][a][right][b]);
                  }
                }
              }
            }
          }
        }
        if (step >= begin) {
          u32 finished[STRIDE][STRIDE][2];
#pragma unroll
          for (int a = 0; a < STRIDE; ++a) {
#pragma unroll
            for (int b = 0; b < STRIDE; ++b) {
              const float(&sum)[4] = sums[pair][0][a][b];
#pragma unroll
              for (int half = 0; half < 2; ++half) {
                finished[a][b][half] = narrow_two<T>(sum[2 * half], sum[2 * half + 1]);
                mark_odd_if<T>(true, odd, finished[a][b][half]);
              }
            }
          }
#pragma unroll
          for (int a = 0; a < STRIDE; ++a) {
#pragma unroll
            for (int b = 0; b < STRIDE; ++b) {
#pragma unroll
              for (int half = 0; half < 2; ++half) {
                const u32 at_pixel = to_y[b] + (step * STRIDE + a) * y_pitch +
                                     (pair * 2 + half) * (STRIDE * kPairBytes / 2);
                *reinterpret_cast<u32*>(to + at_pixel) = finished[a][b][half];
              }
            }
          }
        }
#pragma unroll
        for (int open = 0; open < kMet; ++open) {
#pragma unroll
          for (int i = 0; i < STRIDE * STRIDE * 4; ++i) {
            (&sums[pair][open][0][0][0])[i] =
                open + 1 < kMet ? (&sums[pair][min(open + 1, kMet - 1)][0][0][0])[i] : 0;
          }
        }
#pragma unroll
        for (int quad = 0; quad < kQuads && kAhead; ++quad) {
#pragma unroll
          for (int k = 0; k < 4; ++k) x[quad][k] = ahead[quad][k];
        }
      }
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) from[quad] = next[quad];
    }
    publish_shared();
    __syncwarp();
    if (lane == 0) arrive(barriers.empty(slot)), arrive(barriers.written(result));
    if (++slot == args.slots) slot = 0, parity ^= 1;
    if (++result == kResults) result = 0, result_parity ^= 1;
  }
  return odd != 0;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    hopper_depthwise(const __grid_constant__ HopperDepthwiseArgs args) {
  extern __shared__ uint4 shared[];
  __shared__ u64 all_barriers[kBarriers];
  __shared__ int any_odd;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  char* const base = reinterpret_cast<char*>(shared) + (-shared_address(shared) & (kAlign - 1));
  char* const results = base + args.slots * args.slot_bytes;
  const u32 ring = shared_address(base);
  const Barriers barriers = {shared_address(all_barriers)};
  const Stages stages(args);
  // Warps: 8 channels each of those that are there, then parts of the columns.
  const int octets = min(args.channels - stages.tile * CHANNELS, CHANNELS) / 8;
  const int most_parts = WARPS / octets, each = (args.pairs + most_parts - 1) / most_parts;
  const int parts = (args.pairs + each - 1) / each;
  const int teams = args.down == 1 ? most_parts / parts : 1, warps = octets * parts * teams;
  if (thread == 0) {
    for (int i = 0; i < args.slots; ++i) {
      make_barrier(barriers.full(i), 1);
      make_barrier(barriers.empty(i), warps);
    }
    for (int i = 0; i < kResults; ++i) {
      make_barrier(barriers.written(i), warps);
      make_barrier(barriers.stored(i), 1);
    }
    publish_barriers();
    any_odd = 0;
  }
  __syncthreads();

  if (warp >= WARPS) {
    leave_registers<kLeft>();
    if (warp == WARPS && elected()) copy_stages(args, stages, ring, barriers);
    if (warp == WARPS + 1) {
      if (elected()) store_stages(args, stages, shared_address(results), barriers);
      __syncwarp();
      pass_by(1, kMultiplying + 32);
    }
    return;
  }
  take_registers<kRegisters>();
  if (warp < warps) {
    const Warp own = {warp % octets, warp / octets % parts * each, each, warp / octets / parts,
                      teams};
    if (multiply_stages(args, stages, own, ring, results, barriers)) any_odd = 1;
  }
  wait_at(1, kMultiplying + 32);
  if (any_odd != 0) mend(args, stages);
}
