// Depthwise convolution, forward or the gradient of its input, of channels-last 16-bit tensors on
// tensor cores.
//
// forward   y[n, p, q, c] = sum over (r, s) of
//                           x[n, p*STRIDE + r - pad, q*STRIDE + s - pad, c] * w[c, r, s]
// backward  y[n, u - pad, v - pad, c] = sum over u = p*STRIDE + r, v = q*STRIDE + s
//                                       of x[n, p, q, c] * w[c, r, s]
// then finish() of core/epilogue.cuh, and one rounding; summed in float32. The backward of stride 1 is the
// forward with w flipped.
// GEMM view, for one channel, one row of x and one row of the kernel: M = 16 strips
// (depthwise_strips.cuh), K = the columns that a strip reads, N = its 8 columns of the result
// (backward, 8 for each phase of the stride). Operand B is the kernel's row, shifted by one in each
// column (a Toeplitz matrix). A dilated kernel is a larger one with zeros between its taps. Kernels
// may have up to KERNEL_H rows, and columns such that a strip reads at most UNITS units.
// A warp owns CHANNELS channels of a tile of strips and a chunk of rows, and walks down the source's
// rows: a row is added to every row of the result that it meets, in a ring of accumulators.
// Rows are processed in groups of ROWS. Between two barriers, the block multiplies a group, transposes
// the next one, starts copies of a later one, and stores the rows that the previous group finished.
// Shared memory: STAGES groups as copied, two transposed to lines, the results of two in lines; at the
// start, the kernel's taps are in the place of the lines.
// Relies on its launcher for channels in multiples of 8, aligned to 16 bytes.
// Deterministic: sums are in the order of the source's rows.
// A row of a product is a strip of one channel of one image, so a NaN stays in its plane.
#include "depthwise/depthwise_mma.cuh"
#include "ptx/pdl.cuh"

using namespace convgrad;

extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS)
    depthwise_mma(const __grid_constant__ DepthwiseMmaArgs args) {
  launch_dependent_grids();
  extern __shared__ __align__(128) unsigned char shared[];
  const StripTiling& tiling = args.tiling;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int g = lane / 4, t = lane % 4;
  const int pitch = line_pitch(tiling.slots);
  const int stage_bytes = tiling.slots * kStripColumns * kOctets * 16;
  const int line_bytes = kChannels * pitch;
  const int lines = STAGES * ROWS * stage_bytes, results = lines + 2 * ROWS * line_bytes;

  const int first_channel = blockIdx.x % tiling.channel_tiles * kChannels;
  const Sources sources(first_channel, kChannels, args.multiplier, args.x_channels);
  const TileAt tile = tile_at(tiling, blockIdx.x / tiling.channel_tiles);
  // Rows of the result; backward in units of STRIDE, from the last multiple of STRIDE up to pad.
  int first_row = tile.chunk * tiling.rows;
#if BACKWARD
  first_row += floor_div(args.pad[0], STRIDE);
  const int base = floor_div(args.pad[1], STRIDE), reach = (args.kernel[1] - 1) / STRIDE;
  const int top = first_row - (kReach - 1), left = base - reach;
  const int steps = tiling.rows + kReach - 1;
  const int first_column = base * STRIDE - args.pad[1];
  const int result_row = first_row * STRIDE - args.pad[0];
#else
  const int top = first_row * STRIDE - args.pad[0], left = -args.pad[1];
  const int steps = (tiling.rows - 1) * STRIDE + KERNEL_H;
  constexpr int first_column = 0;
  const int result_row = first_row;
#endif
  // Padding rows before the first finished result.
  const int skipped = max(0, min(-top, kFirst)) / ROWS * ROWS;
  const int end = strip_at<kApart>(tiling, tile, kTileStrips - 1, tiling.units).slot + UNITS;
  Copier copier(shared_address(shared), args.x, args.x_stride, args.batch,
                tile.n, tile.strip * kApart, tiling.units, tiling.slots, end, top + skipped,
                args.x_size[0],
                left, args.x_size[1], sources.first, sources.end);
#pragma unroll
  for (int stage = 0; stage < STAGES; ++stage) {
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const int row = skipped + stage * ROWS + i;
      if (row < steps) copier.copy(row % (STAGES * ROWS) * stage_bytes, top + row, args.x_pitch);
    }
    cp_async_commit();
  }

  Taps taps;
#if BACKWARD
  load_taps(taps, args, reinterpret_cast<u32*>(shared + lines), first_channel, reach);
#else
  load_taps(taps, args, reinterpret_cast<u32*>(shared + lines), first_channel, 0);
#endif

  // What this lane reads from a row's lines and writes to the results' lines.
  const Lines turner(tiling.slots, pitch);
  const int own_slot =
      strip_at<kApart>(tiling, tile, lane % 16, tiling.units).slot + lane / 16;
  int own_line[kOwn];
