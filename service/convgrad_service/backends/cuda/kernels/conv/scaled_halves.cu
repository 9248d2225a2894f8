// Converts two float32 tensors to float16 scaled to use its full range: each channel is multiplied by a power
// of two. Launched by scaled_halves.py.
//
// The power is chosen from a sample of the channel's pixels, so that the tensor is read once: it maps the
// sample's largest finite magnitude (for channels whose sample is zero, the block's) to [2^11, 2^12). The
// kernel writes the copies, channels contiguous and zero-padded to multiples of eight, and records each
// channel's true largest magnitude and the number of non-zero elements that end up below 2^-14, which lose
// bits. NaN and infinities are preserved and ignored by both. Three launches (PASS): clear the records
// (cheaper than a graph's memset node); copy; compute how sums are unscaled, and copy those channels again,
// by their true magnitude, whose sample was not representative. There are usually none, and the last
// launch's blocks exit at once.
//
// Block: 256 threads: `rows` pixels of `lanes` vectors of four channels, kEach times; a sample is kSampled *
//   `rows` pixels. The first of[0].blocks blocks take the first tensor; consecutive blocks have the same
//   pixels and different `chunks` of channels.
// Shared memory: 4 KB.
// Preconditions: channels a multiple of 4, elements aligned to 16 bytes.
// Determinism: all blocks take the same sample; maxima and counts do not depend on order.
// Limits: pixels below 2^31 less a grid's; 64-bit elements.
#include "ptx/load_store.cuh"
#include "core/divider.cuh"
#include "core/opaque.cuh"
#include "ptx/pdl.cuh"
#include "conv/scaled_halves.cuh"
#include "ptx/mma.cuh"

using namespace convgrad;

struct ScaledTensor {
  const float* from;
  f16* to;
  ChannelRange* ranges;
  i64 stride[4];   // of `from`: N D H W, in elements
  Divider by[3];   // D H W
  int size[3];
  int in_order;    // whether all pixels lie stride[3] apart
  int pixels;
  int readable;    // channels, rounded up to 4
  int padded;      // rounded up to 8: those of `to`
  int ranges_at;   // of this tensor
  int all_ranges;  // of both
  int lanes;
  int rows;
  int chunks;
  int blocks;
  int sample_step;  // from one pixel of the sample to the next
};

struct ScaledHalvesArgs {
  ScaledTensor of[2];
};

