// Max pooling in three dimensions. The host's side is max_pool.py.
#pragma once

#include "core/elements.cuh"

namespace convgrad {

struct PoolArgs {
  const void* x;        // the input
  void* y;              // the output, or null
  void* indices;        // flat in each (n, c) plane, or null
  const void* grad;     // of the output
  void* grad_x;         // of the input
  u64* bad;             // set to 1 if an index is outside its window
  i64 x_stride[6];      // N - C D H W, in elements; the second is unused
  i64 y_stride[6];
  i64 index_stride[6];
  i64 grad_stride[6];
  i64 grad_x_stride[6];
  int batch;
  int channels;
  int x_size[3];
  int y_size[3];
  int kernel[3];
  int stride[3];
  int dilation[3];
  int pad[3];
  int lanes;  // index that varies along adjacent threads: 0 positions, 1 channels
};

struct Place {
  i64 n, c, at[3];

  __device__ __forceinline__ i64 offset(const i64 (&stride)[6]) const {
    return n * stride[0] + c * stride[2] + at[0] * stride[3] + at[1] * stride[4] +
           at[2] * stride[5];
  }
};

// Finds the element that this thread computes in a tensor of this size; false if there is none.
__device__ inline bool place_of(const PoolArgs& args, const int (&size)[3], Place& place) {
  const i64 plane = static_cast<i64>(size[0]) * size[1] * size[2];
  i64 index = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x;
  if (index >= plane * args.batch * args.channels) return false;
  if (args.lanes) index = divide(index, args.channels, place.c);
  i64 rest = divide(index, size[2], place.at[2]);
  rest = divide(rest, size[1], place.at[1]);
  rest = divide(rest, size[0], place.at[0]);
  if (!args.lanes) rest = divide(rest, args.channels, place.c);
  place.n = rest;
  return true;
}

}  // namespace convgrad
