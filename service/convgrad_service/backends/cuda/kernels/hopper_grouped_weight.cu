// The gradient of a grouped 3 x 3 convolution's weight on Hopper, CHANNELS neighbouring channels of
// both sides at once. The host's side is hopper_grouped_weight.py.
//
// w[k, c, r, s] = sum over pixels (n, p, q) of y[n, p, q, k] * x[n, p + r - pad, q + s - pad, c], where
// k and c are of one group; what else CHANNELS x CHANNELS products sum is left out.
// GEMM, of one tap s along W: M = ROWS rows of x times CHANNELS channels, 64 together, N = the ROWS + 2
// rows of y that they meet times CHANNELS channels, K = 16 columns of y, eight by eight. Row i of x and
// row j of y meet at tap r = i + 2 - j along H: of (ROWS + 2) * ROWS pairs 3 * ROWS are wanted. The
// three taps along W are the same rows of x from one column further on.
//
// Tile: `tile_rows` rows of x by `tile_columns` columns of y, of `images` images, and the columns of x and the
// rows of y beside them: a box each, as the copy engine leaves them (a pixel's channels a row of 32 or
// 64 bytes). Block: a slice of channels and a share of the tiles. Two threads copy (TMA) into a
// ring of `stages` tiles; two warpgroups multiply, tiles in turn, and have the sums of all nine taps in
// registers. In the end they add up through shared memory, and the block's sums go to its own part of
// `partials`, in the order (k, r, s, c); the last block of a slice adds the parts up.
// Dynamic shared memory: 512 bytes to align it by, the ring, or the sums of each row of x and warpgroup.
// Relies on its launcher for the grid (slices, shares), and for tensors whose channels, of all groups,
// are side by side, with pixels at multiples of 16 bytes. Needs sm_90a, 384 threads.
// Deterministic: one order of additions for each result and number of shares. Pixels outside enter as
// zeros, which times an infinity is NaN: sums that are not finite are taken again by the definition,
// over the block's tiles.
// Index limits: rows and columns of a tensor below 2^30; 64-bit offsets.
#include "hopper_grouped_weight.cuh"
#include "warpgroup.cuh"

using namespace convgrad;

namespace {

using T = ELEMENT;
constexpr int kRows = 64 / CHANNELS, kMet = kRows + 2, kTaps = 3;
constexpr int kBytes = CHANNELS * 2;
constexpr int kFragments = kMet * CHANNELS / 8, kEach = CHANNELS / 8;
constexpr int kLoaders = 2, kStart = 1, kRead = 2;  // warps; barriers
constexpr u32 kOther = 2 * 16 * 8;                  // bytes of one tensor's barriers
constexpr int kGroups = 2, kThreads = (kGroups + 1) * 128, kMostStages = 16;
// Channels of x of one of y's, apart such that no two of a fragment's rows meet in a bank.
constexpr int kPitch = CHANNELS + 4, kSlab = 9 * CHANNELS * kPitch;

// A tile: its first image, row of x and column of y. Counts on without a division.
struct Tile {
  const HopperGroupedWeightArgs& args;
  int n, row, column;

