// fprop of a first layer, whose few input channels would leave a k-tile mostly empty (cp.async, mma.sync).
// Launched by first_forward.py.
//
//   y[n, k, o] = sum over c and r of x[n, c, o*stride + r - pad] * w[k, c, r].
// M = positions q of a row of y, N = channels of y, K = kernel rows x columns of windows: the matrices of
// first_windows.cuh, whose columns are the taps of a kernel row x channels. Products are those of mma.sync,
// which rounds float32 to TF32; with EXACT they are float32's own, by FMA instructions.
//
// Grid: blocks of channels (fastest), ranges of units.
// Block: 32 * `warp_channels` channels and a range of units. Warps: warp_channels x warps along the unit, each
//   with 32 positions of one row and 32 channels. An mma step takes two column tiles from the list of all
//   kernel rows' tiles. With RESIDENT a warp keeps up to PAIRS such steps' weights in registers (T = 1); else
//   it reads them from shared memory, one tap along D after the other.
// Shared memory (dynamic): STAGES units' rows of x as loaded and their windows, and the weights; counted by
//   first_forward.py.
// Preconditions: dilation 1, one group, x contiguous in channels and W, 4-byte aligned. Positions outside the
//   input are zeros.
// Determinism: one order of additions per result.
// Limits: units and positions of a row below 2^31; 64-bit offsets elsewhere.
#include "core/epilogue.cuh"
#include "conv/first_windows.cuh"

using namespace convgrad;

struct FirstForwardArgs {
  const void* x;
  const void* w;
  void* y;
  const void* accumulate;  // like y, or null
  const void* bias;        // one per channel of y, or null
  i64 x_stride[6];         // N G C D H W, in elements
  i64 y_stride[6];
  i64 w_stride[6];  // G K C T R S
  WindowArgs windows;
  float alpha;
  float beta;
  int activation;
  int plain;  // the epilogue is at most a bias
  int y_channels;
  int channel_blocks;
  int warp_channels;
  int ranges;
  int wide_stores;  // y's channels are contiguous in whole 16-byte chunks
};

namespace {

using T = ELEMENT;
constexpr bool kWide = sizeof(T) == 4, kExact = EXACT;
constexpr int kBytes = static_cast<int>(sizeof(T));
constexpr int kChunk = 16 / kBytes;
constexpr int kSteps = 8;                    // steps whose coordinates are precomputed
constexpr int kTilesOfPair = kWide ? 1 : 2;  // column tiles per mma

constexpr int kMostTiles = 256;  // column tiles per tap along D

struct Tile {
  int row, bytes;
};

// Channels are permuted so that a lane's accumulators of four tiles are eight adjacent channels:
// column `column` of tile `tile` is channel 8*(column / 2) + 2*tile + column % 2.
__device__ __forceinline__ int channel_of(int tile, int column) {
  return column / 2 * 8 + tile * 2 + column % 2;
}

// Stores eight results; in float32, the second half only if `all`.
__device__ __forceinline__ void store_eight(float* to, const float (&values)[8], bool all) {
  *reinterpret_cast<float4*>(to) = make_float4(values[0], values[1], values[2], values[3]);
  if (!all) return;
  *reinterpret_cast<float4*>(to + 4) = make_float4(values[4], values[5], values[6], values[7]);
}
template <class U>
__device__ __forceinline__ void store_eight(U* to, const float (&values)[8], bool) {
  *reinterpret_cast<uint4*>(to) =
      make_uint4(narrow_x2<U>(values[0], values[1]), narrow_x2<U>(values[2], values[3]),
                 narrow_x2<U>(values[4], values[5]), narrow_x2<U>(values[6], values[7]));
}

}  // namespace

