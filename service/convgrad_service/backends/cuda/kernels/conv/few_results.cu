// fprop or dgrad with few channels of the result by FMA, in place, in any layout. Launched by few_results.py.
//
//   result[n, c, m] = sum over taps j and channels k of source[n, k, x0 + m*x_step + j*x_tap] * weight[k, c, j].
// With so few channels of the result, a tensor core's tile would be mostly empty, and in float32 its operands would have
// to be split. Along W, `group` positions of the result (the stride of a dgrad) read the same positions of the source, so
// that their channels are the columns of a small GEMM; along D and H, positions have phases (conv/implicit_gemm_args.cuh).
//
// Grid: blocks of roles (fastest), tiles along W, H and D, phases along D, images.
// Block: a tile of positions, for some roles: a phase along H and COLUMNS of a group's columns. A thread has a strip of
//   four groups in each of ROWS adjacent rows of its phase, with all sums in registers. For a row of the source it loads
//   the strip once, for all taps and rows of the result that meet it. Shares of a role's threads take channels of the source
//   in turn, and are added in order.
// Shared memory (dynamic): offsets of a channel's weights and of the positions; two stages of kDepth channels of the source and of weights,
//   copied by cp.async with zeros outside of the tensors (16-bit elements are widened by the threads); at the end the sums.
// Preconditions: no dilation along W, forward passes have stride 1 along it; with several ROWS adjacent rows of a phase
//   read rows of the source as far apart as adjacent taps do.
// Determinism: one order of additions per result.
// Limits: positions below 2^31; 64-bit offsets.
#include "conv/few_results.cuh"
#include "core/epilogue.cuh"
#include "ptx/mma.cuh"

using namespace convgrad;

namespace {

using T = ELEMENT;
constexpr int kDepth = 8, kStrip = 4;
constexpr int kColumns = COLUMNS;

using Sums = float[ROWS][kStrip][kColumns];

__device__ __forceinline__ void load_four(float (&to)[4], const float* from) {
  const float4 four = *reinterpret_cast<const float4*>(from);
  to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
}

// A row of taps' weights of kSteps positions along W, by column.
template <int kSteps>
struct Weights {
  static constexpr int kLoads = (kSteps * kColumns + 3) / 4;
  float of[kLoads][4];

  __device__ __forceinline__ void load(const float* from) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) load_four(of[i], from + 4 * i);
  }
};

// Adds the products of a row of the source and the rows of taps by which rows of the result meet it, of kSteps positions
// along W: `low` and `high` are eight adjacent columns. Unless `whole`, the first step has no taps for the second half of the
// columns. Rows of taps are args.tap_pitch apart, `weights` is that of row h of
// the first row of the result.
template <int kSteps>
__device__ __forceinline__ void add_row(Sums& sum, const float (&low)[4], const float (&high)[4], const float* weights,
                                        int tap_pitch, int h, int height_taps, bool whole) {
  constexpr int kHalf = (kColumns + 1) / 2;
  // If they are few, all are loaded first, also those that are not needed.
  constexpr bool kEarly = ROWS * Weights<kSteps>::kLoads <= 8;
  Weights<kSteps> by[kEarly ? ROWS : 1];
  if constexpr (kEarly) {
#pragma unroll
    for (int m = 0; m < ROWS; ++m) by[m].load(weights - m * tap_pitch);
  }
#pragma unroll
  for (int m = 0; m < ROWS; ++m) {
    if (static_cast<u32>(h - m) >= static_cast<u32>(height_taps)) continue;
    if constexpr (!kEarly) by[0].load(weights - m * tap_pitch);
    const auto add = [&](int t, int first, int end) {
#pragma unroll
      for (int i = 0; i < kStrip; ++i) {
        const float value = i + t < 4 ? low[(i + t) % 4] : high[(i + t) % 4];
#pragma unroll
        for (int q = first; q < end; ++q) {
          const int at = t * kColumns + q;
          sum[m][i][q] = fmaf(value, by[kEarly ? m : 0].of[at / 4][at % 4], sum[m][i][q]);
        }
      }
    };
    add(0, 0, kHalf);
    if (kHalf < kColumns && whole) add(0, kHalf, kColumns);
#pragma unroll
    for (int t = 1; t < kSteps; ++t) add(t, 0, kColumns);
  }
}