namespace {

constexpr int kThreads = 256, kEach = 8, kSampled = 4, kClear = 0, kAgain = 2;
constexpr bool kCopiesAgain = PASS == kAgain;
constexpr u32 kLeastWhole = (127 - 14) << 23;  // 2^-14, from where on float16 has all of its bits

__device__ __forceinline__ const float* pixel_of(const ScaledTensor& of, int pixel) {
  if (of.in_order) return of.from + pixel * of.stride[3];
  const int rest2 = divide(pixel, of.by[2]), rest1 = divide(rest2, of.by[1]);
  const int n = divide(rest1, of.by[0]);
  return of.from + n * of.stride[0] + (rest1 - n * of.size[0]) * of.stride[1] +
         (rest2 - rest1 * of.size[1]) * of.stride[2] + (pixel - rest2 * of.size[2]) * of.stride[3];
}

// All threads: returns to every row the maxima, or sums, over rows of each lane's values.
template <bool kSums = false>
__device__ __forceinline__ void over_rows(uint4 (&found)[kThreads], const ScaledTensor& of, int lane,
                                          u32 (&value)[4]) {
  __syncthreads();
  found[threadIdx.x] = make_uint4(value[0], value[1], value[2], value[3]);
  __syncthreads();
  if (kSums) value[0] = value[1] = value[2] = value[3] = 0;
  const auto with = [](u32 all, u32 one) { return kSums ? all + one : max(all, one); };
#pragma unroll 4
  for (int row = 0; row < of.rows; ++row) {
    const uint4 other = found[row * of.lanes + lane];
    value[0] = with(value[0], other.x), value[1] = with(value[1], other.y);
    value[2] = with(value[2], other.z), value[3] = with(value[3], other.w);
  }
}

__device__ __forceinline__ u32 finite_magnitude(float value) {
  const u32 magnitude = __float_as_uint(value) & 0x7fffffff;
  return magnitude < 0x7f800000 ? magnitude : 0;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 3)
    scaled_halves(const __grid_constant__ ScaledHalvesArgs args) {
  launch_dependent_grids();
  if (PASS == kClear) {
    const int index = blockIdx.x * kThreads + threadIdx.x;
    if (index < args.of[0].all_ranges) {
      args.of[0].ranges[index] = {};
      unscalings_of(args.of[0].ranges, args.of[0].all_ranges)[index] = {};
    }
    return;
  }
  if (kCopiesAgain) wait_on_dependent_grids();
  __shared__ uint4 found[kThreads];
  const bool second = blockIdx.x >= args.of[0].blocks;
  const ScaledTensor& of = second ? args.of[1] : args.of[0];
  const int block = blockIdx.x - (second ? args.of[0].blocks : 0);
  const int turn = block / of.chunks, chunk = block - turn * of.chunks, turns = of.blocks / of.chunks;
  const int thread = threadIdx.x, row = thread / of.lanes, lane = thread - row * of.lanes;
  const int c = (chunk * of.lanes + lane) * 4;
  const bool mine = row < of.rows && c < of.padded, real = mine && c < of.readable;
  const int each = of.rows * kEach;

  float4 four[kEach];
  auto load = [&](auto& four, int first, int step) {
#pragma unroll
    for (int j = 0; j < sizeof four / sizeof *four; ++j) {
      const int pixel = first + j * step;
      four[j] = {};
      if (real && pixel < of.pixels) {
        four[j] = *reinterpret_cast<const float4*>(pixel_of(of, pixel) + c);
      }
    }
  };
  auto largest = [&](const auto& four, u32 (&most)[4]) {
#pragma unroll
    for (int j = 0; j < sizeof four / sizeof *four; ++j) {
      most[0] = max(most[0], finite_magnitude(four[j].x));
      most[1] = max(most[1], finite_magnitude(four[j].y));
      most[2] = max(most[2], finite_magnitude(four[j].z));
      most[3] = max(most[3], finite_magnitude(four[j].w));
    }
  };

  auto range_of = [&](int e) { return of.ranges + of.ranges_at + c + e; };
  auto unscaling_of = [&](int e) {
    return unscalings_of(of.ranges, of.all_ranges) + of.ranges_at + c + e;
  };
  u32 sized[4] = {};  // magnitudes that determine the scales
  bool wanted[4] = {};
  if (kCopiesAgain) {
    if (mine) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const ChannelRange range = *range_of(e);
        wanted[e] = !stands(range), sized[e] = wanted[e] ? range.peak : range.guess;
        if (turn == 0 && row == 0) {
          const float2 inverse = powers_of_two(range.peak == 0 ? 0 : -final_scale(range));
          unscaling_of(e)->powers = __float_as_uint(inverse.x) | __float_as_uint(inverse.y) >> 16;
          if (!wanted[e]) {
            unscaling_of(e)->lost = range.lost, unscaling_of(e)->lost_peak = range.lost_peak;
          }
        }
      }
    }
    if (__syncthreads_or(wanted[0] || wanted[1] || wanted[2] || wanted[3]) == 0) return;
  } else {
    __shared__ u32 of_block;
    if (thread == 0) of_block = 0;
    // The first pixels to copy are loaded with the sample.
    load(four, turn * each + row, of.rows);
    float4 some[kSampled];
    load(some, of.sample_step / 2 + row * of.sample_step, of.rows * of.sample_step);
    largest(some, sized);
    over_rows(found, of, lane, sized);
    if (row == 0 && real) {
      atomicMax(&of_block, max(max(sized[0], sized[1]), max(sized[2], sized[3])));
    }
    __syncthreads();
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      sized[e] = guess_from(sized[e] != 0 ? sized[e] : of_block);
    }
  }
  float factor[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) factor[e] = power_of_two(scale_of(sized[e]));
  const bool copies = mine && (!kCopiesAgain || wanted[0] || wanted[1] || wanted[2] || wanted[3]);
  u32 most[4] = {}, lost[4] = {}, lost_peak = 0;  // per channel, and of all four
  int first = turn * each + row;
  if (kCopiesAgain && copies) load(four, first, of.rows);
  while (first < of.pixels && copies) {
    if (!kCopiesAgain) largest(four, most);
    f16* const to = of.to + static_cast<i64>(first) * of.padded + c;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      float value[4] = {four[j].x, four[j].y, four[j].z, four[j].w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const bool zero = value[e] == 0;
        value[e] *= factor[e];
        const u32 scaled = __float_as_uint(value[e]) & 0x7fffffff;
        const bool small = !zero && scaled < kLeastWhole;
        lost[e] += small;
        lost_peak = max(lost_peak, small ? scaled : 0);
      }
      store_if(first + j * of.rows < of.pixels, to + j * of.rows * of.padded,
               make_uint2(narrow_x2<f16>(value[0], value[1]), narrow_x2<f16>(value[2], value[3])));
    }
    first += turns * each;
    load(four, first, of.rows);
  }
  if (!kCopiesAgain) wait_on_dependent_grids();  // `ranges` are clear
  // Added up over the block first: one atomic for each of its channels.
  if (__syncthreads_or(lost_peak != 0 || (lost[0] | lost[1] | lost[2] | lost[3]) != 0)) {
    over_rows<true>(found, of, opaque_value(lane), lost);
    u32 peaks[4] = {lost_peak, lost_peak, lost_peak, lost_peak};
    over_rows(found, of, opaque_value(lane), peaks);
    lost_peak = peaks[0];
    if (row != 0) lost[0] = lost[1] = lost[2] = lost[3] = 0;
  }
  if (copies) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (!kCopiesAgain && turn == 0 && row == 0) range_of(e)->guess = sized[e];
      if (lost[e] == 0 || loses_nothing(sized[e]) || (kCopiesAgain && !wanted[e])) continue;
      atomicAdd(kCopiesAgain ? &unscaling_of(e)->lost : &range_of(e)->lost, lost[e]);
      atomicMax(kCopiesAgain ? &unscaling_of(e)->lost_peak : &range_of(e)->lost_peak, lost_peak);
    }
  }
  if (kCopiesAgain) return;
  // Skip the atomic if the stored value is already larger, to reduce contention.
  const bool last = row == 0 && real;
  u32 known[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    known[e] = last ? *const_cast<const volatile u32*>(&range_of(e)->peak) : ~0u;
  }
  over_rows(found, of, opaque_value(lane), most);
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if (most[e] > known[e]) atomicMax(&range_of(e)->peak, most[e]);
  }
}
