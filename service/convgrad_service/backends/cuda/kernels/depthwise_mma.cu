// Depthwise convolution, forward or the gradient of its input, of channels-last 16-bit tensors on
// tensor cores.
//
// forward   y[n, p, q, c] = sum over (r, s) of
//                           x[n, p*STRIDE + r - pad, q*STRIDE + s - pad, c] * w[c, r, s]
// backward  y[n, u - pad, v - pad, c] = sum over u = p*STRIDE + r, v = q*STRIDE + s
//                                       of x[n, p, q, c] * w[c, r, s]
// then finish() of epilogue.cuh, and one rounding; summed in float32. The backward of stride 1 is the
// forward with w flipped.
// GEMM view, for one channel, one row of x and one row of the kernel: M = 16 strips
// (depthwise_strips.cuh), K = the columns that a strip reads, N = its 8 columns of the result
// (backward, as many for each phase of the stride); the second factor is the kernel's row, shifted
// by one column from column to column. A dilated kernel is a larger one, whose other taps are zeros.
// Kernels may have up to KERNEL_H rows, and columns such that a
// strip reads no more than UNITS units.
// A warp owns 2 channels of a tile of strips and a chunk of rows, and walks down the source's rows:
// a row is added to every row of the result that it reaches, which live in a ring of accumulators.
// In one step, between two barriers, the block multiplies a row, turns the next one, starts a copy
// of a later one, and writes the rows finished in the step before.
// Shared memory: STAGES rows in planes, two rows in lines, two rows of results in lines; in the
// lines' place, first, the kernel's taps.
// Relies on its launcher for: channels in multiples of 8, aligned to 16 bytes.
// Deterministic: sums run in the order of the source's rows.
// Padding and the second factor's zeros meet elements that may be Inf; a sum that is not finite is
// computed again from the valid taps alone.
#include "depthwise_strips.cuh"

namespace convgrad {

struct DepthwiseMmaArgs {
  const void* x;  // the source: input, or grad_output
  const void* w;
  void* y;                 // the result: output, or grad_input
  const void* accumulate;  // like y, or null
  const void* bias;        // one for each channel, or null
  i64 x_stride[3];         // N H W, in elements; a pixel's channels lie side by side
  i64 w_stride[3];         // C R S
  i64 y_stride[3];
  i64 accumulate_stride[3];
  float alpha;
  float beta;
  int activation;
  int batch;
  int channels;    // of the result
  int x_channels;  // as many, or forward 1 / multiplier of them
  int multiplier;  // results of each channel of x, forward
  int x_size[2];
  int y_size[2];
  int pad[2];
  int kernel[2];    // as far as it reaches, dilated
  int dilation[2];  // taps are so many rows and columns apart
  int flipped;  // whether w is read from its last row and column on
  StripTiling tiling;
};

}  // namespace convgrad

using namespace convgrad;

