// The result of hopper_weight.cu: how tiles cover it, and how accumulators become results. Launched by
// hopper_weight.py.
#pragma once

#include "ptx/load_store.cuh"
#include "core/divider.cuh"
#include "core/epilogue.cuh"
#include "conv/scaled_halves.cuh"
#include "ptx/mma.cuh"

namespace convgrad {

// The result tensor and its tiling.
struct WeightResult {
  void* w;
  const void* accumulate;  // like w, or null
  float* partials;         // [share][tile after the whole ones][fragment][thread][4]
  i64 w_stride[6];         // G K C T R S, in elements; accumulate's too
  float alpha;
  float beta;
  int in_channels;
  int out_channels;
  int kernel[3];
  int shared_taps;   // adjacent taps along W that one box of x serves
  int along;         // groups of such taps in a kernel row
  int boxes;         // boxes of x in a tile
  int row_tiles;
  int column_tiles;
  int rows_first;    // tiles are ordered along rows first, not along columns
  int whole;         // tiles with a single share; `shares` blocks split the others' K
  int shares;
  int share_steps;   // k-tiles of a share (or of a block's part of a cluster's); some have one more
  int warpgroups;    // warpgroups of a tile, each with:
  int rows;          //   64-row blocks,
  int products;      //   column blocks (`products`) per 64 rows,
  int fragments;     //   fragments of 8 columns per product
  int channels;      // channels of a box of x
  int spread;        // warpgroups divide the columns, not the rows
  int pairs;         // pairs of channels are contiguous and aligned in w
  int eights;        // plain results with channels contiguous and aligned by eights
  int wide;          // w is float32, regardless of the type of x and y
  Divider by_groups;    // groups of taps that share a box
  Divider by_along;     // groups in a kernel row
  Divider by_kernel;    // kernel[1]
  Divider by_row;       // tiles along the first direction
  Divider by_parted;    // units of a share, a cluster counted as one
};

// The operands in global memory, for recomputing single results.
struct WeightSource {
  const void* x;
  const void* y;
  i64 x_stride[6];  // N G C D H W, in elements
  i64 y_stride[6];
  int batch;
  int x_size[3];
  int y_size[3];
  int stride[3];
  int dilation[3];
  int pad[3];
  // For float16 copies scaled from float32 (scaled_halves.cuh); x and y are then float32.
  float doubt;                 // 2^17 / the fewest terms of any sum, see `inverse_of`
  const ChannelRange* ranges;  // of x's channels, rounded up to eight, then of y's
};

// The boxes of x in column order: groups of `shared_taps` taps along W (fastest), then channels.
struct Box {
  int c, t, r, s;
  bool real;
};

__device__ __forceinline__ Box box_at(const WeightResult& of, int index) {
  const int along = of.along, groups = of.kernel[0] * of.kernel[1] * along;
  const int chunk = divide(index, of.by_groups), group = index - chunk * groups;
  const int outer = divide(group, of.by_along), t = divide(outer, of.by_kernel);
  const int c = chunk * of.channels;
  return {c, t, outer - t * of.kernel[1], (group - outer * along) * of.shared_taps,
          c < of.in_channels};
}

// The coordinates of a tile.
struct Place {
  int row, column;
};

__device__ __forceinline__ Place place_of(const WeightResult& of, int tile) {
  const int fast = of.rows_first ? of.row_tiles : of.column_tiles;
  const int slow = divide(tile, of.by_row), rest = tile - slow * fast;
  return of.rows_first ? Place{rest, slow} : Place{slow, rest};
}

// The rows and columns of a tile that a thread holds: two columns of each fragment, in rows `k` and k +
// 8; the next 64 rows are in its next fragments.
struct Own {
  int first_box, k, column;

