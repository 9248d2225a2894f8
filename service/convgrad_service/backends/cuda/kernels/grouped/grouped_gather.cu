// A grouped convolution of few channels per group, forward or the gradient of the input, on tensor
// cores: M = positions of the result, N = result channels, K = taps x source channels, of one group
// or of as many groups, merged, as fill whole 16-byte chunks of channels on both sides; else zeros fill
// them up in shared memory. The weight of merged groups is block-diagonal. Launched by grouped_gather.py.
//
// Along each dimension, result position y0 + m*y_step (m in [0, count)) of a phase meets, at its tap
// j in [0, taps), source position x0 + (m*x_step + j*x_tap)*lattice and weight tap r0 + j*r_step.
//
// Block: a box of result positions (up to TILE_POSITIONS of them, over some images) and a slice of
// adjacent channels on both sides. The source's box with its halo and the slice's weights are copied
// to shared memory once. Each warp computes units of MF * 16 positions x PACK merges x NF * 8 result
// channels, with all sums in registers, and stages results in its 16 rows of shared memory for
// 16-byte stores.
// Dynamic shared memory: the box, the weights [merge][taps, then one of zeros][out channel][in
// channel], result offsets and box offsets of positions, offsets of the steps of the reduction, and
// the warps' rows, at offsets that grouped_gather.py computes.
// Grid: slices (fastest), phases, boxes.
// Preconditions: channels, of all merged groups, are contiguous.
// Deterministic: one order of additions for each result, independent of boxes. Positions outside the
// source and other groups' channels are multiplied as zeros, so NaN and infinities spread to merged
// groups: grouped_merge.py only merges groups for which that is allowed.
// Index limits: 64-bit offsets; positions and strides of D, H, W in bytes below 2^31.
#include "grouped/grouped_result.cuh"
#include "grouped/grouped_units.cuh"

using namespace convgrad;

