// Small 1x1 convolutions as products by FMA in float32, for latency: few instructions, and all loads of a
// thread issued before its first product. Launched by simt_gemm.py.
//
//           rows (A)                 columns (B)          terms
//   fprop   pixels                   output channels      input channels
//   dgrad   pixels                   input channels       output channels
//   wgrad   output channels          input channels       pixels
//   or, channels first, with images apart from each other:
//   fprop   output channels          pixels               input channels
//   dgrad   input channels           pixels               output channels
//   wgrad   output channels          input channels       pixels, of several images
//
// Grid: column tiles, row tiles, images. Block: a tile of (4 << across_log) columns and (4 << down_log) rows; a thread
//   has 4 x 4 sums of the terms of its slice: the slices of a tile, the other threads of the block, take turns
//   at units of four terms of an image. Slices are summed in shared memory, in order.
// Shared memory (dynamic): 68 bytes per thread.
// Preconditions: blockDim.x is a power of two, at least a tile's threads. With VECTORS, rows of both matrices in
//   memory are whole, aligned vectors of four elements.
// Determinism: one order of additions, decided by the launch.
// Limits: matrices of less than 2^31 elements.
#include "core/divider.cuh"
#include "core/vectors.cuh"
#include "ptx/pdl.cuh"

using namespace convgrad;

struct SimtGemmArgs {
  const void* a;    // [rows][terms], or without A_TERMS [terms][rows]
  const void* b;    // [columns][terms], or without B_TERMS [terms][columns]
  void* result;     // [rows][columns]
  int rows, columns, terms;
  int a_stride, b_stride, result_stride;  // elements from one line of a matrix to the next
  int a_image, b_image, result_image;     // and from one image to the next
  int across_log, down_log;               // log2 of a tile's threads along columns, and rows
  int units;                              // of all images that are summed
  Divider by_image;                       // units of one of them
};

namespace {

using T = ELEMENT;
using Quad = Vector<T, 4>;
constexpr int kSide = 4, kUnrolled = 2, kSlicesEach = 16;

// The elements from..from + 3 of which the first `count` exist; others are zero.
__device__ __forceinline__ Quad load_quad(const T* from, int count) {
  Quad quad;
  if constexpr (VECTORS) {
    load_ahead_if(count > 0, from, quad.raw);
  } else {
#pragma unroll
    for (int e = 0; e < kSide; ++e) {
      Vector<T, 1> one;
      load_ahead_if(e < count, from + e, one.raw);
      quad.at[e] = one.at[0];
    }
  }
  return quad;
}

// 4 x 4 elements of an operand: terms by rows or columns.
template <bool kTermsInLines>
struct Block {
  Quad line[kSide];

  // The block at `term` and `other`, of a matrix of `terms` by `others` elements.
  __device__ __forceinline__ void load(const T* matrix, int stride, int term, int terms, int other,
                                       int others) {
    const int first = kTermsInLines ? other : term, lines = kTermsInLines ? others : terms;
    const int start = kTermsInLines ? term : other, width = kTermsInLines ? terms : others;
    const T* from = matrix + (first * stride + start);
#pragma unroll
    for (int i = 0; i < kSide; ++i, from += stride) {
      line[i] = load_quad(from, first + i < lines ? width - start : 0);
    }
  }
  __device__ __forceinline__ float at(int term, int other) const {
    return kTermsInLines ? widen(line[other].at[term]) : widen(line[term].at[other]);
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(512, 1) simt_gemm(const __grid_constant__ SimtGemmArgs args) {
  extern __shared__ float4 shared[];
  const int threads = blockDim.x, thread = threadIdx.x;
  const int tile_log = args.across_log + args.down_log, slices = threads >> tile_log;
  const int across = thread & ((1 << args.across_log) - 1);
  const int down = thread >> args.across_log & ((1 << args.down_log) - 1);
  const int first_row = blockIdx.y << args.down_log, first_column = blockIdx.x << args.across_log;
  const int row = (first_row + down) * kSide, column = (first_column + across) * kSide;

  float sums[kSide][kSide] = {};
  const int image = blockIdx.z, in_image = (args.terms + kSide - 1) / kSide;
  const T* const a_from = static_cast<const T*>(args.a) + image * args.a_image;
  const T* const b_from = static_cast<const T*>(args.b) + image * args.b_image;
  wait_on_dependent_grids();
  for (int unit = thread >> tile_log; unit < args.units; unit += slices * kUnrolled) {
    Block<A_TERMS> a[kUnrolled];
    Block<B_TERMS> b[kUnrolled];
#pragma unroll
    for (int u = 0; u < kUnrolled; ++u) {
      const int at = unit + u * slices, summed = divide(at, args.by_image);
      const int term = at < args.units ? (at - summed * in_image) * kSide : args.terms;
      b[u].load(b_from + summed * args.b_image, args.b_stride, term, args.terms, column, args.columns);
      a[u].load(a_from + summed * args.a_image, args.a_stride, term, args.terms, row, args.rows);
    }
#pragma unroll
    for (int u = 0; u < kUnrolled; ++u) {
#pragma unroll
      for (int k = 0; k < kSide; ++k) {
#pragma unroll
        for (int m = 0; m < kSide; ++m) {
#pragma unroll
          for (int n = 0; n < kSide; ++n) sums[m][n] = fmaf(a[u].at(k, m), b[u].at(k, n), sums[m][n]);
        }
      }
    }
  }
  launch_dependent_grids();
#pragma unroll
  for (int m = 0; m < kSide; ++m) {
    shared[m * threads + thread] = {sums[m][0], sums[m][1], sums[m][2], sums[m][3]};
  }
  __syncthreads();

  // The tile's sums are numbered by row of a thread, then thread, then column of a thread.
  const int row_log = tile_log + 2, in_row = 1 << row_log, all = kSide << row_log;
  const float* const slice = reinterpret_cast<const float*>(shared);
  const int groups = max(slices / kSlicesEach, 1), each = min(slices, kSlicesEach);
  float* const partial = reinterpret_cast<float*>(shared + kSide * threads);
#pragma unroll 1
  for (int i = thread; i < all * groups; i += threads) {
    // With many slices, a thread adds up every groups-th.
    const int group = i >> (row_log + 2), sum = i & (all - 1);
    const int m = sum >> row_log, in = sum & (in_row - 1);
    const float* from = slice + (m * threads * kSide + group * in_row + in);
    float value = *from;
#pragma unroll 4
    for (int s = 1; s < each; ++s) value += *(from += groups << row_log);
    if (groups > 1) {
      partial[thread] = value;
      __syncthreads();
      if (thread >= all) return;
#pragma unroll 1
      for (int g = 1; g < groups; ++g) value += partial[g * all + thread];
    }
    const int r = (first_row + (in >> (args.across_log + 2))) * kSide + m;
    const int c = first_column * kSide + (in & ((kSide << args.across_log) - 1));
    if (r < args.rows && c < args.columns) {
      static_cast<T*>(args.result)[image * args.result_image + r * args.result_stride + c] = narrow<T>(value);
    }
  }
}
