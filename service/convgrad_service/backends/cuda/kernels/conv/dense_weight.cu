// wgrad of a dense convolution, as an implicit GEMM (cp.async, mma.sync). Launched by dense_weight.py.
//
// M = channels of grad_output in one group, N = taps x input channels (channels fastest, rounded up to
// 16-byte chunks), K = pixels of grad_output:
//   w[g, k, c, r] = sum over pixels (n, o) of y[n, g, k, o] * x[n, g, c, o*stride + r*dilation - pad].
//
// Grid: column tiles (fastest), row tiles; groups; splits.
// Block: BM x BN, k-tiles of BK pixels, warp tiles of WM x WN, over a share of the pixels. If the tile is within
//   one tap, K has only the pixels that read this tap inside the input. All warps compute the offsets of a few
//   k-tiles' pixels ahead of their copies.
// Results: with one split final; else each split writes float32 partial sums to its part of `partials`, ordered
//   (g, k, t, r, s, c), and core/flat_sum.cu or core/split_sum.cu reduces them.
// Shared memory (dynamic): STAGES stages of both operands, then the tile's taps and the pixels' offsets; counted
//   by dense_weight.py.
// Preconditions: channels contiguous in whole 16-byte chunks: strides and addresses are multiples of 16 bytes;
//   the rest of the last chunk may hold anything. Positions outside the input are zeros.
// Determinism: one order of additions per result and number of splits.
// Limits: pixels below 2^31; element offsets below 2^31, or 64-bit with WIDE.
#include "conv/dense_mma.cuh"

using namespace convgrad;

#if WIDE
using Index = u64;
#else
using Index = u32;
#endif

struct DenseWeightArgs {
  const void* x;
  const void* y;
  void* w;
  const void* accumulate;  // like w, or null
  float* partials;         // null with one split
  i64 x_stride[6];         // N G C D H W, in elements
  i64 y_stride[6];
  i64 w_stride[6];  // G K C T R S; accumulate's too
  float alpha;
  float beta;
  int batch;
  int groups;
  int in_channels;   // in one group
  int out_channels;  // in one group
  int x_size[3];
  int y_size[3];
  int kernel[3];
  int stride[3];
  int dilation[3];
  int pad[3];
  int splits;
  int wide_result;  // w is float32, regardless of the type of x and y
  int plain;        // no epilogue, and the result has the layout of partial sums
};

