// The gradient of a first layer's input by groups of positions, on Hopper's products of a warpgroup.
// The host's side is first_warpgroup.py.
//
// x[n, c, i] = sum over k and taps r that meet an o: y[n, k, o] * w[k, c, r], i = o*stride + r - pad.
// GEMM: M = groups of positions, as many as the stride, N = kernel rows x 8 columns, of a group's
// positions x channels, K = steps x channels of y, see first_groups.cuh. A row of y enters all the
// rows of x that it meets in one product: its columns' sums of kernel row r are those of row
// p*stride - pad + r of x, and so are complete, `stride` rows of them, when y has moved on.
//
// Block: one plane (n, d), a segment of rows of x and one of groups; it walks over the rows of y that
// meet them. A warpgroup has 64 groups. Both operands are read from shared memory, in rows of 128
// bytes, 16*STEPS channels, at most 64; a step along W, of TAPS, is the same rows from one further on. Dynamic shared memory,
// which first_warpgroup.py counts: 1,024 bytes to align it by, a ring of STAGES rows of y, zeros
// outside, and the weights of each step as 64 columns by as many channels.
// Relies on its launcher for the grid (groups' segments running fastest, then rows' segments, planes,
// images), dilation 1, one group of channels, one tap along D, at most 8 kernel rows, a stride of at
// most 2 along H, stride*C at most 8 along W, 16-bit types, and for y with channels side by side in
// whole 16-byte chunks. Needs sm_90a.
// Deterministic: one order of additions for each result, however x is cut. Zeros beside the input and
// the kernel times an infinity are NaN: sums that are not finite are taken again by the definition.
// Index limits: offsets along a row of x and y below 2^31 elements; 64-bit elsewhere.
#include "first_groups.cuh"
#include "tensor_core.cuh"
#include "warpgroup.cuh"

using namespace convgrad;

