// Dense convolution, fprop or dgrad, as an implicit GEMM (cp.async, mma.sync). Launched by dense_gather.py.
//
// M = pixels of one phase of the result (over the batch), N = result channels of one group,
// K = taps x source channels. Along each dimension, result position y0 + m*y_step (m in [0, count)) of a
// phase reads, at its tap j in [0, taps), source position x0 + m*x_step + j*x_tap with weight tap
// r0 + j*r_step. fprop has one phase; dgrad one per residue of the stride, none of which reads inserted zeros.
//
// Grid: channel tiles (fastest), pixel tiles of the largest phase; groups; phases.
// Block: BM pixels x BN channels, k-tiles of BK source channels of one tap, warp tiles of WM x WN. Taps that no
//   pixel of the tile reads are skipped. Source offsets are computed once per tile; one bit per tap says
//   whether a pixel reads it.
// Shared memory (dynamic): STAGES stages of both operands (reused for the result), then offsets and bits of
//   pixels and taps; counted by dense_gather.py.
// Preconditions: source channels contiguous in whole 16-byte chunks: strides and addresses are multiples of 16
//   bytes, and zeros fill the last chunk. The weight is K-major (ACROSS 0) or N-major (ACROSS 1). Positions
//   outside the source are zeros.
// Determinism: one order of additions per result.
// Limits: pixels of a phase below 2^31; element offsets below 2^31, or 64-bit with WIDE.
#include "conv/dense_epilogue.cuh"
#include "conv/dense_mma.cuh"
#include "core/opaque.cuh"

using namespace convgrad;

#if WIDE
using Index = i64;
#else
using Index = int;
#endif

