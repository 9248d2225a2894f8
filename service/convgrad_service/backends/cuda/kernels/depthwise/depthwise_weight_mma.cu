// The gradient of a depthwise convolution's weight, of channels-last 16-bit tensors on tensor cores.
//
// w[c, r, s] = sum over (n, p, q) of
//              x[n, p + r - pad, q + s - pad, c] * y[n, p, q, c],
// then alpha and beta*accumulate, and one rounding.
// GEMM view, for one channel, one row of the kernel and one row of y: K = 16 strips
// (depthwise_strips.cuh), N = the 8 columns of a strip of y, M = the 16 columns of x from where the
// strip's window starts. Each diagonal is one tap; there are at most 8 diagonals, so of two elements 8
// rows apart only one is used.
// A block computes up to KERNEL_H rows and 8 columns of taps; larger kernels are divided into parts. A dilated kernel
// is a larger one of which some taps are unused.
// A warp owns CHANNELS channels of the block's items (tiles of strips and chunks of rows) and walks
// down the rows of x; the rows of y that meet them are in a ring of registers. Rows are processed in
// groups of ROWS: between two barriers, the block multiplies a group, transposes the next one, and
// starts copies of a later one.
// Grid: blocks * channel tiles * parts of the kernel.
// Shared memory: STAGES groups of x and of y as copied, two of each in lines, and the sums of every
// FLUSH rows, because tensor cores truncate instead of rounding.
// Deterministic: the last block of a channel tile to arrive adds the blocks' partial sums in order.
// Preconditions: channels in multiples of 8, aligned to 16 bytes; `arrived` being 0, and
// partials if there is more than one block.
#include "core/vectors.cuh"
#include "depthwise/depthwise_strips.cuh"
#include "depthwise/depthwise_weight_args.cuh"
#include "depthwise/depthwise_weight_sum.cuh"

namespace convgrad {

struct DepthwiseWeightMmaArgs : DepthwiseWeightOperands {
  u32 x_pitch;  // of a row, in units of 16 bytes
  u32 y_pitch;
  int x_channels;  // channels / multiplier
  int multiplier;
  int kernel[2];    // extent of the dilated kernel
  int dilation[2];  // distance of taps in rows and columns
  int part[2];  // largest part of the kernel
  int parts_across;
  StripTiling tiling;
};

}  // namespace convgrad

using namespace convgrad;

namespace {

using T = ELEMENT;

constexpr int kThreads = WARPS * 32;
constexpr int kOwn = CHANNELS;  // channels of a warp
constexpr int kChannels = WARPS * kOwn;
constexpr int kOctets = kChannels / 8;
// Units of x that a tile needs if strips share none.
constexpr int kMostSlots = kTileStrips * 2;
using CopierX = UnitCopier<T, kOctets, kMostSlots * kOwn / 32, kThreads>;
using CopierY = UnitCopier<T, kOctets, kTileStrips * kOwn / 32, kThreads>;
using LinesX = Turner<kOctets, WARPS, kMostSlots>;
using LinesY = Turner<kOctets, WARPS, kTileStrips>;
constexpr int kStageY = kTileStrips * kStripColumns * kOctets * 16;
// Rows after which rings and groups repeat, and how often before products are added up.
constexpr int kUnrolled = KERNEL_H % ROWS == 0 ? KERNEL_H : KERNEL_H * ROWS;
constexpr int kFlush = (FLUSH + kUnrolled - 1) / kUnrolled;
// A lane's sums: for each channel, two columns of y.
constexpr int kWarpSums = KERNEL_H * kOwn * 2;

// A block's tile of channels and part of the kernel, and its number among those that share them.
struct OwnPart {
  int first_channel, block, blocks, column, first_r, first_s;