extern "C" __global__ void __launch_bounds__(384, 1)
    first_forward(const __grid_constant__ FirstForwardArgs args) {
  extern __shared__ uint4 shared[];
  char* const base = reinterpret_cast<char*>(shared);
  const WindowArgs& geometry = args.windows;
  const int thread = threadIdx.x, threads = blockDim.x, lane = thread & 31, warp = thread >> 5;
  const int taps = geometry.kernel[0], rows = geometry.kernel[1];
  const int warp_channel = warp % args.warp_channels, warp_place = warp / args.warp_channels;
  const int parts = geometry.segment / 32;  // warps along a row
  const int warp_row = warp_place / parts, warp_q = warp_place % parts * 32;
  const int first_channel = (blockIdx.x % args.channel_blocks * args.warp_channels + warp_channel) * 32;
  const int range = blockIdx.x / args.channel_blocks;
  const int unit0 = static_cast<int>(static_cast<i64>(geometry.units) * range / args.ranges);
  const int unit1 = static_cast<int>(static_cast<i64>(geometry.units) * (range + 1) / args.ranges);

  Windows<T> x{geometry, args.x_stride, static_cast<const T*>(args.x), base, nullptr};
  x.raws = base + x.ring_bytes();
  char* const weights = x.raws + STAGES * x.raw_bytes();
  const int tiles = rows * geometry.column_tiles;  // per tap along D
  const int padded = (tiles + kTilesOfPair - 1) / kTilesOfPair * kTilesOfPair;
  const u32 w_pitch = (kWide ? (taps * padded * 8 + 4) * 4 : (taps * padded | 1) * 16);

  // For each column tile, its kernel row and its offset in a window.
  __shared__ Tile places[kMostTiles];
  for (int i = thread; i < tiles; i += threads) {
    const int row = i / geometry.column_tiles;
    places[i] = {row, (i - row * geometry.column_tiles) * 8 * kBytes};
  }
  // Weights: one row per channel of the block, in the order of the GEMM's K.
  const T* const w = static_cast<const T*>(args.w);
  const int per_channel = taps * padded * 8;
#pragma unroll 1
  for (int i = thread; i < args.warp_channels * 32 * per_channel; i += threads) {
    const int row = i / per_channel, at = i - row * per_channel;
    const int group = row / 32, tile = row % 32 / 8, column = row % 8;
    const int k = (blockIdx.x % args.channel_blocks * args.warp_channels + group) * 32 +
                  channel_of(tile, column);
    const int t = at / (padded * 8), rest = at - t * (padded * 8);
    const int r = rest / (geometry.column_tiles * 8), in_row = rest - r * geometry.column_tiles * 8;
    const int s = in_row / geometry.channels, c = in_row - s * geometry.channels;
    T value = {};
    if (k < args.y_channels && r < rows && s < geometry.kernel[2]) {
      value = w[k * args.w_stride[1] + c * args.w_stride[2] + t * args.w_stride[3] +
                r * args.w_stride[4] + s * args.w_stride[5]];
    }
    reinterpret_cast<T*>(weights + row * w_pitch)[at] = value;
  }
  __syncthreads();

  // The B fragment: for 16-bit types, of both column tiles of a pair.
  const u32 b_at = shared_address(weights) + (warp_channel * 32 + (lane & 7)) * w_pitch +
                   (lane >> 3 & 1) * 16;
  const auto load_b = [&](u32 (&to)[2], int pair, int n) {
    ldmatrix(to, b_at + n * 8 * w_pitch + pair * (kTilesOfPair * 8 * kBytes));
    if constexpr (kWide) {
      to[0] = to_tf32(to[0]);
      to[1] = to_tf32(to[1]);
    }
  };
  const int pairs = padded / kTilesOfPair;
#if RESIDENT
  u32 b[PAIRS][4][2];
#pragma unroll
  for (int pair = 0; pair < PAIRS; ++pair) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (pair < pairs) load_b(b[pair][n], pair, n);
    }
  }
#endif

  float sum[2][4][4];
  const u32 windows_at = shared_address(base);
  // This lane's address in a pair of tiles: the upper half-warp reads the second one. Past the last
  // tile, the last one is read again, with weights of zero.
  const int half = lane >> 4, tile_half = kWide ? 0 : half;
  const u32 lane_at = windows_at + (warp_q + (lane & 15)) * x.pitch() + (kWide ? half * 16 : 0);
  const auto window_of = [&](int first_slot, int pair) {
    const Tile tile = places[min(pair * kTilesOfPair + tile_half, tiles - 1)];
    int slot = first_slot + tile.row;
    if (slot >= x.ring_rows()) slot -= x.ring_rows();
    return lane_at + slot * x.row_bytes() + tile.bytes;
  };
  const auto multiply = [&](int ring, [[maybe_unused]] int tap) {
    const int first_slot = ring + geometry.stride[1] * warp_row;
#if RESIDENT
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair) {
      if (pair >= pairs) continue;
#else
    for (int pair = 0; pair < pairs; ++pair) {
      u32 weight[4][2];
#pragma unroll
      for (int n = 0; n < 4; ++n) load_b(weight[n], tap * pairs + pair, n);
#endif
      const u32 from = window_of(first_slot, pair);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        u32 a[4];
        ldmatrix(a, from + m * 16 * x.pitch());
        if constexpr (kWide) {
#pragma unroll
          for (int e = 0; e < 4; ++e) a[e] = to_tf32(a[e]);
        }
#pragma unroll
        for (int n = 0; n < 4; ++n) {
#if RESIDENT
          mma<T>(sum[m][n], a, b[pair][n][0], b[pair][n][1]);
#else
          mma<T>(sum[m][n], a, weight[n][0], weight[n][1]);
#endif
        }
      }
    }
  };

  // A lane has the same results as with mma: 4 positions, 8 apart, of 8 channels.
  const char* const x_lane = base + (warp_q + (lane >> 2)) * x.pitch();
  const char* const w_lane = weights + (warp_channel * 32 + (lane & 3) * 2) * w_pitch;
  const auto multiply_exact = [&](int ring, int tap) {
    const int first_slot = ring + geometry.stride[1] * warp_row;
#pragma unroll 1
    for (int at = 0; at < tiles * 2; ++at) {  // half a column tile, 16 bytes, at a time
      const Tile tile = places[at / 2];
      int slot = first_slot + tile.row;
      if (slot >= x.ring_rows()) slot -= x.ring_rows();
      const char* const from = x_lane + slot * x.row_bytes() + tile.bytes + at % 2 * 16;
      float4 value[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        value[i] = *reinterpret_cast<const float4*>(from + i * 8 * x.pitch());
      }
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const float4 weight = *reinterpret_cast<const float4*>(
            w_lane + (e / 2 * 8 + e % 2) * w_pitch + (tap * tiles * 2 + at) * 16);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& result = sum[i / 2][e / 2][i % 2 * 2 + e % 2];
          result = fmaf(value[i].x, weight.x, result);
          result = fmaf(value[i].y, weight.y, result);
          result = fmaf(value[i].z, weight.z, result);
          result = fmaf(value[i].w, weight.w, result);
        }
      }
    }
  };

  const auto write = [&](const Unit& unit) {
    const int p = unit.p0 + warp_row;
    if (p >= geometry.y_size[1]) return;
    const int channel = first_channel + (lane & 3) * 8;
    if (channel >= args.y_channels) return;
    const i64 row_at = unit.n * args.y_stride[0] + unit.z * args.y_stride[3] +
                       p * args.y_stride[4] + channel * args.y_stride[2];
    // Eight adjacent channels of a position at a time.
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int q = warp_q + i * 8 + (lane >> 2);
      if (q >= unit.width || !args.plain) continue;
      float values[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) values[e] = sum[i / 2][e / 2][i % 2 * 2 + e % 2];
      T* const to = static_cast<T*>(args.y) + row_at + (unit.q0 + q) * args.y_stride[5];
      if (args.wide_stores) {
        store_eight(to, values, channel + kChunk < args.y_channels);
      } else {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          if (channel + e < args.y_channels) to[e * args.y_stride[2]] = narrow<T>(values[e]);
        }
      }
    }
    if (args.plain) return;
    // With an epilogue, one result at a time.
