// wgrad of a first layer (few input channels) by mma.sync, in place (cp.async). Launched by first_weight.py.
// Needs sm_80.
//
//   w[k, c, r] = sum over pixels (n, o) of y[n, k, o] * x[n, c, o*stride + r - pad].
// M = taps of all channels, ordered (t, r, s, c), N = channels of y, K = pixels, 8 columns of a row of y per mma. Rows
// of x are in shared memory unchanged, and a lane reads the elements that its taps meet: nothing is expanded. A warp
// tile is FRAGMENTS * 16 taps by 32 channels.
//
// Products are those of TF32, which are exact for 16-bit elements. With SPLIT, products of float32 are three of TF32
// (core/split_tf32.cuh), whose sums over a unit are promoted to float32. A unit with an element whose low part would
// underflow is added by FMA; so are single sums that are not finite, as a high part may round to infinity.
//
// Grid: groups of taps (fastest) x blocks of channels; shares of the units.
// Block: a unit is some rows of y by a segment of columns, with the rows of x that they meet. All threads copy units
//   ahead, in chunks of 16 bytes where rows are aligned, else of 4 bytes or by element. Warps have tiles of taps by
//   channels; those with the same tile take a unit's steps of 8 pixels in turn, and are added in order at the end.
//   Partial sums go to `partials`, ordered (share, k, t, r, s, c); first_sum.cu reduces them.
// Shared memory (dynamic): the pipeline's stages, each a unit's y and x, at the end the sums; counted by first_weight.py.
// Preconditions: no dilation; columns of x are contiguous, alone or with their channels; of y, columns or channels are.
// Determinism: one order of additions per result and number of shares.
// Limits: units below 2^31; 64-bit offsets.
#include "conv/first_weight.cuh"
#include "core/split_tf32.cuh"
#include "ptx/pdl.cuh"

using namespace convgrad;

namespace {

using T = ELEMENT;
constexpr int kItem = static_cast<int>(sizeof(T));
constexpr int kRows = FRAGMENTS, kColumns = 4;  // fragments of a warp tile
constexpr int kTileM = kRows * 16, kTileN = kColumns * 8;
constexpr u32 kTiny = (127 - 102) << 23;  // below this the low part loses bits

// An element as the word of an operand of TF32; float32 is not rounded.
__device__ __forceinline__ u32 word_at(u32 from) {
  return __float_as_uint(widen(element_at<T>(from)));
}

// A step's operands in a lane: unchanged, or of which products are taken.
struct Operands {
  u32 a[kRows][4], b[kColumns / 2][4];

  __device__ __forceinline__ void load(const u32 (&at_a)[kRows][2], u32 from_a, int deeper_a,
                                       u32 from_b, int column_b, int deeper_b) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) a[i][e] = word_at(at_a[i][e & 1] + from_a + (e >> 1) * deeper_a);
    }
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) b[j / 2][j % 2 * 2 + e] = word_at(from_b + j * column_b + e * deeper_b);
    }
  }
};

using Sums = float[kRows][kColumns][4];