namespace {

using T = ELEMENT;

constexpr int kThreads = WARPS * 32;
constexpr int kChannels = WARPS * 2;
constexpr int kOctets = kChannels / 8;
constexpr int kReach = (KERNEL_H + STRIDE - 1) / STRIDE;
#if BACKWARD
constexpr int kOpen = kReach * STRIDE;  // open rows of the result
constexpr int kTurn = kReach;           // rows of x after which they repeat
constexpr int kPhases = STRIDE;         // rows, and columns, of the result for one of x
constexpr int kApart = 1;               // units of x between neighbouring strips
#else
constexpr int kOpen = kReach;
constexpr int kTurn = kReach * STRIDE;
constexpr int kPhases = 1;
constexpr int kApart = STRIDE;
#endif
constexpr int kColumns = kPhases * kStripColumns;  // of the result, of a strip
constexpr int kFirst = BACKWARD ? kReach - 1 : KERNEL_H - 1;  // step that finishes rows
constexpr int kStepsApart = BACKWARD ? 1 : STRIDE;            // and the next one that does
// The pairs of taps that an element pair of the second factor can be.
constexpr int kLastPair = UNITS * kStripColumns - 2;  // its greatest place along the reduction
#if BACKWARD
constexpr int kPairs = kColumns + STRIDE * kLastPair;
#else
constexpr int kPairs = kLastPair + 1 + (kStripColumns - 1) * STRIDE;
#endif
using Copier = UnitCopier<T, kOctets, COPIES, kThreads, 1>;
using Lines = Turner<kOctets, WARPS, COPIES * kTileStrips>;
// Results lie in lines too, a strip a unit; one unit more keeps channels in different banks.
constexpr int kResultPitch = (kTileStrips + 1) * 16;
constexpr int kResultBytes = kChannels * kResultPitch;
constexpr int kResultsBytes = kPhases * kPhases * kResultBytes;  // of one step
constexpr int kWarpStrips = kTileStrips / WARPS;                 // that a warp writes

// Where a strip of results is in its line.
__device__ __forceinline__ int result_unit(int channel, int strip) {
  return strip ^ ((channel >> 3 & (kOctets - 1)) << 1);
}

// The result of a sum.
__device__ __forceinline__ float finished(const DepthwiseMmaArgs& args, float sum, const T* added,
                                          int c) {
#if EPILOGUE
  const T* const bias = static_cast<const T*>(args.bias);
  sum = finish<T, float>(sum, args.alpha, args.beta, added, bias == nullptr ? bias : bias + c,
                         args.activation);
#endif
  return sum;
}

// One result from its valid taps alone.
__device__ __noinline__ T exact(const DepthwiseMmaArgs& args, int n, int c, int row, int column) {
  const T* const x =
      static_cast<const T*>(args.x) + n * args.x_stride[0] + c / args.multiplier;
  const T* const w = static_cast<const T*>(args.w) + c * args.w_stride[0];
  float sum = 0;
  for (int r = 0; r < args.kernel[0]; r += args.dilation[0]) {
    for (int s = 0; s < args.kernel[1]; s += args.dilation[1]) {
#if BACKWARD
      const int u = row + args.pad[0] - r, v = column + args.pad[1] - s;
      if (u < 0 || v < 0 || u % STRIDE != 0 || v % STRIDE != 0) continue;
      const int h = u / STRIDE, k = v / STRIDE;
#else
      const int h = row * STRIDE + r - args.pad[0], k = column * STRIDE + s - args.pad[1];
#endif
      if (h < 0 || h >= args.x_size[0] || k < 0 || k >= args.x_size[1]) continue;
      const int from_r = args.flipped ? args.kernel[0] - 1 - r : r;
      const int from_s = args.flipped ? args.kernel[1] - 1 - s : s;
      sum += widen(x[h * args.x_stride[1] + k * args.x_stride[2]]) *
             widen(w[from_r / args.dilation[0] * args.w_stride[1] +
                     from_s / args.dilation[1] * args.w_stride[2]]);
    }
  }
  const T* added = static_cast<const T*>(args.accumulate);
  if (added != nullptr) {
    added += n * args.accumulate_stride[0] + row * args.accumulate_stride[1] +
             column * args.accumulate_stride[2] + c;
  }
  return narrow<T>(finished(args, sum, added, c));
}

}  // namespace

extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS)
    depthwise_mma(const __grid_constant__ DepthwiseMmaArgs args) {
  extern __shared__ __align__(16) unsigned char shared[];
  const StripTiling& tiling = args.tiling;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int g = lane / 4, t = lane % 4;
  const int pitch = line_pitch(tiling.slots);
  const int stage_bytes = tiling.slots * kStripColumns * kOctets * 16;
  const int line_bytes = kChannels * pitch;
  const int lines = STAGES * stage_bytes, results = lines + 2 * line_bytes;

  const int first_channel = blockIdx.x % tiling.channel_tiles * kChannels;
  const Sources sources(first_channel, kChannels, args.multiplier, args.x_channels);
  const TileAt tile = tile_at(tiling, blockIdx.x / tiling.channel_tiles);
  // Of the result; backward in units of STRIDE, from the last multiple of STRIDE up to pad.
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
  const int end = strip_at<kApart>(tiling, tile, kTileStrips - 1, tiling.units).slot + UNITS;
  Copier copier(shared_address(shared), static_cast<const T*>(args.x), args.x_stride, args.batch,
                tile.n, tile.strip * kApart, tiling.units, tiling.slots, end, top, args.x_size[0],
                left, args.x_size[1], sources.first, sources.end);
#pragma unroll
  for (int stage = 0; stage < STAGES; ++stage) {
    if (stage < steps) copier.copy(stage * stage_bytes, top + stage);
    commit_copies();
  }

  // The kernel's rows as second factors: by way of a table of all pairs of taps that follow one
  // another along the reduction.
  u32* const pairs = reinterpret_cast<u32*>(shared + lines);
  for (int i = threadIdx.x; i < kChannels * KERNEL_H * kPairs; i += kThreads) {
    const int row = i / kPairs, c = first_channel + row / KERNEL_H, r = row % KERNEL_H;
#if BACKWARD
    const int s = i % kPairs + STRIDE * (reach - kLastPair);
    constexpr int next = -STRIDE;
#else
    const int s = i % kPairs - (kStripColumns - 1) * STRIDE;
    constexpr int next = 1;
#endif
    const bool there = r < args.kernel[0] && r % args.dilation[0] == 0 && c < args.channels;
    const int from_r = args.flipped ? args.kernel[0] - 1 - r : r;
    const T* const w = static_cast<const T*>(args.w) + c * args.w_stride[0] +
                       from_r / args.dilation[0] * args.w_stride[1];
    u32 both = 0;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int tap = s + e * next, from_s = args.flipped ? args.kernel[1] - 1 - tap : tap;
      if (there && tap >= 0 && tap < args.kernel[1] && tap % args.dilation[1] == 0) {
        const u32 bits = w[from_s / args.dilation[1] * args.w_stride[2]].bits;
        both |= bits << 16 * e;
      }
    }
    pairs[i] = both;
  }
  __syncthreads();
  u32 taps[2][KERNEL_H][kPhases][UNITS];