namespace {

// A tap of the tile: its displacement in positions and in offsets of x.
struct alignas(16) Shift {
  int d, h, w;
  Index x;
};

constexpr Index kNowhere = ~Index(0);
constexpr int kWarps = (BM / WM) * (BN / WN);
constexpr int kThreads = kWarps * 32;
constexpr int kChunk = 16 / static_cast<int>(sizeof(ELEMENT));
constexpr int kSteps = BK * static_cast<int>(sizeof(ELEMENT)) / 32;

// Pixels are located in batches of k-tiles: at least the k-tiles in flight, in whole rounds.
constexpr int kRound = kThreads >= BK ? kThreads / BK : 1;
constexpr int kBatch = (STAGES - 2 + kRound) / kRound * kRound;

using TileA = Tile<ELEMENT, BK, BM, true>;
using TileB = Tile<ELEMENT, BK, BN, true>;
constexpr int kRingBytes = STAGES * (TileA::kBytes + TileB::kBytes);

// Along one dimension, the outputs [low, low + count) whose input is not padding at a tap, or at
// some tap.
struct Span {
  int low, count;
};

__device__ __forceinline__ Span outputs_of(const DenseWeightArgs& args, int dim, int tap) {
  const int stride = args.stride[dim], shift = args.pad[dim] - tap * args.dilation[dim];
  const int low = shift > 0 ? (shift + stride - 1) / stride : 0;
  const int last = args.x_size[dim] - 1 + shift;
  const int high = last < 0 ? 0 : min(args.y_size[dim], last / stride + 1);
  return {low, max(high - low, 0)};
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)
    dense_weight(const __grid_constant__ DenseWeightArgs args) {
  using T = ELEMENT;
  extern __shared__ uint4 shared[];
  char* const base = reinterpret_cast<char*>(shared);
  const int thread = threadIdx.x, lane = thread & 31, warp = thread / 32;
  const int group = blockIdx.y;
  const int taps = args.kernel[0] * args.kernel[1] * args.kernel[2];
  const int channels = (args.in_channels + kChunk - 1) / kChunk * kChunk;
  const int columns = taps * channels;
  const u32 column_tiles = (columns + BN - 1) / BN;
  const u32 row_tile = blockIdx.x / column_tiles;
  const int first_column = (blockIdx.x - row_tile * column_tiles) * BN, first_row = row_tile * BM;
  const T* const x = static_cast<const T*>(args.x) + group * args.x_stride[1];
  const T* const y = static_cast<const T*>(args.y) + group * args.y_stride[1];

  // Each thread copies one column of chunks, in several rows, of both operands; in B, of one tap.
  constexpr int kARows = kThreads / TileA::kChunks, kACount = BK / kARows;
  constexpr int kBRows = kThreads / TileB::kChunks, kBCount = BK / kBRows;
  static_assert(kACount * kARows == BK && kBCount * kBRows == BK, "whole rounds");
  const int a_row = thread / TileA::kChunks, a_chunk = thread % TileA::kChunks;
  const int b_row = thread / TileB::kChunks, b_chunk = thread % TileB::kChunks;
  const bool a_real = first_row + a_chunk * kChunk < args.out_channels;
  const int b_column = first_column + b_chunk * kChunk;
  const bool b_real = b_column < columns;

  // The taps of the tile, and the tap of this thread's chunks.
  const int first_tap = first_column / channels;
  const int tile_taps = (min(first_column + BN, columns) - 1) / channels - first_tap + 1;
  const int b_tap = b_real ? b_column / channels - first_tap : 0;
  Span* const span = reinterpret_cast<Span*>(base + kRingBytes);  // one per dimension
  Shift* const shifts = reinterpret_cast<Shift*>(span + 4);
  // Offsets of the pixels of two batches: in y, then in x for each tap; kNowhere if outside.
  Index* const y_at = reinterpret_cast<Index*>(shifts + tile_taps);
  Index* const x_at = y_at + 2 * kBatch * BK;
  auto* const flags = reinterpret_cast<ScalingFlags*>(x_at + tile_taps * (2 * kBatch * BK));

  // The pixels of K: all, or if the tile has one tap, those whose input is not padding.
  const bool one_tap = channels % BN == 0;
  auto tap_of = [&](int tap, int dim) {
    const int outer = tap / args.kernel[2];
    return dim == 2 ? tap - outer * args.kernel[2]
                    : dim == 1 ? outer % args.kernel[1] : outer / args.kernel[1];
  };
  if (thread < 3) {
    span[thread] = one_tap ? outputs_of(args, thread, tap_of(first_tap, thread))
                           : Span{0, args.y_size[thread]};
  }
  for (int i = thread; i < tile_taps; i += kThreads) {
    Shift by;
    by.d = tap_of(first_tap + i, 0) * args.dilation[0] - args.pad[0];
    by.h = tap_of(first_tap + i, 1) * args.dilation[1] - args.pad[1];
    by.w = tap_of(first_tap + i, 2) * args.dilation[2] - args.pad[2];
    by.x = static_cast<Index>(by.d) * static_cast<Index>(args.x_stride[3]) +
           static_cast<Index>(by.h) * static_cast<Index>(args.x_stride[4]) +
           static_cast<Index>(by.w) * static_cast<Index>(args.x_stride[5]);
    shifts[i] = by;
  }
  __syncthreads();
  const int pixels = args.batch * span[0].count * span[1].count * span[2].count;
  const i64 all_steps = (static_cast<i64>(pixels) + BK - 1) / BK;
  const int first_step = static_cast<int>(all_steps * blockIdx.z / args.splits);
  const int tiles = static_cast<int>(all_steps * (blockIdx.z + 1) / args.splits) - first_step;
  const int end = min(static_cast<i64>(first_step + tiles) * BK, static_cast<i64>(pixels));

  // A pixel at displacement 0: its position in x, and its offsets in x and y.
  struct Place {
    int d, h, w;
    Index x, y;
  };
  auto place_of = [&](u32 pixel) {
    const Span span0 = span[0], span1 = span[1], span2 = span[2];
    const u32 rest2 = pixel / static_cast<u32>(span2.count);
    const u32 rest1 = rest2 / static_cast<u32>(span1.count);
    const u32 n = rest1 / static_cast<u32>(span0.count);
    const int o2 = pixel - rest2 * span2.count + span2.low;
    const int o1 = rest2 - rest1 * span1.count + span1.low;
    const int o0 = rest1 - n * span0.count + span0.low;
    Place at = {o0 * args.stride[0], o1 * args.stride[1], o2 * args.stride[2], 0, 0};
    at.x = n * static_cast<Index>(args.x_stride[0]) + at.d * static_cast<Index>(args.x_stride[3]) +
           at.h * static_cast<Index>(args.x_stride[4]) + at.w * static_cast<Index>(args.x_stride[5]);
    at.y = n * static_cast<Index>(args.y_stride[0]) + o0 * static_cast<Index>(args.y_stride[3]) +
           o1 * static_cast<Index>(args.y_stride[4]) + o2 * static_cast<Index>(args.y_stride[5]);
    return at;
  };
  auto meets = [&](const Place& at, const Shift& by) {
    return static_cast<u32>(at.d + by.d) < static_cast<u32>(args.x_size[0]) &&
           static_cast<u32>(at.h + by.h) < static_cast<u32>(args.x_size[1]) &&
           static_cast<u32>(at.w + by.w) < static_cast<u32>(args.x_size[2]);
  };
  auto note = [&](int slot, u32 pixel) {
    const bool real = pixel < static_cast<u32>(end);
    Place at = {};
    if (real) at = place_of(pixel);
    y_at[slot] = real ? at.y : kNowhere;
#pragma unroll 1
    for (int i = 0; i < tile_taps; ++i) {
      const Shift by = shifts[i];
      x_at[i * (2 * kBatch * BK) + slot] =
          real && meets(at, by) ? static_cast<Index>(at.x + by.x) : kNowhere;
    }
  };
  for (int i = thread; i < 2 * kBatch * BK; i += kThreads) note(i, first_step * BK + i);
  __syncthreads();

  const T* const y_here = y + first_row + a_chunk * kChunk;
  const T* const x_here = x + (b_real ? b_column % channels : 0);
  const Index* const x_mine = x_at + b_tap * (2 * kBatch * BK) + b_row;
  const Index* const y_mine = y_at + a_row;
  int slot = -1;  // of the k-tile in the two batches
  // Offsets at or above these limits read nothing.
  const Index a_limit = a_real ? kNowhere : 0, b_limit = b_real ? kNowhere : 0;
  Index from[kACount + kBCount];
  auto prepare = [&](int tile) {
    if (++slot == 2 * kBatch) slot = 0;
    // All warps locate the next batch in the slots of the previous one, after a barrier. The first
    // two batches are already located, and the second one is not used before the first barrier.
    if (tile >= kBatch && slot % kBatch == 0) {
      const int next = slot == 0 ? kBatch : 0;
      for (int i = thread; i < kBatch * BK; i += kThreads) {
        note(next * BK + i, (first_step + tile + kBatch) * BK + i);
      }
    }
  };
  auto fetch = [&](int i) {
    from[i] = i < kACount ? y_mine[slot * BK + i * kARows]
                          : x_mine[slot * BK + (i - kACount) * kBRows];
  };
  auto own = [&](int i) {
    const int row = i < kACount ? a_row + i * kARows : b_row + (i - kACount) * kBRows;
    return i < kACount ? TileA::at(row, a_chunk) : TileA::kBytes + TileB::at(row, b_chunk);
  };
  auto copy = [&](int i, u32 stage) {
    if (i < kACount) {
      cp_async_zfill(stage + own(i), y_here + from[i], from[i] < a_limit);
    } else {
      cp_async_zfill(stage + own(i), x_here + from[i], from[i] < b_limit);
    }
  };

  constexpr int kRowFragments = WM / 16, kColumnPairs = WN / 16;
  const int warp_row = warp / (BN / WN) * WM, warp_column = warp % (BN / WN) * WN;
  float sum[kRowFragments][kColumnPairs * 2][4] = {};
  multiply<T, TileA, TileB, SPLIT, kSteps, STAGES, kACount + kBCount, GROUPS, kRowFragments,
           kColumnPairs>(
      sum, shared_address(base), tiles, warp_row, warp_column, prepare, fetch, copy, own,
      flags);

  const i64 columns_of_all = static_cast<i64>(taps) * args.in_channels;
  const i64 group_row = static_cast<i64>(group) * args.out_channels;
  float* const partials =
      args.partials + blockIdx.z * args.groups * args.out_channels * columns_of_all;
  // In partial sums, and in most results, (tap, channel) is contiguous, so columns map directly.
  const bool direct = channels == args.in_channels && (args.splits > 1 || args.plain);
  if (direct) {
#pragma unroll
    for (int i = 0; i < kRowFragments; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int k = first_row + warp_row + i * 16 + half * 8 + lane / 4;
        if (k >= args.out_channels) continue;
        const i64 row = (group_row + k) * columns_of_all;
#pragma unroll
        for (int j = 0; j < kColumnPairs * 2; ++j) {
          const int column = first_column + warp_column + j * 8 + lane % 4 * 2;
          const float first = sum[i][j][half * 2], second = sum[i][j][half * 2 + 1];
          if (column >= columns) continue;
          if (args.splits > 1) {
            store_pair(partials + row + column, first, second);
          } else if (args.wide_result) {
            store_pair(static_cast<float*>(args.w) + row + column, first, second);
          } else {
            store_pair(static_cast<T*>(args.w) + row + column, first, second);
          }
        }
      }
    }
    return;
  }

