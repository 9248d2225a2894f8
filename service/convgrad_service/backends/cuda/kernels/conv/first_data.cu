// dgrad of a first layer, whose few input channels would leave a channel tile mostly empty (cp.async,
// mma.sync). Launched by first_data.py.
//
//   x[n, c, i] = sum over k and taps r with an o: y[n, k, o] * w[k, c, r], i = o*stride + r - pad.
// The taps x channels of a kernel row are contiguous in w and form the columns of one GEMM:
//   rows[h][q, (s, c)] = sum over d, the taps (t, r) of h, and k of y[z, p, q, k] * w[k, t, r, s, c],
// M = positions q of a row of y, N = S*C, K = channels of y. A row of y contributes to R rows of x, whose
// accumulators stay in registers: each is complete when y has advanced by `stride` rows, so a row of y is
// read from global memory once and from shared memory once per warp. The remaining sum, over the at most
// ceil(S / stride) positions q that contribute to a position of x, goes through shared memory.
//
// Grid: segments of positions along W (fastest), segments of rows, planes d, images n.
// Block: one segment; walks down the rows of y that contribute. Warps: `column_tiles` tiles of 8 columns x warps
//   along q with two tiles of 16 positions each; at most 384 threads. With RESIDENT a warp keeps its columns'
//   weights in registers (T = 1, at most DEPTH steps of K); else it reads them from shared memory per row.
// Shared memory (dynamic): STAGES rows of y, the weights, two sets of `stride` finished rows, and the table of
//   sums for each position of x; counted by first_data.py.
// Preconditions: dilation 1, one group, channels of y contiguous in whole 16-byte chunks.
// Determinism: one order of additions per result, however x is divided among blocks.
// Limits: element offsets along a row of x and y below 2^31; 64-bit elsewhere.
#include "core/epilogue.cuh"
#include "ptx/mma.cuh"

using namespace convgrad;

struct FirstDataArgs {
  const void* y;
  const void* w;
  void* x;
  const void* accumulate;  // like x, or null
  const void* bias;        // one per channel of x, or null
  i64 y_stride[6];         // N G C D H W, in elements
  i64 x_stride[6];
  i64 w_stride[6];  // G K C T R S
  float alpha;
  float beta;
  int activation;
  int plain;  // no epilogue
  int channels;
  int y_chunks;  // 16-byte chunks of y's channels
  int y_channels;
  int x_size[3];
  int y_size[3];
  int kernel[3];
  int stride[3];
  int pad[3];
  int column_tiles;
  int steps;         // k-steps of 32 bytes of y's channels
  int positions;     // positions of y in a stage, a multiple of 16
  int row_segments;  // segments along H
  int segment_rows;  // rows of y that a segment advances by
  int segments;      // segments along W
  int segment;       // positions of x in a segment along W
  int channels_last;
};