#pragma unroll
  for (int channel = 0; channel < 2; ++channel) {
#pragma unroll
    for (int r = 0; r < KERNEL_H; ++r) {
#pragma unroll
      for (int phase = 0; phase < kPhases; ++phase) {
#pragma unroll
        for (int unit = 0; unit < UNITS; ++unit) {
          const int from = unit * kStripColumns + 2 * t, to = phase * kStripColumns + g;
#if BACKWARD
          const int at = to + STRIDE * (kLastPair - from);
#else
          const int at = from + (kStripColumns - 1 - to) * STRIDE;
#endif
          taps[channel][r][phase][unit] =
              pairs[((warp * 2 + channel) * KERNEL_H + r) * kPairs + at];
        }
      }
    }
  }

  // What this lane reads of a row's lines, and writes of the results'.
  const Lines turner(tiling.slots, pitch);
  const int own_slot =
      strip_at<kApart>(tiling, tile, lane % 16, tiling.units).slot + lane / 16;
  const int line = sources.line(first_channel + warp * 2);
  const int own_line = kept_value(line * pitch + own_slot * 16);
  const int next_line =
      kept_value((sources.line(first_channel + warp * 2 + 1) - line) * pitch);
  // Both channels are of one octet, so that their units are permuted alike.
  const int own_result =
      kept_value(warp * 2 * kResultPitch + result_unit(warp * 2, g) * 16 + t * 4);
  // The strips that this warp writes: a lane has one column and kOctets * 2 channels.
  constexpr int kVector = kOctets * 2;
  T* out[kWarpStrips];
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
    out[i] = kept_pointer(static_cast<T*>(args.y) + at.n * args.y_stride[0] +
                          column * args.y_stride[2] + c + result_row * args.y_stride[1]);
  }
#pragma unroll
  for (int i = 0; i < kWarpStrips * kOctets / 4; ++i) {
    const int matrix = i * 4 + lane / 8, row = lane % 8;
    const int c = kVector * (row / 2) + matrix % kOctets * 2 + row % 2;
    from_result[i] = kept_value(
        c * kResultPitch + result_unit(c, warp * kWarpStrips + matrix / kOctets) * 16);
  }

  writes = kept_value(writes);