#pragma unroll
  for (int channel = 0; channel < kOwn; ++channel) {
    const int line = sources.line(first_channel + warp * kOwn + channel);
    own_line[channel] = opaque_value(line * pitch + own_slot * 16);
  }
  // A warp's channels are in one octet, so their units have the same permutation.
  const int own_result =
      opaque_value(warp * kOwn * kResultPitch + result_unit(warp * kOwn, g) * 16 + t * 4);
  // The strips that this warp stores; a lane has one column and kOctets * 2 channels.
  constexpr int kVector = kOctets * 2;
  u32 out[kWarpStrips];  // in units of 8 bytes
  u32 writes = 0;
  int from_result[kWarpStrips * kOctets / 4];
#pragma unroll
  for (int i = 0; i < kWarpStrips; ++i) {
    const StripAt at = strip_at<kApart>(tiling, tile, warp * kWarpStrips + i, tiling.units);
    const int column = first_column + at.strip * kColumns + g, c = first_channel + kVector * t;
#pragma unroll
    for (int phase = 0; phase < kPhases; ++phase) {
      const int to = column + phase * kStripColumns;
      const bool there = at.n < args.batch && to >= 0 && to < args.y_size[1] && c < args.channels;
      writes |= static_cast<u32>(there) << (i * kPhases + phase);
    }
    const i64 start = at.n * args.y_stride[0] + column * args.y_stride[2] + c;
    out[i] = opaque_value(static_cast<u32>((start + result_row * args.y_stride[1]) / 4));
  }
#pragma unroll
  for (int i = 0; i < kWarpStrips * kOctets / 4; ++i) {
    const int matrix = i * 4 + lane / 8, row = lane % 8;
    const int c = kVector * (row / 2) + matrix % kOctets * 2 + row % 2;
    from_result[i] = opaque_value(
        c * kResultPitch + result_unit(c, warp * kWarpStrips + matrix / kOctets) * 16);
  }

  writes = opaque_value(writes);
#if EPILOGUE
  // Accumulate operand of this lane's sums: of strips g and g + 8, from the first row on.
  const T* added[2];
  u32 adds = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const StripAt at = strip_at<kApart>(tiling, tile, g + half * 8, tiling.units);
    const int column = first_column + at.strip * kColumns + 2 * t;
    const int c = first_channel + warp * kOwn;
    added[half] = static_cast<const T*>(args.accumulate) + at.n * args.accumulate_stride[0] +
                  result_row * args.accumulate_stride[1] + column * args.accumulate_stride[2] + c;
#pragma unroll
    for (int i = 0; i < kPhases * 2; ++i) {
      const int to = column + i / 2 * kStripColumns + i % 2;
      const bool there = args.accumulate != nullptr && at.n < args.batch && to >= 0 &&
                         to < args.y_size[1] && c < args.channels;
      adds |= static_cast<u32>(there) << (half * kPhases * 2 + i);
    }
  }