namespace {

using T = ELEMENT;
constexpr int kWide = sizeof(T) == 4;
constexpr int kChunk = 16 / static_cast<int>(sizeof(T));
constexpr int kDepth = 32 / static_cast<int>(sizeof(T));  // K of an mma

// For a position of x: its sums in a finished row, and its offset in a row of x.
struct Place {
  u32 sums;  // bits 0 to 15: the first one, bits 16 and above: their count
  int x;
};

template <int kValue>
struct Count {
  static constexpr int value = kValue;
};

__device__ __forceinline__ int floor_div(int a, int b) { return a >= 0 ? a / b : -((b - 1 - a) / b); }

// Loads the B fragment of one kernel row and k-step.
__device__ __forceinline__ void load_weights(u32 (&to)[2], u32 from, u32 pitch) {
  const int lane = threadIdx.x & 31;
  if constexpr (kWide) {
    const u32 at = from + (lane & 3) * pitch + (lane >> 2) * 4;
    to[0] = to_tf32(ld_shared_u32(at));
    to[1] = to_tf32(ld_shared_u32(at + 4 * pitch));
  } else {
    ldmatrix_trans(to, from + (lane & 15) * pitch);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(384, 1)
    first_data(const __grid_constant__ FirstDataArgs args) {
  extern __shared__ uint4 shared[];
  char* const base = reinterpret_cast<char*>(shared);
  const int thread = threadIdx.x, threads = blockDim.x, lane = thread & 31, warp = thread >> 5;
  const int column_tile = warp % args.column_tiles, warp_row = warp / args.column_tiles;
  const int warp_rows = (threads >> 5) / args.column_tiles;
  const int stride_h = args.stride[1], stride_w = args.stride[2];

  u32 block = blockIdx.x;
  const int segment = block % args.segments;
  block /= args.segments;
  const int row_segment = block % args.row_segments;
  block /= args.row_segments;
  const int d = block % args.x_size[0];
  const int n = block / args.x_size[0];

  // Positions along W start at w0 in x and at q0 in y.
  const int w0 = segment * args.segment;
  const int owned = min(args.segment, args.x_size[2] - w0);
  const int q0 = max(0, floor_div(w0 + args.pad[2] - args.kernel[2], stride_w) + 1);
  const int q_end = min(args.y_size[2], floor_div(w0 + owned - 1 + args.pad[2], stride_w) + 1);
  const int width = max(0, q_end - q0);
  // Rows: after row p of y, rows p*stride - pad + [0, stride) of x are complete.
  const int finish0 = floor_div(args.pad[1], stride_h) + row_segment * args.segment_rows;
  const int finish1 = min(finish0 + args.segment_rows - 1,
                          floor_div(args.x_size[1] - 1 + args.pad[1], stride_h));
  const int p0 = finish0 - (args.kernel[1] - 1) / stride_h;
  const int real0 = max(0, p0), real1 = min(args.y_size[1] - 1, finish1);

  const u32 y_pitch = (2 * args.steps + 1) * 16;
  const u32 stage_bytes = args.positions * y_pitch;
  const u32 units = (args.kernel[0] * ROWS * args.column_tiles) | 1;
  const u32 w_pitch = units * 8 * static_cast<u32>(sizeof(T));
  char* const weights = base + STAGES * stage_bytes;
  float* const finished =
      reinterpret_cast<float*>(weights + args.steps * kDepth * w_pitch);
  const int sum_pitch = (args.column_tiles | 1) * 8;
  const int sum_row = args.positions * sum_pitch;
  Place* const places = reinterpret_cast<Place*>(finished + 2 * stride_h * sum_row);
  const int elements = owned * args.channels;

  // Taps along D that contribute to this plane: the j-th is t0 + j*stride, in plane z0 - j of y.
  int t0 = floor_div(d + args.pad[0], args.stride[0]);
  int z0 = t0;
  t0 = d + args.pad[0] - t0 * args.stride[0];
  int planes = t0 < args.kernel[0] ? (args.kernel[0] - 1 - t0) / args.stride[0] + 1 : 0;
  const int beyond = max(0, z0 - (args.y_size[0] - 1));
  t0 += beyond * args.stride[0];
  z0 -= beyond;
  planes = max(0, min(planes - beyond, z0 + 1));

  // Each thread copies one column of chunks of y.
  const int copy_row = thread / args.y_chunks, copy_chunk_at = thread - copy_row * args.y_chunks;
  const int copy_rows = threads / args.y_chunks;
  const T* const y = static_cast<const T*>(args.y) + n * args.y_stride[0] +
                     z0 * args.y_stride[3] + q0 * args.y_stride[5] + copy_chunk_at * kChunk;
  const u32 ring = shared_address(base);
  int put_p = planes > 0 ? real0 : real1 + 1, put_j = 0;
  const auto copy_row_of_y = [&](int stage) {
    if (put_p <= real1) {
      if (copy_row < copy_rows) {
        const T* const from = y - put_j * args.y_stride[3] + put_p * args.y_stride[4];
        const u32 to = ring + stage * stage_bytes + copy_chunk_at * 16;
#pragma unroll 2
        for (int q = copy_row; q < width; q += copy_rows) {
          cp_async_zfill(to + q * y_pitch, from + q * args.y_stride[5], true);
        }
      }
      if (RESIDENT || ++put_j == planes) {
        put_j = 0;
        ++put_p;
      }
    }
    cp_async_commit();
  };
  for (int i = 0; i < STAGES - 1; ++i) copy_row_of_y(i);

  // Zero-fill past the last channel, up to a whole k-step.
  for (int i = thread; i < STAGES * args.positions; i += threads) {
    for (int chunk = args.y_chunks; chunk < 2 * args.steps; ++chunk) {
      *reinterpret_cast<uint4*>(base + i * y_pitch + chunk * 16) = make_uint4(0, 0, 0, 0);
    }
  }
  const T* const w = static_cast<const T*>(args.w);
  const int columns = args.column_tiles * 8;
#pragma unroll 4
  for (int i = thread; i < args.steps * kDepth * args.kernel[0] * ROWS * columns; i += threads) {
    const int tap = i / columns, column = i - tap * columns;
    const int k = tap / (args.kernel[0] * ROWS), row = tap - k * (args.kernel[0] * ROWS);
    const int t = row / ROWS, r = row - t * ROWS;
    const int s = column / args.channels, c = column - s * args.channels;
    T value = {};
    if (k < args.y_channels && r < args.kernel[1] && s < args.kernel[2]) {
      value = w[k * args.w_stride[1] + c * args.w_stride[2] + t * args.w_stride[3] +
                r * args.w_stride[4] + s * args.w_stride[5]];
    }
    reinterpret_cast<T*>(weights + k * w_pitch)[row * columns + column] = value;
  }
  const int sum_step = stride_w * args.channels - sum_pitch;
  for (int i = thread; i < elements; i += threads) {
    const int outer = args.channels_last ? args.channels : owned;
    const int high = i / outer, low = i - high * outer;
    const int w_at = args.channels_last ? high : low, c = args.channels_last ? low : high;
    const int reach = w0 + w_at + args.pad[2];
    const int q = floor_div(reach, stride_w), s = reach - q * stride_w;
    const int first = max(0, q - (q_end - 1));
    const int last = min(floor_div(args.kernel[2] - 1 - s, stride_w), q - q0);
    const u32 count = max(0, last - first + 1);
    const int at = count == 0 ? 0
                              : (q - first - q0) * sum_pitch +
                                    (s + first * stride_w) * args.channels + c;
    places[i] = {static_cast<u32>(at) | count << 16,
                 static_cast<int>((w0 + w_at) * args.x_stride[5] + c * args.x_stride[2])};
  }
  __syncthreads();

  const u32 weights_at = shared_address(weights) + column_tile * 8 * static_cast<u32>(sizeof(T));
  const u32 row_bytes = columns * static_cast<u32>(sizeof(T));
#if RESIDENT
  u32 b[DEPTH][ROWS][2];
#pragma unroll
  for (int step = 0; step < DEPTH; ++step) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      load_weights(b[step][r], weights_at + step * kDepth * w_pitch + r * row_bytes, w_pitch);
    }
  }
#endif

  float sum[2][ROWS][4] = {};
  const u32 lane_at = ring + (warp_row * 16 + (lane & 15)) * y_pitch + (lane >> 4) * 16;
  const u32 further = warp_rows * 16 * y_pitch;  // offset of a warp's second tile from its first
  const i64 plane_at = n * args.x_stride[0] + d * args.x_stride[3];
  // Stores rows of x whose sums were written to shared memory before the last barrier.
  const auto write_rows = [&](int p, const float* from) {
    if (p < finish0) return;
#pragma unroll 1
    for (int row = 0; row < stride_h; ++row, from += sum_row) {
      const int h = p * stride_h - args.pad[1] + row;
      if (h < 0 || h >= args.x_size[1]) continue;
      const i64 at = plane_at + h * args.x_stride[4];
      T* const x = static_cast<T*>(args.x) + at;
#pragma unroll 1
      for (int i = thread; i < elements; i += threads) {
        const Place place = places[i];
        const float* sums = from + (place.sums & 0xffff);
        float total = 0;
#pragma unroll 2
        for (int count = place.sums >> 16; count > 0; --count, sums += sum_step) total += *sums;
        if (!args.plain) {
          const T* accumulate = static_cast<const T*>(args.accumulate);
          if (accumulate != nullptr) accumulate += at + place.x;
          const T* bias = static_cast<const T*>(args.bias);
          if (bias != nullptr) bias += args.channels_last ? i % args.channels : i / owned;
          total = finish<T, float>(total, args.alpha, args.beta, accumulate, bias,
                                   args.activation);
        }
        x[place.x] = narrow<T>(total);
      }
    }
  };

  int stage = 0, set = 0;
  for (int p = p0; p <= finish1; ++p) {
    if (p >= real0 && p <= real1 && planes > 0) {
      for (int j = 0; j < (RESIDENT ? 1 : planes); ++j) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        copy_row_of_y(stage == 0 ? STAGES - 1 : stage - 1);
        const u32 from = lane_at + stage * stage_bytes;
        const u32 tap_at = weights_at + (t0 + j * args.stride[0]) * ROWS * row_bytes;
#if RESIDENT
#pragma unroll
        for (int step = 0; step < DEPTH; ++step) {
#else
        for (int step = 0; step < args.steps; ++step) {
#endif
          u32 a[2][4];
          ldmatrix(a[0], from + step * 32);
          ldmatrix(a[1], from + further + step * 32);
          if constexpr (kWide) {
#pragma unroll
            for (int e = 0; e < 8; ++e) a[e / 4][e % 4] = to_tf32(a[e / 4][e % 4]);
          }
#pragma unroll
          for (int r = 0; r < ROWS; ++r) {
#if RESIDENT
            const u32(&weight)[2] = b[step][r];
#else
            u32 weight[2];
            load_weights(weight, tap_at + step * kDepth * w_pitch + r * row_bytes, w_pitch);
#endif
            mma<T>(sum[0][r], a[0], weight[0], weight[1]);
            mma<T>(sum[1][r], a[1], weight[0], weight[1]);
          }
        }
        if (++stage == STAGES) stage = 0;
      }
    } else {
      __syncthreads();
    }
    if (p > p0) write_rows(p - 1, finished + (set ^ 1) * stride_h * sum_row);

    float* const to = finished + set * stride_h * sum_row + column_tile * 8 + (lane & 3) * 2 +
                      (warp_row * 16 + (lane >> 2)) * sum_pitch;
    const auto put_row = [&](const float (&tile)[4], float* at) {
      *reinterpret_cast<float2*>(at) = make_float2(tile[0], tile[1]);
      *reinterpret_cast<float2*>(at + 8 * sum_pitch) = make_float2(tile[2], tile[3]);
    };
    const auto finish_rows = [&](auto count, int row) {
      constexpr int kCount = decltype(count)::value;
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        for (int r = 0; r < kCount; ++r) {
          put_row(sum[tile][r], to + (row + r) * sum_row + tile * warp_rows * 16 * sum_pitch);
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            sum[tile][r][e] = r + kCount < ROWS ? sum[tile][r + kCount < ROWS ? r + kCount : 0][e]
                                                : 0.0f;
          }
        }
      }
    };
    if (ROWS > 1 && stride_h == 2) {
      finish_rows(Count<(ROWS > 1 ? 2 : 1)>{}, 0);
    } else {
#pragma unroll 1
      for (int row = 0; row < stride_h; ++row) finish_rows(Count<1>{}, row);
    }
    set ^= 1;
  }
  __syncthreads();
  write_rows(finish1, finished + (set ^ 1) * stride_h * sum_row);
}
