// Depthwise convolution, the gradient of its input or, with stride 1, forward, of channels-last 16-bit
// tensors, on tensor cores without transposing pixels.
//
// y[n, u - pad, v - pad, c] = sum over u = p*STRIDE + r, v = q*STRIDE + s
//                             of x[n, p, q, c] * w[c, r, s]
// (forward: with w read in reverse, and pad from its end), rounded once; summed in float32. With
// EPILOGUE, the result is activation(alpha * sum + bias).
// GEMM view, for one pair of adjacent channels, one row of x and one row of the kernel: M = 16 runs of
// 4 columns of the result, K = the columns of x that those read, times the pair, N = the 4 columns
// times the pair. Operand B has w[c, r, s] where the channels are equal and the columns are s apart,
// and zeros elsewhere. So a register of operand A, and of the result, is a pixel's pair of channels:
// nothing is transposed. 2 units of 4 columns of x suffice for kernels of up to 5 columns (stride 2:
// one), 3 for up to 9, 4 for up to 13; half of the products are with the pair's zeros.
// A warp owns PAIRS pairs of channels of 8 strips of 8 columns, adjacent and continuing through the
// images of the batch. It walks down x's rows: a row is added to every row of the result that it
// meets, in a ring of accumulators.
// Block: OCTETS * 8 channels of one tile of 8 strips. Between two barriers it multiplies a row, starts
// the copies of a later one, and stores the rows that the previous one finished.
// Grid: tiles of channels, and equal shares of the rows of all tiles of strips, concatenated, so that
// all blocks end at the same time. A share may span several tiles.
// Shared memory: STAGES rows of x, and twice the rows of results that one of them finishes.
// Preconditions: channels and strides in multiples of 8, aligned to 16 bytes; tensors
// below 2^33 elements, weights and rows of all tiles below 2^31.
// Deterministic: sums are in the order of x's rows.
// Zeros in operand B would spread a NaN to the pair's other channel. So non-finite elements are
// multiplied as zeros, and make all unfinished results of their strip and channel NaN.
#include "depthwise/depthwise_pairs.cuh"

using namespace convgrad;

