// Depthwise convolution, the gradient of its input or, of stride 1, forward, of channels-last 16-bit
// tensors on tensor cores that take pixels as they lie in memory.
//
// y[n, u - pad, v - pad, c] = sum over u = p*STRIDE + r, v = q*STRIDE + s
//                             of x[n, p, q, c] * w[c, r, s]
// (forward: with w read from its end on, and pad from there) and one rounding; summed in float32.
// GEMM view, for one pair of neighbouring channels, one row of x and one row of the kernel: M = 16
// runs of 4 columns of the result, K = the columns of x that those need, times the pair, N = the 4
// columns times the pair. The second factor has w[c, r, s] where the channels are the same and s is
// between the columns, zeros elsewhere. So a register of the first factor is a pixel's pair of
// channels, and of the results too: nothing is turned around. 2 units of 4 columns of x serve kernels
// of up to 5 columns (stride 2: one), 3 up to 9; half of what is multiplied are zeros of the pair.
// A warp owns PAIRS pairs of channels of 8 strips of 8 columns (side by side, and on through the
// images of the batch) and a chunk of rows. It walks down x's rows: a row is added to every row of the
// result that it reaches, which live in a ring of accumulators.
// Block: OCTETS * 8 channels, GROUPS * 8 strips. Between two barriers it multiplies a row, starts the
// copies of a later one, and writes the rows that the one before finished.
// Grid: tiles of channels, chunks of rows, tiles of strips.
// Shared memory: STAGES rows of x, two times the rows of results that one of x finishes.
// Relies on its launcher for: channels and strides in multiples of 8, aligned to 16 bytes; places below
// 2^32 in 16 bytes.
// Deterministic: sums run in the order of x's rows.
// The second factor's zeros meet elements that may be Inf; a sum that is not finite is computed again
// from the valid taps alone.
#include "depthwise_pairs.cuh"

using namespace convgrad;

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)
    depthwise_pairs(const __grid_constant__ DepthwisePairsArgs args) {
  extern __shared__ __align__(128) unsigned char shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int g = lane / 4, t = lane % 4;
  const int part = warp % kParts, group = warp / kParts;
  const int first_channel = blockIdx.x * kChannels;
  const int along = blockIdx.z * kTileStrips, n = divide(along, args.by_strips);
  const int strip = along - n * args.strips;  // the first, in image n
  // In units of STRIDE, from -pad on.
  const int first_row = args.base + blockIdx.y * args.rows;
  const int top = first_row - (kReach - 1);
  const int steps = min(args.rows, args.last - first_row + 1) + kReach - 1;
  const int result_row = first_row * STRIDE - args.pad[0];
  // Rows of padding that come before any result is finished.
  const int skipped = max(0, min(-top, kReach - 1)) / ROWS * ROWS;

  // All strips' units of x, one more behind each image's.
  const auto pixel_of = [&](int own) {
    return (own + divide(strip + own, args.by_strips)) * kUnitColumns;
  };
  const int last_pixel = pixel_of(kTileStrips - 1);
  RowsCopier copier(args, shared_address(shared), n, strip, last_pixel + 2 * kUnitColumns,
                    last_pixel + args.read, top + skipped);
  const int row_bytes = args.row_bytes, stage_bytes = ROWS * row_bytes;
  // A stage's rows, from the `step`th on.
  const auto copy = [&](int stage, int step) {
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      if (step + i < steps) {
        copier.copy(stage + i * row_bytes, top + step + i, args.x_size[0], args.x_stride[1]);
      }
    }
    commit_copies();
  };
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; ++stage) {
    copy(stage * stage_bytes, skipped + stage * ROWS);
  }

  Taps taps;
  load_taps(taps, args, first_channel + part * kOwnChannels);

  // What this lane reads of a row, and writes of a row of results.
  const int own_strip = group * 8 + g, own_pixel = pixel_of(own_strip);
  const int own_bytes = t * kPixelBytes + part * kOwnChannels * 2;
  const u32 from = kept_value(shared_address(shared) + own_bytes + own_pixel * kPixelBytes +
                              own_pixel / 8 * kApartBytes);
  const int results = STAGES * stage_bytes;
  const u32 to = kept_value(results + own_bytes + place_of(own_strip * 8, kResultApartBytes));
  // The pixels that this thread writes.
  u32 out[kWrites], writes = 0;
  const int octet = threadIdx.x % OCTETS, own = threadIdx.x / OCTETS;
  const u32 written = kept_value(shared_address(shared) + results + octet * 16 + place_of(own, kResultApartBytes));
