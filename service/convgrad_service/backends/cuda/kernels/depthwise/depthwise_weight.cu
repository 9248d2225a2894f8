// The gradient of a depthwise convolution's weight, on channels-last tensors.
//
// w[c, r, s] = sum over (n, p, q) of
//              x[n, p*STRIDE + r - pad, q*STRIDE + s - pad, c] * y[n, p, q, c],
// then alpha and beta*accumulate, and one rounding.
// Warps: depthwise_args.cuh; each computes items one after another, and multiplies each row of x by
// the rows of y that meet it, which are in a ring of registers. A lane has KERNEL_H x KERNEL_W sums;
// kernels of more rows are divided into groups of KERNEL_H, and those of several planes into planes.
// Grid: blocks, channel tiles, groups of kernel rows of all planes.
// Shared memory: STAGES rows of x and y per warp, later reused for the strips' sums, which
// depthwise_weight_sum.cuh adds. Deterministic.
// Relies on its launcher for channels and strides in multiples of PIECE; an image's extent below 2^31
// elements; rows of weights of all planes at the same distance; `arrived` being 0, and partials if
// there is more than one block. Padding is read as zeros.
#include "depthwise/depthwise_args.cuh"
#include "depthwise/depthwise_weight_args.cuh"
#include "depthwise/depthwise_weight_sum.cuh"

using namespace convgrad;

namespace {

using T = ELEMENT;
using R = RESULT;
using S = ElementAccumulator<T>;
using Channels = Vector<T, VECTOR>;

constexpr int kChannels = LANES * VECTOR;
constexpr int kTaps = KERNEL_H * KERNEL_W;
constexpr int kStrideH = KERNEL_H == 1 ? 1 : STRIDE;
constexpr int kSlots = (KERNEL_H + kStrideH - 1) / kStrideH;
constexpr int kTurn = kSlots * kStrideH;
constexpr int kRead = (COLUMNS - 1) * STRIDE + KERNEL_W;
constexpr int kStrips = 32 / LANES;
constexpr int kColumnsX = (kStrips - 1) * COLUMNS * STRIDE + kRead;
constexpr int kColumnsY = kStrips * COLUMNS;
using CopierX = RowCopier<T, PIECE, kChannels, kColumnsX>;
using CopierY = RowCopier<T, PIECE, kChannels, kColumnsY>;
constexpr int kStage = CopierX::kElements + CopierY::kElements;
constexpr int kStageBytes = kStage * sizeof(T);
constexpr int kPixelBytes = kChannels * sizeof(T);
// Where sums of other blocks are received, behind all that is used until then.
constexpr int kStagesBytes = WARPS * STAGES * kStageBytes;
constexpr int kSumsBytes = WARPS * kStrips * kTaps * kChannels * sizeof(S);
constexpr int kReceivedAt = kStagesBytes > kSumsBytes ? kStagesBytes : kSumsBytes;
// See depthwise.cu.
constexpr bool kSkipTaps = KERNEL_H >= 5;

// Stores the gradient of a tap, if the kernel has it.
__device__ __forceinline__ void put(const DepthwiseWeightArgs& args, int c, int r, int s, S sum) {
  if (r >= args.kernel_rows || c >= args.channels) return;
  if constexpr (KERNEL_H == 1) {
    const int own = s / args.dilation;
    if (own * args.dilation != s || own >= args.columns) return;
    s = own;
  }
  put_gradient<R>(args, c, r, s, sum);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS)
    depthwise_weight(const __grid_constant__ DepthwiseWeightArgs args) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ u64 barrier;
  __shared__ bool last;
  const Tiling& tiling = args.tiling;
  const int thread = threadIdx.x;
  const int lane = thread % 32, warp = thread / 32;
  const int channel_tile = blockIdx.y, block = blockIdx.x, blocks = gridDim.x;
  const int first_channel = channel_tile * kChannels;
  const int strip = lane / LANES, own = lane % LANES * VECTOR;
#if PLANES
  // Row in this plane of the kernel, then over all planes.
  const int plane_rows = args.kernel_rows / args.planes.kernel;
  const int plane_groups = (plane_rows + KERNEL_H - 1) / KERNEL_H;
  const int kernel_plane = blockIdx.z / plane_groups;
  const int top_tap = (blockIdx.z - kernel_plane * plane_groups) * KERNEL_H;
  const int first_tap_row = kernel_plane * plane_rows + top_tap;
  const int tap_rows = min(KERNEL_H, plane_rows - top_tap);
#else
  const int top_tap = blockIdx.z * KERNEL_H, first_tap_row = top_tap;
  constexpr int tap_rows = KERNEL_H;
#endif
  const int items = tiling.groups * tiling.chunks * args.batch;
  T* const all_stages = reinterpret_cast<T*>(shared);
  const int stages = warp * STAGES * kStage;
  const int first_stage =
      static_cast<int>(__cvta_generic_to_shared(all_stages)) + stages * sizeof(T);
  const int own_x =
      opaque_value(first_stage + (strip * COLUMNS * STRIDE * kChannels + own) * sizeof(T));
  const int own_y = opaque_value(
      first_stage + (CopierX::kElements + strip * COLUMNS * kChannels + own) * sizeof(T));
  const int steps = (tiling.rows - 1) * kStrideH + KERNEL_H;

