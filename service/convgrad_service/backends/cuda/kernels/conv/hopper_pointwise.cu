// A 1x1 convolution of stride 1 on Hopper, channels first, fprop or dgrad, as a GEMM per image (TMA, wgmma).
// Launched by hopper_pointwise.py. Needs sm_90a.
//
// M = result channels, N = pixels, K = source channels:
//   y[n, m, p] = sum over k of w[k, m] * x[n, k, p]  (ACROSS: the weight is M-major; else w[m, k], K-major).
// The source is N-major; both tensors are used in their own layout. With SPREAD, dgrad where windows do not
// overlap (stride = kernel, 2 along W; no padding): M = result channels x taps; a row of accumulators is a
// channel's pixels of one tap, and rows of two taps adjacent along W are interleaved into rows of the result.
//
// Grid: persistent, one block per SM: tiles blockIdx.x, + gridDim.x, ... of BM channels (fastest) x BN pixels
//   of one image.
// Block: one thread loads the source (64 channels of BN pixels per k-tile), one the weights; two consumer
//   warpgroups, each with half of the tile's channels, or of its pixels where BM is 64. Results are stored
//   by TMA, 64 x 64 at a time through one of two buffers per warpgroup, clipped to image and channels; with
//   SPREAD from registers.
// Shared memory (dynamic): 1,024 bytes of alignment; STAGES stages of BM + BN rows of 128 bytes; two buffers of
//   8 KB per warpgroup; mbarriers, full and empty per stage.
// Preconditions: images and channels start at multiples of 16 bytes.
// Determinism: one order of additions.
// Limits: tiles below 2^31.
#include "core/pipeline_state.cuh"
#include "ptx/load_store.cuh"
#include "ptx/tma.cuh"
#include "ptx/pdl.cuh"
#include "ptx/warpgroup.cuh"

namespace convgrad {

struct HopperPointwiseArgs {
  TensorMap x_map;  // pixels, the source's channels, images: boxes of 64 x 64
  TensorMap w_map;  // boxes of 64 x 64 (ACROSS), or of 64 of the source's channels x BM
  TensorMap y_map;  // pixels, the result's channels, images: boxes of 64 x 64
  void* y;          // with SPREAD
  i64 y_stride[6];  // N G C D H W, in elements
  int channels;     // of the source
  int rows;         // with SPREAD: the result's channels x taps
  int channel_tiles;
  int pixel_tiles;  // of an image
  int tiles;
  int taps[3];      // with SPREAD: T R S
  int size[3];      // with SPREAD: of the source, D H W, of which W is a multiple of 8
};

}  // namespace convgrad

using namespace convgrad;

namespace {

using T = ELEMENT;
constexpr int kDepth = 64, kRowBytes = 128, kGroups = 2;
constexpr u32 kBoxBytes = 64 * kRowBytes;
constexpr u32 kABytes = BM * kRowBytes, kBBytes = BN * kRowBytes, kStageBytes = kABytes + kBBytes;
// A warpgroup's accumulators: 64 channels each, fragments of 8 pixels.
constexpr bool kPixelsApart = BM == 64;
constexpr int kMmasM = kPixelsApart ? 1 : BM / 128, kColumns = kPixelsApart ? BN / 2 : BN;
constexpr int kFragments = kColumns / 8, kBlocks = kColumns / 64;
static_assert(BN % 128 == 0 && (kPixelsApart || BM % 128 == 0), "whole boxes for each");

struct SharedLayout {
  u32 stage0, staging, barriers;

  __device__ __forceinline__ u32 stage(int i) const { return stage0 + i * kStageBytes; }
  __device__ __forceinline__ u32 full_barrier(int i) const { return barriers + i * 8; }
  __device__ __forceinline__ u32 empty_barrier(int i) const { return barriers + (STAGES + i) * 8; }
};

struct Tile {
  int channel, pixel, image;

