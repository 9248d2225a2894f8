// Kernel parameters, units and copies of first_weight.cu.
#pragma once

#include "core/divider.cuh"
#include "core/extremes.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared_element.cuh"

namespace convgrad {

// How threads share out copies of planes of rows of chunks.
struct CopyShape {
  int bytes;           // of a chunk: 16, 4, or an element's
  int places, chunks;  // chunks of a plane, and of a row
  int groups;          // of threads, which take planes in turn
  Divider by_places, by_chunks;
};

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
  CopyShape y_shape, x_shape;
  CopyShape y_scan, x_scan;  // of the pass over what has been copied
  int y_row, y_column, y_channel;
  int x_lead;  // elements of a row of x before the first
  int x_row, x_plane;
};

// A unit of work: rows p to p + args.rows of one plane of y, and a segment of their columns.
struct FirstWeightUnit {
  int left;  // units of the share from this one on
  int n, z, segment, row;

  __device__ __forceinline__ FirstWeightUnit(const FirstWeightArgs& args, int share) {
    left = args.units + (share < args.more);
    int rest = share * args.units + min(share, args.more);
    const int outer = rest / args.segments;
    segment = rest - outer * args.segments;
    rest = outer / args.row_units;
    row = outer - rest * args.row_units;
    n = rest / args.y_size[0];
    z = rest - n * args.y_size[0];
  }
  __device__ __forceinline__ bool there() const { return left > 0; }
  __device__ __forceinline__ void next(const FirstWeightArgs& args) {
    --left;
    if (++segment < args.segments) return;
    segment = 0;
    if (++row < args.row_units) return;
    row = 0;
    if (++z < args.y_size[0]) return;
    z = 0, ++n;
  }
};

// What a unit copies of a tensor: planes of rows of chunks.
template <class T>
struct CopyBox {
  const T* from;         // of the first chunk; may lie outside of the tensor
  u32 to;
  i64 plane, row;        // strides in elements
  u32 to_plane, to_row;  // in bytes
  int planes, there;     // the first `there` planes exist, others are zeros
};

// Calls each(chunk in memory, in shared memory, its elements that exist) for this thread's chunks of a box. Threads have
// chunks of the same place in several planes, which differ by additions alone. high(row) is the number of a row's
// elements before its end in the tensor, of which those below `low` do not exist either.
template <int kBytes, class T, class High, class Each>
__device__ __forceinline__ void for_each_chunk(const CopyShape& shape, const CopyBox<T>& box, int low, const High& high,
                                               const Each& each) {
  constexpr int kChunk = kBytes / static_cast<int>(sizeof(T));
  const int thread = threadIdx.x, group = divide(thread, shape.by_places);
  if (group >= shape.groups) return;
  for (int place = thread - group * shape.places; place < shape.places; place += blockDim.x) {
    const int row = divide(place, shape.by_chunks), chunk = place - row * shape.chunks;
    const int element = chunk * kChunk;
    const int exist = element < low ? 0 : min(max(high(row) - element, 0), kChunk);
    const T* from = box.from + group * box.plane + row * box.row + element;
    u32 to = box.to + group * box.to_plane + row * box.to_row + chunk * kBytes;
#pragma unroll 2
    for (int plane = group; plane < box.planes; plane += shape.groups) {
      each(from, to, plane < box.there ? exist : 0);
      from += shape.groups * box.plane, to += shape.groups * box.to_plane;
    }
  }
}

