// Dense convolution on Hopper, fprop or dgrad, as an implicit GEMM of a single wave of tiles: one tile per
// block, or per cluster whose blocks split K. Launched by hopper_gather.py. Needs sm_90a.
//
// The GEMM, its phases and taps are those of hopper_gather.cu. Here a block has no queue of tiles, which
// would delay its first loads: the producer warps compute the block's tile themselves.
// Grid: tiles x `cluster`. Block: CONSUMERS warpgroups of BM / CONSUMERS pixels each and two producer warps,
//   one for source pixels (im2col), one for weights. The former initialises the pipeline's mbarriers and
//   issues its first load before the block synchronises.
// Cluster: with SPLIT its blocks divide the k-tiles of one tile and reduce through distributed shared memory
//   (SplitKReduce); all tiles of a phase are split at the same k-tiles, whatever taps they skip.
// Shared memory (dynamic): 1,024 bytes of alignment; `stages` stages of BM rows of 128 bytes and of the
//   weights' 64-row boxes; partial sums (SPLIT) or 8 KB of staging per warpgroup; mbarriers; two lists of taps.
// Preconditions: as hopper_gather.cu; at most 128 taps of a phase.
// Determinism: one order of additions per result, whatever the tile shape; with SPLIT, per number of blocks.
// Limits: those of hopper_gather.cu.
#include "conv/hopper_gather.cuh"
#include "conv/hopper_gather_result.cuh"
#include "core/opaque.cuh"
#include "core/pipeline_state.cuh"
#include "core/split_k_reduce.cuh"

using namespace convgrad;

#ifdef TRACE
extern "C" __device__ unsigned long long convgrad_trace[132 * 4 * 16] = {};
#endif

namespace {

using T = ELEMENT;
constexpr int kRowBytes = 128, kTileK = kRowBytes / static_cast<int>(sizeof(T));
constexpr int kMmaK = 32 / static_cast<int>(sizeof(T)), kMmasK = kTileK / kMmaK;
constexpr int kBoxColumns = 64, kBoxes = (BN + kBoxColumns - 1) / kBoxColumns;
constexpr u32 kABytes = BM * kRowBytes, kBBytes = kBoxes * kBoxColumns * kRowBytes;
constexpr u32 kStageBytes = kABytes + kBBytes;
constexpr int kWarpgroupRows = BM / CONSUMERS, kMmasM = kWarpgroupRows / 64, kFragmentsN = BN / 8;
constexpr int kBoxBytes = kTileK * kRowBytes;
constexpr Major kWeights = ACROSS ? kMajorMn : kMajorK;
constexpr int kConsumers = CONSUMERS * 128, kThreads = kConsumers + 64;
constexpr int kMaxTaps = 128;
constexpr u32 kReduceBytes = SPLIT ? 0 : CONSUMERS * kStagingBytes;
using Accumulators = float[kMmasM][kFragmentsN][4];
using Reduce = SplitKReduce<kMmasM * kFragmentsN, CONSUMERS * 4>;

struct SharedLayout {
  u32 ring, reduce, barriers;
  char* base;
  int stages;

