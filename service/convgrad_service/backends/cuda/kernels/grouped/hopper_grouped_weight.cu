// The gradient of a grouped 3 x 3 convolution's weight on Hopper, 32 adjacent channels of both sides
// at once. Launched by hopper_grouped_weight.py.
//
// w[k, c, r, s] = sum over pixels (n, p, q) of y[n, p, q, k] * x[n, p + r - pad, q + s - pad, c] for k
// and c of one group; other elements of the 32 x 32 products are discarded.
// GEMM: K = 16 columns of y, in two eights; N = 32 channels of rows of y; M = 32 channels of x, twice.
// For the first two taps s along W: a row of x at two adjacent columns, times the 3 rows of y that it
// meets. For the last tap: two rows of x, times the 4 rows of y that they meet; row i of x and row j of
// y meet at tap r = i + 2 - j along H, so 6 of 8 pairs are used. For two rows of x and 16 columns these
// products take 160 clocks; two rows of x at each tap s would take 192.
//
// Tile: `tile_rows` rows of x by `tile_columns` columns of y, of `images` images, with a halo of columns
// of x and rows of y: a TMA box each (a pixel's channels are a row of 64 bytes).
// Block: a slice of channels and a share of the tiles. Two producer threads copy (TMA) into a ring of
// `stages` tiles; two consumer warpgroups multiply alternate tiles, with the sums of all nine taps in
// registers. At the end they are reduced through shared memory, and over the blocks of a slice through
// `partials`, each block reducing a part of the results (hopper_grouped_weight_sums.cuh).
// Dynamic shared memory: 512 bytes for alignment, and the ring, later the warps' sums.
// Grid: slices, shares (at most 255); fastest with no more blocks than run at once.
// Preconditions: channels, of all groups, are contiguous, with pixels at multiples of 16 bytes. Needs sm_90a, 384 threads.
// Deterministic: one order of additions for each result and number of shares. Pixels outside are read
// as zeros. Past the end of a row of x, the next row's first pixels are read; they meet columns past
// the end of y, or are outside x too.
// Index limits: rows and columns of a tensor below 2^30; 64-bit offsets.
#include "grouped/hopper_grouped_weight_sums.cuh"

using namespace convgrad;

namespace {

using T = ELEMENT;
constexpr int kBytes = kWidth * 2;
constexpr int kLoaders = 2, kStart = 1, kRead = 2;  // warps; barriers
constexpr u32 kOther = 2 * 16 * 8;                  // bytes of a tensor's barriers
constexpr int kGroups = 2, kThreads = (kGroups + 1) * 128, kMostStages = 16;

// Producer thread: copies a tensor's boxes. It does not wait for the first ones.
struct Loader {
  const HopperGroupedWeightArgs& args;
  const TensorMap& map;
  const bool of_x;
  const u32 full, empty, to, bytes;
  const int channel;
  int stage = 0;
  u32 parity = 1;

  __device__ __forceinline__ Loader(const HopperGroupedWeightArgs& args, bool of_x, u32 barriers,
                                    u32 ring, int channel)
      : args(args),
        map(of_x ? args.x_map : args.y_map),
        of_x(of_x),
        full(barriers + (of_x ? 0 : kOther)),
        empty(full + kMostStages * 8),
        to(ring + (of_x ? 0 : args.y_at)),
        bytes(of_x ? args.x_bytes : args.y_bytes),
        channel(channel) {}

