// Kernel parameters, units and copies of first_weight.cu.
#pragma once

#include "core/divider.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared_element.cuh"

namespace convgrad {

// Strides of tensors count elements, those of shared memory bytes.
struct FirstWeightArgs {
  const void* x;
  const void* y;
  float* partials;
  i64 x_stride[4];  // N, planes, D, H; columns are contiguous
  i64 y_stride[5];  // N, K, D, H, W; of K or W one is 1
  int y_channels;
  int x_size[3];
  int y_size[3];
  int kernel[3];
  int stride[3];
  int pad[3];
  int planes, column;      // planes of x, each with `column` channels at a position: C x 1 or 1 x C
  int taps;                // of all channels
  int tap_groups;          // blocks that share out the taps
  int warps_m, warps_n;    // warps along taps and channels of y; others share out a unit's steps
  int rows, segment;       // of a unit: rows of y, and columns (a multiple of 8)
  int row_units, segments;
  int units, more;         // of a share; the first `more` shares have one more
  int stages;              // 2 or 3
  int stage_bytes, x_at;   // of a stage of the pipeline; where x is in it
  int y_last;              // whether channels of y are contiguous
  int y_bytes, x_bytes;    // of a chunk that is copied at once: 16, 4, or an element's
  int y_log, x_log;        // log2 of the threads that copy a row
  int y_chunks;            // of a row that is copied
  int y_row, y_column, y_channel;
  int x_rows, x_lead, x_chunks;  // rows of x of a plane; elements before the first; chunks of a row
  int x_row, x_plane;
  Divider by_y_rows, by_x_rows;  // inner rows of copies
};

// A unit of work: rows p to p + args.rows of one plane of y, and a segment of their columns.
struct FirstWeightUnit {
  int left;  // units of the share from this one on
  int n, z, segment, row;

  __device__ __forceinline__ FirstWeightUnit(const FirstWeightArgs& args, int share) {
    left = args.units + (share < args.more);
    int rest = share * args.units + min(share, args.more);
    int outer = rest / args.row_units;
    row = rest - outer * args.row_units;
    rest = outer / args.segments;
    segment = outer - rest * args.segments;
    n = rest / args.y_size[0];
    z = rest - n * args.y_size[0];
  }
  __device__ __forceinline__ bool there() const { return left > 0; }
  __device__ __forceinline__ void next(const FirstWeightArgs& args) {
    --left;
    if (++row < args.row_units) return;
    row = 0;
    if (++segment < args.segments) return;
    segment = 0;
    if (++z < args.y_size[0]) return;
    z = 0, ++n;
  }
};

// A row to copy: `from` may lie outside of the tensor; elements [low, high) exist, others are zeros.
template <class T>
struct FirstWeightRow {
  const T* from;
  u32 to;
  int low, high;
};

// Copies rows of `chunks` chunks of kBytes. 1 << log threads copy a row; row(i) describes it.
template <int kBytes, class T, class Row>
__device__ __forceinline__ void copy_rows(int rows, int chunks, int log, const T* tensor, const Row& row) {
  constexpr int kItem = static_cast<int>(sizeof(T)), kChunk = kBytes / kItem;
  const int lanes = 1 << log, first = threadIdx.x & (lanes - 1);
  for (int i = threadIdx.x >> log; i < rows; i += blockDim.x >> log) {
    const FirstWeightRow<T> one = row(i);
    for (int chunk = first; chunk < chunks; chunk += lanes) {
      const int element = chunk * kChunk;
      const int there = element < one.low ? 0 : min(max(one.high - element, 0), kChunk);
      const u32 to = one.to + chunk * kBytes;
      if constexpr (kBytes < 4) {  // not asynchronous
        store_element<T>(to, there > 0 ? one.from[element] : T{});
      } else {
        cp_async<kBytes>(to, there > 0 ? one.from + element : tensor, there * kItem);
      }
    }
  }
}
// The same with chunks of `bytes`: 16, 4, or an element's.
template <class T, class Row>
__device__ __forceinline__ void copy_rows(int bytes, int rows, int chunks, int log, const T* tensor,
                                          const Row& row) {
  if (bytes == 16) {
    copy_rows<16>(rows, chunks, log, tensor, row);
  } else if (bytes == 4) {
    copy_rows<4>(rows, chunks, log, tensor, row);
  } else if constexpr (sizeof(T) < 4) {
    copy_rows<sizeof(T)>(rows, chunks, log, tensor, row);
  }
}

// Starts the copies of a unit to a stage: `channels` channels of y from `first_channel` on, and x.
template <class T>
__device__ __forceinline__ void copy_unit(const FirstWeightArgs& args, const FirstWeightUnit& unit,
                                          u32 stage, int first_channel, int channels) {
  const int p0 = unit.row * args.rows, q0 = unit.segment * args.segment;
  const int width = min(args.segment, args.y_size[2] - q0), height = min(args.rows, args.y_size[1] - p0);
  const T* const all_y = static_cast<const T*>(args.y);
  const T* const y = all_y + unit.n * args.y_stride[0] + unit.z * args.y_stride[2] +
                         p0 * args.y_stride[3] + q0 * args.y_stride[4] +
                         first_channel * args.y_stride[1];
  const int there = min(channels, args.y_channels - first_channel);
  const auto y_row = [&](int i) {
    const int outer = divide(i, args.by_y_rows);
    FirstWeightRow<T> one;
    one.low = 0;
    if (args.y_last) {
      const int column = i - outer * args.segment;
      one.from = y + outer * args.y_stride[3] + column * args.y_stride[4];
      one.to = stage + outer * args.y_row + column * args.y_column;
      one.high = outer < height && column < width ? there : 0;
    } else {
      const int row = i - outer * args.rows;
      one.from = y + outer * args.y_stride[1] + row * args.y_stride[3];
      one.to = stage + outer * args.y_channel + row * args.y_row;
      one.high = outer < there && row < height ? width : 0;
    }
    return one;
  };
  const int y_rows = args.rows * (args.y_last ? args.segment : channels);
  copy_rows(args.y_bytes, y_rows, args.y_chunks, args.y_log, all_y, y_row);

  const int d0 = unit.z * args.stride[0] - args.pad[0], h0 = p0 * args.stride[1] - args.pad[1];
  const int first = (q0 * args.stride[2] - args.pad[2]) * args.column - args.x_lead;
  const int elements = args.x_size[2] * args.column;
  const T* const all_x = static_cast<const T*>(args.x);
  const T* const x = all_x + unit.n * args.x_stride[0] + first;
  const auto x_row = [&](int i) {
    const int outer = divide(i, args.by_x_rows), h = h0 + i - outer * args.x_rows;
    const int plane = args.kernel[0] > 1 ? outer / args.kernel[0] : outer;
    const int d = d0 + outer - plane * args.kernel[0];
    const bool inside = d >= 0 && d < args.x_size[0] && h >= 0 && h < args.x_size[1];
    FirstWeightRow<T> one;
    one.from = x + plane * args.x_stride[1] + d * args.x_stride[2] + h * args.x_stride[3];
    one.to = stage + args.x_at + outer * args.x_plane + (h - h0) * args.x_row;
    one.low = -first;
    one.high = inside ? elements - first : 0;
    return one;
  };
  const int x_rows = args.planes * args.kernel[0] * args.x_rows;
  copy_rows(args.x_bytes, x_rows, args.x_chunks, args.x_log, all_x, x_row);
}

}  // namespace convgrad