  __device__ __forceinline__ Own(const WeightResult& of, int tile, int warpgroup, int thread) {
    const Place place = place_of(of, tile);
    const int row_boxes = of.spread ? of.rows : of.rows * of.warpgroups;
    const int each = of.shared_taps > 1 ? 1 : of.fragments * 8 / of.channels;
    first_box = place.column * of.boxes + (of.spread ? warpgroup * of.products * each : 0);
    k = (place.row * row_boxes + (of.spread ? 0 : warpgroup * of.rows)) * 64 + thread / 32 * 16 +
        thread % 32 / 4;
    column = thread % 4 * 2;
  }
  // The tap and first channel of the fragments of one product, from `block` * channels on.
  __device__ __forceinline__ Box box(const WeightResult& of, int product, int block) const {
    const bool shared = of.shared_taps > 1;
    const int each = shared ? 1 : of.fragments * 8 / of.channels;
    Box found = box_at(of, first_box + product * each + (shared ? 0 : block));
    if (shared) found.s += block;
    found.real &= found.s < of.kernel[2];
    return found;
  }
};

__device__ __forceinline__ i64 result_at(const WeightResult& of, int k, const Box& box) {
  return k * of.w_stride[1] + box.c * of.w_stride[2] + box.t * of.w_stride[3] +
         box.r * of.w_stride[4] + box.s * of.w_stride[5];
}

// Recomputes one result in float32 from the unscaled tensors, where scaling may have lost bits.
template <class T>
__device__ __noinline__ float defined_sum(const WeightSource& of, int k, const Box& box) {
  const T* const x = static_cast<const T*>(of.x) + box.c * of.x_stride[2];
  const T* const y = static_cast<const T*>(of.y) + k * of.y_stride[2];
  float sum = 0;
#pragma unroll 1
  for (int n = 0; n < of.batch; ++n) {
#pragma unroll 1
    for (int z = 0; z < of.y_size[0]; ++z) {
      const int d = z * of.stride[0] + box.t * of.dilation[0] - of.pad[0];
      if (static_cast<u32>(d) >= static_cast<u32>(of.x_size[0])) continue;
#pragma unroll 1
      for (int p = 0; p < of.y_size[1]; ++p) {
        const int h = p * of.stride[1] + box.r * of.dilation[1] - of.pad[1];
        if (static_cast<u32>(h) >= static_cast<u32>(of.x_size[1])) continue;
        const T* const x_row = x + n * of.x_stride[0] + d * of.x_stride[3] + h * of.x_stride[4];
        const T* const y_row = y + n * of.y_stride[0] + z * of.y_stride[3] + p * of.y_stride[4];
#pragma unroll 4
        for (int q = 0; q < of.y_size[2]; ++q) {
          const int w = q * of.stride[2] + box.s * of.dilation[2] - of.pad[2];
          if (static_cast<u32>(w) >= static_cast<u32>(of.x_size[2])) continue;
          sum += widen(y_row[q * of.y_stride[5]]) * widen(x_row[w * of.x_stride[5]]);
        }
      }
    }
  }
  return sum;
}

__device__ __forceinline__ int in_eights(int channels) { return (channels + 7) / 8 * 8; }

// How the sums of a scaled channel are unscaled (scaled_halves.cuh), and the channel's part of the
// magnitude below which a sum is in doubt.
struct Inverse {
  u32 powers;  // two powers, packed as bfloat16 to save registers
  float least;