__device__ __forceinline__ void multiply(Sums& sum, const Operands& a, const Operands& b) {
#pragma unroll
  for (int j = 0; j < kColumns; ++j) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      mma<float>(sum[i][j], a.a[i], b.b[j / 2][j % 2 * 2], b.b[j / 2][j % 2 * 2 + 1]);
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    first_weight(const __grid_constant__ FirstWeightArgs args) {
  extern __shared__ uint4 shared[];
  const int thread = threadIdx.x, lane = thread & 31;
  const int warp = __shfl_sync(0xffffffff, thread / 32, 0);
  const int tiles = args.warps_m * args.warps_n, turns = blockDim.x / 32 / tiles;
  const int turn = warp / tiles, warp_n = warp % tiles / args.warps_m, warp_m = warp % args.warps_m;
  const int block_m = args.warps_m * kTileM, block_n = args.warps_n * kTileN;
  const int group = blockIdx.x / args.tap_groups;
  const int first_tap = (blockIdx.x - group * args.tap_groups) * block_m, first_channel = group * block_n;
  const u32 ring = shared_address(shared);

  FirstWeightUnit unit(args, blockIdx.y), copied = unit;
  u32 write = ring, read = ring;
  const u32 end = ring + args.stages * args.stage_bytes;
  const auto advance = [&](u32& stage) {
    stage += args.stage_bytes;
    if (stage == end) stage = ring;
  };
  const auto copy = [&] {
    if (copied.there()) {
      copy_unit<T>(args, copied, write, first_channel, block_n);
      copied.next(args);
    }
    cp_async_commit();
    advance(write);
  };
  launch_dependent_grids();
  for (int i = 1; i < args.stages; ++i) copy();
  // Where this lane's taps and channels are in a stage, at the first pixel that it reads.
  const int g = lane >> 2, t = lane & 3;
  const int pixel = args.stride[2] * args.column * kItem;  // bytes of x between columns
  u32 at_a[kRows][2];
#pragma unroll
  for (int i = 0; i < 2 * kRows; ++i) {
    const int tap = first_tap + warp_m * kTileM + i * 8 + g;
    const int channels = args.planes * args.column;
    int rest = tap < args.taps ? tap : 0;
    const int c = rest % channels;
    rest /= channels;
    const int s = rest % args.kernel[2];
    rest /= args.kernel[2];
    const int r = rest % args.kernel[1], depth = rest / args.kernel[1];
    const int plane = args.planes == 1 ? 0 : c, within = args.planes == 1 ? c : 0;
    at_a[i / 2][i % 2] = args.x_at + (plane * args.kernel[0] + depth) * args.x_plane + r * args.x_row +
                         (s * args.column + within + args.x_lead) * kItem + t * pixel;
  }
  const u32 at_b = (warp_n * kTileN + g) * args.y_channel + t * args.y_column;

  Sums sum = {};
#pragma unroll 1
  for (; unit.there(); unit.next(args)) {
    if (args.stages == 2) {
      cp_async_wait<0>();
    } else {
      cp_async_wait<1>();
    }
    [[maybe_unused]] bool tiny = false;
    if constexpr (SPLIT) {
      if (args.x_shape.bytes < 16 || args.y_shape.bytes < 16) __syncthreads();
      tiny = extremes_of_copies(args, unit, read, first_channel, block_n).least < Extremes::low(kTiny);
      tiny = __syncthreads_or(tiny);
    } else {
      __syncthreads();
    }
    copy();
    const int width = min(args.segment, args.y_size[2] - unit.segment * args.segment);
    const int steps = (width + 7) / 8;  // of a row
    const int height = min(args.rows, args.y_size[1] - unit.row * args.rows);
    const auto for_each_step = [&](const auto& each) {
      int p = turn / steps, step = turn - p * steps;
#pragma unroll 1
      while (p < height) {
        const int now_p = p, now_step = step;
        for (step += turns; step >= steps; step -= steps) ++p;
        each(now_p, now_step, p, step);
      }
    };
    const u32 x_row = args.stride[1] * args.x_row;
    Operands next;
    const auto load = [&](int p, int step) {
      next.load(at_a, read + p * x_row + step * 8 * pixel, 4 * pixel,
                read + at_b + p * args.y_row + step * 8 * args.y_column, 8 * args.y_channel,
                4 * args.y_column);
    };
    if (turn < steps * height) load(turn / steps, turn % steps);
    [[maybe_unused]] Sums part = {};
    for_each_step([&](int, int, int p, int step) {
      Operands high = next;
      if constexpr (SPLIT) {
        Operands low;
#pragma unroll
        for (int i = 0; i < kRows; ++i) split(next.a[i], high.a[i], low.a[i]);
#pragma unroll
        for (int j = 0; j < kColumns / 2; ++j) split(next.b[j], high.b[j], low.b[j]);
        if (p < height) load(p, step);
        multiply(part, low, high);
        multiply(part, high, low);
        multiply(part, high, high);
      } else {
#pragma unroll
        for (int e = 0; e < (kItem == 4 ? 4 : 0); ++e) {
#pragma unroll
          for (int i = 0; i < kRows; ++i) high.a[i][e] = to_tf32(high.a[i][e]);
#pragma unroll
          for (int j = 0; j < kColumns / 2; ++j) high.b[j][e] = to_tf32(high.b[j][e]);
        }
        if (p < height) load(p, step);
        multiply(sum, high, high);
      }
    });
    if constexpr (SPLIT) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        float some = 0;  // not zero, but NaN, if one of the sums is not finite
#pragma unroll
        for (int e = 0; e < 4 * kColumns; ++e) some += part[i][e / 4][e % 4] * 0;
        if (tiny || __any_sync(0xffffffff, some != 0)) {
          float exact[kColumns][4] = {};
          for_each_step([&](int p, int step, int, int) {
            for (int k = 0; k < 8; ++k) {
              const int column = step * 8 + k;
              const u32 from_a = read + p * x_row + (column - t) * pixel;
              const u32 from_b = read + warp_n * kTileN * args.y_channel + p * args.y_row +
                                 column * args.y_column + 2 * t * args.y_channel;
              float a[2];
#pragma unroll
              for (int e = 0; e < 2; ++e) a[e] = __uint_as_float(word_at(at_a[i][e] + from_a));
#pragma unroll
              for (int e = 0; e < 4 * kColumns; ++e) {
                const float b =
                    __uint_as_float(word_at(from_b + (e / 4 * 8 + e % 2) * args.y_channel));
                exact[e / 4][e % 4] = fmaf(a[e % 4 / 2], b, exact[e / 4][e % 4]);
              }
            }
          });
#pragma unroll
          for (int e = 0; e < 4 * kColumns; ++e) {
            float& one = part[i][e / 4][e % 4];
            if (tiny || one * 0 != 0) one = exact[e / 4][e % 4];
          }
        }
#pragma unroll
        for (int e = 0; e < 4 * kColumns; ++e) sum[i][e / 4][e % 4] += part[i][e / 4][e % 4];
      }
    }
    advance(read);
  }
  cp_async_wait<0>();

  // The warps of a tile add their sums one after another.
  const int pitch = block_m + 4;
  float* const sums = reinterpret_cast<float*>(shared);
  float* const own = sums + (warp_n * kTileN + 2 * t) * pitch + warp_m * kTileM + g;
  for (int now = 0; now < turns; ++now) {
    __syncthreads();
    if (turn != now) continue;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int e = 0; e < 4 * kColumns; ++e) {
        float* const to = own + (e / 4 * 8 + e % 2) * pitch + i * 16 + e % 4 / 2 * 8;
        *to = now == 0 ? sum[i][e / 4][e % 4] : *to + sum[i][e / 4][e % 4];
      }
    }
  }
  __syncthreads();
  const int channels = min(block_n, args.y_channels - first_channel), taps = min(block_m, args.taps - first_tap);
  float* const to = args.partials +
                    (static_cast<i64>(blockIdx.y) * args.y_channels + first_channel) * args.taps + first_tap;
  for (int channel = warp; channel < channels; channel += blockDim.x / 32) {
    for (int tap = lane; tap < taps; tap += 32) {
      to[static_cast<i64>(channel) * args.taps + tap] = sums[channel * pitch + tap];
    }
  }
}
