// The gradient of a depthwise convolution's weight, of channels-last tensors with one to three spatial
// dimensions, in registers: shared memory is for the final sums only. The host's side is
// depthwise_weight_direct.py.
//
// w[c, t, r, s] = sum over (n, z, p, q) of y[n, z, p, q, c] *
//                 x[n, z*sd + t*dd - pd, p*STRIDE + r - ph, q*STRIDE + s - pw, c],
// then alpha and beta*accumulate, and one rounding.
// Thread: VECTOR adjacent channels of a strip of COLUMNS columns of y, and a plane of KERNEL x KERNEL
// taps. It walks down a chunk of rows of x, loads rows AHEAD rows before their use, and multiplies each
// by the rows of y that meet it, which are in a ring of registers.
// Unit: whole warps, whose threads have all channels of a tile, then adjacent strips. They are in the
// same row, so an address is the sum of a warp-uniform and a constant part.
// Block: `units` units, each with every blocks * units-th item. An item is a chunk of a group of strips.
// Grid: blocks of equal shares, in a cluster if there are at most 8; tiles of channels; planes of taps.
// Shared memory: depthwise_weight_sum.cuh. Deterministic.
// Relies on its launcher for contiguous channels, strides and channels in multiples of VECTOR, `vectors`
// in multiples of 4, an image's extent below 2^30 elements, items below 2^31, `arrived` being 0.
// Padding is read as zeros.
#include "depthwise/depthwise_weight_args.cuh"
#include "core/divider.cuh"
#include "core/opaque.cuh"
#include "core/vectors.cuh"
#include "depthwise/depthwise_weight_sum.cuh"
#include "depthwise/depthwise_words.cuh"

namespace convgrad {

struct DepthwiseWeightNewArgs : DepthwiseWeightVolume {
  int strips;      // strips of a unit
  int unit_warps;
  int units;       // of a block
  int groups;      // groups of strips in a row
  int chunks;      // chunks of rows in a plane of y
  int rows;        // rows of a chunk
  int items;
  Divider by_unit_warps, by_groups, by_chunks, by_planes;
};

}  // namespace convgrad

using namespace convgrad;