  // Barriers of a stage.
  __device__ __forceinline__ void make(int i) const {
    mbarrier_init(full + i * 8, 1);
    mbarrier_init(empty + i * 8, 4);
    fence_mbarrier_init();
  }
  __device__ __forceinline__ void load(const Tile& tile) {
    const u32 barrier = full + stage * 8;
    mbarrier_arrive_expect_tx(barrier, bytes);
    const int at[4] = {channel, tile.q() - (of_x ? args.pad[1] : 0),
                       tile.h() + (of_x ? 0 : args.pad[0] - (kTaps - 1)), tile.image()};
    tma_load(to + stage * args.stage_bytes, map, barrier, at);
    if (++stage == args.stages) stage = 0, parity ^= 1;
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    hopper_grouped_weight(const __grid_constant__ HopperGroupedWeightArgs args) {
  extern __shared__ uint4 shared[];
  __shared__ u64 barriers[4 * kMostStages];
  const int thread = threadIdx.x, lane = thread & 31;
  // Uniform in a warp; a shuffle tells the compiler so.
  const int warp = __shfl_sync(0xffffffff, thread / 32, 0), warpgroup = warp / 4;
  const u32 padding = -shared_address(shared) & 511;
  char* const base = reinterpret_cast<char*>(shared) + padding;
  const u32 ring = shared_address(base);
  // Barriers of x, followed by those of y: each loader has its own.
  const u32 full = shared_address(barriers), empty = full + kMostStages * 8;

  const int slice = blockIdx.x, share = blockIdx.y, shares = gridDim.y;
  const int first = slice * kWidth;
  const Tiles tiles(args, share);

  // One thread for each tensor: starting a copy takes longer than most copies. The first box is
  // requested before anything else.
  const bool copies = warpgroup == kGroups && warp < kGroups * 4 + kLoaders && elect_one();
  Loader loader(args, warp == kGroups * 4, full, ring, first);
  Tile tile(args, tiles.begin);
  if (copies && tiles.begin < tiles.end) {
    loader.make(0);
    loader.load(tile);
  }
  __syncwarp();
  if (warpgroup == kGroups) {
    setmaxnreg_dec<56>();
    int index = tiles.begin + 1;
    if (copies) {
#pragma unroll 1
      for (int i = 1; i < args.stages; ++i) {
        loader.make(i);
        if (index >= tiles.end) continue;
        tile.next();
        loader.load(tile);
        ++index;
      }
    }
    __syncwarp();
    named_barrier_sync(kStart, kThreads);
    if (copies) {
#pragma unroll 1
      for (; index < tiles.end; ++index) {
        tile.next();
        mbarrier_wait(loader.empty + loader.stage * 8, loader.parity);
        loader.load(tile);
      }
    }
    return;
  }

  setmaxnreg_inc<224>();
  u32* const word = args.met + slice;
  if (thread == 0 && shares > 1) rendezvous_begin(word);
  Sums sum;
  const auto clear = [](float (&one)[4]) { one[0] = one[1] = one[2] = one[3] = 0; };
#pragma unroll
  for (auto& one : sum.pairs) clear(one);
#pragma unroll
  for (auto& one : sum.last) clear(one);
  // A row of x at two taps along W; with `a_more`, two rows of x.
  const u64 a_first = mn_major_descriptor<kBytes>(ring, kBytes, args.x_eight);
  const u64 a_more = static_cast<u64>((args.x_row - kBytes) >> 4) << 16;
  const u64 b_first = mn_major_descriptor<kBytes>(ring + args.y_at, args.y_row, args.y_eight);
  auto hold = [&] {
    fence_accumulators(sum.pairs);
    fence_accumulators(sum.last);
  };
  auto release = [&](int stage) {
    if (lane == 0) {
      mbarrier_arrive(empty + stage * 8);
      mbarrier_arrive(empty + kOther + stage * 8);
    }
  };
  hold();
  if (args.x_gap > 0) {
#pragma unroll 1
    for (int i = 0; i < args.stages; ++i) {
#pragma unroll 1
      for (u32 at = thread * 16; at < args.x_gap; at += kSummers * 16) {
        *reinterpret_cast<uint4*>(base + i * args.stage_bytes + args.x_bytes + at) =
            make_uint4(0, 0, 0, 0);
      }
    }
    fence_proxy_async();
  }
  named_barrier_sync(kStart, kThreads);
  int stage = 0, last = -1;
  u32 parity = 0;
  for (int index = tiles.begin; index < tiles.end; ++index, tile.next()) {
    // Consecutive images start with different warpgroups, because their last tiles may be smaller.
    const int in_turn = index + (args.row_tiles & 1 ? 0 : tile.n);
    if ((in_turn & 1) == warpgroup) {
      const int rows = min(args.tile_rows, args.x_size[0] - tile.h());
      const int images = min(args.images, args.batch - tile.image());
      const u32 at = stage * args.stage_bytes >> 4;
      u64 a_image = a_first + at, b_image = b_first + at;
      mbarrier_wait(full + stage * 8, parity);
      mbarrier_wait(full + kOther + stage * 8, parity);
      wgmma_fence();
#pragma unroll 1
      for (int image = 0; image < images; ++image) {
        u64 a_outer = a_image, b_outer = b_image;
#pragma unroll 1
        for (int row = 0; row < rows; row += args.outer_rows) {
          u64 a = a_outer, b = b_outer;
#pragma unroll 1
          for (int i = 0; i < args.inner; ++i) {
            wgmma<T, kMajorMn, kMajorMn>(sum.pairs, a, b, 1);
            wgmma<T, kMajorMn, kMajorMn>(sum.pairs, advance_descriptor(a, args.x_row),
                                         advance_descriptor(b, args.y_row), 1);
            wgmma<T, kMajorMn, kMajorMn>(sum.last, advance_descriptor(a + a_more, 2 * kBytes), b, 1);
            // One wgmma group for each: a group committed after a loop would cover all of it.
            wgmma_commit();
            if (last >= 0) {
              wgmma_wait<1>();
              release(last);
              last = -1;
            }
            a = advance_descriptor(a, args.inner_bytes);
            b = advance_descriptor(b, args.inner_bytes);
          }
          a_outer = advance_descriptor(a_outer, args.x_outer);
          b_outer = advance_descriptor(b_outer, args.y_outer);
        }
        a_image = advance_descriptor(a_image, args.x_image);
        b_image = advance_descriptor(b_image, args.y_image);
      }
      last = stage;
    }
    if (++stage == args.stages) stage = 0, parity ^= 1;
  }
  // The number of blocks of the slice that have started, loaded during the last products.
  u32 begun = 0;
  if (thread == 0 && shares > 1) begun = rendezvous_begun(word);
  wgmma_wait<0>();
  hold();
  named_barrier_sync(kRead, kSummers);  // all warps have read the ring
  float4* const room = reinterpret_cast<float4*>(base);
  float4 own[kOwn] = {};
  const Summer of(warp);
  sum_block(sum, of, room, own);
  sum_slice<T>(args, slice, share, shares, first, warp, begun, own);
}