namespace {

constexpr int kWarps = WARPS, kThreads = kWarps * 32;
constexpr u32 kNowhere = ~0u;

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)
    grouped_gather(const __grid_constant__ GroupedGatherArgs args) {
  using T = ELEMENT;
  extern __shared__ uint4 shared[];
  __shared__ Place place;
  __shared__ Spot spots[3];  // of this box and the next two
  char* const base = reinterpret_cast<char*>(shared);
  u32* const result_at = reinterpret_cast<u32*>(base + args.results_at);
  int* const source_at = reinterpret_cast<int*>(base + args.sources_at);
  u32* const digits_at = reinterpret_cast<u32*>(base + args.digits_at);
  Step* const step_at = reinterpret_cast<Step*>(base + args.steps_at);
  const u32 box_at = shared_address(base), weights_at = box_at + args.weights_at;
  const int thread = threadIdx.x, lane = thread & 31, warp = thread / 32;

  // The block's slice and phase, and its first two boxes.
  const int boxes = args.tiles[0] * args.tiles[1] * args.tiles[2] * args.tiles[3];
  const int first_merge = blockIdx.y * args.slice, first_group = first_merge * args.merged;
  Place mine;
  u32 part = blockIdx.z;
#pragma unroll
  for (int dim = 2; dim >= 0; --dim) {
    const u32 above = gridDim.z > 1 ? part / static_cast<u32>(args.phases[dim]) : 0;
    mine.phase[dim] = args.phase[dim][part - above * args.phases[dim]];
    part = above;
    mine.low[dim] = min(0, (mine.phase[dim].taps - 1) * args.x_tap[dim]);
  }
  mine.group = first_group;
  if (thread == 0) place = mine;
  if (thread < 2) spots[thread] = spot_of(args, mine, blockIdx.x + thread * gridDim.x);
  const int merges = min(args.slice, args.merges - first_merge);
  const int x_merge = args.merged * args.x_channels, y_merge = args.merged * args.y_channels;
  const int x_chunks = (x_merge + kChunk - 1) / kChunk;
  const T* const x = static_cast<const T*>(args.x) + first_group * args.x_group;
  const T* const w = static_cast<const T*>(args.w) + first_group * args.w_group;
  const int taps = mine.phase[0].taps * mine.phase[1].taps * mine.phase[2].taps;

  // Weights as [merge][tap][out channel][in channel], block-diagonal.
  const int in_channels = ACROSS ? args.y_channels : args.x_channels;
  const int out_channels = ACROSS ? args.x_channels : args.y_channels;
  const int real_rows = args.merged * out_channels, w_rows = (real_rows + kChunk - 1) / kChunk * kChunk;
  const int w_chunks = (args.merged * in_channels + kChunk - 1) / kChunk;
  const int tap_bytes = w_rows * args.w_pitch, merge_bytes = (taps + 1) * tap_bytes;
  {
    // A thread keeps its chunk within a tap, and walks over taps and merges.
    const int row_chunks = w_rows * w_chunks, lanes = min(row_chunks, kThreads);
    const int at_once = quick_divide(kThreads, lanes), slot = quick_divide(thread, lanes);
    const int radix[4] = {max(mine.phase[0].taps, 1), max(mine.phase[1].taps, 1), max(mine.phase[2].taps, 1), 1};
    const int steps[3] = {args.r_step[0] * args.w_stride[3], args.r_step[1] * args.w_stride[4],
                          args.r_step[2] * args.w_stride[5]};
    const Walk first_tap(radix, slot, at_once);
    for (int within = thread - slot * lanes; within < row_chunks; within += kThreads) {
      const int row = quick_divide(within, w_chunks);
      const int chunk = within - row * w_chunks;
      const int own = quick_divide(row, out_channels), limit = row < real_rows ? in_channels : 0;
      // The chunk's first channel, relative to this row's group.
      const int channel = chunk * kChunk - own * in_channels;
      const T* const first = w + own * args.w_group +
                             ((row - own * out_channels) * args.w_stride[1] +
                              mine.phase[0].r0 * args.w_stride[3] + mine.phase[1].r0 * args.w_stride[4] +
                              mine.phase[2].r0 * args.w_stride[5]);
      char* to = base + args.weights_at + row * args.w_pitch + chunk * 16;
      for (int merge = 0; merge < merges; ++merge, to += merge_bytes) {
        const T* const of_merge = first + merge * args.merged * args.w_group;
        Walk tap = first_tap;
        for (int i = slot; i <= taps && slot < at_once; i += at_once, tap.next(radix)) {
          const T* const from =
              of_merge + (tap.n * steps[0] + tap.d * steps[1] + tap.h * steps[2]);
          copy_weights(to + i * tap_bytes, i < taps ? from : of_merge, channel,
                       i < taps ? limit : 0, args.w_vector, args.w_stride[2]);
        }
      }
    }
  }

  const Copier copier(args.box, reinterpret_cast<const char*>(x), args.x_stride, args.lattice,
                      (args.groups - first_group) * args.x_channels * kSize);
  if (args.padded) clear<kThreads>(base, args.weights_at);
  __syncthreads();
  const Phase(&phase)[3] = place.phase;
  auto copy = [&](int index, const Spot& spot, u32 to) {
    if (index < boxes && taps > 0) {
      copier.copy(to, args.box, args.x_stride, spot.image, args.batch, spot.from, args.lattice,
                  args.x_size);
    }
  };
  copy(blockIdx.x, spots[0], box_at);
  cp_async_commit();

  // Steps of two chunks; if their number is odd, the last one uses the tap of zeros.
  const int met = args.own ? args.x_channels / kChunk : x_chunks;  // chunks of a tap that one result meets
  const int chunks = taps * met, steps = EXACT ? chunks : (chunks + 1) / 2;
  for (int i = thread; i < (EXACT ? chunks : steps * 2); i += kThreads) {
    const int tap = i < chunks ? quick_divide(i, met) : taps;
    const int chunk = i < chunks ? i - tap * met : 0;
    Step to = {0, tap * tap_bytes + chunk * (ACROSS ? kChunk * args.w_pitch : 16)};
    if (i < chunks) {
      const int j01 = quick_divide(tap, phase[2].taps);
      const int j0 = quick_divide(j01, phase[1].taps);
      const int d = j0 * args.x_tap[0] - place.low[0];
      const int h = (j01 - j0 * phase[1].taps) * args.x_tap[1] - place.low[1];
      const int v = (tap - j01 * phase[2].taps) * args.x_tap[2] - place.low[2];
      to.a = ((d * args.box.extent[2] + h) * args.box.extent[3] + v) * args.box.pitch + chunk * 16;
    }
    step_at[i] = to;
  }

  // Offsets at which a box's positions are read and written, and their coordinates.
  // In windows, four rows of eight positions are consecutive.
  const int positions = args.tile[0] * args.tile[1] * args.tile[2] * args.tile[3];
  const int fragments = (positions + 15) / 16;
  // Within a box, offsets fit in 32 bits.
  const u32 y_next[4] = {static_cast<u32>(args.y_stride[0]),
                         static_cast<u32>(args.y_step[0] * args.y_stride[1]),
                         static_cast<u32>(args.y_step[1] * args.y_stride[2]),
                         static_cast<u32>(args.y_step[2] * args.y_stride[3])};
  constexpr int kHigh = WINDOWS ? 4 : 1, kWide = WINDOWS ? 8 : 1;
  const int radix[4] = {args.tile[0], args.tile[1], args.tile[2] / kHigh, args.tile[3] / kWide};
  constexpr int kWindow = kHigh * kWide;
  Walk at(radix, thread / kWindow, kThreads / kWindow);
  for (int i = thread; i < fragments * 16; i += kThreads, at.next(radix)) {
    const int h = at.h * kHigh + i % kWindow / kWide, v = at.w * kWide + i % kWide;
    const int row = (at.n * args.box.extent[1] + at.d * args.x_step[0]) * args.box.extent[2] +
                    h * args.x_step[1];
    const int source = (row * args.box.extent[3] + v * args.x_step[2]) * args.box.pitch;
    source_at[i] = i < positions ? source : 0;
    const u32 result = at.n * y_next[0] + at.d * y_next[1] + h * y_next[2] + v * y_next[3];
    result_at[i] = i < positions ? result : kNowhere;
    digits_at[i] = at.n << 25 | at.d << 18 | h << 10 | v;
  }

  const i64 y_merge_stride = args.merged * args.y_group;
  const int packs = (merges + PACK - 1) / PACK;
  const int column_blocks = (y_merge + NF * 8 - 1) / (NF * 8);
  const int row_blocks = (fragments + MF - 1) / MF;
  const int units = packs * column_blocks * row_blocks;
  const int x_merge_bytes = x_chunks * 16;
  // Bytes between groups of 8 result channels in the weights.
  const int column_bytes = ACROSS ? 8 * kSize : 8 * args.w_pitch;
  char* const rows = base + args.rows_at + warp * kRowsBytes;
  __syncthreads();
  Operands from = {step_at, steps,      x_merge_bytes, merge_bytes, column_bytes, args.w_pitch, 0,
                   base,    0,          0};
#if WINDOWS
  const int row_bytes = args.box.extent[3] * args.box.pitch, eighth = lane >> 3;
  // Offset o of a row, or of a column, is tap o forward and tap 2 - o backward.
  const int turned = args.x_tap[2] < 0;
  auto tap_at = [&](int tap) { return (turned ? 8 - tap : tap) * tap_bytes; };
  const Windows windows = {
      phase[0].taps,
      args.x_tap[0] * args.box.extent[2] * row_bytes,
      9 * tap_bytes,
      -place.low[0] * args.box.extent[2] * row_bytes,
      row_bytes,
      (eighth >> 1) * row_bytes + ((eighth & 1) + (lane & 7)) * args.box.pitch,
      eighth * row_bytes + (2 + (lane & 7)) * args.box.pitch,
      tap_at(eighth) + (lane & 7) * args.w_pitch,
      turned ? -4 * tap_bytes : 4 * tap_bytes};
  // From the first result of a window's two rows to the one that this lane stores.
  const int lane_to = static_cast<int>((lane >> 4) * args.y_step[1] * args.y_stride[2] +
                                       (lane / 2 % 8) * args.y_step[2] * args.y_stride[3]);
#endif
  if (args.own) {
    const int own = lane % 4 * 2 / args.y_channels * args.x_channels;
    from.own_a = own * kSize, from.own_b = own * (ACROSS ? args.w_pitch : kSize);
  }
  u32 stage_at = box_at, next_at = box_at + args.stage_bytes;
  int turn = 0;
#pragma unroll 1
  for (int index = blockIdx.x; index < boxes; index += gridDim.x) {
    copy(index + gridDim.x, spots[turn == 2 ? 0 : turn + 1], next_at);
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();
    const Spot& spot = spots[turn];
    if (thread == kThreads - 1) {
      spots[turn == 0 ? 2 : turn - 1] = spot_of(args, place, index + 2 * gridDim.x);
    }
    T* const y = static_cast<T*>(args.y) + first_group * args.y_group + spot.y;
    const bool whole = spot.whole;
    auto real = [&](int position) {
      if (whole) return true;
      const u32 digits = digits_at[position];
      return static_cast<int>(digits >> 25) < spot.left[0] &&
             static_cast<int>(digits >> 18 & 127) < spot.left[1] &&
             static_cast<int>(digits >> 10 & 255) < spot.left[2] &&
             static_cast<int>(digits & 1023) < spot.left[3];
    };
#pragma unroll 1
  for (int unit = warp; unit < units; unit += kWarps) {
    const int row_and_column = quick_divide(unit, packs);
    const int merge = (unit - row_and_column * packs) * PACK;
    const int row_block = quick_divide(row_and_column, column_blocks);
    const int column_block = row_and_column - row_block * column_blocks;
    const int fragment = row_block * MF;
    from.weights = weights_at + merge * merge_bytes + column_block * NF * column_bytes;
    auto a_at = [&](int f) {
      const int row = min(fragment + f, fragments - 1) * 16 + (lane & 15);
      return stage_at + source_at[row] + merge * x_merge_bytes;
    };
    auto corner_at = [&](int v) {
      return stage_at + source_at[min(fragment / 2 + v, fragments / 2 - 1) * 32] +
             merge * x_merge_bytes;
    };
    const int first_channel = column_block * NF * 8;
    if (args.plain) {
      float sum[PACK][MF][NF][4] = {};
#if WINDOWS
      u32 corner[MF / 2];
#pragma unroll
      for (int v = 0; v < MF / 2; ++v) corner[v] = corner_at(v);
      multiply_windows(sum, corner, from, windows);
#else
      u32 from_a[MF];
#pragma unroll
      for (int f = 0; f < MF; ++f) from_a[f] = a_at(f);
      multiply(sum, from_a, from);
#endif
      // Results without an epilogue.
#if WINDOWS
      // 16 bytes of 16 positions at a time: two rows of a window.
      const int row = lane / 2, line = lane % 2, s = line ^ (row >> 2 & 1);
      const bool mine = merge + s < merges;
#pragma unroll
      for (int f = 0; f < MF; ++f) {
        if (fragment + f >= fragments) break;
        put(sum, f, reinterpret_cast<T*>(rows), kRowPitch / kSize);
        __syncwarp();
        const int position = (fragment + f) * 16;
        if (mine && real(position + row)) {
          T* const to = y + result_at[position] + s * y_merge_stride + lane_to;
          store_chunk(to + merge * y_merge_stride, rows + lane * 16, y_merge, args.y_piece);
        }
        __syncwarp();
      }
#else
      // 16 bytes of 16 rows at a time: this lane's rows and channels.
      constexpr int kLine = kColumns / kChunk, kMergeLine = NF * 8 / kChunk;
      constexpr int kRounds = (16 * kLine + 31) / 32;
#pragma unroll
      for (int f = 0; f < MF; ++f) {
        if (fragment + f >= fragments) break;
        put(sum, f, reinterpret_cast<T*>(rows), kRowPitch / kSize);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kRounds; ++i) {
          const int slot = i * 32 + lane, row = slot / kLine;
          const int line = slot % kLine ^ (kSwapped ? row >> 2 & 1 : 0), s = line / kMergeLine;
          const int channel = first_channel + (line - s * kMergeLine) * kChunk;
          const int position = (fragment + f) * 16 + row;
          if (slot >= 16 * kLine || merge + s >= merges || channel >= y_merge) continue;
          const u32 at = result_at[position];
          if (at == kNowhere || !real(position)) continue;
          T* const to = y + (merge + s) * y_merge_stride + channel;
          store_chunk(to + at, rows + row * kRowPitch + slot % kLine * 16, y_merge - channel, args.y_piece);
        }
        __syncwarp();
      }
#endif
      continue;
    }
    // Results with an epilogue, 16 positions at a time to save registers.
#pragma unroll 1
    for (int f = 0; f < MF && fragment + f < fragments; ++f) {
      float* const slab = reinterpret_cast<float*>(rows);
#if WINDOWS
      float sum[PACK][2][NF][4] = {};
      const u32 corner[1] = {corner_at(f / 2)};
      multiply_windows(sum, corner, from, windows);
      if (f % 2 == 0) {
        put(sum, 0, slab, kColumns + 4);
      } else {
        put(sum, 1, slab, kColumns + 4);
      }
#else
      float sum[PACK][1][NF][4] = {};
      const u32 from_a[1] = {a_at(f)};
      multiply(sum, from_a, from);
      put(sum, 0, slab, kColumns + 4);
#endif
      __syncwarp();
#pragma unroll 1
      for (int i = lane; i < 16 * kColumns; i += 32) {
        const int row = i / kColumns, column = i % kColumns, s = column / (NF * 8);
        const int channel = first_channel + column - s * NF * 8;
        const int position = (fragment + f) * 16 + row;
        const u32 at = result_at[position];
        if (at == kNowhere || merge + s >= merges || channel >= y_merge || !real(position)) {
          continue;
        }
        const int own = quick_divide(channel, args.y_channels);
        settle(args, spot, slab[row * (kColumns + 4) + column], at,
               place.group + (merge + s) * args.merged + own,
               channel - own * args.y_channels);
      }
      __syncwarp();
    }
  }
    __syncthreads();
    turn = turn == 2 ? 0 : turn + 1;
    if (args.stage_bytes) {
      const u32 read = stage_at;
      stage_at = next_at, next_at = read;
    }
  }
}