namespace {

using T = ELEMENT;
using Raw = typename RawOf<sizeof(T) * VECTOR>::type;

constexpr int kTaps = KERNEL * KERNEL;
constexpr int kSlots = (KERNEL + STRIDE - 1) / STRIDE;
constexpr int kRead = (COLUMNS - 1) * STRIDE + KERNEL;
// Whether to skip products with rows of y that do not exist, which are many of a large kernel's.
constexpr bool kSkip = KERNEL >= 5;

constexpr int common_multiple(int a, int b) {
  int both = a;
  while (both % b != 0) both += a;
  return both;
}
// Rows of x after which the ring and the rows loaded ahead repeat.
constexpr int kTurn = common_multiple(kSlots * STRIDE, AHEAD);

// The elements of a word if mask is ~0, or zeros. Opaque to the compiler, which would otherwise widen
// them for each use.
__device__ __forceinline__ void widen_masked(Raw raw, u32 mask, float (&wide)[VECTOR]) {
  widen_word<T>(static_cast<Raw>(raw & mask), wide);
#pragma unroll
  for (int v = 0; v < VECTOR; ++v) {
    wide[v] = __uint_as_float(opaque_value(static_cast<int>(__float_as_uint(wide[v]))));
  }
}

__device__ __forceinline__ Raw read_only(const char* from) {
  return __ldg(reinterpret_cast<const Raw*>(from));
}

// Stores a block's sum number `index` as the gradient of its channel and tap.
__device__ __forceinline__ void put(const DepthwiseWeightNewArgs& args, int index, float sum) {
  const int above = divide(index, args.by_vectors), vector = index - above * args.vectors;
  const int c = (blockIdx.y * args.vectors + vector) * VECTOR + above % VECTOR;
  const int tap = above / VECTOR, row = blockIdx.z * KERNEL + tap / KERNEL;
  if (c < args.channels) put_gradient_as<T>(args, c, row, tap % KERNEL, sum);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    depthwise_weight_new(const __grid_constant__ DepthwiseWeightNewArgs args) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ u64 barrier;
  __shared__ bool last;
  const int thread = threadIdx.x, block = blockIdx.x, blocks = gridDim.x;
  const int slots = args.units * args.strips, part = kTaps * VECTOR * args.vectors, quads = part / 4;
  float4* const all_sums = reinterpret_cast<float4*>(shared);
  const BlockSums<THREADS> block_sums(all_sums, all_sums + slots * quads, &barrier, slots, quads, block,
                                      blocks);
  block_sums.begin();

  // Tells the compiler that the value is uniform in a warp.
  const int warp = __shfl_sync(0xffffffffu, thread / 32, 0);
  const int unit = divide(warp, args.by_unit_warps), place = thread - unit * args.unit_warps * 32;
  // Threads without a strip or channels compute too, but their sums are not used.
  const int own_strip = divide(place, args.by_vectors), strip = min(own_strip, args.strips - 1);
  const int vector = place - own_strip * args.vectors;
  const int c = min((static_cast<int>(blockIdx.y) * args.vectors + vector) * VECTOR,
                    args.channels - VECTOR);
  const int top_d = blockIdx.z * args.dilation[0] - args.pad[0];

  float sums[KERNEL][KERNEL][VECTOR] = {};
  const int end = unit < args.units ? args.items : 0;
#pragma unroll 1
  for (int item = block * args.units + unit; item < end; item += blocks * args.units) {
    const int line = divide(item, args.by_groups), group = item - line * args.groups;
    const int plane = divide(line, args.by_chunks), chunk = line - plane * args.chunks;
    const int n = divide(plane, args.by_planes), z = plane - n * args.y_size[0];
    const int d = z * args.stride[0] + top_d;
    if (static_cast<u32>(d) >= static_cast<u32>(args.x_size[0])) continue;
    const int first_row = chunk * args.rows;
    const int rows = min(args.y_size[1] - first_row, args.rows);
    const int top = first_row * STRIDE - args.pad[1];
    const int steps = (rows - 1) * STRIDE + KERNEL;
    const int left_y = (group * args.strips + strip) * COLUMNS;
    const int left_x = left_y * STRIDE - args.pad[2];
    // Columns outside read the nearest column inside and are then set to zero.
    u32 from_x[kRead], from_y[COLUMNS], mask_x[kRead], mask_y[COLUMNS];
#pragma unroll
    for (int i = 0; i < kRead; ++i) {
      const int column = min(max(left_x + i, 0), args.x_size[2] - 1);
      from_x[i] = opaque_value((column * static_cast<int>(args.x_stride[3]) + c) * sizeof(T));
      mask_x[i] = column == left_x + i ? 0xffffffffu : 0;
    }
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) {
      const int column = min(left_y + i, args.y_size[2] - 1);
      from_y[i] = opaque_value((column * static_cast<int>(args.y_stride[3]) + c) * sizeof(T));
      mask_y[i] = column == left_y + i ? 0xffffffffu : 0;
    }

    Raw next_x[AHEAD][kRead], next_y[AHEAD][COLUMNS];
    const char* row_x = reinterpret_cast<const char*>(static_cast<const T*>(args.x) +
                                                      n * args.x_stride[0] + d * args.x_stride[1] +
                                                      top * args.x_stride[2]);
    const char* row_y = reinterpret_cast<const char*>(static_cast<const T*>(args.y) +
                                                      n * args.y_stride[0] + z * args.y_stride[1] +
                                                      first_row * args.y_stride[2]);
    // Rows outside are zeros.
    const auto fetch = [&](int step, int j) {
      const int h = top + step;
      if (h >= 0 && h < args.x_size[1]) {
#pragma unroll
        for (int i = 0; i < kRead; ++i) next_x[j % AHEAD][i] = read_only(row_x + from_x[i]);
      } else {
#pragma unroll
        for (int i = 0; i < kRead; ++i) next_x[j % AHEAD][i] = Raw{};
      }
      row_x += args.x_stride[2] * sizeof(T);
      if (j % STRIDE != 0) return;
      if (step < rows * STRIDE) {
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) next_y[j % AHEAD][i] = read_only(row_y + from_y[i]);
      } else {
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) next_y[j % AHEAD][i] = Raw{};
      }
      row_y += args.y_stride[2] * sizeof(T);
    };
#pragma unroll
    for (int step = 0; step < AHEAD; ++step) fetch(step, step);

    float ring[kSlots][COLUMNS][VECTOR] = {};
#pragma unroll 1
    for (int turn = 0; turn < steps; turn += kTurn) {
#pragma unroll
      for (int j = 0; j < kTurn; ++j) {
        const int step = turn + j;
        if (step >= steps) break;
        if (j % STRIDE == 0) {
#pragma unroll
          for (int i = 0; i < COLUMNS; ++i) {
            widen_masked(next_y[j % AHEAD][i], mask_y[i], ring[j / STRIDE % kSlots][i]);
          }
        }
        float row[kRead][VECTOR];
#pragma unroll
        for (int i = 0; i < kRead; ++i) widen_masked(next_x[j % AHEAD][i], mask_x[i], row[i]);
        fetch(step + AHEAD, j + AHEAD);
#pragma unroll
        for (int r = 0; r < KERNEL; ++r) {
          if (positive_mod(j - r, STRIDE) != 0) continue;
          if (kSkip && (step < r || step - r >= rows * STRIDE)) continue;
          const int slot = positive_mod(j - r, kTurn) / STRIDE % kSlots;
#pragma unroll
          for (int s = 0; s < KERNEL; ++s) {
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

  if (unit < args.units && own_strip < args.strips) {
    float* const to = reinterpret_cast<float*>(all_sums) +
                      (unit * args.strips + own_strip) * part + vector;
#pragma unroll
    for (int i = 0; i < kTaps * VECTOR; ++i) {
      to[i * args.vectors] = sums[i / VECTOR / KERNEL][i / VECTOR % KERNEL][i % VECTOR];
    }
  }
  __syncthreads();
  const int column = blockIdx.z * gridDim.y + blockIdx.y;
  float4* const partials =
      reinterpret_cast<float4*>(args.partials) + static_cast<i64>(column) * blocks * quads;
  block_sums.finish(partials, args.arrived + column, last,
                    [&](int index, float sum) { put(args, index, sum); });
}
