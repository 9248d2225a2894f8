// wgrad of a first layer, whose few input channels would leave a channel tile mostly empty (cp.async,
// mma.sync). Launched by first_weight.py.
//
//   w[k, c, r] = sum over pixels (n, o) of y[n, k, o] * x[n, c, o*stride + r - pad].
// M = channels of y, 16 * ROWS per block, N = columns of windows of several kernel rows (the matrices of
// first_windows.cuh), K = positions q of rows of y.
//
// Grid: groups of kernel rows (fastest), then taps along D, blocks of channels, splits.
// Block: kernel rows of one tap along D, 16 * ROWS channels, and a share of the units. Warps: warp_columns x rows
//   of a unit; each has up to six tiles of 8 columns, all channels, and one row of y of each unit.
// Results: with one split final; else each split writes float32 partial sums to its part of `partials`, ordered
//   (k, t, r, s, c), and first_sum.cu reduces them.
// Shared memory (dynamic): STAGES units of y, the windows and the rows of x as loaded, at the end the sums of
//   all warps; counted by first_weight.py.
// Preconditions: dilation 1, one group; y contiguous in channels (with ALONG_W: in W) in whole 16-byte chunks; x
//   contiguous in channels and W; both 4-byte aligned. Positions outside the input are zeros.
// Determinism: one order of additions per result and number of splits.
// Limits: units and positions of a row below 2^31; 64-bit offsets elsewhere.
#include "core/epilogue.cuh"
#include "conv/first_windows.cuh"
#include "ptx/pdl.cuh"

using namespace convgrad;

struct FirstWeightArgs {
  const void* x;
  const void* y;
  void* w;
  const void* accumulate;  // like w, or null
  float* partials;         // null with one split
  i64 x_stride[6];         // N G C D H W, in elements
  i64 y_stride[6];
  i64 w_stride[6];  // G K C T R S; accumulate's too
  WindowArgs windows;
  float alpha;
  float beta;
  int y_channels;
  int wide_result;  // w is float32, regardless of the type of x and y
  int row_groups;
  int channel_blocks;
  int warp_columns;
  int splits;
};

