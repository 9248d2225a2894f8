// Convolution as an implicit GEMM (cp.async, mma.sync): fprop, dgrad or wgrad, any geometry. Launched by
// implicit_gemm.py.
//
//           M                              N                       K
//   fprop   pixels of the output           output channels         taps x input channels
//   dgrad   pixels of a phase of the       input channels          taps of the phase x output channels
//           input
//   wgrad   output channels                taps x input channels   pixels of the output
// Channels of a tap are padded to 16-byte chunks, in K and (wgrad) in N. With PLANES, tensors are channels first
// in float32, and taps are faster than channels, which are not padded. Groups are a batch dimension.
//
// With POINTWISE (fprop, dgrad), only 1x1 layers with stride 1, channels last in whole chunks, without an
//   epilogue.
// With SPLIT, products of float32 are three of TF32 (core/split_tf32.cuh).
//
// Grid: blocks of a cluster (fastest), column tiles, row tiles; groups; workspace splits, then phases.
// Block: a kM x kN tile (core/mma_multistage.cuh). K is split among the blocks of a cluster, which reduce
//   through distributed shared memory in the order of their ranks, and, where that is not enough, among
//   clusters, which leave partial sums in a workspace: the last block to arrive reduces them in the order of
//   clusters.
// Shared memory (dynamic): mbarrier and flags of SPLIT; the pipeline's stages, reused by the reduction.
// Preconditions: channels of the source, of the weight's inner dimension and of grad_output are contiguous, in
//   aligned vectors of VECTOR bytes. With PLANES instead: an image of the source below 2^31 bytes, up to ten
//   taps along a dimension, and wgrad's result contiguous as (channels, taps). Counters are zero.
// Determinism: one order of additions, decided by the launch.
// Limits: pixels of a phase and K below 2^31; 64-bit offsets.
#include "conv/implicit_gemm_planes.cuh"
#include "conv/implicit_gemm_result.cuh"
#include "core/cluster_reduce.cuh"
#include "core/mma_multistage.cuh"
#include "ptx/pdl.cuh"

using namespace convgrad;

namespace {

// The loaders of both operands.
template <class Gemm, class A, class B>
struct Loads {
  using OwnA = typename A::Own;
  using OwnB = typename B::Own;
  using Scaling = OperandScaling<OwnA::kCount, OwnB::kCount, OwnA::kWords, OwnB::kWords>;
  static_assert(!Gemm::kSplit || (OwnA::kAll && OwnB::kAll), "each thread copies");

  const Phases& phases;
  A a;
  B b;

  __device__ __forceinline__ Loads(const ImplicitGemmArgs& args, const Phases& phases, int group,
                                   int row, int pixels, int column, int first_step)
      : phases(phases),
        a(args, phases, group, row, pixels, first_step),
        b(args, phases, group, column, pixels, first_step) {}

