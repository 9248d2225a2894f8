// Shared by the kernels that compute dgrad of a first layer by groups of positions. Launched by
// first_groups.py.
//
// Positions of x along W form groups of `group`, a multiple of the stride. Group i reads the
// positions of y from i*hop + first_tap, at the same steps as every other group. Then
//   x[h][i, (b, c)] = sum over h's kernel rows r, steps t and k of
//                     y[p][i*hop + first_tap + t, k] * v[r][t, k, (b, c)]
// with v[r][t, k, (b, c)] = w[k, c, r, b + pad - (first_tap + t)*stride], zero outside the kernel, is
// a GEMM with M = groups i, N = group*C columns, K = steps x channels of y.
#pragma once

#include "ptx/load_store.cuh"
#include "core/epilogue.cuh"

namespace convgrad {

struct FirstGroupsArgs {
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
  int plain;  // no epilogue: 1, or one of the constants below if columns are contiguous in x
  int flat_weights;  // w is contiguous as (K, R, S, C)
  int channels;
  int y_chunks;  // 16-byte chunks of y's channels
  int y_channels;
  int x_size[3];
  int y_size[3];
  int kernel[3];
  int stride[3];
  int pad[3];
  int group;
  int hop;
  int first_tap;
  int taps;  // steps along W
  int warp_groups;
  int positions;     // positions of y that a block's groups read
  int row_segments;  // row segments along H
  int segment_rows;  // rows of y that a segment advances by
  int segments;      // along W
};

constexpr int kNeighbours = 2, kInTwos = 3;  // columns are contiguous; and pairs at even offsets

__device__ __forceinline__ int floor_div(int a, int b) { return a >= 0 ? a / b : -((b - 1 - a) / b); }

// What a block computes: one plane (n, d) of x, a segment of its rows and one of its groups.
struct Share {
  int n, d, z, segment;
  bool met;              // whether a tap along D reads plane z of y
  int finish0, finish1;  // after row p of y, rows p*stride - pad + [0, stride) of x are complete
  int p0;                // the first row of y that contributes to them
  int real0, real1;      // the range of rows that exist

  __device__ __forceinline__ explicit Share(const FirstGroupsArgs& args) {
    u32 block = blockIdx.x;
    segment = block % args.segments;
    block /= args.segments;
    const int row_segment = block % args.row_segments;
    block /= args.row_segments;
    d = block % args.x_size[0];
    n = block / args.x_size[0];
    const int stride = args.stride[1];
    finish0 = floor_div(args.pad[1], stride) + row_segment * args.segment_rows;
    finish1 = min(finish0 + args.segment_rows - 1,
                  floor_div(args.x_size[1] - 1 + args.pad[1], stride));
    p0 = finish0 - (args.kernel[1] - 1) / stride;
    z = floor_div(d + args.pad[0], args.stride[0]);
    met = z * args.stride[0] == d + args.pad[0] && z >= 0 && z < args.y_size[0];
    real0 = max(0, p0);
    real1 = met ? min(args.y_size[1] - 1, finish1) : -1;
  }
};

// Stores one result of group `group` in row h, with an epilogue.
template <class T>
__device__ inline void put_one(const FirstGroupsArgs& args, const Share& share, int h, int group,
                               int column, float value) {
  const int b = column / args.channels, c = column - b * args.channels;
  const int w_at = group * args.group + b;
  if (b >= args.group || w_at >= args.x_size[2]) return;
  const i64 at = share.n * args.x_stride[0] + share.d * args.x_stride[3] + h * args.x_stride[4] +
                 w_at * args.x_stride[5] + c * args.x_stride[2];
  const T* accumulate = static_cast<const T*>(args.accumulate);
  if (accumulate != nullptr) accumulate += at;
  const T* bias = static_cast<const T*>(args.bias);
  if (bias != nullptr) bias += c;
  static_cast<T*>(args.x)[at] = narrow<T>(
      finish<T, float>(value, args.alpha, args.beta, accumulate, bias, args.activation));
}

// Stores two adjacent columns without an epilogue. `x` is the row, `at` the offset of the first
// column in it if columns are contiguous.
template <class T>
__device__ __forceinline__ void put_two(const FirstGroupsArgs& args, T* x, int at, int group,
                                        int column, u32 two) {
  const int columns = args.group * args.channels, elements = args.x_size[2] * args.channels;
  if (args.plain == kInTwos) {
    store_if(column < columns && at < elements, x + at, two);
  } else if (args.plain == kNeighbours) {
    store_if(column < columns && at < elements, x + at, static_cast<unsigned short>(two & 0xffff));
    store_if(column + 1 < columns && at + 1 < elements, x + at + 1,
             static_cast<unsigned short>(two >> 16));
  } else if (args.plain) {
#pragma unroll 1
    for (int e = 0; e < 2; ++e) {
      const int b = (column + e) / args.channels, c = column + e - b * args.channels;
      const int w_at = group * args.group + b;
      store_if(b < args.group && w_at < args.x_size[2],
               x + w_at * args.x_stride[5] + c * args.x_stride[2],
               static_cast<unsigned short>(two >> e * 16 & 0xffff));
    }
  }
}

}  // namespace convgrad