// Copies one element to shared memory as float32, or a zero.
__device__ __forceinline__ void copy_one(float* to, const T* from, bool there, const T* anywhere) {
  if constexpr (sizeof(T) == 4) {
    cp_async<4>(shared_address(to), there ? from : anywhere, there ? 4 : 0);
  } else {
    *to = there ? widen(*from) : 0.f;
  }
}

// Adds the products of a thread's channels of a stage. kLast: the steps along W beyond whole fours, 1 to 4.
template <int kLast>
__device__ __forceinline__ void add_stage(Sums& sum, const FewResultsArgs& args, const float* source, const float* weights,
                                          int share, int channels, bool whole, int depth_taps, int height_taps, int plane_step,
                                          int row_step) {
  const int fours = (args.steps - 1) / 4;
#pragma unroll 1
  for (int k = share; k < channels; k += args.shares) {
#pragma unroll 1
    for (int d = 0; d < depth_taps; ++d) {
      const float* row = source + k * args.channel_pitch + d * plane_step;
      const float* const taps = weights + k * args.weights + d * args.height_taps * args.tap_pitch;
#pragma unroll 1
      for (int h = 0; h < height_taps + ROWS - 1; ++h, row += row_step) {
        float low[4], high[4] = {};
        load_four(low, row);
        const float* now = taps + h * args.tap_pitch;
#pragma unroll 1
        for (int four = 0; four < fours; ++four, now += 4 * kColumns) {
          load_four(high, row + 4 * four + 4);
          add_row<4>(sum, low, high, now, args.tap_pitch, h, height_taps, whole || four > 0);
#pragma unroll
          for (int i = 0; i < 4; ++i) low[i] = high[i];
        }
        if constexpr (kLast > 1) load_four(high, row + 4 * fours + 4);
        add_row<kLast>(sum, low, high, now, args.tap_pitch, h, height_taps, whole || fours > 0);
      }
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(256, 2) few_results(const __grid_constant__ FewResultsArgs args) {
  extern __shared__ uint4 shared[];
  const GatherAxis &depth = args.axis[0], &height = args.axis[1];
  const int threads = blockDim.x, thread = threadIdx.x, lane = thread & 31;

  int rest = blockIdx.x;
  const auto take = [&](int count) {
    const int outer = rest / count, own = rest - outer * count;
    rest = outer;
    return own;
  };
  const int first_role = take(args.role_blocks) * args.roles;
  const int tile_w = take(args.tiles_w), tile_h = take(args.tiles_h), tile_d = take(args.tiles_d);
  const GatherPhase& along_d = args.phase[take(depth.phases)][0];
  const int n = rest;
  const int m_h = tile_h * args.rows * ROWS, m_d = tile_d * args.planes, group_w = tile_w * args.strips * kStrip;

  // A thread's place.
  const int per_role = threads / args.roles, per_share = per_role / args.shares;
  const int role = first_role + thread / per_role, place = thread % per_role;
  const int share = place / per_share, index = place - share * per_share;
  const int strip = index % args.strips, row = index / args.strips % args.rows, plane = index / args.strips / args.rows;
  const bool busy = role < args.all_roles && plane < args.planes;
  const GatherPhase& along_h = args.phase[busy ? role / args.column_blocks : 0][1];

  // Where each of a channel's weights is, from the channel's first on; -1 for zeros.
  int* const offsets = reinterpret_cast<int*>(shared);
  for (int i = thread; i < args.weights; i += threads) {
    int outer = i / args.tap_pitch;
    const int within = i - outer * args.tap_pitch, t = within / kColumns;
    const int j_h = outer % args.height_taps;
    outer /= args.height_taps;
    const int j_d = outer % args.depth_taps, of = first_role + outer / args.depth_taps;
    const GatherPhase& phase = args.phase[of < args.all_roles ? of / args.column_blocks : 0][1];
    const int column = of % args.column_blocks * kColumns + within - t * kColumns;
    const int b = divide(column, args.by_channels), c = column - b * args.result_channels;
    const int s = args.backward ? b + (args.steps - 1 - t) * args.group : t;
    const bool there = of < args.all_roles && t < args.steps && j_h < phase.taps && j_d < along_d.taps &&
                       b < args.group && s < args.kernel_w;
    const int d = depth.x_tap < 0 ? along_d.taps - 1 - j_d : j_d;
    const int h = height.x_tap < 0 ? phase.taps - 1 - j_h : j_h;
    offsets[i] = there ? static_cast<int>(c * args.weight_stride[1] + (along_d.r0 + d * depth.r_step) * args.weight_stride[2] +
                                          (phase.r0 + h * height.r_step) * args.weight_stride[3] +
                                          s * args.weight_stride[4])
                       : -1;
  }
  // Where the source's positions of a tile are, from the image's first on; -1 for zeros.
  int* const positions = offsets + args.weights;
  const int step_d = abs(depth.x_tap), reach_d = max(along_d.taps - 1, 0) * step_d;
  const int source_planes = along_d.taps > 0 ? (args.planes - 1) * depth.x_step + reach_d + 1 : 0;
  const int position_count = source_planes * args.source_rows * args.row_pitch;
  for (int i = thread; i < position_count; i += threads) {
    const int of_row = divide(i, args.by_row_pitch), of_plane = divide(of_row, args.by_rows);
    const int d = m_d * depth.x_step + along_d.x0 - (depth.x_tap < 0 ? reach_d : 0) + of_plane;
    const int h = m_h * height.x_step + args.first_h + of_row - of_plane * args.source_rows;
    const int w = group_w + args.first + i - of_row * args.row_pitch;
    const bool there = static_cast<u32>(d) < static_cast<u32>(depth.size) &&
                       static_cast<u32>(h) < static_cast<u32>(height.size) &&
                       static_cast<u32>(w) < static_cast<u32>(args.source_w);
    positions[i] = there ? static_cast<int>(d * args.source_stride[2] + h * args.source_stride[3] +
                                            w * args.source_stride[4])
                         : -1;
  }
  float* const stages = reinterpret_cast<float*>(positions + args.channel_pitch);
  __syncthreads();

  const T* const image = static_cast<const T*>(args.source) + n * args.source_stride[0];
  const T* const weight = static_cast<const T*>(args.weight);
  const auto copy = [&](int first_k, float* to) {
    const int left = args.source_channels - first_k;
    float* const weights = to + kDepth * args.channel_pitch;
    const T* const weight_k = weight + first_k * args.weight_stride[0];
    for (int i = thread; i < kDepth * args.weights; i += threads) {
      const int k = divide(i, args.by_weights), offset = offsets[i - k * args.weights];
      copy_one(weights + i, weight_k + k * args.weight_stride[0] + offset, offset >= 0 && k < left, weight);
    }
    if (args.channels_last) {
      const int k = thread % kDepth;
      const T* const image_k = image + first_k + k;
      for (int i = thread / kDepth; i < position_count; i += threads / kDepth) {
        const int offset = positions[i];
        copy_one(to + k * args.channel_pitch + i, image_k + offset, offset >= 0 && k < left, image);
      }
    } else {
      const i64 channel = args.source_stride[1];
      const T* const image_k = image + first_k * channel;
      for (int i = thread; i < position_count; i += threads) {
        const int offset = positions[i];
        const T* from = image_k + offset;
        float* put = to + i;
        if (offset >= 0 && left >= kDepth) {
#pragma unroll
          for (int k = 0; k < kDepth; ++k, put += args.channel_pitch, from += channel) copy_one(put, from, true, image);
        } else {
          for (int k = 0; k < kDepth; ++k, put += args.channel_pitch, from += channel) {
            copy_one(put, from, offset >= 0 && k < left, image);
          }
        }
      }
    }
    cp_async_commit();
  };

  // Where its strip starts in a stage.
  const int plane_pitch = args.source_rows * args.row_pitch;
  const int reach_h = max(along_h.taps - 1, 0) * abs(height.x_tap);
  const int own_h = row * ROWS * height.x_step + along_h.x0 - (height.x_tap < 0 ? reach_h : 0) - args.first_h;
  const int own = plane * depth.x_step * plane_pitch + own_h * args.row_pitch + strip * kStrip;
  const int own_weights = kDepth * args.channel_pitch +
                          (role - first_role) * args.depth_taps * args.height_taps * args.tap_pitch;
  const int taps_d = along_d.taps, taps_h = busy ? along_h.taps : 0;
  const int plane_step = step_d * plane_pitch, row_step = abs(height.x_tap) * args.row_pitch;

  const bool whole = args.first_columns - role % args.column_blocks * kColumns > (kColumns + 1) / 2;

  Sums sum = {};
  copy(0, stages);
  for (int first_k = 0, turn = 0; first_k < args.source_channels; first_k += kDepth, turn ^= 1) {
    cp_async_wait<0>();
    __syncthreads();
    if (first_k + kDepth < args.source_channels) copy(first_k + kDepth, stages + (turn ^ 1) * args.stage);
    if (taps_h == 0) continue;
    const int left = min(kDepth, args.source_channels - first_k);
    const float* const source = stages + turn * args.stage + own;
    const float* const weights = stages + turn * args.stage + own_weights;
    switch (args.steps - (args.steps - 1) / 4 * 4) {
      case 1: add_stage<1>(sum, args, source, weights, share, left, whole, taps_d, taps_h, plane_step, row_step); break;
      case 2: add_stage<2>(sum, args, source, weights, share, left, whole, taps_d, taps_h, plane_step, row_step); break;
      case 3: add_stage<3>(sum, args, source, weights, share, left, whole, taps_d, taps_h, plane_step, row_step); break;
      default: add_stage<4>(sum, args, source, weights, share, left, whole, taps_d, taps_h, plane_step, row_step);
    }
  }

  // Sums by element of a thread, then by thread; shares are added in order.
  float* const sums = reinterpret_cast<float*>(shared);
  const int of_role = args.planes * args.rows * args.strips, pitch = args.roles * of_role + 1;
  for (int turn = 0; turn < args.shares; ++turn) {
    __syncthreads();
    if (share != turn || !busy) continue;
    float* to = sums + (role - first_role) * of_role + index;
#pragma unroll
    for (int m = 0; m < ROWS; ++m) {
#pragma unroll
      for (int i = 0; i < kStrip; ++i) {
#pragma unroll
        for (int q = 0; q < kColumns; ++q, to += pitch) *to = turn == 0 ? sum[m][i][q] : *to + sum[m][i][q];
      }
    }
  }
  __syncthreads();

  const int last_role = min(first_role + args.roles, args.all_roles) - 1;
  const int first_phase = first_role / args.column_blocks, phases = last_role / args.column_blocks - first_phase + 1;
  const int width = args.strips * kStrip * args.group, result_rows = args.rows * ROWS;
  const int count = phases * width * result_rows * args.planes * args.result_channels;
  for (int i = thread; i < count; i += threads) {
    int outer = i, c = 0;
    if (args.result_last) outer = divide(i, args.by_channels), c = i - outer * args.result_channels;
    const int of_w = divide(outer, args.by_width), w = outer - of_w * width;
    const int of_h = divide(of_w, args.by_result_rows), m = of_w - of_h * result_rows;
    int phase = divide(of_h, args.by_planes);
    const int of_d = of_h - phase * args.planes;
    if (!args.result_last) {
      c = phase / phases;
      phase -= c * phases;
    }
    const int group = divide(w, args.by_group), column = (w - group * args.group) * args.result_channels + c;
    const int of = (first_phase + phase) * args.column_blocks + column / kColumns - first_role;
    if (of < 0 || of >= args.roles) continue;
    const GatherPhase& to_h = args.phase[first_phase + phase][1];
    const int at_w = group_w * args.group + w + args.shift;
    if (at_w < 0 || at_w >= args.result_w || m_h + m >= to_h.count || m_d + of_d >= along_d.count) continue;
    const int own_thread = of * of_role + (of_d * args.rows + m / ROWS) * args.strips + group / kStrip;
    const int element = (m % ROWS * kStrip + group % kStrip) * kColumns + column % kColumns;
    const i64 at = n * args.result_stride[0] + c * args.result_stride[1] +
                   (along_d.y0 + (m_d + of_d) * depth.y_step) * args.result_stride[2] +
                   (to_h.y0 + (m_h + m) * height.y_step) * args.result_stride[3] + at_w * args.result_stride[4];
    const T* accumulate = static_cast<const T*>(args.accumulate);
    if (accumulate != nullptr) accumulate += at;
    const T* bias = static_cast<const T*>(args.bias);
    if (bias != nullptr) bias += c;
    const float value = sums[element * pitch + own_thread];
    static_cast<T*>(args.result)[at] =
        narrow<T>(finish<T, float>(value, args.alpha, args.beta, accumulate, bias, args.activation));
  }
}