  __device__ __forceinline__ u32 own(int i) const {
    return i < OwnA::kCount ? a.at(i) : Gemm::TileA::kBytes + b.at(i - OwnA::kCount);
  }
  __device__ __forceinline__ void operator()(u32 stage) {
    a.load(stage, phases);
    b.load(stage + Gemm::TileA::kBytes, phases);
  }
};

constexpr Operation kOperation = Operation::OPERATION;
constexpr bool kWgrad = kOperation == Operation::kWgrad;
constexpr bool kPlanes = PLANES != kNoPlanes, kFlat = PLANES == kFlatPlanes;
// Channels first, the weight of several taps is read by element, that of one tap as channels last.
constexpr bool kElements = kPlanes && VECTOR == 4;
constexpr bool kWeightColumns = kOperation == Operation::kDgrad && !kElements;
using Gemm = MmaMultistage<ELEMENT, BM, BN, WM, WN, STAGES, kWgrad != kPlanes,
                           kWeightColumns || (kWgrad && !kPlanes), SPLIT>;
using TileA = Gemm::TileA;
using TileB = Gemm::TileB;
constexpr int kThreads = Gemm::kThreads;

using Pixels = Conditional<
    kElements, PlanePixels<TileA, kThreads>,
    Conditional<kPlanes, PointwisePixels<TileA, kThreads, kFlat ? 4 : 1>,
           PixelRows<ELEMENT, TileA, kThreads, VECTOR>>::type>::type;
using Weights =
    Conditional<kElements, PlaneWeights<TileB, kThreads>,
           Conditional<kWeightColumns, WeightColumns<ELEMENT, TileB, kThreads, VECTOR>,
                  WeightRows<ELEMENT, TileB, kThreads, VECTOR>>::type>::type;
using Gradient = Conditional<
    kElements, PlaneGradient<TileA, kThreads>,
    Conditional<kFlat, FlatPixels<TileA, kThreads, true>,
           GradientPixels<ELEMENT, TileA, kThreads, VECTOR>>::type>::type;
using Input = Conditional<kElements, PlaneTaps<TileB, kThreads>,
                     Conditional<kFlat, FlatPixels<TileB, kThreads, false>,
                            TapColumns<ELEMENT, TileB, kThreads, VECTOR>>::type>::type;
using Load = Loads<Gemm, Conditional<kWgrad, Gradient, Pixels>::type, Conditional<kWgrad, Input, Weights>::type>;
using Reduce = ClusterReduce<Gemm>;

// Calls each(index, fragment, fragment_row, row, column) for this thread's part of the owned fragments:
// eight consecutive columns of rows `row` and row + 8 of the tile. `index` numbers the parts within the
// block.
template <class Each>
__device__ __forceinline__ void for_each_pair(const Reduce& reduce, bool pixels_fastest,
                                              Each each) {
  pixels_fastest = pixels_fastest && !kPointwise;
  // Owned fragments are whole fragment rows of the warp tile, or a part of one: powers of two.
  const int owned_log = reduce.owned_log();
  const int across_log = min(owned_log, Reduce::log_of(Gemm::kFragmentsN));
  const int first = static_cast<int>(threadIdx.x / 32) << (3 + owned_log);
#pragma unroll 1
  for (int i = threadIdx.x & 31; i < 8 << owned_log; i += 32) {
    const int row = pixels_fastest ? i & 7 : i >> across_log & 7;
    const int across = (pixels_fastest ? i >> 3 : i) & ((1 << across_log) - 1);
    const int fragment = (i >> (3 + across_log) << across_log) + across;
    const int f = reduce.first_fragment() + fragment;
    each(first + i, fragment, row, Gemm::warp_row() + f / Gemm::kFragmentsN * 16 + row,
         Gemm::warp_column() + f % Gemm::kFragmentsN * 8);
  }
}

constexpr int kTileSums = Gemm::kM * Gemm::kN;

// Adds a thread's partial sums of all clusters, in order.
__device__ __forceinline__ void add_up(const float4* from, int count, float (&sums)[2][8]) {
#pragma unroll
  for (int e = 0; e < 16; ++e) sums[e / 8][e % 8] = 0;
#pragma unroll 2
  for (int p = 0; p < count; ++p, from += kTileSums / 4) {
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const float4 four = __ldcg(from + q);
      float(&to)[8] = sums[q / 2];
      const int e = q % 2 * 4;
      to[e] += four.x, to[e + 1] += four.y, to[e + 2] += four.z, to[e + 3] += four.w;
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(Gemm::kThreads, BLOCKS)
    implicit_gemm(const __grid_constant__ ImplicitGemmArgs args) {
  using T = ELEMENT;
  extern __shared__ uint4 shared[];
  char* const base = reinterpret_cast<char*>(shared);
  // The pipeline follows the mbarrier and the flags. Without a cluster, the reduction reuses its memory.
  char* const ring = base + 128;
  char* const room = args.cluster_log == 0 ? ring : ring + args.ring_bytes;

  const u32 cluster = blockIdx.x >> args.cluster_log;
  const u32 rank = blockIdx.x & ((1u << args.cluster_log) - 1);
  const int row_tile = divide(cluster, args.by_column_tiles);
  const int column_tiles = (args.columns + Gemm::kN - 1) / Gemm::kN;
  const int row = row_tile * Gemm::kM, column = (cluster - row_tile * column_tiles) * Gemm::kN;
  const int group = blockIdx.y;
  const u32 phase = args.workspace == 1 ? blockIdx.z : blockIdx.z / args.workspace;
  const u32 part = blockIdx.z - phase * args.workspace;
  // fprop and wgrad have one phase, at constant offsets in the kernel parameters.
  const Phases phases(args, kOperation == Operation::kDgrad ? phase : 0);
  const int pixels = args.batch * phases.d->count * phases.h->count * phases.w->count;
  const int row_end = kWgrad ? args.rows : pixels;

  // This block's range of k-tiles.
  const int all_steps = kWgrad    ? (pixels + Gemm::kTileK - 1) / Gemm::kTileK
                        : kPlanes ? (phases.taps() * args.source_channels + Gemm::kTileK - 1) / Gemm::kTileK
                                  : (phases.taps() * args.tap_chunks + 7) / 8;
  const int splits = args.workspace << args.cluster_log;
  const int each = divide(all_steps + splits - 1, args.by_splits);
  const int begin = min(static_cast<int>((part << args.cluster_log) + rank) * each, all_steps);
  const int steps = row < row_end ? min(each, all_steps - begin) : 0;

  Load load(args, phases, group, row, pixels, column, begin);
  const Reduce reduce(room, shared_address(base), rank, args.cluster_log);
  reduce.prepare();
  wait_on_dependent_grids();
  typename Gemm::Accumulators sums = {};
  Gemm::run(sums, shared_address(ring), steps, load, reinterpret_cast<ScalingFlags*>(base + 16));
  launch_dependent_grids();
  reduce.exchange(sums);

  // Split-K among clusters: of each rank, the last block to arrive reduces its part of the tile.
  float4* partials = nullptr;
  if (args.workspace > 1) {
    const u32 tiles = gridDim.x >> args.cluster_log;
    const i64 tile = (static_cast<i64>(phase) * gridDim.y + blockIdx.y) * tiles + cluster;
    const int own_sums = Gemm::kWarps * 128 << reduce.owned_log();
    partials = reinterpret_cast<float4*>(args.partials + tile * args.workspace * kTileSums +
                                         static_cast<i64>(rank) * own_sums);
    float4* const own = partials + static_cast<i64>(part) * (kTileSums / 4);
    for_each_pair(reduce, args.pixels_fastest, [&](int i, int fragment, int in, int, int) {
      float found[2][8];
      reduce.load_rows(fragment, in, found);
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const float* const four = found[q / 2] + q % 2 * 4;
        own[i * 4 + q] = {four[0], four[1], four[2], four[3]};
      }
    });
    __threadfence();
    __syncthreads();
    int last = 0;
    if (threadIdx.x == 0) {
      u32* const counter = args.counters + (tile << args.cluster_log) + rank;
      last = atomicInc(counter, args.workspace - 1) == static_cast<u32>(args.workspace) - 1;
    }
    if (!__syncthreads_or(last)) return;
    __threadfence();
  }
  // In float32, four columns at a time: a chunk, which belongs to a single tap.
  constexpr int kRun = sizeof(T) == 2 ? 8 : 4;
  for_each_pair(reduce, args.pixels_fastest, [&](int i, int fragment, int in, int r, int c) {
    float found[2][8];
    if (partials == nullptr) {
      reduce.load_rows(fragment, in, found);
    } else {
      add_up(partials + i * 4, args.workspace, found);
    }
    if constexpr (kPointwise) {
      const OutputPointer<T> result{static_cast<char*>(args.result), args.wide_result != 0};
      const i64 pixel = args.result_stride[5];
      const i64 to = group * args.result_stride[1] + (row + r) * pixel + column + c;
#pragma unroll
      for (int e = 0; e < 16; e += kRun) {
        float own[kRun];
#pragma unroll
        for (int q = 0; q < kRun; ++q) own[q] = found[e / 8][e % 8 + q];
        if (row + r + e / 8 * 8 < row_end && column + c + e % 8 < args.result_channels) {
          result.store_vector(to + e / 8 * 8 * pixel + e % 8, own);
        }
      }
      return;
    }
#pragma unroll
    for (int first = 0; first < 8; first += kRun) {
      const ResultColumns<kOperation, T, kPlanes> columns(args, phases, group, column + c + first);
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        const int at = row + r + half * 8;
        if (at >= row_end || columns.count <= 0) continue;
        float own[kRun];
#pragma unroll
        for (int e = 0; e < kRun; ++e) own[e] = half == 0 ? found[0][first + e] : found[1][first + e];
        store_run<T, kRun>(args, result_row<kOperation>(args, phases, at) + columns.at,
                            args.result_stride[2], columns.count, columns.channel, own);
      }
    }
  });
}
