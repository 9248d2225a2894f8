// The gradient of a depthwise convolution's weight on Hopper, of channels-last 16-bit tensors on
// tensor cores.
//
// w[c, r, s] = sum over (n, p, q) of
//              x[n, p*STRIDE + r - pad, q*STRIDE + s - pad, c] * y[n, p, q, c],
// then alpha and beta*accumulate, and one rounding. KERNEL rows and columns.
// GEMM view, for 8 channels, one row of the kernel and two of its columns: M = 8 channels of x at
// the one tap and at the other, N = 8 channels of y, K = 16 columns of y. Only what meets its own
// channel is wanted, one in eight; but operands are what ldmatrix makes of pixels as they lie, so
// nothing is turned around, and what a row of x was loaded as serves all its rows of taps.
// Block: a tile of CHANNELS channels and a run of stages: `stage_rows` rows of y, `pairs` times 16
// columns wide, from one image into the next. One thread copies them (TMA), WARPS warps multiply:
// each has 8 channels and up to PAIRS times 16 columns, walks down x, and keeps the rows of y that
// meet it. Where stages are whole images, warps also share the rows.
// Grid: `blocks` for each tile, `last_blocks` for the last, which may have fewer channels.
// Dynamic shared memory: 1,024 bytes to align it by, a ring of `slots` stages, the warps' sums.
// Deterministic: the last block of a tile to arrive adds the blocks' partial sums up, in an order
// that depends on their number alone.
// Relies on its launcher for: channels in multiples of 8, aligned to 16 bytes; `arrived` being 0,
// and partials with more than one block.
// Zeros stand for what is outside. Tensor cores do not round but cut, so products are added up in
// float32 every kFlush.
// Index limits: stages below 2^31, elements 64-bit.
#include "depthwise/hopper_depthwise_weight.cuh"
#include "ptx/warpgroup.cuh"

using namespace convgrad;