  __device__ __forceinline__ float first() const { return __uint_as_float(powers & 0xffff0000); }
  __device__ __forceinline__ float second() const { return __uint_as_float(powers << 16); }
};
struct InversePair {
  Inverse first, second;
};

// Each element that lost bits has an error of at most 2^-25 times the other factor, which is below 2^16;
// all of them together may reach 2^-26 times the number of terms of the sum, a quarter of the error of
// adding as many terms. Doubled, for rounding.
__device__ __forceinline__ Inverse inverse_of(const Unscaling& by, const WeightSource& source) {
  const float each = fminf(__uint_as_float(by.lost_peak) * 0x1p25f, 1.0f);
  return {by.powers, static_cast<float>(by.lost) * each * source.doubt};
}
__device__ __forceinline__ const Unscaling* unscalings(const WeightResult& of,
                                                       const WeightSource& source) {
  return unscalings_of(source.ranges, in_eights(of.in_channels) + in_eights(of.out_channels));
}
// For grad_output's channel k; neutral for a channel beyond the last.
__device__ __forceinline__ Inverse inverse_at(const WeightResult& of, const WeightSource& source, int k) {
  const int row = in_eights(of.in_channels) + min(k, of.out_channels - 1);
  return inverse_of(unscalings(of, source)[row], source);
}
// For the input's channels c and c + 1, c even.
__device__ __forceinline__ InversePair inverses_at(const WeightResult& of, const WeightSource& source,
                                                   int c) {
  const Unscaling* const by = unscalings(of, source) + c;
  return {inverse_of(by[0], source), inverse_of(by[1], source)};
}

// Marks a sum in doubt: a NaN that no arithmetic produces. Non-finite sums are never in doubt.
constexpr u32 kDoubted = 0x7fc0d0b7;
__device__ __forceinline__ bool is_doubted(float sum) { return __float_as_uint(sum) == kDoubted; }

// Factors are applied alternately, so that no intermediate leaves float32's range unless the result does.
__device__ __forceinline__ float unscaled(float sum, const Inverse& x, const Inverse& y) {
  const float found = sum * x.first() * y.first() * x.second() * y.second();
  return fabsf(sum) < x.least + y.least ? __uint_as_float(kDoubted) : found;
}
// Two channels of rows k and k + 8.
__device__ __forceinline__ float4 unscaled_four(const float4& sum, const InversePair& x,
                                                const InversePair& y) {
  return make_float4(unscaled(sum.x, x.first, y.first), unscaled(sum.y, x.second, y.first),
                     unscaled(sum.z, x.first, y.second), unscaled(sum.w, x.second, y.second));
}
__device__ __forceinline__ bool some_doubted(const float4& sum) {
  return is_doubted(sum.x) || is_doubted(sum.y) || is_doubted(sum.z) || is_doubted(sum.w);
}

// Recomputes those of four results that are in doubt.
template <class E>
__device__ __noinline__ float4 settled_four(const WeightResult& of, const WeightSource& source, int k,
                                            const Box& box, float4 sum) {
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    Box at = box;
    at.c += i % 2;
    const int row = k + i / 2 * 8;
    float& one = i == 0 ? sum.x : i == 1 ? sum.y : i == 2 ? sum.z : sum.w;
    if (!is_doubted(one) || at.c >= of.in_channels || row >= of.out_channels) continue;
    one = defined_sum<E>(source, row, at);
  }
  return sum;
}

// Two consecutive elements, aligned to their combined size.
__device__ __forceinline__ void put_pair(float* to, float first, float second) {
  *reinterpret_cast<float2*>(to) = make_float2(first, second);
}
template <class R>
__device__ __forceinline__ void put_pair(R* to, float first, float second) {
  *reinterpret_cast<u32*>(to) = narrow_x2<R>(first, second);
}

// Finishes and stores the sums of a channel and, where `both`, of the next.
template <class R>
__device__ __forceinline__ void put_two(const WeightResult& of, i64 at, float first, float second,
                                        bool both) {
  const R* const accumulate = static_cast<const R*>(of.accumulate);
  R* const w = static_cast<R*>(of.w);
  auto finished = [&](float sum, i64 to) {
    sum *= of.alpha;
    if (accumulate != nullptr) sum += of.beta * widen(accumulate[to]);
    return sum;
  };
  first = finished(first, at);
  if (!both) {
    w[at] = narrow<R>(first);
    return;
  }
  second = finished(second, at + of.w_stride[2]);
  if (!of.pairs) {
    w[at] = narrow<R>(first);
    w[at + of.w_stride[2]] = narrow<R>(second);
  } else {
    put_pair(w + at, first, second);
  }
}

}  // namespace convgrad