  __device__ __forceinline__ explicit OwnPart(const DepthwiseWeightMmaArgs& args)
      : blocks(args.blocks) {
    const int tiles = args.tiling.channel_tiles, tile = blockIdx.x % tiles;
    const int kernel_part = blockIdx.x / tiles / blocks;
    first_channel = tile * kChannels, block = blockIdx.x / tiles % blocks;
    column = kernel_part * tiles + tile;
    first_r = kernel_part / args.parts_across * args.part[0];
    first_s = kernel_part % args.parts_across * args.part[1];
  }
};

// The block's sums of each tap, in the order of y's columns, and the tile's from those of all its
// blocks.
__device__ __noinline__ void finish_tile(const DepthwiseWeightMmaArgs& args, float* sums, bool& last) {
  __syncthreads();
  const OwnPart own(args);
  const int tap_columns = min(args.part[1], args.kernel[1] - own.first_s);
  const int part = min(args.part[0], args.kernel[0] - own.first_r) * tap_columns * kChannels;
  float* const partials = args.partials + static_cast<i64>(own.column) * own.blocks *
                                              (args.part[0] * args.part[1] * kChannels);
  const auto own_sum = [&](int i) {
    const int tap = i / kChannels, channel = i % kChannels;
    const int r = tap / tap_columns, s = tap % tap_columns;
    const float* const from =
        sums + (channel / kOwn * kWarpSums + (r * kOwn + channel % kOwn) * 2) * 32;
    float sum = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) sum += from[j % 2 * 32 + (s + j) % 8 * 4 + j / 2];
    return sum;
  };
  // Those of taps that a dilated kernel lacks are not stored.
  const auto put = [&](int i, float sum) {
    const int tap = i / kChannels, c = own.first_channel + i % kChannels;
    const int r = own.first_r + tap / tap_columns, s = own.first_s + tap % tap_columns;
    if (c >= args.channels || r % args.dilation[0] != 0 || s % args.dilation[1] != 0) return;
    put_gradient_as<T>(args, c, r / args.dilation[0], s / args.dilation[1], sum);
  };
  add_blocks(kThreads, partials, args.arrived + own.column, own.block, own.blocks, part, sums, last, own_sum,
             put);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS)
    depthwise_weight_mma(const __grid_constant__ DepthwiseWeightMmaArgs args) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ bool last;
  const StripTiling& tiling = args.tiling;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int g = lane / 4, t = lane % 4;
  const int pitch_x = line_pitch(tiling.slots), pitch_y = line_pitch(kTileStrips);
  const int stage_x = tiling.slots * kStripColumns * kOctets * 16, stage = stage_x + kStageY;
  const int row_x = kChannels * pitch_x, row = row_x + kChannels * pitch_y;
  const int lines = STAGES * ROWS * stage;
  float* const sums = reinterpret_cast<float*>(shared + lines + 2 * ROWS * row);
  const int own_sums = warp * kWarpSums * 32 + lane;

  const OwnPart own(args);
  const int block = own.block, blocks = own.blocks, first_r = own.first_r, first_s = own.first_s;
  const int first_channel = own.first_channel;
  const int items = tiling.tiles * tiling.chunks;
  const int steps = tiling.rows - 1 + KERNEL_H;