  __device__ __forceinline__ Tile(const HopperPointwiseArgs& args, int index) {
    const u32 pixels = static_cast<u32>(index) / static_cast<u32>(args.channel_tiles);
    channel = (index - pixels * args.channel_tiles) * BM;
    image = pixels / static_cast<u32>(args.pixel_tiles);
    pixel = (pixels - image * args.pixel_tiles) * BN;
  }
};

// A producer thread: loads all of the block's tiles of the source or of the weights.
template <bool kSource>
__device__ __forceinline__ void load_operand(const HopperPointwiseArgs& args, const SharedLayout& smem) {
  PipelineState state{0, 1};
#pragma unroll 1
  for (int index = blockIdx.x; index < args.tiles; index += gridDim.x) {
    const Tile tile(args, index);
#pragma unroll 1
    for (int k = 0; k < args.channels; k += kDepth) {
      mbarrier_wait(smem.empty_barrier(state.index), state.parity);
      const u32 barrier = smem.full_barrier(state.index);
      mbarrier_arrive_expect_tx(barrier, kSource ? kBBytes : kABytes);
      if constexpr (kSource) {
        const u32 to = smem.stage(state.index) + kABytes;
#pragma unroll
        for (int i = 0; i < BN / 64; ++i) {
          tma_load<3>(to + i * kBoxBytes, args.x_map, barrier, {tile.pixel + i * 64, k, tile.image});
        }
      } else if constexpr (ACROSS) {
#pragma unroll
        for (int i = 0; i < BM / 64; ++i) {
          tma_load<2>(smem.stage(state.index) + i * kBoxBytes, args.w_map, barrier,
                       {tile.channel + i * 64, k}, kEvictLast);
        }
      } else {
        tma_load<2>(smem.stage(state.index), args.w_map, barrier, {k, tile.channel}, kEvictLast);
      }
      state.advance(STAGES);
    }
  }
}

// Stores a warpgroup's results by TMA, 64 x 64 at a time, through one of two buffers.
__device__ __forceinline__ void store_planes(const HopperPointwiseArgs& args, const Tile& tile,
                                             u32 staging, const float (&accum)[kMmasM][kFragments][4]) {
  const int warpgroup = threadIdx.x / 128 - 1, lane = threadIdx.x & 31;
  const int warp = threadIdx.x % 128 / 32;
  const int channel = tile.channel + (kPixelsApart ? 0 : warpgroup * kMmasM * 64);
  const int pixel = tile.pixel + (kPixelsApart ? warpgroup * kColumns : 0);
  const bool stores = threadIdx.x % 128 == 0;
#pragma unroll
  for (int part = 0; part < kMmasM; ++part) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const u32 buffer = staging + (part * kBlocks + block) % 2 * kBoxBytes;
      if (stores) tma_store_wait_read<1>();
      named_barrier_sync(1 + warpgroup, 128);
      const int row = warp * 16 + lane % 16, chunk = lane / 16;
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        const float(&first)[4] = accum[part][block * 8 + j];
        const float(&second)[4] = accum[part][block * 8 + j + 1];
        const u32 words[4] = {narrow_x2<T>(first[0], first[1]), narrow_x2<T>(first[2], first[3]),
                              narrow_x2<T>(second[0], second[1]),
                              narrow_x2<T>(second[2], second[3])};
        stmatrix(buffer + row * kRowBytes + ((j + chunk) ^ (row & 7)) * 16, words);
      }
      fence_proxy_async();
      named_barrier_sync(1 + warpgroup, 128);
      if (stores) {
        tma_store<3>(args.y_map, buffer, {pixel + block * 64, channel + part * 64, tile.image});
        tma_store_commit();
      }
    }
  }
}

// Interleaves the elements of two words of two elements each.
__device__ __forceinline__ uint2 by_turns(u32 first, u32 second) {
  return {__byte_perm(first, second, 0x5410), __byte_perm(first, second, 0x7632)};
}

// Stores a warpgroup's results with SPREAD: a lane stores two pixels of each of two rows that are
// adjacent along W.
__device__ __forceinline__ void store_spread(const HopperPointwiseArgs& args, const Tile& tile,
                                             const float (&accum)[kMmasM][kFragments][4]) {
  const int warpgroup = threadIdx.x / 128 - 1, lane = threadIdx.x & 31;
  const int warp = threadIdx.x % 128 / 32, row = lane / 4;
  const bool odd = row & 1;
  const int first = tile.pixel + (kPixelsApart ? warpgroup * kColumns : 0) + lane % 4 * 2;
  const int pixels = args.size[0] * args.size[1] * args.size[2];
#pragma unroll
  for (int part = 0; part < kMmasM; ++part) {
    const int at = tile.channel + (kPixelsApart ? 0 : warpgroup * kMmasM + part) * 64 + warp * 16 +
                   (odd ? row + 7 : row);
    u32 rest = static_cast<u32>(at) / 2;
    const int r = rest % args.taps[1];
    rest /= args.taps[1];
    const int t = rest % args.taps[0], channel = rest / args.taps[0];
    T* const y = static_cast<T*>(args.y) + tile.image * args.y_stride[0] +
                 channel * args.y_stride[2] + t * args.y_stride[3] + r * args.y_stride[4];
    int w = first % args.size[2], h = first / args.size[2] % args.size[1];
    int d = first / args.size[2] / args.size[1];
#pragma unroll
    for (int j = 0; j < kFragments; ++j) {
      const u32 low = narrow_x2<T>(accum[part][j][0], accum[part][j][1]);
      const u32 high = narrow_x2<T>(accum[part][j][2], accum[part][j][3]);
      const u32 other = __shfl_xor_sync(~0u, odd ? low : high, 4);
      const i64 to = d * args.taps[0] * args.y_stride[3] + h * args.taps[1] * args.y_stride[4] + w * 2;
      store_if(at < args.rows && first + j * 8 < pixels, y + to,
               odd ? by_turns(other, high) : by_turns(low, other));
      w += 8;
      if (w >= args.size[2]) w -= args.size[2], ++h;
      if (h >= args.size[1]) h -= args.size[1], ++d;
    }
  }
}