#if EPILOGUE
  // What is added to this lane's sums: of strips g and g + 8, from the first row on.
  const T* added[2];
  u32 adds = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const StripAt at = strip_at<kApart>(tiling, tile, g + half * 8, tiling.units);
    const int column = first_column + at.strip * kColumns + 2 * t;
    const int c = first_channel + warp * 2;
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

  // Writes the rows that `step` finished; they follow one another.
  const auto write = [&](int step) {
    if (step < kFirst || (step - kFirst) % kStepsApart != 0) return;
#pragma unroll
    for (int a = 0; a < kPhases; ++a) {
      const int row = result_row + (step - kFirst) / kStepsApart * kPhases + a;
      const bool there = row >= 0 && row < args.y_size[0];
#pragma unroll
      for (int phase = 0; phase < kPhases; ++phase) {
        const u32 from = shared_address(shared) + results + (step & 1) * kResultsBytes +
                         (a * kPhases + phase) * kResultBytes;
        const i64 offset = phase * kStripColumns * args.y_stride[2];
#pragma unroll
        for (int i = 0; i < kWarpStrips * kOctets / 4; ++i) {
          u32 words[4];
          load_matrices_transposed(words, from + from_result[i]);
          if constexpr (kOctets == 4) {
            if (there && writes >> (i * kPhases + phase) & 1) {
              *reinterpret_cast<uint4*>(out[i] + offset) =
                  make_uint4(words[0], words[1], words[2], words[3]);
            }
          } else {
#pragma unroll
            for (int k = 0; k < 2; ++k) {
              store_if(there && writes >> ((2 * i + k) * kPhases + phase) & 1,
                       out[2 * i + k] + offset, make_uint2(words[2 * k], words[2 * k + 1]));
            }
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kWarpStrips; ++i) out[i] += args.y_stride[1];
    }
  };

  float sums[2][kOpen][kPhases][4] = {};
  float probe = 0;  // NaN once any sum was not finite
  wait_copies<STAGES - 1>();
  __syncthreads();  // nor is the table read any more
  turner.turn(shared, 0, lines);
  for (int turn = 0; turn <= steps; turn += kTurn) {
#pragma unroll
    for (int j = 0; j < kTurn; ++j) {
      const int step = turn + j;
      if (step <= steps) {
        wait_copies<STAGES - 2>();
        __syncthreads();
        if (step + STAGES < steps) {
          copier.copy(step % STAGES * stage_bytes, top + step + STAGES);
        }
        commit_copies();
        if (step + 1 < steps) {
          turner.turn(shared, (step + 1) % STAGES * stage_bytes,
                      lines + (step + 1 & 1) * line_bytes);
        }
        if (step > 0) write(step - 1);
        const int h = top + step;
        if (step < steps && h >= 0 && h < args.x_size[0]) {
          const u32 from = shared_address(shared) + lines + (step & 1) * line_bytes + own_line;
          u32 columns[2][4], beyond[2][2];
#pragma unroll
          for (int channel = 0; channel < 2; ++channel) {
            load_matrices(columns[channel], from + channel * next_line);
            if constexpr (UNITS == 3) {
              load_matrices(beyond[channel], from + channel * next_line + (2 - lane / 16) * 16);
            }
          }
#pragma unroll
          for (int r = 0; r < KERNEL_H; ++r) {
#if BACKWARD
            const int slot = (j * STRIDE + r) % kOpen;
#else
            if (wrapped(j - r, STRIDE) != 0) continue;
            const int slot = wrapped(j - r, kTurn) / STRIDE;
#endif
#pragma unroll
            for (int channel = 0; channel < 2; ++channel) {
#pragma unroll
              for (int phase = 0; phase < kPhases; ++phase) {
                const u32(&own)[UNITS] = taps[channel][r][phase];
                mma<T>(sums[channel][slot][phase], columns[channel], own[0], own[1]);
                if constexpr (UNITS == 3) {
                  mma<T>(sums[channel][slot][phase], beyond[channel], own[2]);
                }
              }
            }
          }
        }
        // What no later row of x reaches is done.
#pragma unroll
        for (int a = 0; a < kPhases; ++a) {
#if BACKWARD
          const int slot = (j * STRIDE + a) % kOpen;
#else
          if (wrapped(j - (KERNEL_H - 1), STRIDE) != 0) continue;
          const int slot = wrapped(j - (KERNEL_H - 1), kTurn) / STRIDE;
#endif
#pragma unroll
          for (int channel = 0; channel < 2; ++channel) {
#pragma unroll
            for (int phase = 0; phase < kPhases; ++phase) {
              float(&sum)[4] = sums[channel][slot][phase];
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                probe = fmaf(sum[i], 0.0f, probe);
#if EPILOGUE
                const int row = result_row + (step - kFirst) / kStepsApart * kPhases + a;
                const int c = first_channel + warp * 2 + channel;
                const bool adding = step >= kFirst && row >= 0 && row < args.y_size[0] &&
                                    adds >> (i / 2 * kPhases * 2 + phase * 2 + i % 2) & 1;
                const T* const from = added[i / 2] + channel +
                                      (phase * kStripColumns + i % 2) * args.accumulate_stride[2];
                if (c < args.channels) {
                  sum[i] = finished(args, sum[i], adding ? from : nullptr, c);
                }
#endif
              }
              unsigned char* const to = shared + results + (step & 1) * kResultsBytes +
                                        (a * kPhases + phase) * kResultBytes + own_result +
                                        channel * kResultPitch;
              *reinterpret_cast<u32*>(to) = narrow_two<T>(sum[0], sum[1]);
              // Strips 8 to 15: no permutation flips the 8.
              *reinterpret_cast<u32*>(to + 8 * 16) = narrow_two<T>(sum[2], sum[3]);
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
      }
    }
  }
  __syncthreads();
  if (probe == 0) return;
  // This lane's strips again.
  const int last_row = result_row + tiling.rows * kPhases;
  for (int half = 0; half < 2; ++half) {
    const StripAt at = strip_at<kApart>(tiling, tile, g + half * 8, tiling.units);
    if (at.n >= args.batch) continue;
    for (int i = 0; i < kPhases * 4; ++i) {
      const int c = first_channel + warp * 2 + i / (kPhases * 2);
      const int column = first_column + at.strip * kColumns + i / 2 % kPhases * kStripColumns +
                         2 * t + i % 2;
      if (c >= args.channels || column < 0 || column >= args.y_size[1]) continue;
      for (int row = max(result_row, 0); row < min(last_row, args.y_size[0]); ++row) {
        static_cast<T*>(args.y)[at.n * args.y_stride[0] + row * args.y_stride[1] +
                                column * args.y_stride[2] + c] = exact(args, at.n, c, row, column);
      }
    }
  }
}