  __device__ __forceinline__ char* pointer(u32 address) const { return base + (address - ring); }
  __device__ __forceinline__ u32 stage(int i) const { return ring + i * kStageBytes; }
  __device__ __forceinline__ u32 full_barrier(int i) const { return barriers + i * 8; }
  __device__ __forceinline__ u32 empty_barrier(int i) const { return barriers + (stages + i) * 8; }
  __device__ __forceinline__ u32 reduce_barrier() const { return barriers + 2 * stages * 8; }
  __device__ __forceinline__ u32 steps() const { return reduce_barrier() + 8; }
  __device__ __forceinline__ u32 taps(int producer) const { return steps() + 8 + producer * kMaxTaps * 4; }
};

// The block's k-tiles: `steps` of them, from the tap at `index` of the list of `kept` taps and the chunk of
// channels `chunk` on; taps are the inner loop.
struct KTiles {
  int steps, kept, index, chunk;
};

// Warp: lists the taps of a tile that are not skipped, t, r and s eight bits each, and finds the k-tiles of
// part `part` of `parts`.
__device__ __forceinline__ KTiles list_taps(const HopperGatherArgs& args, const GatherPhase& phase,
                                            const u32 (&inside)[3], int part, int parts, u32 list) {
  const int taps1 = phase.axis[1].taps, taps2 = phase.axis[2].taps, lane = threadIdx.x & 31;
  const int taps = phase.axis[0].taps * taps1 * taps2, chunks = (args.in_channels + kTileK - 1) / kTileK;
  const int all = chunks * taps, first = SPLIT ? all * part / parts : 0, end = SPLIT ? all * (part + 1) / parts : all;
  KTiles found = {};
  if (taps == 0) return found;
  found.chunk = first / taps;
  const int end_chunk = end / taps, first_tap = first - found.chunk * taps, end_tap = end - end_chunk * taps;
  int below_end = 0;
#pragma unroll 1
  for (int from = 0; from < taps; from += 32) {
    const u32 tap = from + lane, outer = tap / taps2, s = tap - outer * taps2, t = outer / taps1,
              r = outer - t * taps1;
    const bool in = tap < taps && (inside[0] >> t & inside[1] >> r & inside[2] >> s & 1);
    const u32 mask = __ballot_sync(~0u, in);
    if (in) st_shared_u32(list + (found.kept + __popc(mask & ((1u << lane) - 1))) * 4, t | r << 8 | s << 16);
    found.index += __popc(__ballot_sync(~0u, in && static_cast<int>(tap) < first_tap));
    below_end += __popc(__ballot_sync(~0u, in && static_cast<int>(tap) < end_tap));
    found.kept += __popc(mask);
  }
  found.steps = (end_chunk - found.chunk) * found.kept + below_end - found.index;
  if (found.index == found.kept) found.index = 0, ++found.chunk;
  __syncwarp();
  return found;
}

struct Place {
  GatherTile tile;
  PixelAt first;
  KTiles k;
};

// Warp.
__device__ __forceinline__ Place place_of(const HopperGatherArgs& args, int part, int parts, u32 list) {
  Place place;
  tile_at<BM, BN>(args, blockIdx.x / parts, args.slots, place.tile);
  const GatherPhase& phase = phase_of(args, place.tile.phase);
  place.first = pixel_at(phase, place.tile.first_pixel);
  const PixelAt last = pixel_at(phase, min(place.tile.first_pixel + BM, phase.pixels) - 1);
  u32 inside[3];
#pragma unroll
  for (int d = 0; d < 3; ++d) inside[d] = taps_inside(args, phase, place.first, last, d);
  place.k = list_taps(args, phase, inside, part, parts, list);
  return place;
}

// Walks through a block's k-tiles.
struct Walk {
  int channel, index, kept;
  u32 list, entry;
  __device__ __forceinline__ Walk(const KTiles& k, u32 list)
      : channel(k.chunk * kTileK), index(k.index), kept(k.kept), list(list), entry(ld_shared_u32(list + k.index * 4)) {}
  __device__ __forceinline__ void next() {
    if (++index == kept) index = 0, channel += kTileK;
    entry = ld_shared_u32(list + index * 4);
  }
};

template <int kDims, bool kImages>
__device__ __forceinline__ void load_pixels(const HopperGatherArgs& args, const SharedLayout& smem, u32 to, u32 barrier,
                                            const TensorMap& map, const int (&at)[4], int channel, int dd, int dh, int dw) {
  const int n = at[3], d = at[0], h = at[1], w = at[2];
  // The slowest dimension has no im2col offset: its displacement is added to the coordinate.
  if constexpr (kDims == 3 && !kImages) tma_load_im2col<3>(to, map, barrier, {channel, w, n}, {dw});
  if constexpr (kDims == 4 && !kImages) tma_load_im2col<4>(to, map, barrier, {channel, w, h, n}, {dw, dh});
  if constexpr (kDims == 5 && !kImages) tma_load_im2col<5>(to, map, barrier, {channel, w, h, d, n}, {dw, dh, dd});
  if constexpr (kDims == 3 && kImages) tma_load_im2col<3>(to, map, barrier, {channel, n, w + dw}, {0});
  if constexpr (kDims == 4 && kImages) tma_load_im2col<4>(to, map, barrier, {channel, n, w, h + dh}, {0, dw});
  if constexpr (kDims == 5 && kImages) tma_load_im2col<5>(to, map, barrier, {channel, n, w, h, d + dd}, {0, dw, dh});
}

// All threads, between the initialisation of the mbarriers and their use.
__device__ __forceinline__ void sync_block() {
  __syncwarp();
  __syncthreads();
  if (SPLIT) cluster_arrive();
}

template <int kDims, bool kImages>
__device__ __forceinline__ void produce_pixels(const HopperGatherArgs& args, const SharedLayout& smem, int part) {
  const bool elected = elect_one();
  if (elected) {
    for (int i = 0; i < smem.stages; ++i) {
      mbarrier_init(smem.full_barrier(i), 2);
      mbarrier_init(smem.empty_barrier(i), CONSUMERS * 4);
    }
    fence_mbarrier_init();
    fence_proxy_async();
  }
  __syncwarp();
  const Place place = place_of(args, part, SPLIT ? args.cluster : 1, smem.taps(0));
  const GatherPhase& phase = phase_of(args, place.tile.phase);
  const TensorMap& map = args.source[MAPS == 1 ? 0 : place.tile.phase];
  int at[4], base[3];
#pragma unroll
  for (int d = 0; d < 3; ++d) {
    at[d] = phase.axis[d].low + position(place.first, d, args.images_first) * args.x_step[d];
    base[d] = phase.axis[d].x0 - phase.axis[d].low;
  }
  at[3] = image(place.first, args.images_first);
  if (elected) st_shared_u32(smem.steps(), place.k.steps);
  Walk walk(place.k, smem.taps(0));
  PipelineState state{0, 1};
  auto load = [&]() {
    const int t = walk.entry & 255, r = walk.entry >> 8 & 255, s = walk.entry >> 16;
    const u32 barrier = smem.full_barrier(state.index);
    mbarrier_arrive_expect_tx(barrier, kABytes);
    load_pixels<kDims, kImages>(args, smem, smem.stage(state.index), barrier, map, at, walk.channel,
                                base[0] + t * args.x_tap[0], base[1] + r * args.x_tap[1], base[2] + s * args.x_tap[2]);
    walk.next();
    state.advance(smem.stages);
  };
  if (elected) {
    wait_on_dependent_grids();
    if (place.k.steps > 0) load();
    TRACED(7);
  }
  sync_block();
  if (elected) {
#pragma unroll 1
    for (int i = 1; i < place.k.steps; ++i) {
      mbarrier_wait(smem.empty_barrier(state.index), state.parity);
      load();
    }
    TRACED(10);
  }
  __syncwarp();
  if (SPLIT) cluster_wait();
}

__device__ __forceinline__ void produce_weights(const HopperGatherArgs& args, const SharedLayout& smem, int part) {
  const bool elected = elect_one();
  if (elected) prefetch_tensor_map(args.weight);
  const Place place = place_of(args, part, SPLIT ? args.cluster : 1, smem.taps(1));
  const GatherPhase& phase = phase_of(args, place.tile.phase);
  Walk walk(place.k, smem.taps(1));
  PipelineState state{0, 1};
  if (elected) wait_on_dependent_grids();
  sync_block();
  if (elected) {
#pragma unroll 1
    for (int i = 0; i < place.k.steps; ++i) {
      const int t = phase.axis[0].r0 + (walk.entry & 255) * args.r_step[0],
                r = phase.axis[1].r0 + (walk.entry >> 8 & 255) * args.r_step[1],
                s = phase.axis[2].r0 + (walk.entry >> 16) * args.r_step[2], channel = walk.channel;
      walk.next();
      mbarrier_wait(smem.empty_barrier(state.index), state.parity);
      const u32 barrier = smem.full_barrier(state.index), to = smem.stage(state.index) + kABytes;
      mbarrier_arrive_expect_tx(barrier, ACROSS ? kBBytes : BN * kRowBytes);
      if constexpr (ACROSS) {
#pragma unroll
        for (int box = 0; box < kBoxes; ++box) {
          tma_load<5>(to + box * kBoxBytes, args.weight, barrier,
                      {place.tile.first_channel + box * kBoxColumns, s, r, t, channel}, kEvictLast);
        }
      } else {
        tma_load<5>(to, args.weight, barrier, {channel, s, r, t, place.tile.first_channel}, kEvictLast);
      }
      state.advance(smem.stages);
    }
  }
  __syncwarp();
  if (SPLIT) cluster_wait();
}

// This warpgroup's accumulators over `steps` k-tiles.
__device__ __forceinline__ void mainloop(const SharedLayout& smem, int steps, Accumulators& accum) {
  const int first_row = CONSUMERS == 1 ? 0 : static_cast<int>(threadIdx.x / 128) * kWarpgroupRows;
  const int lane = threadIdx.x & 31;
  PipelineState state;
  int previous = -1;  // the stage that wgmmas in flight read
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    mbarrier_wait(smem.full_barrier(state.index), state.parity);
    if (step == 0 && threadIdx.x == 0) TRACED(3);
    const u32 rows = smem.stage(state.index) + first_row * kRowBytes, weights = smem.stage(state.index) + kABytes;
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kMmasK; ++i) {
      const u64 b = ACROSS ? advance_descriptor(mn_major_descriptor<128>(weights, kBoxBytes), i * kMmaK * kRowBytes)
                           : advance_descriptor(k_major_descriptor<128>(weights), i * 32);
#pragma unroll
      for (int part = 0; part < kMmasM; ++part) {
        const u64 a = advance_descriptor(k_major_descriptor<128>(rows + part * 64 * kRowBytes), i * 32);
        wgmma<T, kMajorK, kWeights>(accum[part], a, b, i > 0 || step > 0);
      }
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (previous >= 0 && lane == 0) mbarrier_arrive(smem.empty_barrier(previous));
    previous = state.index;
    state.advance(smem.stages);
  }
  wgmma_wait<0>();
#pragma unroll
  for (int part = 0; part < kMmasM; ++part) fence_accumulators(accum[part]);
}