#pragma unroll 1
    for (int i = 0; i < 32; ++i) {
      const int q = warp_q + i / 8 * 8 + (lane >> 2), k = channel + i % 8;
      if (q >= unit.width || k >= args.y_channels) continue;
      float value = 0;
#pragma unroll
      for (int other = 0; other < 32; ++other) {
        const int of = other / 8, e = other % 8;
        value = other == i ? sum[of / 2][e / 2][of % 2 * 2 + e % 2] : value;
      }
      const i64 place = row_at + (unit.q0 + q) * args.y_stride[5] + i % 8 * args.y_stride[2];
      static_cast<T*>(args.y)[place] = narrow<T>(finish_at<T>(args, value, place, k));
    }
  };

  // A step is one tap along D of one unit. With several taps, steps cannot reuse windows.
  const int first_step = unit0 * taps, end_step = unit1 * taps;
  const auto step_of = [&](int step) {
    const int index = taps == 1 ? step : step / taps;
    return x.unit_of(index, step - index * taps, taps > 1 || step == first_step);
  };
  // Coordinates of upcoming steps, each computed by one thread.
  __shared__ Unit steps[kSteps];
  if (thread < STAGES) steps[thread] = step_of(first_step + thread);
  __syncthreads();
  const auto copy_step = [&](int step, int stage) {
    if (step < end_step) {
      const Unit& unit = steps[(step - first_step) % kSteps];
      if (unit.inside) x.copy(unit, stage);
    }
    cp_async_commit();
  };
  for (int i = 0; i < STAGES - 1; ++i) copy_step(first_step + i, i);
  int stage = 0, ring = 0, tap = 0;
  bool ready = false;
  for (int step = first_step; step < end_step; ++step) {
    const int place = step - first_step;
    cp_async_wait<STAGES - 3>();  // for this step and the next
    __syncthreads();
    if (thread == 0) steps[(place + STAGES) % kSteps] = step_of(step + STAGES);
    const Unit& unit = steps[place % kSteps];
    copy_step(step + STAGES - 1, stage == 0 ? STAGES - 1 : stage - 1);
    const int next = stage + 1 == STAGES ? 0 : stage + 1;
    if (tap == 0) {
      // If the epilogue is just a bias, accumulators start from it.
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const int k = first_channel + (lane & 3) * 8 + e;
        const bool biased = args.plain && args.bias != nullptr && k < args.y_channels;
        const float start = biased ? widen(static_cast<const T*>(args.bias)[k]) : 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[i / 2][e / 2][i % 2 * 2 + e % 2] = start;
      }
    }
    if (unit.inside && !ready) {
      x.lay_out(unit, stage, ring);
      __syncthreads();
    }
    // Some warps lay out the next step before their mma and some after, so that the two overlap.
    const Unit& after = steps[(place + 1) % kSteps];
    ready = step + 1 < end_step && after.inside && !after.fresh;
    const int here = ring;
    if (ready) {
      ring += x.ahead();
      if (ring >= x.ring_rows()) ring -= x.ring_rows();
    }
    const bool before = (warp >> 2) & 1;
    if (ready && before) x.lay_out(after, next, ring);
    if (unit.inside) {
      if constexpr (kExact) {
        multiply_exact(here, tap);
      } else {
        multiply(here, tap);
      }
    }
    if (ready && !before) x.lay_out(after, next, ring);
    if (++tap == taps) {
      tap = 0;
      write(unit);
    }
    stage = next;
  }
}
