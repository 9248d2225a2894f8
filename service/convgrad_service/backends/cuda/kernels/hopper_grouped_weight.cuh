// The arguments of hopper_grouped_weight.cu, and how its partial sums become results.
#pragma once

#include "epilogue.cuh"
#include "hopper.cuh"

namespace convgrad {

struct HopperGroupedWeightArgs {
  TensorMap x_map;
  TensorMap y_map;
  const void* x;
  const void* y;
  float* partials;
  void* w;
  const void* accumulate;  // like w, or null
  u32* arrived;            // a zero for each slice, left as zeros
  i64 x_stride[3];  // N H W, in elements
  i64 y_stride[3];
  i64 w_stride[6];  // G K C T R S; accumulate's too
  float alpha;
  float beta;
  int plain;           // w's elements lie one after another in the order (k, r, s, c), to be written only
  int wide;            // w holds float32, whatever x and y do
  int channels;        // of all groups,
  int group_channels;  // and of one, on both sides
  int parts;           // blocks of CHANNELS channels that a group has, at least 1
  int batch;
  int x_size[2];
  int y_size[2];
  int pad[2];
  int tile_rows, tile_columns;
  int images, row_tiles, column_tiles;  // of a tile, and tiles of an image
  int tiles, more;              // of a share, and one more of so many, the first ones
  int stages;
  u32 y_at, stage_bytes, x_bytes, y_bytes;
  // Products of a tile: `outer` times `inner`, with so many bytes between them and between the eights
  // of columns of one product.
  int outer_rows, inner;
  u32 x_row, y_row;
  u32 x_image, y_image;
  u32 x_outer, y_outer, inner_bytes;
  u32 x_eight, y_eight;
};

// Where four neighbouring sums belong: those of a channel of y, a tap and channels of x, of which a
// tap has four times two to the `log`.
struct Four {
  int k, tap, c;

  __device__ __forceinline__ Four(int index, int log) {
    const int above = index >> log;
    k = above / 9;
    tap = above - k * 9;
    c = (index - (above << log)) * 4;
  }
};

__device__ __forceinline__ void add(float4& to, const float4& more) {
  to.x += more.x;
  to.y += more.y;
  to.z += more.z;
  to.w += more.w;
}

// Finishes the sums of four neighbouring channels of x.
template <class R>
__device__ __forceinline__ void finish_four(const HopperGroupedWeightArgs& args, i64 at, float4 sum) {
  const R* const accumulate = static_cast<const R*>(args.accumulate);
  const R* const none = nullptr;
  const float values[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const i64 to = at + i * args.w_stride[2];
    const float done = finish<R, float>(values[i], args.alpha, args.beta,
                                        accumulate == nullptr ? none : accumulate + to, none, kNone);
    static_cast<R*>(args.w)[to] = narrow<R>(done);
  }
}
template <class T>
__device__ __forceinline__ void put_four(const HopperGroupedWeightArgs& args, int k, int c, int tap,
                                         float4 sum) {
  const int group = k / args.group_channels;
  const i64 at = group * args.w_stride[0] + (k - group * args.group_channels) * args.w_stride[1] +
                 c * args.w_stride[2] + tap / 3 * args.w_stride[4] + tap % 3 * args.w_stride[5];
  if (args.wide) {
    finish_four<float>(args, at, sum);
  } else {
    finish_four<T>(args, at, sum);
  }
}

// Adds up the partial sums of a slice, `fours` times four, of so many shares.
template <int kTogether, int kAhead, class Put>
__device__ __forceinline__ void sum_shares(const float4* partials, int fours, int shares, Put put) {
  const int thread = threadIdx.x, threads = blockDim.x;
#pragma unroll 1
  for (int i = thread; i < fours; i += kTogether * threads) {
    float4 sum[kTogether] = {};
    const float4* from = partials + i;
#pragma unroll kAhead
    for (int share = 0; share < shares; ++share, from += fours) {
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        if (i + j * threads < fours) add(sum[j], __ldcg(from + j * threads));
      }
    }
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      if (i + j * threads < fours) put(i + j * threads, sum[j]);
    }
  }
}

// The results of a slice: channels of y from k on and of x from c on.
template <class T>
__device__ __forceinline__ void sum_up(const HopperGroupedWeightArgs& args, const float4* partials,
                                       int fours, int log, int shares, int k, int c) {
  if (!args.plain) {
    sum_shares<1, 4>(partials, fours, shares, [&](int index, const float4& sum) {
      const Four four(index, log);
      if (k + four.k >= args.channels) return;
      put_four<T>(args, k + four.k, c % args.group_channels + four.c, four.tap, sum);
    });
    return;
  }
  // Results lie as their sums do.
  const int first = k * 9 * args.group_channels, end = args.channels * 9 * args.group_channels;
  const auto put = [&](int index, const float4& sum) {
    const int at = first + index * 4;
    if (at >= end) return;
    const float alpha = args.alpha;
    if (args.wide) {
      *reinterpret_cast<float4*>(static_cast<float*>(args.w) + at) =
          make_float4(sum.x * alpha, sum.y * alpha, sum.z * alpha, sum.w * alpha);
    } else {
      *reinterpret_cast<uint2*>(static_cast<T*>(args.w) + at) =
          make_uint2(narrow_two<T>(sum.x * alpha, sum.y * alpha),
                     narrow_two<T>(sum.z * alpha, sum.w * alpha));
    }
  };
  // About sixteen loads under way.
  if (shares >= 16) {
    sum_shares<1, 16>(partials, fours, shares, put);
  } else {
    sum_shares<4, 4>(partials, fours, shares, put);
  }
}

}  // namespace convgrad
