// The gradient of a depthwise convolution's weight on Hopper, of channels-last 16-bit tensors on
// tensor cores, with stride 1. The host's side is hopper_depthwise_strips.py.
//
// w[c, r, s] = sum over (n, p, q) of x[n, p + r - pad, q + s - pad, c] * y[n, p, q, c],
// then alpha and beta*accumulate, and one rounding. KERNEL rows and columns, at most 8.
// GEMM view, for one channel, one row of the kernel and one row of y: K = 16 strips of 8 columns of
// y, SIDE adjacent ones in each of 16 / SIDE images; N = a strip's columns of y, M = the 16 columns
// of x from where its window starts. Each diagonal is one tap.
// Operands are pairs of strips of one channel. A lane loads 4 channels of a pixel of each of two
// strips from shared memory, where TMA has copied pixels unchanged, and pairs them. The images that
// adjacent lanes read are an odd number of 128 bytes apart, so that a swizzle of 64 bytes avoids bank
// conflicts. Nothing is transposed or written back to shared memory.
// Block: a tile of 32 channels, and items of `rows` rows of y of all images by 8 * SIDE columns. WARPS
// warps have 4 channels each and walk down the rows of x; the rows of y that meet them are in a ring
// of registers. One more thread copies rows into a ring of `slots` stages, a row of x and one of y in
// each.
// Grid: channel tiles, then `blocks` of each.
// Dynamic shared memory: 1,024 bytes for alignment, the ring, the warps' sums of diagonals.
// Deterministic: the last block of a tile to arrive adds the blocks' partial sums, in an order that
// depends on their number only.
// Relies on its launcher for channels in multiples of 8, aligned to 16 bytes; `arrived` being 0, and
// partials if there is more than one block.
// Padding is read as zeros. Tensor cores truncate instead of rounding, so products are added in
// float32 every kFlush rows.
// Index limits: items below 2^31, an image's extent below 2^31 elements.
#include "ptx/load_store.cuh"
#include "depthwise/depthwise_weight_args.cuh"
#include "ptx/tma.cuh"
#include "depthwise/depthwise_weight_sum.cuh"
#include "core/vectors.cuh"
#include "ptx/warpgroup.cuh"

namespace convgrad {

struct HopperDepthwiseStripsMaps {
  TensorMap x_map;  // a row of all the images of an item
  TensorMap y_map;
};

struct HopperDepthwiseStripsArgs : DepthwiseWeightOperands<HopperDepthwiseStripsMaps> {
  int groups;  // groups of 8 * SIDE columns in a row
  int chunks;  // chunks of `rows` rows in an image
  int rows;
  int items;   // in a tile of channels
  int blocks;  // in a tile of channels
  int slots;   // slots of the ring
};

}  // namespace convgrad

using namespace convgrad;

namespace {

using T = ELEMENT;

constexpr int kChannels = 32, kOwn = 4;
constexpr int WARPS = kChannels / kOwn;
constexpr int kImages = 16 / SIDE;
constexpr int kTaps = KERNEL * KERNEL;
constexpr int kPixelBytes = kChannels * 2;
// Columns in shared memory: an odd number of pairs of 128 bytes.
constexpr int odd_pairs(int columns) { return (columns + 1) / 4 * 4 + 2; }
constexpr int kColumnsX = odd_pairs(8 * SIDE + KERNEL - 1), kColumnsY = odd_pairs(8 * SIDE);
constexpr int kBoxX = kImages * kColumnsX * kPixelBytes, kBoxY = kImages * kColumnsY * kPixelBytes;
constexpr int kAlign = 1024;
constexpr int aligned(int bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }
constexpr int kStageX = aligned(kBoxX), kStage = kStageX + aligned(kBoxY);
constexpr int kMostSlots = 16;
constexpr int kMultiplying = WARPS * 32, kThreads = kMultiplying + 128;
// Registers of a computing thread; copying threads release theirs.
constexpr int kLeft = 24, kRegisters = 240;
constexpr int kWarpSums = KERNEL * kOwn * 2;
constexpr int kFlush = 64 / KERNEL;  // turns of KERNEL rows

// An item: images from n on, columns from `left` on, rows of y from `top` on.
struct Item {
  int n, left, top, rows, steps;