// Calls each(bytes, box, low, high) for what a unit copies: `channels` channels of y from `first_channel` on, then x.
template <class T, class Each>
__device__ __forceinline__ void for_each_box(const FirstWeightArgs& args, const CopyShape& y_shape,
                                             const CopyShape& x_shape, const FirstWeightUnit& unit, u32 stage,
                                             int first_channel, int channels, const Each& each) {
  const int p0 = unit.row * args.rows, q0 = unit.segment * args.segment;
  const int width = min(args.segment, args.y_size[2] - q0), height = min(args.rows, args.y_size[1] - p0);
  const int there = min(channels, args.y_channels - first_channel);
  const u32 y_row = args.y_row, y_column = args.y_column, y_channel = args.y_channel;
  CopyBox<T> y;
  y.from = static_cast<const T*>(args.y) + unit.n * args.y_stride[0] + unit.z * args.y_stride[2] +
           p0 * args.y_stride[3] + q0 * args.y_stride[4] + first_channel * args.y_stride[1];
  y.to = stage;
  if (args.y_last) {  // rows are positions of a row of y
    y.plane = args.y_stride[3], y.row = args.y_stride[4], y.to_plane = y_row, y.to_row = y_column;
    y.planes = args.rows, y.there = height;
    each(y_shape, y, 0, [&](int column) { return column < width ? there : 0; });
  } else {
    y.plane = args.y_stride[1], y.row = args.y_stride[3], y.to_plane = y_channel, y.to_row = y_row;
    y.planes = channels, y.there = there;
    each(y_shape, y, 0, [&](int row) { return row < height ? width : 0; });
  }

  const int d0 = unit.z * args.stride[0] - args.pad[0], h0 = p0 * args.stride[1] - args.pad[1];
  const int first = (q0 * args.stride[2] - args.pad[2]) * args.column - args.x_lead;
  const int elements = args.x_size[2] * args.column;
  CopyBox<T> x;
  x.plane = args.x_stride[1], x.row = args.x_stride[3];
  x.to_plane = args.kernel[0] * args.x_plane, x.to_row = args.x_row;
  x.planes = args.planes;
  for (int t = 0; t < args.kernel[0]; ++t) {
    const int d = d0 + t;
    x.from = static_cast<const T*>(args.x) + unit.n * args.x_stride[0] + d * args.x_stride[2] +
             h0 * args.x_stride[3] + first;
    x.to = stage + args.x_at + t * args.x_plane;
    x.there = d >= 0 && d < args.x_size[0] ? x.planes : 0;
    each(x_shape, x, -first, [&](int row) {
      const int h = h0 + row;
      return h >= 0 && h < args.x_size[1] ? elements - first : 0;
    });
  }
}

// Starts the copies of a unit to a stage.
template <class T>
__device__ __forceinline__ void copy_unit(const FirstWeightArgs& args, const FirstWeightUnit& unit, u32 stage,
                                          int first_channel, int channels) {
  for_each_box<T>(args, args.y_shape, args.x_shape, unit, stage, first_channel, channels,
                  [&](const CopyShape& shape, const CopyBox<T>& box, int low, const auto& high) {
    constexpr int kItem = static_cast<int>(sizeof(T));
    const T* const inside = static_cast<const T*>(args.x);  // any address
    if (shape.bytes == 16) {
      for_each_chunk<16>(shape, box, low, high, [&](const T* from, u32 to, int exist) {
        cp_async<16>(to, exist > 0 ? from : inside, exist * kItem);
      });
    } else if (shape.bytes == 4) {
      for_each_chunk<4>(shape, box, low, high, [&](const T* from, u32 to, int exist) {
        cp_async<4>(to, exist > 0 ? from : inside, exist * kItem);
      });
    } else if constexpr (kItem < 4) {  // not asynchronous
      for_each_chunk<kItem>(shape, box, low, high, [&](const T* from, u32 to, int exist) {
        store_element<T>(to, exist > 0 ? *from : T{});
      });
    }
  });
}

// The extremes of this thread's share of what a unit has copied, 16 bytes at a time: of its own copies if those were as long.
__device__ __forceinline__ Extremes extremes_of_copies(const FirstWeightArgs& args, const FirstWeightUnit& unit, u32 stage,
                                                       int first_channel, int channels) {
  Extremes seen = Extremes::none();
  for_each_box<float>(args, args.y_scan, args.x_scan, unit, stage, first_channel, channels,
                      [&](const CopyShape& shape, const CopyBox<float>& box, int low, const auto& high) {
    for_each_chunk<16>(shape, box, low, high, [&](const float*, u32 to, int) {
      u32 words[4];
      ld_shared_v4(words, to);
#pragma unroll
      for (int e = 0; e < 4; ++e) seen.add(words[e]);
    });
  });
  return seen;
}

}  // namespace convgrad