extern "C" __global__ void __launch_bounds__(kThreads, kHeld)
    depthwise_pairs(const __grid_constant__ DepthwisePairsArgs args) {
  extern __shared__ __align__(128) unsigned char shared[];
  const int own_strip = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int part = threadIdx.x / 32;
  const int octet = threadIdx.x % OCTETS, first_pixel = own_pixel() % kTilePixels;
  const int first_channel = blockIdx.x * kChannels, own_channel = first_channel + octet * 8;
  const int row_bytes = args.row_bytes, results = STAGES * row_bytes;
  // A lane's part of a pixel, and where a thread reads results.
  const int own_bytes = part * kOwnChannels * 2;
  const u32 to =
      opaque_value(results + own_bytes + result_place(own_strip * 8) + t * kResultPixelBytes);
  const u32 written =
      opaque_value(shared_address(shared) + results + octet * 16 + result_place(first_pixel));
  // An opaque value: otherwise the compiler would gather a factor's registers again for each
  // product.
  const u32 zero = args.flipped >> 1;
  Taps taps;
  bool has_taps = false;
#if EPILOGUE
  __shared__ float biases[kChannels];
  load_biases(args, biases, first_channel);
#endif

  const int share_end = min(args.tiles * args.rows, (static_cast<int>(blockIdx.y) + 1) * args.share);
  for (int place = blockIdx.y * args.share; place < share_end;) {
    const int tile = divide(place, args.by_rows);
    const int along = tile * kTileStrips, n = divide(along, args.by_strips);
    const int strip = along - n * args.strips;  // the first one, in image n
    // In units of STRIDE, relative to -pad.
    const int tile_row = place - tile * args.rows, first_row = args.base + tile_row;
    const int rows = min(args.rows - tile_row, share_end - place);
    place += rows;
    const int top = first_row - (kReach - 1), steps = rows + kReach - 1;
    const int result_row = first_row * STRIDE - args.pad[0];
    // Padding rows before the first finished result.
    const int skipped = opaque_value(max(0, min(-top, kReach - 1)));

    // Units of x of all strips, and some more after each image's.
    const auto pixel_of = [&](int of) {
      return (of + kMore * divide(strip + of, args.by_strips)) * kUnitColumns;
    };
    const int last_pixel = pixel_of(kTileStrips - 1);
    RowsCopier copier(args, shared_address(shared), n, strip, last_pixel + (1 + kMore) * kUnitColumns,
                      last_pixel + args.read, top + skipped);
    // Row number `step`.
    const auto copy = [&](int stage, int step) {
      if (step < steps) copier.copy(stage, top + step, args.x_size[0], args.x_stride[1]);
      cp_async_commit();
    };
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) copy(stage * row_bytes, skipped + stage);
    if (!has_taps) load_taps(taps, args, first_channel + part * kOwnChannels);
    has_taps = true;

    const int from_pixel = pixel_of(own_strip);
    const u32 from = opaque_value(shared_address(shared) + own_bytes + place_of(from_pixel) +
                                t * kPixelBytes);
    // The pixels that this thread stores.
    u32 out[kWrites], writes = 0;
#pragma unroll
    for (int i = 0; i < kWrites; ++i) {
      const int pixel = first_pixel + i * kRoundPixels, of = strip + pixel / 8;
      const int images = divide(of, args.by_strips);
      const int column = (of - images * args.strips) * 8 + pixel % 8;
      const bool there = own_pixel() < kTilePixels && n + images < args.batch &&
                         column < args.y_size[1] && own_channel < args.channels;
      writes |= static_cast<u32>(there) << i;
      out[i] = opaque_value((n + images) * args.y_stride[0] + result_row * args.y_stride[1] +
                          column * args.y_stride[2] + own_channel / 8);
    }
    writes = opaque_value(writes);

    float sums[kOpen][PAIRS][4] = {};
    NanRows nan_rows;
    int now = 0, before = (STAGES - 1) * row_bytes;  // stages of this row and the previous one
    int buffer = 0;                                  // buffer of the results that it finishes
    // One more step, which stores the last results.
    for (int turn = 0; turn <= steps; turn += kReach) {
#pragma unroll
      for (int j = 0; j < kReach; ++j) {
        const int step = turn + j;
        if (step < skipped) continue;
        if (step > steps) break;
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        Pixels pixels[kBlocks];
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          ld_shared(from + now + place_of(block * kApart), pixels[block].raw);
        }
        copy(before, step + STAGES - 1);
        // Results of the previous row: read here, stored while products are in flight.
        uint4 finished[STRIDE][kWrites];
#pragma unroll
        for (int a = 0; a < STRIDE; ++a) {
#pragma unroll
          for (int own = 0; own < kWrites; ++own) {
            ld_shared(written + (kResultsBytes - buffer) + a * kResultBytes +
                            result_place(own * kRoundPixels),
                        finished[a][own]);
          }
        }
        if (nan_rows.any()) nan_rows.next();
        // Rows outside are zeros; below x no further result starts.
        if (step < rows || (step < steps && top + step < args.x_size[0])) {
          // Results that the row contributes to are NaN whatever the products, if all channels are odd.
          bool all_odd = false;
          if (__any_sync(0xffffffffu, any_odd(pixels))) {
            const u32 odd = clear_odd(pixels);
            nan_rows.add(odd);
            all_odd = __all_sync(0xffffffffu, odd == kAllChannels);
          }
#pragma unroll
          for (int r = kOpen - STRIDE; r < kOpen; ++r) {
#pragma unroll
            for (int pair = 0; pair < PAIRS; ++pair) clear(sums[(j * STRIDE + r) % kOpen][pair]);
          }
          if (!all_odd) {
            u32 factors[PAIRS][UNITS][2];
#pragma unroll
            for (int pair = 0; pair < PAIRS; ++pair) {
#pragma unroll
              for (int block = 0; block < 2 * UNITS; ++block) {
                factors[pair][block / 2][block % 2] =
                    pixels[kBlocksApart * (block / 2) + block % 2].words[pair] ^ zero;
              }
            }
            // Products that this row finishes come first.
#pragma unroll
            for (int r = 0; r < KERNEL_H; ++r) {
#pragma unroll
              for (int pair = 0; pair < PAIRS; ++pair) {
                float(&sum)[4] = sums[(j * STRIDE + r) % kOpen][pair];
                const u32(&own_taps)[UNITS] = taps[r][pair];
                const u32(&factor)[UNITS][2] = factors[pair];
#pragma unroll
                for (int u = 0; u + 1 < UNITS; u += 2) {
                  const u32 both[4] = {factor[u][0], factor[u][1], factor[u + 1][0], factor[u + 1][1]};
                  mma<T>(sum, both, own_taps[u], own_taps[u + 1]);
                }
                if constexpr (UNITS % 2 == 1) mma<T>(sum, factor[UNITS - 1], own_taps[UNITS - 1]);
              }
            }
          }
        }
        if (step >= kReach) {
#pragma unroll
          for (int a = 0; a < STRIDE; ++a) {
            const int row = result_row + (step - kReach) * STRIDE + a;
            const u32 there = row >= 0 && row < args.y_size[0] ? writes : 0;
#pragma unroll
            for (int own = 0; own < kWrites; ++own) {
              store_if((there & 1u << own) != 0,
                       static_cast<T*>(args.y) + static_cast<i64>(out[own]) * 8,
                       finished[a][own]);
              out[own] += args.y_stride[1];
            }
          }
        }
        // Rows that no later row of x meets are finished.
        if (step >= kReach - 1 && step < steps) {
#pragma unroll
          for (int a = 0; a < STRIDE; ++a) {
            Pixels result[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
              for (int pair = 0; pair < PAIRS; ++pair) {
                float(&sum)[4] = sums[(j * STRIDE + a) % kOpen][pair];
#if EPILOGUE
                // An opaque value: a register for it would be one too many.
                const float* const bias =
                    biases + opaque_value(threadIdx.x) / 32 * kOwnChannels + 2 * pair;
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                  sum[2 * half + i] = finish_sum(args, sum[2 * half + i], bias + i);
                }
#endif
                result[half].words[pair] = narrow_x2<T>(sum[2 * half], sum[2 * half + 1]);
              }
            }
            if (nan_rows.any()) nan_rows.apply(a, result);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              *reinterpret_cast<decltype(Pixels::raw)*>(shared + to + buffer + a * kResultBytes +
                                                        half * 4 * kResultPixelBytes) =
                  result[half].raw;
            }
          }
        }
        buffer = kResultsBytes - buffer;
        before = now;
        now += row_bytes;
        if (now == results) now = 0;
      }
    }
    // This part's rows are no longer read.
    __syncthreads();
  }
}