__device__ __forceinline__ void consume(const HopperPointwiseArgs& args, const SharedLayout& smem) {
  const int warpgroup = threadIdx.x / 128 - 1, lane = threadIdx.x & 31;
  const u32 own_a = kPixelsApart ? 0 : warpgroup * kMmasM * kBoxBytes;
  const u32 own_b = kABytes + (kPixelsApart ? warpgroup * kBlocks * kBoxBytes : 0);
  const u32 staging = smem.staging + warpgroup * 2 * kBoxBytes;
  constexpr Major kWeights = ACROSS ? kMajorMn : kMajorK;
  constexpr u32 kNextA = ACROSS ? 16 * kRowBytes : 32;
  PipelineState state;
#pragma unroll 1
  for (int index = blockIdx.x; index < args.tiles; index += gridDim.x) {
    float accum[kMmasM][kFragments][4];
    int previous = -1;  // the stage that wgmmas in flight read
#pragma unroll 1
    for (int k = 0; k < args.channels; k += kDepth) {
      mbarrier_wait(smem.full_barrier(state.index), state.parity);
      const u32 from = smem.stage(state.index);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kDepth / 16; ++i) {
        const u64 b =
            advance_descriptor(mn_major_descriptor<128>(from + own_b, kBoxBytes), i * 16 * kRowBytes);
#pragma unroll
        for (int part = 0; part < kMmasM; ++part) {
          const u32 at = from + own_a + part * kBoxBytes;
          const u64 a = ACROSS ? mn_major_descriptor<128>(at) : k_major_descriptor<128>(at);
          wgmma<T, kWeights, kMajorMn>(accum[part], advance_descriptor(a, i * kNextA), b, i > 0 || k > 0);
        }
      }
      wgmma_commit();
      wgmma_wait<1>();
      if (previous >= 0 && lane == 0) mbarrier_arrive(smem.empty_barrier(previous));
      previous = state.index;
      state.advance(STAGES);
    }
    const Tile tile(args, index);
    wgmma_wait<0>();
#pragma unroll
    for (int part = 0; part < kMmasM; ++part) fence_accumulators(accum[part]);
    if (lane == 0) mbarrier_arrive(smem.empty_barrier(previous));
    if constexpr (SPREAD) {
      store_spread(args, tile, accum);
    } else {
      store_planes(args, tile, staging, accum);
    }
  }
  if (!SPREAD && threadIdx.x % 128 == 0) tma_store_wait<0>();
}

}  // namespace

extern "C" __global__ void __launch_bounds__(128 * (kGroups + 1), 1)
    hopper_pointwise(const __grid_constant__ HopperPointwiseArgs args) {
  extern __shared__ uint4 shared[];
  SharedLayout smem;
  smem.stage0 = (shared_address(shared) + 1023) & ~1023u;
  smem.staging = smem.stage0 + STAGES * kStageBytes;
  smem.barriers = smem.staging + kGroups * 2 * kBoxBytes;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(smem.full_barrier(i), 2);
      mbarrier_init(smem.empty_barrier(i), kGroups * 4);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  wait_on_dependent_grids();
  if (threadIdx.x < 128) {
    setmaxnreg_dec<40>();
    const int warp = threadIdx.x / 32;
    if (warp == 0) {
      if (elect_one()) load_operand<true>(args, smem);
    } else if (warp == 1) {
      if (elect_one()) load_operand<false>(args, smem);
    }
  } else {
    setmaxnreg_inc<232>();
    consume(args, smem);
  }
}