// Finishes and stores the fragments that this block owns.
__device__ __forceinline__ void store_owned(const HopperGatherArgs& args, const GatherTile& tile, const Reduce& reduce) {
  const Results<T, 1, 4> results(args, tile, 0);
  const GatherPhase& phase = phase_of(args, tile.phase);
  const int warp = threadIdx.x / 32;
#pragma unroll 1
  for (int i = threadIdx.x & 31; i < reduce.fragment_count() * 8; i += 32) {
    const int row = i & 7, fragment = i >> 3, f = reduce.first_fragment() + fragment;
    float sums[2][8];
    reduce.load_rows(fragment, row, sums);
    const int channel = tile.first_channel + f % kFragmentsN * 8;
    const int pixel = tile.first_pixel + warp / 4 * kWarpgroupRows + f / kFragmentsN * 64 + warp % 4 * 16 + row;
    if (channel >= args.out_channels) continue;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (pixel + half * 8 >= phase.pixels) continue;
      const i64 at = results.result_at(pixel_at(phase, pixel + half * 8)) + channel * args.y_stride[2];
      results.store_eight(at, channel, sums[half]);
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)
    hopper_gather_single(const __grid_constant__ HopperGatherArgs args) {
  extern __shared__ uint4 shared[];
#ifdef TRACE
  if (threadIdx.x == 0) trace(0);
#endif
  SharedLayout smem;
  const u32 padding = -shared_address(shared) & 1023;
  smem.ring = shared_address(shared) + padding;
  smem.base = reinterpret_cast<char*>(shared) + padding;
  smem.stages = args.stages;
  smem.reduce = smem.stage(args.stages);
  smem.barriers = smem.reduce + (SPLIT ? args.cluster * args.owned * CONSUMERS * 4 * 512 : CONSUMERS * kStagingBytes);
  const int part = SPLIT ? static_cast<int>(cluster_rank()) : 0;
  const int warp = threadIdx.x / 32;
  if (warp == CONSUMERS * 4) {
    switch (args.dims + (args.images_first ? 3 : 0)) {
      case 3: produce_pixels<3, false>(args, smem, part); break;
      case 4: produce_pixels<4, false>(args, smem, part); break;
      case 5: produce_pixels<5, false>(args, smem, part); break;
      case 6: produce_pixels<3, true>(args, smem, part); break;
      case 7: produce_pixels<4, true>(args, smem, part); break;
      default: produce_pixels<5, true>(args, smem, part);
    }
  } else if (warp == CONSUMERS * 4 + 1) {
    produce_weights(args, smem, part);
  } else {
    const Reduce reduce(smem.pointer(smem.reduce), smem.reduce_barrier(), part, SPLIT ? args.cluster : 1, args.owned);
    if (SPLIT && threadIdx.x == 0) reduce.prepare();
    sync_block();
    if (threadIdx.x == 0) TRACED(1);
    wait_on_dependent_grids();
    const int steps = ld_shared_u32(smem.steps());
    Accumulators accum;
    mainloop(smem, steps, accum);
    if (threadIdx.x == 0) TRACED(4);
    if (steps == 0) {
#pragma unroll
      for (int i = 0; i < kMmasM; ++i)
#pragma unroll
        for (int j = 0; j < kFragmentsN; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e) accum[i][j][e] = 0.0f;
    }
    GatherTile tile;
    tile_at<BM, BN>(args, blockIdx.x / (SPLIT ? args.cluster : 1), args.slots, tile);
    if constexpr (SPLIT) {
      cluster_wait();
      if (threadIdx.x == 0) TRACED(5);
      reduce.exchange(accum);
      if (threadIdx.x == 0) TRACED(6);
      store_owned(args, tile, reduce);
    } else {
      tile.first_pixel += threadIdx.x / 128 * kWarpgroupRows;
      const Results<T, kMmasM, kFragmentsN> results(args, tile, smem.reduce + threadIdx.x / 128 * kStagingBytes);
      results.store(accum);
    }
    if (threadIdx.x == 0) TRACED(11);
  }
}