namespace {

// A tap: its displacement in the source and its offset in the weight.
struct Tap {
  Index x, w;
  int number;
};

constexpr int kThreads = (BM / WM) * (BN / WN) * 32;
constexpr int kChunk = 16 / static_cast<int>(sizeof(ELEMENT));
constexpr int kRowChunks = BK / kChunk;
constexpr int kSteps = BK * static_cast<int>(sizeof(ELEMENT)) / 32;

using TileA = Tile<ELEMENT, BM, BK, false>;
using TileB = Conditional<ACROSS, Tile<ELEMENT, BK, BN, true>, Tile<ELEMENT, BN, BK, false>>::type;
constexpr int kRingBytes = STAGES * (TileA::kBytes + TileB::kBytes);
// The staging tile of the epilogue reuses the pipeline's shared memory.
using Sums = FinishedSums<BM, BN>;
constexpr int kRoomBytes = kRingBytes > Sums::kBytes ? kRingBytes : Sums::kBytes;

// n / phase.count for n below 2^31, without the latency of a division.
__device__ __forceinline__ u32 over_count(u32 n, const Phase& phase) {
  return phase.count == 1 ? n : __umulhi(n, phase.factor) >> phase.shift;
}

__device__ __forceinline__ bool inside(int position, int size) {
  return static_cast<u32>(position) < static_cast<u32>(size);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)
    dense_gather(const __grid_constant__ DenseGatherArgs args) {
  using T = ELEMENT;
  extern __shared__ uint4 shared[];
  char* const base = reinterpret_cast<char*>(shared);
  int part0 = 0, part1 = 0, part2 = 0;
  if (gridDim.z > 1) {
    const u32 outer = blockIdx.z / static_cast<u32>(args.phases[2]);
    part2 = blockIdx.z - outer * args.phases[2];
    part0 = outer / static_cast<u32>(args.phases[1]);
    part1 = outer - part0 * args.phases[1];
  }
  const Phase &phase0 = args.phase[0][part0], &phase1 = args.phase[1][part1];
  const Phase& phase2 = args.phase[2][part2];
  const int all_taps = phase0.taps * phase1.taps * phase2.taps, words = (all_taps + 31) / 32;
  i64* const result_at = reinterpret_cast<i64*>(base + kRoomBytes);  // negative past the last pixel
  Tap* const tap_at = reinterpret_cast<Tap*>(result_at + BM);
  Index* const source_at = reinterpret_cast<Index*>(tap_at + all_taps);  // of a pixel at displacement 0
  u32* const kept = reinterpret_cast<u32*>(source_at + BM);  // one bit per tap that is not skipped
  u32* const meets = kept + words;                           // likewise for each pixel: [words][BM]
  auto* const flags = reinterpret_cast<ScalingFlags*>(meets + words * BM);

  const int thread = threadIdx.x, lane = thread & 31, warp = thread / 32;
  const u32 channel_tiles = (args.out_channels + BN - 1) / BN;
  const u32 pixel_tile = blockIdx.x / channel_tiles;
  const int first_channel = (blockIdx.x - pixel_tile * channel_tiles) * BN;
  const int pixels = args.batch * phase0.count * phase1.count * phase2.count;
  if (static_cast<i64>(pixel_tile) * BM >= pixels) return;  // smaller than the largest phase
  const int first_pixel = pixel_tile * BM;

  struct Pixel {
    int n, m0, m1, m2;
  };
  auto pixel_of = [&](int i) {
    const u32 pixel = first_pixel + i;
    const u32 rest2 = over_count(pixel, phase2), rest1 = over_count(rest2, phase1);
    const int n = over_count(rest1, phase0);
    return Pixel{n, static_cast<int>(rest1 - n * phase0.count),
                 static_cast<int>(rest2 - rest1 * phase1.count),
                 static_cast<int>(pixel - rest2 * phase2.count)};
  };
  for (int i = thread; i < words; i += kThreads) kept[i] = args.may_skip_taps ? 0u : ~0u;
  if (args.may_skip_taps) __syncthreads();
  for (int i = thread; i < BM; i += kThreads) {
    const Pixel at = pixel_of(i);
    const bool real = first_pixel + i < pixels;
    const int d = phase0.x0 + at.m0 * args.x_step[0], h = phase1.x0 + at.m1 * args.x_step[1];
    const int v = phase2.x0 + at.m2 * args.x_step[2];
    source_at[i] = at.n * static_cast<Index>(args.x_stride[0]) +
                   d * static_cast<Index>(args.x_stride[3]) +
                   h * static_cast<Index>(args.x_stride[4]) +
                   v * static_cast<Index>(args.x_stride[5]);
    result_at[i] = real ? at.n * args.y_stride[0] +
                              (phase0.y0 + at.m0 * args.y_step[0]) * args.y_stride[3] +
                              (phase1.y0 + at.m1 * args.y_step[1]) * args.y_stride[4] +
                              (phase2.y0 + at.m2 * args.y_step[2]) * args.y_stride[5]
                        : -1;
    if (all_taps <= 32) {
      u32 row = 0, bits = 0;
      for (int j2 = 0; j2 < phase2.taps; ++j2) {
        if (inside(v + j2 * args.x_tap[2], args.x_size[2])) row |= 1u << j2;
      }
      for (int j0 = 0, shift = 0; j0 < phase0.taps; ++j0) {
        const bool there = real && inside(d + j0 * args.x_tap[0], args.x_size[0]);
        for (int j1 = 0; j1 < phase1.taps; ++j1, shift += phase2.taps) {
          if (there && inside(h + j1 * args.x_tap[1], args.x_size[1])) bits |= row << shift;
        }
      }
      if (words) meets[i] = bits;
      if (bits && args.may_skip_taps) atomicOr(kept, bits);
      continue;
    }
    for (int word = 0, tap = 0; word < words; ++word) {
      u32 bits = 0;
      for (int bit = 0; bit < 32 && tap < all_taps; ++bit, ++tap) {
        const int j01 = tap / phase2.taps, j0 = j01 / phase1.taps;
        if (real && inside(d + j0 * args.x_tap[0], args.x_size[0]) &&
            inside(h + (j01 - j0 * phase1.taps) * args.x_tap[1], args.x_size[1]) &&
            inside(v + (tap - j01 * phase2.taps) * args.x_tap[2], args.x_size[2])) {
          bits |= 1u << bit;
        }
      }
      meets[word * BM + i] = bits;
      if (bits && args.may_skip_taps) atomicOr(kept + word, bits);
    }
  }
  __syncthreads();
  for (int tap = thread; tap < all_taps; tap += kThreads) {
    const u32 mine = kept[tap / 32];
    if (!(mine >> (tap & 31) & 1)) continue;
    int to = __popc(mine & ((1u << (tap & 31)) - 1));
    for (int word = 0; word < tap / 32; ++word) to += __popc(kept[word]);
    const u32 j01 = static_cast<u32>(tap) / phase2.taps, j0 = j01 / phase1.taps;
    const int j1 = j01 - j0 * phase1.taps, j2 = tap - j01 * phase2.taps;
    Tap at;
    at.x = static_cast<Index>(j0) * args.x_tap[0] * static_cast<Index>(args.x_stride[3]) +
           static_cast<Index>(j1) * args.x_tap[1] * static_cast<Index>(args.x_stride[4]) +
           static_cast<Index>(j2) * args.x_tap[2] * static_cast<Index>(args.x_stride[5]);
    at.w = static_cast<Index>(phase0.r0 + j0 * args.r_step[0]) *
               static_cast<Index>(args.w_stride[3]) +
           static_cast<Index>(phase1.r0 + j1 * args.r_step[1]) *
               static_cast<Index>(args.w_stride[4]) +
           static_cast<Index>(phase2.r0 + j2 * args.r_step[2]) *
               static_cast<Index>(args.w_stride[5]);
    at.number = tap;
    tap_at[to] = at;
  }
  int taps = 0;
  for (int word = 0; word < words; ++word) {
    const int rest = all_taps - word * 32;
    taps += __popc(kept[word] & (rest < 32 ? (1u << rest) - 1 : ~0u));
  }
  __syncthreads();

  const int group = blockIdx.y;
  const T* const x = static_cast<const T*>(args.x) + group * args.x_stride[1];
  const T* const w = static_cast<const T*>(args.w) + group * args.w_stride[0];
  const Index w_result = static_cast<Index>(args.w_stride[1]);
  const Index w_source = static_cast<Index>(args.w_stride[2]);

  // Each thread copies one column of chunks, in several rows, of both operands.
  constexpr int kARows = kThreads / kRowChunks, kACount = BM / kARows;
  constexpr int kBChunks = TileB::kChunks, kBRows = kThreads / kBChunks;
  constexpr int kBCount = TileB::kRows / kBRows;
  static_assert(kACount * kARows == BM && kBCount * kBRows == TileB::kRows, "whole rounds");
  const int a_row = thread / kRowChunks, a_channel = thread % kRowChunks * kChunk;
  const int b_row = thread / kBChunks, b_chunk = thread % kBChunks;
  const u32 a_to = TileA::at(a_row, thread % kRowChunks);
  Index a_from[kACount];
#pragma unroll
  for (int i = 0; i < kACount; ++i) a_from[i] = source_at[a_row + i * kARows] + a_channel;
  // Chunks of B that hold result channels: all or none if N-major, one bit per row if K-major.
  const int b_left = args.out_channels - first_channel - (ACROSS ? b_chunk * kChunk : b_row);
  const Index b_step = kBRows * (ACROSS ? w_source : w_result);

  const int tiles = taps * ((args.in_channels + BK - 1) / BK);
  int tap = 0, channel = args.in_channels;
  u32 met = 0, a_there = 0, b_there = 0;
  const T* x_now = x;
  const T* w_now = w;
  auto prepare = [&](int tile) {
    channel += BK;
    x_now += BK;
    w_now += ACROSS ? BK * w_source : static_cast<Index>(BK);
    if (channel >= args.in_channels && tile < tiles) {
      const Tap at = tap_at[tap];
      const u32* const bits = meets + at.number / 32 * BM + a_row;
      met = 0;
#pragma unroll
      for (int i = 0; i < kACount; ++i) met |= (bits[i * kARows] >> (at.number & 31) & 1) << i;
      x_now = x + at.x;
      w_now = w + at.w + (ACROSS ? first_channel + b_chunk * kChunk + b_row * w_source
                                 : b_chunk * kChunk + (first_channel + b_row) * w_result);
      channel = 0;
      ++tap;
    }
    const int left = tile < tiles ? args.in_channels - channel : 0;
    a_there = a_channel < left ? met : 0;
    // Rows below the limit, as bits.
    const int rows = ACROSS ? (b_left > 0 ? left - b_row : 0)
                            : (b_chunk * kChunk < left ? b_left : 0);
    const int count = min(max((rows + kBRows - 1) / kBRows, 0), kBCount);
    b_there = (1u << count) - 1;
  };
  auto fetch = [](int) {};
  auto own = [&](int i) {
    // Rows at this distance have the same swizzle.
    static_assert(kARows % 8 == 0, "whole turns of the permutation");
    const int row = b_row + (i - kACount) * kBRows;
    return i < kACount ? a_to + i * kARows * TileA::kRowBytes : TileA::kBytes + TileB::at(row, b_chunk);
  };
  auto copy = [&](int i, u32 stage) {
    if (i < kACount) {
      cp_async_zfill(stage + own(i), x_now + a_from[i], a_there >> i & 1);
    } else {
      const int j = i - kACount;
      cp_async_zfill(stage + own(i), w_now + j * b_step, b_there >> j & 1);
    }
  };

  constexpr int kRowFragments = WM / 16, kColumnPairs = WN / 16;
  const int warp_row = warp / (BN / WN) * WM, warp_column = warp % (BN / WN) * WN;
  float sum[kRowFragments][kColumnPairs * 2][4] = {};
  multiply<T, TileA, TileB, SPLIT, kSteps, STAGES, kACount + kBCount, GROUPS, kRowFragments,
           kColumnPairs>(
      sum, shared_address(base), tiles, warp_row, warp_column, prepare, fetch, copy, own,
      flags);

  // Recomputed from here on, to save registers during the mainloop.
  const int own_group = opaque_value(static_cast<int>(blockIdx.y));
  T* const y = static_cast<T*>(args.y) + own_group * args.y_stride[1];
  // Without an epilogue, rounded results are staged in the pipeline's shared memory.
  if (args.plain && args.wide_stores) {
    // Padding rows by a chunk reduces bank conflicts.
    constexpr int kPitch = BM * (BN + kChunk) * sizeof(T) <= kRingBytes ? BN + kChunk : BN;
    static_assert(BM * kPitch * sizeof(T) <= kRingBytes, "a tile of results");
    T* const slab = reinterpret_cast<T*>(base);
#pragma unroll
    for (int i = 0; i < kRowFragments; ++i) {
#pragma unroll
      for (int j = 0; j < kColumnPairs * 2; ++j) {
        T* const to = slab + (warp_row + i * 16 + lane / 4) * kPitch + warp_column + j * 8 +
                      lane % 4 * 2;
        store_pair(to, sum[i][j][0], sum[i][j][1]);
        store_pair(to + 8 * kPitch, sum[i][j][2], sum[i][j][3]);
      }
    }
    __syncthreads();
    constexpr int kLine = BN / kChunk;
    const int column = thread % kLine * kChunk;
    if (first_channel + column < args.out_channels) {
#pragma unroll 4
      for (int row = thread / kLine; row < BM; row += kThreads / kLine) {
        const i64 at = result_at[row];
        if (at < 0) break;
        *reinterpret_cast<uint4*>(y + at + first_channel + column) =
            *reinterpret_cast<const uint4*>(slab + row * kPitch + column);
      }
    }
    return;
  }

  // Otherwise float32 accumulators are staged, and the epilogue runs over vectors of channels or
  // pixels, whichever are contiguous in the result.
  float* const slab = reinterpret_cast<float*>(base);
#pragma unroll
  for (int i = 0; i < kRowFragments; ++i) {
#pragma unroll
    for (int j = 0; j < kColumnPairs * 2; ++j) {
      const int row = warp_row + i * 16 + lane / 4, column = warp_column + j * 8 + lane % 4 * 2;
      store_pair(slab + Sums::at(row, column), sum[i][j][0], sum[i][j][1]);
      store_pair(slab + Sums::at(row + 8, column), sum[i][j][2], sum[i][j][3]);
    }
  }
  __syncthreads();
  if (args.activation != kNone) {
    activate_sums<T, BM, BN, kThreads>(args, slab, result_at, own_group, first_channel);
  }
  auto store_by = [&](auto run) {
    store_runs<T, BM, BN, kThreads, decltype(run)>(args, slab, result_at, own_group, first_channel);
  };
  if (args.wide_stores) {
    store_by(Run<kChunk, false>());
  } else if (args.runs_of_pixels) {
    store_by(Run<4, true>());
  } else if (args.y_stride[2] != 1) {
    store_by(Run<1, true>());
  } else {
    store_by(Run<1, false>());
  }
}