namespace {

using T = ELEMENT;
constexpr bool kWide = sizeof(T) == 4;
constexpr int kBytes = static_cast<int>(sizeof(T));
constexpr int kChunk = 16 / kBytes;
constexpr int kDepth = 32 / kBytes;  // K of an mma
constexpr int kTiles = 6;            // column tiles of a warp
constexpr int kUnits = 8;            // units whose coordinates are precomputed
constexpr int kChannels = 16 * ROWS;
constexpr int kSegment = 64;         // the most positions of a unit's row
// The pitch of y in shared memory, whose rows are positions, or with ALONG_W channels. It avoids
// bank conflicts between the rows of a fragment.
constexpr int kPitch = ALONG_W ? kSegment * kBytes + 16 : kChannels * kBytes + (kWide ? 32 : 16);

template <class R>
__device__ __forceinline__ void finish_to(const FirstWeightArgs& args, i64 at, float sum) {
  const R* accumulate = static_cast<const R*>(args.accumulate);
  if (accumulate != nullptr) accumulate += at;
  const R* const none = nullptr;
  const float done = finish<R, float>(sum, args.alpha, args.beta, accumulate, none, kNone);
  static_cast<R*>(args.w)[at] = narrow<R>(done);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(384, 1)
    first_weight(const __grid_constant__ FirstWeightArgs args) {
  extern __shared__ uint4 shared[];
  char* const base = reinterpret_cast<char*>(shared);
  const int thread = threadIdx.x, threads = blockDim.x, lane = thread & 31, warp = thread >> 5;
  const WindowArgs& geometry = args.windows;
  const int warp_row = warp % geometry.unit_rows, warp_column = warp / geometry.unit_rows;

  u32 block = blockIdx.x;
  const int first_row = block % args.row_groups * geometry.rows;
  block /= args.row_groups;
  const int tap = block % geometry.kernel[0];
  block /= geometry.kernel[0];
  const int first_channel = block % args.channel_blocks * kChannels;
  const int split = block / args.channel_blocks;
  const int unit0 = static_cast<int>(static_cast<i64>(geometry.units) * split / args.splits);
  const int unit1 = static_cast<int>(static_cast<i64>(geometry.units) * (split + 1) / args.splits);

  const u32 y_row_bytes = (ALONG_W ? kChannels : geometry.segment) * kPitch;
  const u32 y_bytes = geometry.unit_rows * y_row_bytes;
  Windows<T> x{geometry,
               args.x_stride,
               static_cast<const T*>(args.x),
               first_row,
               min(geometry.rows, geometry.kernel[1] - first_row),
               base + STAGES * y_bytes,
               nullptr};
  x.raws = x.windows + x.ring_bytes();
  const T* const y = static_cast<const T*>(args.y);
  const auto unit_of = [&](int index) { return x.unit_of(index, tap, index == unit0); };
  // Coordinates of upcoming units, each computed by one thread.
  __shared__ Unit units[kUnits];
  if (thread < STAGES) units[thread] = unit_of(unit0 + thread);
  __syncthreads();

  const u32 base_at = shared_address(base);
  const auto copy_unit = [&](int index, int stage) {
    if (index < unit1) {
      const Unit& unit = units[(index - unit0) % kUnits];
      if (unit.inside) {
        // Adjacent threads copy adjacent chunks of a position, or with ALONG_W of a channel.
        const int chunks = (ALONG_W ? geometry.segment : kChannels) / kChunk;
        const int chunk = thread % static_cast<u32>(chunks), first = thread / static_cast<u32>(chunks);
        const int step = threads / static_cast<u32>(chunks);
        const int depth = (unit.width + kDepth - 1) / kDepth * kDepth;
        const int lines = ALONG_W ? kChannels : depth;  // rows of shared memory,
        int real = ALONG_W ? args.y_channels - first_channel : unit.width;  // and those not padding
        const int channel = first_channel + (ALONG_W ? first : chunk * kChunk);
        const int q = ALONG_W ? chunk * kChunk : first;
        if (ALONG_W ? q >= unit.width : channel >= args.y_channels) real = 0;
        const i64 next = step * args.y_stride[ALONG_W ? 2 : 5];
        const T* row_from = y + unit.n * args.y_stride[0] + channel * args.y_stride[2] +
                            unit.z * args.y_stride[3] + unit.p0 * args.y_stride[4] +
                            (unit.q0 + q) * args.y_stride[5];
        u32 row_to = base_at + stage * y_bytes + first * kPitch + chunk * 16;
        const int unit_rows = min(geometry.unit_rows, geometry.y_size[1] - unit.p0);
        for (int row = 0; row < unit_rows; ++row) {
          const T* from = row_from;
          u32 to = row_to;
#pragma unroll 2
          for (int line = first; line < lines; line += step) {
            cp_async_zfill(to, from, line < real);
            from += next;
            to += step * kPitch;
          }
          row_from += args.y_stride[4];
          row_to += y_row_bytes;
        }
        x.copy(unit, stage);
      }
    }
    cp_async_commit();
  };

  // This warp's share of the column tiles (kernel row, tile), which are distributed evenly.
  const int all_tiles = x.rows * geometry.column_tiles;
  const int first_tile = all_tiles * warp_column / args.warp_columns;
  const int tiles = all_tiles * (warp_column + 1) / args.warp_columns - first_tile;
  // ldmatrix loads two tiles: lower lanes hold addresses of the first, upper lanes of the second.
  // In TF32, every lane reads its own column of both.
  const auto tile_of = [&](int j) { return min(first_tile + j, all_tiles - 1); };
  float sum[ROWS][kTiles][4] = {};

  const u32 window_pitch = x.pitch();
  const u32 windows_at = shared_address(x.windows), windows_end = windows_at + x.ring_rows() * x.row_bytes();
  // This lane's addresses in the unit's windows, which advance with the ring.
  constexpr int kLoads = kWide ? kTiles : kTiles / 2;
  u32 window_at[kLoads];
#pragma unroll
  for (int j = 0; j < kLoads; ++j) {
    const int tile = tile_of(kWide ? j : j * 2 + (lane >> 4)), row = tile / geometry.column_tiles;
    window_at[j] = windows_at + (geometry.stride[1] * warp_row + row) * x.row_bytes() +
                   (tile - row * geometry.column_tiles) * 8 * kBytes +
                   (kWide ? (lane & 3) * window_pitch + (lane >> 2) * 4 : (lane & 15) * window_pitch);
  }
  const auto multiply = [&](const Unit& unit, int stage) {
    if (unit.p0 + warp_row >= geometry.y_size[1]) return;
    u32 a_at = base_at + stage * y_bytes + warp_row * y_row_bytes;
    if constexpr (ALONG_W) {
      a_at += (lane & 15) * kPitch + (lane >> 4) * 16;
    } else {
      a_at += kWide ? (lane & 3) * kPitch + (lane >> 2) * 4
                    : ((lane & 7) + (lane >> 4) * 8) * kPitch + (lane >> 3 & 1) * 16;
    }
    u32 b_at[kLoads];
#pragma unroll
    for (int j = 0; j < kLoads; ++j) b_at[j] = window_at[j];
    const int steps = (unit.width + kDepth - 1) / kDepth;
    for (int step = 0; step < steps; ++step) {
      u32 a[ROWS][4];
#pragma unroll
      for (int i = 0; i < ROWS; ++i) {
        if constexpr (ALONG_W) {
          ldmatrix(a[i], a_at + i * 16 * kPitch);
#pragma unroll
          for (int e = 0; kWide && e < 4; ++e) a[i][e] = to_tf32(a[i][e]);
        } else if constexpr (kWide) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            a[i][e] = to_tf32(ld_shared_u32(a_at + i * 64 + (e & 1) * 32 + (e >> 1) * 4 * kPitch));
          }
        } else {
          ldmatrix_trans(a[i], a_at + i * 32);
        }
      }
      a_at += ALONG_W ? 32 : kDepth * kPitch;
#pragma unroll
      for (int j = 0; j < kTiles / 2; ++j) {
        u32 b[4];
        if constexpr (kWide) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            b[e] = to_tf32(ld_shared_u32(b_at[j * 2 + (e >> 1)] + (e & 1) * 4 * window_pitch));
          }
          b_at[j * 2] += kDepth * window_pitch;
          b_at[j * 2 + 1] += kDepth * window_pitch;
        } else {
          ldmatrix_trans(b, b_at[j]);
          b_at[j] += kDepth * window_pitch;
        }
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
          mma<T>(sum[i][j * 2], a[i], b[0], b[1]);
          mma<T>(sum[i][j * 2 + 1], a[i], b[2], b[3]);
        }
      }
    }
  };

  for (int i = 0; i < STAGES - 1; ++i) copy_unit(unit0 + i, i);
  int stage = 0, ring = 0;
  bool ready = false;
  for (int index = unit0; index < unit1; ++index) {
    const int place = index - unit0;
    cp_async_wait<STAGES - 3>();  // for this unit and the next
    __syncthreads();
    if (thread == 0) units[(place + STAGES) % kUnits] = unit_of(index + STAGES);
    const Unit& unit = units[place % kUnits];
    copy_unit(index + STAGES - 1, stage == 0 ? STAGES - 1 : stage - 1);
    const int next = stage + 1 == STAGES ? 0 : stage + 1;
    if (unit.inside && !ready) {
      x.lay_out<false>(unit, stage, ring);
      __syncthreads();
    }
    // Some warps lay out the next unit before their mma and some after, so that the two overlap.
    const Unit& after = units[(place + 1) % kUnits];
    ready = index + 1 < unit1 && after.inside && !after.fresh;
    if (ready) {
      ring += x.ahead();
      if (ring >= x.ring_rows()) ring -= x.ring_rows();
    }
    const bool before = (warp >> 2) & 1;
    if (ready && before) x.lay_out<false>(after, next, ring);
    if (unit.inside) multiply(unit, stage);
    if (ready && !before) x.lay_out<false>(after, next, ring);
    if (ready) {
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        window_at[j] += x.ahead() * x.row_bytes();
        if (window_at[j] >= windows_end) window_at[j] -= windows_end - windows_at;
      }
    }
    stage = next;
  }
  cp_async_wait<0>();
  __syncthreads();
  launch_dependent_grids();

  // Adds the accumulators of all warps along the pixels, in order.
  float* const total = reinterpret_cast<float*>(base);
  const int total_pitch = all_tiles * 8 + 4;
  for (int turn = 0; turn < geometry.unit_rows; ++turn) {
    if (turn == warp_row) {
#pragma unroll
      for (int i = 0; i < ROWS; ++i) {
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
          if (j >= tiles) continue;
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            float& to = total[(i * 16 + (lane >> 2) + (e >> 1) * 8) * total_pitch +
                              (first_tile + j) * 8 + (lane & 3) * 2 + (e & 1)];
            to = turn == 0 ? sum[i][j][e] : to + sum[i][j][e];
          }
        }
      }
    }
    __syncthreads();
  }

  const int columns = x.columns(), results = x.rows * columns;
  for (int i = thread; i < kChannels * results; i += threads) {
    const int channel = static_cast<u32>(i) / results, rest = i - channel * results;
    const int row = rest / columns, column = rest - row * columns;
    const int k = first_channel + channel, r = first_row + row;
    const int s = column / geometry.channels, c = column - s * geometry.channels;
    if (k >= args.y_channels) break;
    const float value = total[channel * total_pitch + row * geometry.column_tiles * 8 + column];
    if (args.splits > 1) {
      const i64 all = static_cast<i64>(geometry.kernel[0]) * geometry.kernel[1] * columns;
      const i64 at = k * all + (static_cast<i64>(tap) * geometry.kernel[1] + r) * columns + column;
      args.partials[split * args.y_channels * all + at] = value;
      continue;
    }
    const i64 at = k * args.w_stride[1] + c * args.w_stride[2] + tap * args.w_stride[3] +
                   r * args.w_stride[4] + s * args.w_stride[5];
    if (args.wide_result) {
      finish_to<float>(args, at, value);
    } else {
      finish_to<T>(args, at, value);
    }
  }
}