  // Otherwise results are staged in shared memory and stored element by element.
  auto put = [&](int t, int c, int k, i64 row, float value) {
    const int t01 = t / args.kernel[2], t0 = t01 / args.kernel[1];
    const int t1 = t01 - t0 * args.kernel[1], t2 = t - t01 * args.kernel[2];
    if (args.splits > 1) {
      partials[row + static_cast<i64>(t) * args.in_channels + c] = value;
      return;
    }
    const i64 to = group * args.w_stride[0] + k * args.w_stride[1] + c * args.w_stride[2] +
                   t0 * args.w_stride[3] + t1 * args.w_stride[4] + t2 * args.w_stride[5];
    if (args.wide_result) {
      static_cast<float*>(args.w)[to] = finish_at<float>(args, value, to);
    } else {
      static_cast<T*>(args.w)[to] = narrow<T>(finish_at<T>(args, value, to));
    }
  };
  constexpr int kSlabRows = BM / WM * 16, kSlabPitch = BN + 8;
  static_assert(kSlabRows * kSlabPitch * 4 <= kRingBytes, "the sums pass through the ring");
  float* const slab = reinterpret_cast<float*>(base);
#pragma unroll
  for (int part = 0; part < kRowFragments; ++part) {
#pragma unroll
    for (int j = 0; j < kColumnPairs * 2; ++j) {
      float* const to = slab + (warp_row / WM * 16 + lane / 4) * kSlabPitch + warp_column + j * 8 +
                        lane % 4 * 2;
      store_pair(to, sum[part][j][0], sum[part][j][1]);
      store_pair(to + 8 * kSlabPitch, sum[part][j][2], sum[part][j][3]);
    }
    __syncthreads();
    // Row r of the staging tile holds row r / 16 * WM + part * 16 + r % 16 of the tile.
#pragma unroll 1
    for (int i = thread; i < kSlabRows * BN; i += kThreads) {
      const int row = i / BN, k = first_row + row / 16 * WM + part * 16 + row % 16;
      const int column = first_column + i % BN, t = column / channels, c = column - t * channels;
      if (k >= args.out_channels || t >= taps || c >= args.in_channels) continue;
      put(t, c, k, (group_row + k) * columns_of_all, slab[row * kSlabPitch + i % BN]);
    }
    __syncthreads();
  }
}