#endif

  // The consecutive rows that `step` finished.
  constexpr int kReads = kPhases * kPhases * kWarpStrips * kOctets / 4;
  const auto finished_by = [&](int step) {
    return step >= kFirst && step < steps && (step - kFirst) % kStepsApart == 0;
  };
  const auto read_results = [&](u32(&words)[kReads][4], int step, int buffer) {
    const u32 from = shared_address(shared) + results + buffer * kResultsBytes;
#pragma unroll
    for (int i = 0; i < kReads; ++i) {
      constexpr int kEach = kWarpStrips * kOctets / 4;
      ldmatrix_trans(words[i], from + i / kEach * kResultBytes + from_result[i % kEach]);
    }
  };
  const auto write_results = [&](const u32(&words)[kReads][4], int step) {
#pragma unroll
    for (int a = 0; a < kPhases; ++a) {
      const int row = result_row + (step - kFirst) / kStepsApart * kPhases + a;
      const bool there = row >= 0 && row < args.y_size[0];
#pragma unroll
      for (int phase = 0; phase < kPhases; ++phase) {
        const u32(*const own)[4] = words + (a * kPhases + phase) * (kWarpStrips * kOctets / 4);
#pragma unroll
        for (int i = 0; i < kWarpStrips; ++i) {
          // Only their sum needs to be inside.
          const u32 piece =
              out[i] + phase * static_cast<u32>(kStripColumns / 4 * args.y_stride[2]);
          T* const to = static_cast<T*>(args.y) + static_cast<i64>(piece) * 4;
          const bool wanted = there && writes >> (i * kPhases + phase) & 1;
          if constexpr (kOctets == 4) {
            if (wanted) {
              *reinterpret_cast<uint4*>(to) = make_uint4(own[i][0], own[i][1], own[i][2], own[i][3]);
            }
          } else {
            store_if(wanted, to, make_uint2(own[i / 2][i % 2 * 2], own[i / 2][i % 2 * 2 + 1]));
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kWarpStrips; ++i) out[i] += args.y_pitch;
    }
  };

  float sums[kOwn][kOpen][kPhases][4] = {};
  cp_async_wait<STAGES - 1>();
  __syncthreads();  // the table is no longer read either
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const int row = skipped + i;
    if (row >= steps) break;
    turner.turn(shared_address(shared) + row % (STAGES * ROWS) * stage_bytes,
                shared + lines + row % (2 * ROWS) * line_bytes);
  }
  for (int turn = 0; turn < steps + ROWS; turn += kUnrolled) {
#pragma unroll
    for (int first = 0; first < kUnrolled; first += ROWS) {
      if (turn + first < skipped) continue;
      if (turn + first >= steps + ROWS) break;
      cp_async_wait<STAGES - 2>();
      __syncthreads();
      const int group = (turn + first) / ROWS, now = group & 1, next = group + 1;
#pragma unroll
      for (int i = 0; i < ROWS; ++i) {
        const int j = first + i, step = turn + j;
        const int h = top + step;
        const bool exists = step < steps && h >= 0 && h < args.x_size[0];
        const bool turns = step + ROWS < steps, writes_rows = finished_by(step - ROWS);
        const u32 raw = shared_address(shared) + (next % STAGES * ROWS + i) * stage_bytes;
        unsigned char* const turned = shared + lines + ((1 - now) * ROWS + i) * line_bytes;
        const int other = (1 - now) * ROWS + i;
        // Copies occupy shared memory, so they start while tensor cores are busy; or last,
        // when registers are free again.
        const auto copy = [&] {
          if (step + STAGES * ROWS < steps) {
            copier.copy((group % STAGES * ROWS + i) * stage_bytes, h + STAGES * ROWS, args.x_pitch);
          }
          if (i == ROWS - 1) cp_async_commit();
        };
        u32 columns[kOwn][4], beyond[kOwn][2];
        if (turns) turner.turn(raw, turned);
        if (writes_rows) {
          u32 written[kReads][4];
          read_results(written, step - ROWS, other);
          write_results(written, step - ROWS);
        }
        if (exists) {
          const u32 from = shared_address(shared) + lines + (now * ROWS + i) * line_bytes;
#pragma unroll
          for (int channel = 0; channel < kOwn; ++channel) {
            ldmatrix(columns[channel], from + own_line[channel]);
            if constexpr (UNITS == 3) {
              ldmatrix(beyond[channel], from + own_line[channel] + (2 - lane / 16) * 16);
            }
          }
        }
        if (!LATE) copy();
        if (exists) {
          // Products that this row finishes come first.
#pragma unroll
          for (int r = KERNEL_H - 1; r >= 0; --r) {
#if BACKWARD
            const int slot = (j * STRIDE + KERNEL_H - 1 - r) % kOpen, tap = KERNEL_H - 1 - r;
#else
            if (wrapped(j - r, STRIDE) != 0) continue;
            const int slot = wrapped(j - r, kTurn) / STRIDE, tap = r;
#endif
#pragma unroll
            for (int channel = 0; channel < kOwn; ++channel) {
#pragma unroll
              for (int phase = 0; phase < kPhases; ++phase) {
                const u32(&own)[UNITS] = taps[channel][tap][phase];
                mma<T>(sums[channel][slot][phase], columns[channel], own[0], own[1]);
                if constexpr (UNITS == 3) {
                  mma<T>(sums[channel][slot][phase], beyond[channel], own[2]);
                }
              }
            }
          }
        }
        if (step >= steps) continue;
        // Rows that no later row of x meets are finished.
#pragma unroll
        for (int a = 0; a < kPhases; ++a) {
#if BACKWARD
          const int slot = (j * STRIDE + a) % kOpen;
#else
          if (wrapped(j - (KERNEL_H - 1), STRIDE) != 0) continue;
          const int slot = wrapped(j - (KERNEL_H - 1), kTurn) / STRIDE;
#endif
#pragma unroll
          for (int channel = 0; channel < kOwn; ++channel) {
#pragma unroll
            for (int phase = 0; phase < kPhases; ++phase) {
              float(&sum)[4] = sums[channel][slot][phase];
#if EPILOGUE
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                const int row = result_row + (step - kFirst) / kStepsApart * kPhases + a;
                const int c = first_channel + warp * kOwn + channel;
                const bool adding = step >= kFirst && row >= 0 && row < args.y_size[0] &&
                                    adds >> (i / 2 * kPhases * 2 + phase * 2 + i % 2) & 1;
                const T* const from = added[i / 2] + channel +
                                      (phase * kStripColumns + i % 2) * args.accumulate_stride[2];
                if (c < args.channels) {
                  sum[i] = finished(args, sum[i], adding ? from : nullptr, c);
                }
              }
#endif
              unsigned char* const to = shared + results + (now * ROWS + i) * kResultsBytes +
                                        (a * kPhases + phase) * kResultBytes + own_result +
                                        channel * kResultPitch;
              *reinterpret_cast<u32*>(to) = narrow_x2<T>(sum[0], sum[1]);
              // Strips 8 to 15: no permutation flips the 8.
              *reinterpret_cast<u32*>(to + 8 * 16) = narrow_x2<T>(sum[2], sum[3]);
#pragma unroll
              for (int i = 0; i < 4; ++i) sum[i] = 0;
            }
          }
#if EPILOGUE
          if (step >= kFirst) {
#pragma unroll
            for (int half = 0; half < 2; ++half) added[half] += args.accumulate_stride[1];
          }
#endif
        }
        if (LATE) copy();
      }
    }
  }
}