#pragma unroll
  for (int i = 0; i < kWarpSums; ++i) sums[own_sums + i * 32] = 0;

  // y's matrices: strips 0 to 7, then 8 to 15, of one channel and then of the other.
  const int own_y = opaque_value(row_x + (warp * kOwn + lane / 16) * pitch_y + lane % 16 * 16);
  float products[kOwn][KERNEL_H][4] = {};
  u32 ring[kOwn][KERNEL_H][2];

  for (int item = block; item < items; item += blocks) {
    const TileAt tile = tile_at(tiling, item);
    const int first_row = tile.chunk * tiling.rows;
    const int top = first_row - args.pad[0] + first_r;
    const int end = slot_of(tiling, tile, kTileStrips - 1) + 2;
    const int slot = slot_of(tiling, tile, lane % 8 + lane / 16 * 8);
    // x's: the first 8 columns, then the others, of strips 0 to 7 and then of 8 to 15.
    // For each item again: registers do not suffice to keep it.
    const Sources sources(opaque_value(first_channel), kChannels, args.multiplier, args.x_channels);
    int own_x[kOwn];
#pragma unroll
    for (int channel = 0; channel < kOwn; ++channel) {
      const int line = sources.line(first_channel + warp * kOwn + channel);
      own_x[channel] = opaque_value(line * pitch_x + (slot + lane / 8 % 2) * 16);
    }
    CopierX x(shared_address(shared), args.x, args.x_stride, args.batch,
              tile.n, tile.strip, tiling.units, tiling.slots, end, top, args.x_size[0],
              first_s - args.pad[1], args.x_size[1], sources.first, sources.end);
    CopierY y(shared_address(shared) + stage_x, args.y, args.y_stride,
              args.batch, tile.n, tile.strip, tiling.strips, kTileStrips, kTileStrips, first_row,
              min(args.y_size[0] - first_row, tiling.rows), 0, args.y_size[1], first_channel,
              args.channels);
    const LinesX turn_x(tiling.slots, pitch_x);
    const LinesY turn_y(kTileStrips, pitch_y);
    // For a group of rows: the copies, and the transposition to lines.
    const auto fetch = [&](int group) {
#pragma unroll
      for (int i = 0; i < ROWS; ++i) {
        const int step = group * ROWS + i, to = (group % STAGES * ROWS + i) * stage;
        if (step < steps) {
          x.copy(to, top + step, args.x_pitch);
          y.copy(to, step, args.y_pitch);
        }
      }
      cp_async_commit();
    };
    const auto turn_row = [&](int group, int i) {
      const u32 from = shared_address(shared) + (group % STAGES * ROWS + i) * stage;
      unsigned char* const to = shared + lines + ((group & 1) * ROWS + i) * row;
      turn_x.turn(from, to);
      turn_y.turn(from + stage_x, to + row_x);
    };
    cp_async_wait<0>();  // copies of rows that the previous item skipped
    __syncthreads();  // the previous item is no longer read
#pragma unroll
    for (int stages = 0; stages < STAGES; ++stages) fetch(stages);
    cp_async_wait<STAGES - 1>();
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ROWS; ++i) turn_row(0, i);
#pragma unroll
    for (int channel = 0; channel < kOwn; ++channel) {
#pragma unroll
      for (int i = 0; i < KERNEL_H; ++i) ring[channel][i][0] = ring[channel][i][1] = 0;
    }
    for (int turn = 0; turn < steps; turn += kUnrolled) {
#pragma unroll
      for (int first = 0; first < kUnrolled; first += ROWS) {
        // Rows past x's last meet nothing of y.
        if (turn + first >= steps || top + turn + first >= args.x_size[0]) break;
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        const int group = (turn + first) / ROWS;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
          const int j = first + i, step = turn + j;
          if (step >= steps) break;
          const int h = top + step;
          const bool exists = h >= 0 && (ROWS == 1 || h < args.x_size[0]);
          const bool turns = step + ROWS < steps;
          if (turns) turn_row(group + 1, i);
          const u32 from =
              shared_address(shared) + lines + ((group & 1) * ROWS + i) * row;
#pragma unroll
          for (int pair = 0; pair < kOwn / 2; ++pair) {
            u32 both[4];
            ldmatrix_trans(both, from + own_y + pair * 2 * pitch_y);
#pragma unroll
            for (int k = 0; k < 4; ++k) ring[pair * 2 + k / 2][j % KERNEL_H][k % 2] = both[k];
          }
          u32 columns[kOwn][4];
          if (exists) {
#pragma unroll
            for (int channel = 0; channel < kOwn; ++channel) {
              ldmatrix_trans(columns[channel], from + own_x[channel]);
            }
          }
          // Copies occupy shared memory, so they start while tensor cores are busy; or
          // last, when registers are free again.
          if (!LATE && i == ROWS - 1) fetch(group + STAGES);
          if (exists) {
#pragma unroll
            for (int r = 0; r < KERNEL_H; ++r) {
              const int at = positive_mod(j - r, KERNEL_H);
#pragma unroll
              for (int channel = 0; channel < kOwn; ++channel) {
                mma<T>(products[channel][r], columns[channel], ring[channel][at][0],
                       ring[channel][at][1]);
              }
            }
          }
          if (LATE && i == ROWS - 1) fetch(group + STAGES);
        }
      }
      if (turn / kUnrolled % kFlush != kFlush - 1 && turn + kUnrolled < steps) continue;
#pragma unroll
      for (int r = 0; r < KERNEL_H; ++r) {
#pragma unroll
        for (int channel = 0; channel < kOwn; ++channel) {
          float(&product)[4] = products[channel][r];
          float* const to = sums + own_sums + (r * kOwn + channel) * 2 * 32;
          // Column 2t of y, and 2t + 1: the diagonal from 0 to 7 that row g or g + 8 is on.
          to[0] += g >= 2 * t ? product[0] : product[2];
          to[32] += g >= 2 * t + 1 ? product[1] : product[3];
#pragma unroll
          for (int i = 0; i < 4; ++i) product[i] = 0;
        }
      }
    }
  }

  finish_tile(args, sums, last);
}
