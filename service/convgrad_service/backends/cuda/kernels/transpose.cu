// Copies a box of elements between an order in which x runs side by side and one in which y does:
// target[o, x, y] = source[o, y, x], through shared memory. The host's side is transpose.py.
//
// Block: 256 threads move a tile of 64 x 64, in 16-byte chunks where rows start and end at whole
// ones (WIDE_SOURCE, WIDE_TARGET), else element by element. Static shared memory: 64 rows of 65
// elements, so that neither side meets in a bank more than twice. Where y reaches `y_limit`, the
// source has no element and the target gets zero.
// Relies on its launcher for the grid: tiles of x (fastest), tiles of y, outer positions.
// Deterministic. Index limits: 64-bit throughout; blocks below 2^31.
#include "vectors.cuh"

using namespace convgrad;

struct TransposeArgs {
  const void* source;
  void* target;
  i64 extent[4];  // of the outer axes, leading ones where there are fewer
  i64 source_stride[4];
  i64 target_stride[4];
  i64 x_extent;
  i64 y_extent;
  i64 y_limit;
  i64 x_target;  // x's stride in the target; 1 in the source
  i64 y_source;  // y's stride in the source; 1 in the target
  int wide_source;
  int wide_target;
};

extern "C" __global__ void __launch_bounds__(256)
    transpose(const __grid_constant__ TransposeArgs args) {
  using T = ELEMENT;
  constexpr int kTile = 64, kChunk = 16 / static_cast<int>(sizeof(T)), kChunks = kTile / kChunk;
  using Chunk = Vector<T, kChunk>;
  __shared__ T tile[kTile][kTile + 1];

  i64 rest = blockIdx.x, tile_x, tile_y, from = 0, to = 0;
  rest = divide(rest, ceil_div(args.x_extent, kTile), tile_x);
  rest = divide(rest, ceil_div(args.y_extent, kTile), tile_y);
#pragma unroll
  for (int axis = 3; axis >= 0; --axis) {
    i64 at;
    rest = divide(rest, args.extent[axis], at);
    from += at * args.source_stride[axis];
    to += at * args.target_stride[axis];
  }
  const i64 x0 = tile_x * kTile, y0 = tile_y * kTile;
  const T* const source = static_cast<const T*>(args.source) + from + y0 * args.y_source + x0;
  T* const target = static_cast<T*>(args.target) + to + x0 * args.x_target + y0;
  const int xs = min(static_cast<i64>(kTile), args.x_extent - x0);
  const int ys = min(static_cast<i64>(kTile), args.y_extent - y0);
  const int reals = min(static_cast<i64>(ys), args.y_limit - y0);

  if (args.wide_source) {
    Chunk chunk[kTile * kChunks / 256];
#pragma unroll
    for (int i = 0; i < kTile * kChunks / 256; ++i) {
      const int at = threadIdx.x + i * 256, y = at / kChunks, x = at % kChunks * kChunk;
      chunk[i] = y < reals && x < xs ? Chunk::load(source + y * args.y_source + x) : Chunk::zero();
    }
#pragma unroll
    for (int i = 0; i < kTile * kChunks / 256; ++i) {
      const int at = threadIdx.x + i * 256, y = at / kChunks, x = at % kChunks * kChunk;
#pragma unroll
      for (int e = 0; e < kChunk; ++e) tile[y][x + e] = chunk[i].at[e];
    }
  } else {
#pragma unroll 8
    for (int i = 0; i < kTile * kTile / 256; ++i) {
      const int at = threadIdx.x + i * 256, y = at / kTile, x = at % kTile;
      T value = {};
      if (y < reals && x < xs) value = source[y * args.y_source + x];
      tile[y][x] = value;
    }
  }
  __syncthreads();
  if (args.wide_target) {
#pragma unroll
    for (int i = 0; i < kTile * kChunks / 256; ++i) {
      const int at = threadIdx.x + i * 256, x = at / kChunks, y = at % kChunks * kChunk;
      Chunk chunk;
#pragma unroll
      for (int e = 0; e < kChunk; ++e) chunk.at[e] = tile[y + e][x];
      if (x < xs && y < ys) chunk.store(target + x * args.x_target + y);
    }
  } else {
#pragma unroll 8
    for (int i = 0; i < kTile * kTile / 256; ++i) {
      const int at = threadIdx.x + i * 256, x = at / kTile, y = at % kTile;
      if (x < xs && y < ys) target[x * args.x_target + y] = tile[y][x];
    }
  }
}