namespace {

using T = ELEMENT;
constexpr int kRows = 8;  // of the kernel, at most
constexpr u32 kRowBytes = 128, kTapBytes = 64 * kRowBytes;
constexpr int kMostFinished = 2;

// Where 16-byte chunk c of row r is.
__device__ __forceinline__ u32 chunk_at(u32 row, u32 chunk) {
  return row * kRowBytes + (chunk ^ (row & 7)) * 16;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(256)
    first_warpgroup(const __grid_constant__ FirstGroupsArgs args) {
  extern __shared__ uint4 shared[];
  const int thread = threadIdx.x, threads = blockDim.x, lane = thread & 31, warp = thread >> 5;
  const int stride_h = args.stride[1], stride_w = args.stride[2];
  const Share share(args);
  const int first_group = share.segment * args.warp_groups * 64;
  const int q0 = first_group + args.first_tap;

  const u32 padding = -shared_address(shared) & 1023;
  char* const base = reinterpret_cast<char*>(shared) + padding;
  const u32 ring = shared_address(base);
  const u32 stage_bytes = (args.positions * kRowBytes + 1023) / 1024 * 1024;
  char* const weights = base + STAGES * stage_bytes;

  // This thread's chunks of y.
  const int copy_row = thread / args.y_chunks, copy_at = thread - copy_row * args.y_chunks;
  const int copy_rows = threads / args.y_chunks;
  const T* const from0 = static_cast<const T*>(args.y) + share.n * args.y_stride[0] +
                         share.z * args.y_stride[3] + (q0 + copy_row) * args.y_stride[5] +
                         copy_at * 8;
  int put_p = share.real0;
  const auto copy_row_of_y = [&](int stage) {
    if (put_p <= share.real1) {
      if (copy_row < copy_rows) {
        const T* from = from0 + put_p * args.y_stride[4];
        const u32 to = ring + stage * stage_bytes;
#pragma unroll 2
        for (int row = copy_row; row < args.positions; row += copy_rows) {
          copy_chunk(to + chunk_at(row, copy_at), from,
                     static_cast<u32>(q0 + row) < static_cast<u32>(args.y_size[2]));
          from += copy_rows * args.y_stride[5];
        }
      }
      ++put_p;
    }
    commit_copies();
  };
  for (int i = 0; i < STAGES - 1; ++i) copy_row_of_y(i);

  // Zeros beyond the last channel, up to a whole number of products.
  for (int i = thread; i < STAGES * args.positions; i += threads) {
    const int stage = i / args.positions, row = i - stage * args.positions;
    for (int chunk = args.y_chunks; chunk < 2 * STEPS; ++chunk) {
      *reinterpret_cast<uint4*>(base + stage * stage_bytes + chunk_at(row, chunk)) =
          make_uint4(0, 0, 0, 0);
    }
  }
  // Weights: columns are kernel rows x (b, c), 8 of them each. A thread has one, and every so many
  // channels.
  {
    const T* const w = static_cast<const T*>(args.w);
    const int column = thread & 63, r = column / 8, first_k = thread / 64;
    const int b = (column & 7) / args.channels, c = (column & 7) - b * args.channels;
    for (int tap = 0; tap < TAPS; ++tap) {
      const int s = b + args.pad[2] - (args.first_tap + tap) * stride_w;
      const bool there = r < args.kernel[1] && b < args.group && s >= 0 && s < args.kernel[2];
      const T* const from =
          w + c * args.w_stride[2] + r * args.w_stride[4] + s * args.w_stride[5];
#pragma unroll 16
      for (int k = first_k; k < 16 * STEPS; k += threads / 64) {
        T value = {};
        if (there && k < args.y_channels) value = from[k * args.w_stride[1]];
        *reinterpret_cast<T*>(weights + tap * kTapBytes + chunk_at(column, k / 8) + k % 8 * 2) =
            value;
      }
    }
  }

  // A lane's sums: of groups own_group and 8 further on, columns own_column and the next, for each
  // kernel row.
  float sum[kRows][4] = {}, finished[kMostFinished][4];
  const int tile = warp / 4;
  const i64 plane_at = share.n * args.x_stride[0] + share.d * args.x_stride[3];
  const int in_group = args.group * args.channels;  // columns that are there
  const int own_group = first_group + tile * 64 + warp % 4 * 16 + (lane >> 2);
  const int own_column = (lane & 3) * 2, own_at = own_group * in_group + own_column;
  const auto write_rows = [&](int p) {
    if (p < share.finish0) return;
#pragma unroll
    for (int row = 0; row < kMostFinished; ++row) {
      const int h = p * stride_h - args.pad[1] + row;
      if (row >= stride_h || h < 0 || h >= args.x_size[1]) continue;
      const float(&of)[4] = finished[row];
      T* const x = static_cast<T*>(args.x) + (plane_at + h * args.x_stride[4]);
      put_two(args, x, own_at, own_group, own_column, narrow_two<T>(of[0], of[1]));
      put_two(args, x, own_at + 8 * in_group, own_group + 8, own_column,
              narrow_two<T>(of[2], of[3]));
      const float finite = fmaf(of[0], 0.0f, of[1] * 0.0f) + fmaf(of[2], 0.0f, of[3] * 0.0f);
      if (finite == 0.0f && args.plain) continue;
#pragma unroll 1
      for (int i = 0; i < 4; ++i) {
        const float value = i < 2 ? (i == 0 ? of[0] : of[1]) : i == 2 ? of[2] : of[3];
        put_one<T>(args, share, h, own_group + i / 2 * 8, own_column + i % 2, value);
      }
    }
  };

  const u32 weights_at = shared_address(weights);
  int stage = 0;
  for (int p = share.p0; p <= share.finish1; ++p) {
    const bool real = p >= share.real0 && p <= share.real1;
    if (real) {
      wait_copies<STAGES - 2>();
      publish_shared();
      __syncthreads();
      hold_sums(sum);
      begin_products();
      const u32 rows = ring + stage * stage_bytes;
      const u64 a = shifted_rows_of_128_bytes(rows, tile * 64);
      const u64 b = rows_of_128_bytes(weights_at);
#pragma unroll
      for (int tap = 0; tap < TAPS; ++tap) {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
          WarpgroupMma<T, kRows>::start(sum, a + tap * (kRowBytes / 16) + step * 2,
                                        b + tap * (kTapBytes / 16) + step * 2, 1);
        }
      }
      commit_products();
      copy_row_of_y(stage == 0 ? STAGES - 1 : stage - 1);
      // Meanwhile what the last row of y completed.
      if (p > share.p0) write_rows(p - 1);
      wait_products<0>();
      hold_sums(sum);
      if (++stage == STAGES) stage = 0;
    } else if (p > share.p0) {
      write_rows(p - 1);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      finished[0][e] = sum[0][e];
      finished[1][e] = sum[1][e];
      if (stride_h == 1) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) sum[r][e] = r + 1 < kRows ? sum[(r + 1) % kRows][e] : 0;
      } else {
#pragma unroll
        for (int r = 0; r < kRows; ++r) sum[r][e] = r + 2 < kRows ? sum[(r + 2) % kRows][e] : 0;
      }
    }
  }
  write_rows(share.finish1);
}