  constexpr int kUnits = WARPS * kStrips, kPart = kTaps * kChannels;
  float4* const unit_sums = reinterpret_cast<float4*>(shared);
  const BlockSums<WARPS * 32> block_sums(unit_sums, reinterpret_cast<float4*>(shared + kReceivedAt),
                                         &barrier, kUnits, kPart / 4, block, blocks);
  block_sums.begin();

  S sums[KERNEL_H][KERNEL_W][VECTOR] = {};
  for (int item = block * WARPS + warp; item < items; item += blocks * WARPS) {
    const ItemAt at = item_at(tiling, item);
    const int first_row = at.chunk * tiling.rows, first_column = at.group * kColumnsY;
    const int top = first_row * kStrideH - args.pad[0] + top_tap;
    const int y_end = min(args.y_size[0], first_row + tiling.rows);
#if PLANES
    const Planes& of = args.planes;
    const int image = at.n / of.y, z = at.n - image * of.y;
    const int d = z * of.stride + kernel_plane * of.dilation - of.pad;
    if (d < 0 || d >= of.x) continue;
    const i64 x_image = image * args.x_stride[0] + d * of.x_stride;
    const i64 y_image = image * args.y_stride[0] + z * of.y_stride;
#else
    const i64 x_image = at.n * args.x_stride[0], y_image = at.n * args.y_stride[0];
#endif
    CopierX x(all_stages + stages, static_cast<const T*>(args.x) + x_image, args.x_stride, top,
              args.x_size[0], first_column * STRIDE - args.pad[1], args.x_size[1], first_channel,
              args.channels, lane);
    CopierY y(all_stages + stages + CopierX::kElements, static_cast<const T*>(args.y) + y_image,
              args.y_stride, first_row, y_end, first_column, args.y_size[1], first_channel,
              args.channels, lane);
    const auto fetch = [&](int step) {
      if (step < steps) {
        const int offset = step % STAGES * kStageBytes;
        x.copy(offset);
        if (kStrideH == 1 || step % kStrideH == 0) y.copy(offset);
      }
      cp_async_commit();
    };
    __syncwarp();  // the previous item is no longer read
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) fetch(stage);

    S ring[kSlots][COLUMNS][VECTOR] = {};
    for (int turn = 0; turn < steps; turn += kTurn) {
#pragma unroll
      for (int j = 0; j < kTurn; ++j) {
        const int step = turn + j;
        if (step < steps) {
          wait_for_copies<STAGES - 2>();
          fetch(step + STAGES - 1);
          const int stage = step % STAGES * kStageBytes;
          if (j % kStrideH == 0) {
#pragma unroll
            for (int i = 0; i < COLUMNS; ++i) {
              Channels read;
              ld_shared(own_y + stage + i * kPixelBytes, read.raw);
#pragma unroll
              for (int v = 0; v < VECTOR; ++v) ring[j / kStrideH][i][v] = widen(read.at[v]);
            }
          }
          const int h = top + step;
          if (!kSkipTaps || (h >= 0 && h < args.x_size[0])) {
            S row[kRead][VECTOR];
#pragma unroll
            for (int i = 0; i < kRead; ++i) {
              Channels read;
              ld_shared(own_x + stage + i * kPixelBytes, read.raw);
#pragma unroll
              for (int v = 0; v < VECTOR; ++v) row[i][v] = widen(read.at[v]);
            }
#pragma unroll
            for (int r = 0; r < KERNEL_H; ++r) {
              if (positive_mod(j - r, kStrideH) != 0) continue;
              const int slot = positive_mod(j - r, kTurn) / kStrideH;
              if (kSkipTaps && (step < r || step - r > (tiling.rows - 1) * kStrideH)) continue;
#pragma unroll
              for (int s = 0; s < KERNEL_W; ++s) {
#pragma unroll
                for (int i = 0; i < COLUMNS; ++i) {
#pragma unroll
                  for (int v = 0; v < VECTOR; ++v) {
                    sums[r][s][v] += row[i * STRIDE + s][v] * ring[slot][i][v];
                  }
                }
              }
            }
          }
        }
      }
    }
  }

  const int unit = warp * kStrips + strip;
  __syncthreads();
#pragma unroll
  for (int r = 0; r < KERNEL_H; ++r) {
#pragma unroll
    for (int s = 0; s < KERNEL_W; ++s) {
#pragma unroll
      for (int v = 0; v < VECTOR; ++v) {
        reinterpret_cast<S*>(shared)[unit * kPart + (r * KERNEL_W + s) * kChannels + own + v] =
            sums[r][s][v];
      }
    }
  }
  __syncthreads();
  const int column = blockIdx.z * tiling.channel_tiles + channel_tile;
  float4* const partials =
      static_cast<float4*>(args.partials) + static_cast<i64>(column) * blocks * (kPart / 4);
  block_sums.finish(partials, args.arrived + column, last, [&](int index, S sum) {
    const int tap = index / kChannels, r = tap / KERNEL_W;
    if (r >= tap_rows) return;
    put(args, first_channel + index % kChannels, first_tap_row + r, tap % KERNEL_W, sum);
  });
}