namespace {

constexpr int kQuads = (KERNEL + 1) / 2;                    // of matrices: two shifts, 16 columns
constexpr int kMet = (KERNEL + STRIDE - 1) / STRIDE;        // rows of y that meet a row of x
constexpr int kTailSteps = (kTail + STRIDE - 1) / STRIDE;
// Of a thread that multiplies; those that copy leave theirs to it.
constexpr int kStarted = 65536 / kThreads / 8 * 8, kLeft = 24;
constexpr int kRegisters = (kStarted * (WARPS / 4 + 1) - kLeft) / (WARPS / 4) / 8 * 8;
// Whether registers suffice to load a step ahead.
constexpr bool kAhead = KERNEL < 5 || WARPS == 8;
constexpr int kFlush = 64;  // products, of 16 terms each

// Where a matrix's row lies: 16 bytes of 8 channels, which a swizzle has moved within a pixel.
__device__ __forceinline__ u32 swizzled(u32 offset, u32 chunk) {
  return (offset | chunk) ^ (offset >> 3 & kSwizzle);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    hopper_depthwise_weight(const __grid_constant__ HopperDepthwiseWeightArgs args) {
  extern __shared__ uint4 shared[];
  __shared__ u64 barriers[2 * kMostSlots];
  __shared__ bool last;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const u32 padding = -shared_address(shared) & (kAlign - 1);
  char* const base = reinterpret_cast<char*>(shared) + padding;
  const u32 ring = shared_address(base);
  float* const sums = reinterpret_cast<float*>(base + args.slots * args.slot_bytes);
  const u32 full = shared_address(barriers), empty = full + kMostSlots * 8;
  const Stages stages(args);
  // Warps: 8 channels each of those that are there, then parts of the columns.
  const int octets = min(args.channels - stages.tile * CHANNELS, CHANNELS) / 8;
  const int most_parts = WARPS / octets, each = (args.pairs + most_parts - 1) / most_parts;
  const int parts = (args.pairs + each - 1) / each;
  // Then, where stages are whole images, parts of the rows.
  const int teams = args.down == 1 ? most_parts / parts : 1, warps = octets * parts * teams;
  if (thread == 0) {
    for (int i = 0; i < args.slots; ++i) {
      init_barrier(full + i * 8, 1);
      init_barrier(empty + i * 8, warps);
    }
    fence_barrier_init();
  }
  for (int i = thread; i < WARPS * kTaps * 8; i += kThreads) sums[i] = 0;
  __syncthreads();

  if (warp >= WARPS) {
    leave_registers<kLeft>();
    if (warp == WARPS && elect_one()) copy_stages(args, stages, ring, full);
    return;
  }
  take_registers<kRegisters>();
  if (warp < warps) {
    const int first = warp / octets % parts * each, team = warp / octets / parts;
    const int team_rows = (args.stage_rows + teams - 1) / teams;
    const u32 chunk = warp % octets * 16;
    const u32 x_pitch = args.x_columns * kRowBytes, y_pitch = args.pairs * kPairBytes;
    // Of a quad's matrices, this lane says a row of one: two shifts, then those 8 columns further
    // on. The last quad has y in place of a shift.
    const int pixel = first * 16 + lane / 16 * 8 + lane % 8, odd = lane / 8 % 2;
    u32 from_x[kQuads], from_tail[kQuads];
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      const int s = min(2 * quad + odd, KERNEL - 1);
      from_x[quad] = (pixel * STRIDE + s) * kRowBytes;
      from_tail[quad] = from_x[quad] + args.x_bytes;
    }
    const u32 from_y = args.x_bytes + args.tail_bytes + pixel * kRowBytes;
    const bool diagonal = lane % 4 == lane / 8;  // holds a channel of x times the same of y
    const bool second = lane / 4 % 2 != 0;
    float* const own_sums = sums + warp * kTaps * 8 + lane / 4;
    const int all_pairs = (args.y_size[1] + 15) / 16;

    float products[KERNEL][kQuads][4] = {};
    u32 y[PAIRS][kMet][2];
    int slot = 0, since = 0;
    u32 parity = 0;
    const u32 last_apart = odd ? kPairBytes : STRIDE * kPairBytes;
    const auto apart = [&](int i, int quad) {
      return i == 0 && quad == kQuads - 1 ? last_apart : STRIDE * kPairBytes;
    };
    // Where this lane's rows of a step's matrices lie.
    const auto places = [&](u32 (&from)[STRIDE][kQuads], u32 stage, int step, int rows) {
      const bool below = step >= rows;
      const u32 x_row = (below ? step - rows : step) * STRIDE * x_pitch;
#pragma unroll
      for (int i = 0; i < STRIDE; ++i) {
#pragma unroll
        for (int quad = 0; quad < kQuads; ++quad) {
          u32 at_row = (below ? from_tail[quad] : from_x[quad]) + x_row + i * x_pitch;
          if (i == 0 && quad == kQuads - 1 && odd) {
            at_row = from_y + min(step, rows - 1) * y_pitch;
          }
          from[i][quad] = stage + swizzled(at_row, chunk);
        }
      }
    };
#pragma unroll 1
    for (StageAt at(args, stages.begin); at.index < stages.end; at.next(args)) {
      const int own = min(each, min(args.pairs, all_pairs - at.part * args.pairs) - first);
      const int rows = at.rows(args);
      // Rows of y, and those of x that meet them.
      const int begin = team * team_rows, y_end = min(rows, begin + team_rows);
      const bool ends = teams > 1 || at.last(args, stages);
      const int end = begin < y_end ? y_end + (ends ? kTailSteps : 0) : begin;
      const u32 stage = ring + slot * args.slot_bytes;
      if (teams > 1 || at.first(stages)) {
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair) {
#pragma unroll
          for (int i = 0; i < kMet; ++i) y[pair][i][0] = y[pair][i][1] = 0;
        }
      }
      int h = (at.row + begin) * STRIDE - args.pad[0];
      u32 from[STRIDE][kQuads], x[STRIDE][kQuads][4];
      places(from, stage, begin, rows);
      wait_barrier(full + slot * 8, parity);
      if (kAhead && begin < end) {
#pragma unroll
        for (int i = 0; i < STRIDE; ++i) {
#pragma unroll
          for (int quad = 0; quad < kQuads; ++quad) {
            load_matrices_transposed(x[i][quad], from[i][quad]);
          }
        }
      }
#pragma unroll 1
      for (int step = begin; step < end; ++step, h += STRIDE) {
        const bool in_tail = step >= y_end;
        u32 next[STRIDE][kQuads];
        places(next, stage, min(step + 1, end - 1), rows);
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair) {
          if (pair >= own) break;
          // What comes next is on its way while the tensor cores work.
          u32 ahead[STRIDE][kQuads][4];
          const bool more = pair + 1 < PAIRS && pair + 1 < own;
#pragma unroll
          for (int i = 0; i < STRIDE; ++i) {
#pragma unroll
            for (int quad = 0; quad < kQuads; ++quad) {
              if (kAhead) {
                load_matrices_transposed(
                    ahead[i][quad],
                    more ? from[i][quad] + (pair + 1) * apart(i, quad) : next[i][quad]);
              } else {
                load_matrices_transposed(x[i][quad], from[i][quad] + pair * apart(i, quad));
              }
            }
          }
#pragma unroll
          for (int i = kMet - 1; i > 0; --i) {
            y[pair][i][0] = y[pair][i - 1][0], y[pair][i][1] = y[pair][i - 1][1];
          }
          y[pair][0][0] = in_tail ? 0 : x[0][kQuads - 1][1];
          y[pair][0][1] = in_tail ? 0 : x[0][kQuads - 1][3];
#pragma unroll
          for (int i = 0; i < STRIDE; ++i) {
            if (static_cast<u32>(h + i) >= static_cast<u32>(args.x_size[0])) continue;
            if (kTail % STRIDE > 0 && i >= kTail % STRIDE && in_tail) continue;
#pragma unroll
            for (int quad = 0; quad < kQuads; ++quad) {
#pragma unroll
              for (int r = i; r < KERNEL; r += STRIDE) {
                const u32(&met)[2] = y[pair][(r - i) / STRIDE];
                mma<T>(products[r][quad], x[i][quad], met[0], met[1]);
              }
            }
          }
#pragma unroll
          for (int i = 0; i < STRIDE; ++i) {
#pragma unroll
            for (int quad = 0; quad < kQuads; ++quad) {
#pragma unroll
              for (int k = 0; k < 4 && kAhead; ++k) x[i][quad][k] = ahead[i][quad][k];
            }
          }
        }
#pragma unroll
        for (int i = 0; i < STRIDE; ++i) {
#pragma unroll
          for (int quad = 0; quad < kQuads; ++quad) from[i][quad] = next[i][quad];
        }
      }
      __syncwarp();
      if (lane == 0) arrive(empty + slot * 8);
      if (++slot == args.slots) slot = 0, parity ^= 1;
      since += (end - begin) * PAIRS;
      if (since < kFlush && at.index + 1 < stages.end) continue;
      since = 0;
#pragma unroll
      for (int r = 0; r < KERNEL; ++r) {
#pragma unroll
        for (int s = 0; s < KERNEL; ++s) {
          float(&product)[4] = products[r][s / 2];
          const float sum = second ? product[s % 2 * 2 + 1] : product[s % 2 * 2];
          if (diagonal) own_sums[(r * KERNEL + s) * 8] += sum;
        }
#pragma unroll
        for (int quad = 0; quad < kQuads; ++quad) {
#pragma unroll
          for (int e = 0; e < 4; ++e) products[r][quad][e] = 0;
        }
      }
    }
  }

  // The block's sums, the columns' parts in order.
  wait_at(1, kMultiplying);
  float* const partials =
      args.partials + static_cast<i64>(stages.tile) * args.blocks * (kTaps * CHANNELS);
  const bool alone = stages.blocks == 1;
  for (int i = thread; i < kTaps * CHANNELS; i += kMultiplying) {
    const int tap = i / CHANNELS, channel = i % CHANNELS, c = stages.tile * CHANNELS + channel;
    float sum = 0;
    if (c < args.channels) {
      for (int part = 0; part < parts * teams; ++part) {
        sum += sums[((part * octets + channel / 8) * kTaps + tap) * 8 + channel % 8];
      }
    }
    if (!alone) {
      partials[static_cast<i64>(stages.block) * (kTaps * CHANNELS) + i] = sum;
    } else {
      put(args, c, tap, sum);
    }
  }
  if (alone) return;
  __threadfence();
  wait_at(1, kMultiplying);
  if (thread == 0) {
    last = atomicInc(args.arrived + stages.tile, stages.blocks - 1) == stages.blocks - 1;
  }
  wait_at(1, kMultiplying);
  if (!last) return;
  __threadfence();
  // The ring is not needed any more.
  put_tile(args, stages, partials, reinterpret_cast<float*>(base));
}