#pragma unroll
  for (int i = 0; i < kWrites; ++i) {
    const int pixel = own + i * kRoundPixels, of = strip + pixel / 8;
    const int images = divide(of, args.by_strips);
    const int column = (of - images * args.strips) * 8 + pixel % 8, c = first_channel + octet * 8;
    const bool there = n + images < args.batch && column < args.y_size[1] && c < args.channels;
    writes |= static_cast<u32>(there) << i;
    out[i] = kept_value((n + images) * args.y_stride[0] + result_row * args.y_stride[1] +
                        column * args.y_stride[2] + c / 8);
  }
  writes = kept_value(writes);

  float sums[kOpen][PAIRS][4] = {};
  const auto clear = [](float(&row)[PAIRS][4]) {
#pragma unroll
    for (int i = 0; i < PAIRS * 4; ++i) row[i / 4][i % 4] = 0;
  };
  u32 marked = 0;                                    // once any sum was not finite
  int now = 0, before = (STAGES - 1) * stage_bytes;  // these rows' stage, and the last ones'
  int buffer = 0;                                    // where the results are that they finish
  for (int turn = 0; turn < steps + ROWS; turn += kUnrolled) {
#pragma unroll
    for (int first = 0; first < kUnrolled; first += ROWS) {
      const int start = turn + first;
      if (start < skipped) continue;
      if (start >= steps + ROWS) break;
      wait_copies<STAGES - 2>();
      __syncthreads();
      bool exists[ROWS];
      Pixels pixels[ROWS][kBlocks];
#pragma unroll
      for (int i = 0; i < ROWS; ++i) {
        const int h = top + start + i;
        exists[i] = start + i < steps && static_cast<u32>(h) < static_cast<u32>(args.x_size[0]);
        if (!exists[i]) continue;
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          load_shared(from + now + i * row_bytes + place_of(block * kApart, kApartBytes),
                      pixels[i][block].raw);
        }
      }
      copy(before, start + (STAGES - 1) * ROWS);
      // What the rows before finished.
#pragma unroll
      for (int i = 0; i < ROWS; ++i) {
        const int step = start - ROWS + i;
        if (step < kReach - 1 || step >= steps) continue;
#pragma unroll
        for (int a = 0; a < STRIDE; ++a) {
          const int row = result_row + (step - (kReach - 1)) * STRIDE + a;
          const bool there = row >= 0 && row < args.y_size[0];
#pragma unroll
          for (int own = 0; own < kWrites; ++own) {
            uint4 result;
            load_shared(written + (kGroupBytes - buffer) + (i * STRIDE + a) * kResultBytes +
                            place_of(own * kRoundPixels, kResultApartBytes),
                        result);
            store_if(there && (writes >> own & 1),
                     static_cast<T*>(args.y) + static_cast<i64>(out[own]) * 8, result);
            out[own] += args.y_stride[1];
          }
        }
      }
#pragma unroll
      for (int i = 0; i < ROWS; ++i) {
        const int j = first + i, step = turn + j;
        if (exists[i]) {
          u32 factors[PAIRS][UNITS][2];
#pragma unroll
          for (int pair = 0; pair < PAIRS; ++pair) {
#pragma unroll
            for (int block = 0; block < 2 * UNITS; ++block) {
              // The compiler would gather a factor's registers for each of its products.
              factors[pair][block / 2][block % 2] = kept_value(
                  pixels[i][kBlocksApart * (block / 2) + block % 2].words[pair]);
            }
          }
          // What is finished by this row comes first.
#pragma unroll
          for (int r = 0; r < KERNEL_H; ++r) {
#pragma unroll
            for (int pair = 0; pair < PAIRS; ++pair) {
              float(&sum)[4] = sums[(j * STRIDE + r) % kOpen][pair];
              const u32(&own_taps)[UNITS] = taps[r][pair];
              const u32(&factor)[UNITS][2] = factors[pair];
              if (r >= kOpen - STRIDE) {
#pragma unroll
                for (int e = 0; e < 4; ++e) sum[e] = 0;
              }
              if constexpr (UNITS >= 2) {
                const u32 both[4] = {factor[0][0], factor[0][1], factor[1][0], factor[1][1]};
                mma<T>(sum, both, own_taps[0], own_taps[1]);
              }
              if constexpr (UNITS % 2 == 1) mma<T>(sum, factor[UNITS - 1], own_taps[UNITS - 1]);
            }
          }
        }
#pragma unroll
        for (int r = KERNEL_H; r < kOpen; ++r) clear(sums[(j * STRIDE + r) % kOpen]);
        if (!exists[i]) {
#pragma unroll
          for (int r = kOpen - STRIDE; r < KERNEL_H; ++r) clear(sums[(j * STRIDE + r) % kOpen]);
        }
        // What no later row of x reaches is done.
        if (step < kReach - 1 || step >= steps) continue;
#pragma unroll
        for (int a = 0; a < STRIDE; ++a) {
          Pixels result[2];
#pragma unroll
          for (int pair = 0; pair < PAIRS; ++pair) {
            const float(&sum)[4] = sums[(j * STRIDE + a) % kOpen][pair];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const u32 both = narrow_two<T>(sum[2 * half], sum[2 * half + 1]);
              mark_odd<T>(marked, both);
              result[half].words[pair] = both;
            }
          }
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            *reinterpret_cast<decltype(Pixels::raw)*>(
                shared + to + buffer + (i * STRIDE + a) * kResultBytes + half * 4 * kPixelBytes) =
                result[half].raw;
          }
        }
      }
      buffer = kGroupBytes - buffer;
      before = now;
      now += stage_bytes;
      if (now == results) now = 0;
    }
  }
  if (!__syncthreads_or(marked != 0) || marked == 0) return;
  // This lane's results again, once all are written.
  const int images = divide(strip + own_strip, args.by_strips);
  if (n + images >= args.batch) return;
  const int first = result_row, end = result_row + (steps - (kReach - 1)) * STRIDE;
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    const int column = (strip + own_strip - images * args.strips) * 8 + half * 4 + t;
    if (column >= args.y_size[1]) continue;
#pragma unroll 1
    for (int row = max(first, 0); row < min(end, args.y_size[0]); ++row) {
#pragma unroll 1
      for (int i = 0; i < kOwnChannels; ++i) {
        const int c = first_channel + part * kOwnChannels + i;
        if (c >= args.channels) break;
        const u32 piece = (n + images) * args.y_stride[0] + row * args.y_stride[1] +
                          column * args.y_stride[2] + c / 8;
        static_cast<T*>(args.y)[static_cast<i64>(piece) * 8 + c % 8] =
            exact(args, n + images, c, row, column);
      }
    }
  }
}