  __device__ __forceinline__ Item(const HopperDepthwiseStripsArgs& args, int item) {
    const int above = item / args.chunks, set = above / args.groups;
    n = set * kImages, left = (above - set * args.groups) * 8 * SIDE;
    top = (item - above * args.chunks) * args.rows;
    rows = min(args.rows, args.y_size[0] - top);
    // Rows past x's last meet nothing of y.
    steps = min(rows + KERNEL - 1, args.x_size[0] + args.pad[0] - top);
  }
};

// One thread copies a block's rows into the ring, whose barriers start at `full`.
__device__ __forceinline__ void copy_rows(const HopperDepthwiseStripsArgs& args, u32 ring,
                                          u32 full) {
  const u32 empty = full + kMostSlots * 8;
  const int c = blockIdx.x * kChannels;
  int slot = 0;
  u32 parity = 1;
#pragma unroll 1
  for (int index = blockIdx.y; index < args.items; index += args.blocks) {
    const Item item(args, index);
#pragma unroll 1
    for (int step = 0; step < item.steps; ++step) {
      const int h = item.top - args.pad[0] + step;
      const u32 to = ring + slot * kStage, barrier = full + slot * 8;
      mbarrier_wait(empty + slot * 8, parity);
      mbarrier_arrive_expect_tx(barrier, (h >= 0 ? kBoxX : 0) + (step < item.rows ? kBoxY : 0));
      if (h >= 0) tma_load<4>(to, args.x_map, barrier, {c, item.left - args.pad[1], h, item.n});
      if (step < item.rows) {
        tma_load<4>(to + kStageX, args.y_map, barrier, {c, item.left, item.top + step, item.n});
      }
      if (++slot == args.slots) slot = 0, parity ^= 1;
    }
  }
}

// The pairs of each channel from pixels of two strips.
__device__ __forceinline__ void pair_up(uint2 first, uint2 second, u32 (&pairs)[kOwn]) {
  pairs[0] = __byte_perm(first.x, second.x, 0x5410);
  pairs[1] = __byte_perm(first.x, second.x, 0x7632);
  pairs[2] = __byte_perm(first.y, second.y, 0x5410);
  pairs[3] = __byte_perm(first.y, second.y, 0x7632);
}

// The block's sums of each tap, in the order of y's columns, and the tile's from those of all its
// blocks.
__device__ __noinline__ void finish_tile(const HopperDepthwiseStripsArgs& args, float* sums,
                                         bool& last) {
  const auto meet = [] { named_barrier_sync(1, kMultiplying); };
  meet();
  constexpr int part = kTaps * kChannels;
  const auto own_sum = [&](int i) {
    const int tap = i / kChannels, channel = i % kChannels, r = tap / KERNEL, s = tap % KERNEL;
    const float* const from =
        sums + (channel / kOwn * kWarpSums + (r * kOwn + channel % kOwn) * 2) * 32;
    float sum = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) sum += from[j % 2 * 32 + (s + j) % 8 * 4 + j / 2];
    return sum;
  };
  add_blocks<kMultiplying>(
      args.partials + static_cast<i64>(blockIdx.x) * args.blocks * part, args.arrived + blockIdx.x,
      blockIdx.y, args.blocks, part, sums, last, own_sum, meet, [&](int i, float sum) {
        const int c = blockIdx.x * kChannels + i % kChannels, tap = i / kChannels;
        if (c < args.channels) put_gradient_as<T>(args, c, tap / KERNEL, tap % KERNEL, sum);
      });
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    hopper_depthwise_strips(const __grid_constant__ HopperDepthwiseStripsArgs args) {
  extern __shared__ uint4 shared[];
  __shared__ u64 barriers[2 * kMostSlots];
  __shared__ bool last;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const u32 padding = -shared_address(shared) & (kAlign - 1);
  char* const base = reinterpret_cast<char*>(shared) + padding;
  const u32 ring = shared_address(base);
  float* const sums = reinterpret_cast<float*>(base + args.slots * kStage);
  const u32 full = shared_address(barriers), empty = full + kMostSlots * 8;
  if (thread == kMultiplying) {
    for (int i = 0; i < args.slots; ++i) {
      mbarrier_init(full + i * 8, 1);
      mbarrier_init(empty + i * 8, WARPS);
    }
    fence_mbarrier_init();
  }
  for (int i = thread; i < WARPS * kWarpSums * 32; i += kThreads) sums[i] = 0;
  __syncthreads();

  if (warp >= WARPS) {
    setmaxnreg_dec<kLeft>();
    if (warp == WARPS && elect_one()) copy_rows(args, ring, full);
    return;
  }
  setmaxnreg_inc<kRegisters>();
  {
    const int g = lane / 4, t = lane % 4;
    // Where this lane's pixel of the first strip lies, of image t; the other strips are 512 bytes
    // apart, where the swizzle is the same, and so are other images.
    const auto place = [&](int columns) {
      const u32 pixel = (t * columns + g) * kPixelBytes;
      return pixel + ((warp / 2 ^ (pixel >> 7 & 3)) * 16 + warp % 2 * 8);
    };
    const u32 own_x = ring + place(kColumnsX), own_y = ring + kStageX + place(kColumnsY);
    float* const own_sums = sums + warp * kWarpSums * 32 + lane;

    float products[KERNEL][kOwn][4] = {};
    u32 met[KERNEL][2][kOwn];
    int slot = 0;
    u32 parity = 0;
#pragma unroll 1
    for (int index = blockIdx.y; index < args.items; index += args.blocks) {
      const Item item(args, index);
#pragma unroll 1
      for (int turn = 0; turn < item.steps; turn += KERNEL) {
#pragma unroll
        for (int j = 0; j < KERNEL; ++j) {
          const int step = turn + j;
          if (step >= item.steps) break;
          const bool exists = item.top - args.pad[0] + step >= 0;
          const u32 stage = slot * kStage;
          mbarrier_wait(full + slot * 8, parity);
          uint2 of_y[4], of_x[2 * (16 / 8 + 1)];
          constexpr int kRun = SIDE == 4 ? 4 : 2;  // strips side by side
          if (step < item.rows) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              ld_shared(own_y + stage + i / kRun * (4 * kColumnsY * kPixelBytes) + i % kRun * 512,
                          of_y[i]);
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) pair_up(of_y[2 * i], of_y[2 * i + 1], met[j][i]);
          }
          u32 windows[4][kOwn];
          if (exists) {
#pragma unroll
            for (int i = 0; i < 4 / kRun; ++i) {
#pragma unroll
              for (int k = 0; k <= kRun; ++k) {
                ld_shared(own_x + stage + i * (4 * kColumnsX * kPixelBytes) + k * 512,
                            of_x[i * (kRun + 1) + k]);
              }
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              const int first = kRun == 4 ? 2 * i : 3 * i;
              pair_up(of_x[first], of_x[first + 1], windows[2 * i]);
              pair_up(of_x[first + 1], of_x[first + 2], windows[2 * i + 1]);
            }
          }
          __syncwarp();
          if (lane == 0) mbarrier_arrive(empty + slot * 8);
          if (++slot == args.slots) slot = 0, parity ^= 1;
          if (!exists) continue;
#pragma unroll
          for (int r = 0; r < KERNEL; ++r) {
            if (step < r || step - r >= item.rows) continue;
            const u32(&of_row)[2][kOwn] = met[positive_mod(j - r, KERNEL)];
#pragma unroll
            for (int v = 0; v < kOwn; ++v) {
              const u32 window[4] = {windows[0][v], windows[1][v], windows[2][v], windows[3][v]};
              mma<T>(products[r][v], window, of_row[0][v], of_row[1][v]);
            }
          }
        }
        if (turn / KERNEL % kFlush != kFlush - 1 && turn + KERNEL < item.steps) continue;
#pragma unroll
        for (int r = 0; r < KERNEL; ++r) {
#pragma unroll
          for (int v = 0; v < kOwn; ++v) {
            float(&product)[4] = products[r][v];
            float* const to = own_sums + (r * kOwn + v) * 2 * 32;
            // Column 2t of y, and 2t + 1: the diagonal from 0 to 7 that row g or g + 8 is on.
            to[0] += g >= 2 * t ? product[0] : product[2];
            to[32] += g >= 2 * t + 1 ? product[1] : product[3];
#pragma unroll
            for (int i = 0; i < 4; ++i) product[i] = 0;
          }
        }
      }
    }
  }

  finish_tile(args, sums, last);
}