  __device__ __forceinline__ Tile(const HopperGroupedWeightArgs& args, int index) : args(args) {
    const int above = index / args.column_tiles;
    column = index - above * args.column_tiles;
    n = above / args.row_tiles;
    row = above - n * args.row_tiles;
  }
  __device__ __forceinline__ int image() const { return n * args.images; }
  __device__ __forceinline__ int h() const { return row * args.tile_rows; }
  __device__ __forceinline__ int q() const { return column * args.tile_columns; }
  __device__ __forceinline__ void next() {
    if (++column < args.column_tiles) return;
    column = 0;
    if (++row < args.row_tiles) return;
    row = 0;
    ++n;
  }
};

// A result again, over the tiles of a block.
__device__ __forceinline__ float again(const HopperGroupedWeightArgs& args, int begin, int end, int c,
                                       int k, int tap) {
  const int r = tap / kTaps, s = tap - r * kTaps;
  const T* const x = static_cast<const T*>(args.x) + c;
  const T* const y = static_cast<const T*>(args.y) + k;
  float sum = 0;
  Tile tile(args, begin);
#pragma unroll 1
  for (int index = begin; index < end; ++index, tile.next()) {
#pragma unroll 1
    for (int n = tile.image(); n < min(tile.image() + args.images, args.batch); ++n) {
#pragma unroll 1
      for (int h = tile.h(); h < min(tile.h() + args.tile_rows, args.x_size[0]); ++h) {
        const int p = h + args.pad[0] - r;
        if (static_cast<u32>(p) >= static_cast<u32>(args.y_size[0])) continue;
        const T* const x_row = x + n * args.x_stride[0] + h * args.x_stride[1];
        const T* const y_row = y + n * args.y_stride[0] + p * args.y_stride[1];
#pragma unroll 1
        for (int q = tile.q(); q < min(tile.q() + args.tile_columns, args.y_size[1]); ++q) {
          const int w = q + s - args.pad[1];
          if (static_cast<u32>(w) >= static_cast<u32>(args.x_size[1])) continue;
          sum += widen(y_row[q * args.y_stride[2]]) * widen(x_row[w * args.x_stride[2]]);
        }
      }
    }
  }
  return sum;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    hopper_grouped_weight(const __grid_constant__ HopperGroupedWeightArgs args) {
  extern __shared__ uint4 shared[];
  __shared__ u64 barriers[4 * kMostStages];
  const int thread = threadIdx.x, lane = thread & 31;
  // The same in all lanes, which the compiler knows of a shuffle alone.
  const int warp = __shfl_sync(0xffffffff, thread / 32, 0), warpgroup = warp / 4;
  const u32 padding = -shared_address(shared) & 511;
  char* const base = reinterpret_cast<char*>(shared) + padding;
  const u32 ring = shared_address(base);
  // Of x, and those of y behind them: each loader has its own, and need not wait for anybody.
  const u32 full = shared_address(barriers), empty = full + kMostStages * 8;

  // Channels: of a slice on both sides; of a group that has several, each with each.
  const int of_group = blockIdx.x / (args.parts * args.parts);
  const int pair = blockIdx.x - of_group * args.parts * args.parts;
  const int part = pair / args.parts;
  const int k0 = (of_group * args.parts + part) * CHANNELS;
  const int c0 = (of_group * args.parts + pair - part * args.parts) * CHANNELS;
  const int share = blockIdx.y;
  const int begin = share * args.tiles + min(share, args.more);
  const int end = begin + args.tiles + (share < args.more);

  float* const slabs = reinterpret_cast<float*>(base);
  if (warpgroup == kGroups) {
    leave_registers<56>();
    // A thread for either tensor: starting a copy takes longer than most copies.
    if (warp < kGroups * 4 + kLoaders) {
      const bool of_x = warp == kGroups * 4;
      const TensorMap& map = of_x ? args.x_map : args.y_map;
      const u32 own = of_x ? 0 : kOther;
      if (elected()) {
        prefetch_map(map);
        for (int i = 0; i < args.stages; ++i) {
          make_barrier(full + own + i * 8, 1);
          make_barrier(empty + own + i * 8, 4);
        }
        publish_barriers();
      }
      __syncwarp();
      pass_by(kStart, (kGroups * 4 + kLoaders) * 32);
      if (elected()) {
        const u32 bytes = of_x ? args.x_bytes : args.y_bytes, to = ring + (of_x ? 0 : args.y_at);
        const int channel = of_x ? c0 : k0, column = of_x ? -args.pad[1] : 0;
        const int row = of_x ? 0 : args.pad[0] - (kTaps - 1);
        int stage = 0;
        u32 parity = 1;
        Tile tile(args, begin);
#pragma unroll 1
        for (int index = begin; index < end; ++index, tile.next()) {
          const u32 barrier = full + own + stage * 8;
          wait_for(empty + own + stage * 8, parity);
          arrive_expecting(barrier, bytes);
          const int at[4] = {channel, tile.q() + column, tile.h() + row, tile.image()};
          load_tile(to + stage * args.stage_bytes, map, barrier, at);
          if (++stage == args.stages) stage = 0, parity ^= 1;
        }
      }
      __syncwarp();  // the barrier at the end is for whole warps
    }
  } else {
    take_registers<224>();
    float sum[kTaps][kFragments][4];
#pragma unroll
    for (int s = 0; s < kTaps; ++s) {
#pragma unroll
      for (int f = 0; f < kFragments; ++f) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[s][f][e] = 0;
      }
    }
    const u64 a_first = operand_along_mn<kBytes>(ring, args.x_row, args.x_eight);
    const u64 b_first = operand_along_mn<kBytes>(ring + args.y_at, args.y_row, args.y_eight);
    auto hold = [&] {
#pragma unroll
      for (int s = 0; s < kTaps; ++s) hold_sums(sum[s]);
    };
    auto release = [&](int stage) {
      if (lane == 0) {
        arrive(empty + stage * 8);
        arrive(empty + kOther + stage * 8);
      }
    };
    hold();
    wait_at(kStart, (kGroups * 4 + kLoaders) * 32);
    int stage = 0, last = -1;
    u32 parity = 0;
    Tile tile(args, begin);
    for (int index = begin; index < end; ++index, tile.next()) {
      // Images in turn begin with the other warpgroup, for their last tiles may be smaller.
      const int in_turn = index + (args.row_tiles & 1 ? 0 : tile.n);
      if ((in_turn & 1) == warpgroup) {
        const int rows = min(args.tile_rows, args.x_size[0] - tile.h());
        const int images = min(args.images, args.batch - tile.image());
        const u32 at = stage * args.stage_bytes >> 4;
        u64 a_image = a_first + at, b_image = b_first + at;
        wait_for(full + stage * 8, parity);
        wait_for(full + kOther + stage * 8, parity);
        begin_products();
#pragma unroll 1
        for (int image = 0; image < images; ++image) {
          u64 a_outer = a_image, b_outer = b_image;
#pragma unroll 1
          for (int row = 0; row < rows; row += args.outer_rows) {
            u64 a = a_outer, b = b_outer;
#pragma unroll 1
            for (int i = 0; i < args.inner; ++i) {
#pragma unroll
              for (int s = 0; s < kTaps; ++s) {
                multiply<T, kAlongMn, kAlongMn>(sum[s], advance(a, s * kBytes), b, 1);
              }
              // A group each: one that ends behind a loop ends when all of it is over.
              commit_products();
              if (last >= 0) {
                wait_products<1>();
                release(last);
                last = -1;
              }
              a = advance(a, args.inner_bytes);
              b = advance(b, args.inner_bytes);
            }
            a_outer = advance(a_outer, args.x_outer);
            b_outer = advance(b_outer, args.y_outer);
          }
          a_image = advance(a_image, args.x_image);
          b_image = advance(b_image, args.y_image);
        }
        last = stage;
      }
      if (++stage == args.stages) stage = 0, parity ^= 1;
    }
    wait_products<0>();
    hold();
    // All of the block have read the ring.
    wait_at(kRead, kGroups * 128);

    // This warp's row of x and channels of it. Row j of y meets it at tap row + 2 - j. What is
    // nobody's group's is left: half a fragment, where groups are no larger.
    const int near = max(args.group_channels, 8) - 1;
    const int row = (warp & 3) * 16 / CHANNELS, c = (warp & 3) * 16 % CHANNELS + lane / 4;
    const int apart = (lane % 4 * 2 ^ c) & ~near, next = 8 & ~near;
    float* const slab = slabs + (warpgroup * kRows + row) * kSlab +
                        ((row + 2) * kTaps * CHANNELS + lane % 4 * 2) * kPitch + c;
#pragma unroll
    for (int j = 0; j < kMet; ++j) {
      if (j < row || j > row + 2) continue;
#pragma unroll
      for (int f = 0; f < kEach; ++f) {
        const int far = apart ^ f * 8 & ~near;
        const bool low = far == 0, high = (far ^ next) == 0;
#pragma unroll
        for (int s = 0; s < kTaps; ++s) {
          float* const to = slab + ((s - j * kTaps) * CHANNELS + f * 8) * kPitch;
          const float(&of)[4] = sum[s][j * kEach + f];
          if (low) to[0] = of[0], to[kPitch] = of[1];
          if (high) to[8] = of[2], to[kPitch + 8] = of[3];
        }
      }
    }
  }
  __syncthreads();

  // A channel of y has its taps one after another, and of each the channels of x in its group, four
  // of which a thread adds up. All of a group's, or of the block's, are a power of two.
  const int near = min(args.group_channels, CHANNELS), fours_log = __ffs(near) - 3;
  const int fours = CHANNELS * 9 << fours_log;
  float4* const partials =
      reinterpret_cast<float4*>(args.partials) + static_cast<i64>(blockIdx.x) * gridDim.y * fours;
  bool odd = false;
#pragma unroll 1
  for (int i = thread; i < fours; i += kThreads) {
    const Four four(i, fours_log);
    const int c = four.k / near * near + four.c;
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int j = 0; j < kGroups * kRows; ++j) {
      add(sum, *reinterpret_cast<const float4*>(slabs + j * kSlab +
                                                (four.tap * CHANNELS + four.k) * kPitch + c));
    }
    odd |= !is_finite(sum.x + sum.y + sum.z + sum.w);
    partials[share * fours + i] = sum;
  }
  if (odd) {
#pragma unroll 1
    for (int j = 0, i = thread; i < fours; j = (j + 1) & 3, i += j == 0 ? kThreads : 0) {
      float* const own = reinterpret_cast<float*>(partials + share * fours + i) + j;
      if (is_finite(*own)) continue;
      const Four four(i, fours_log);
      *own = again(args, begin, end, c0 + four.k / near * near + four.c + j, k0 + four.k, four.tap);
    }
  }

  // The slice's blocks, in order, by the last of them.
  __shared__ bool last;
  __syncthreads();
  if (thread == 0) {
    __threadfence();
    last = atomicInc(args.arrived + blockIdx.x, gridDim.y - 1) == gridDim.y - 1;
    __threadfence();
  }
  __syncthreads();
  if (last) sum_up<T>(args, partials, fours, fours_log, gridDim.y, k0, c0);
}
