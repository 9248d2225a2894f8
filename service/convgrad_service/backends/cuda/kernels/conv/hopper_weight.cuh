// The result of hopper_weight.cu: how tiles cover it, and how accumulators become results. Launched by
// hopper_weight.py.
#pragma once

#include "ptx/load_store.cuh"
#include "core/divider.cuh"
#include "core/epilogue.cuh"
#include "core/fragments.cuh"

namespace convgrad {

// The result tensor and its tiling.
struct WeightResult {
  void* w;
  const void* accumulate;  // like w, or null
  float* partials;         // [share][tile after the whole ones][fragment][thread][4]
  i64 w_stride[6];         // G K C T R S, in elements; accumulate's too
  float alpha;
  float beta;
  int in_channels;   // of a group, as all channels and columns
  int out_channels;
  int kernel[3];
  int shared_taps;   // adjacent taps along W that one box of x serves
  int along;         // groups of such taps in a kernel row
  int boxes;         // boxes of x in a tile
  int row_tiles;     // of all groups of the convolution, each with `group_tiles`
  int group_tiles;
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
  Divider by_group;     // row tiles of a group of the convolution
};

// What the operands are: a box of x is read for each k-tile of y, by tensor maps.
struct WeightSource {
  int batch;
  int y_size[3];  // D H W
  int stride[3];
  int dilation[3];
  int pad[3];
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

// The coordinates of a tile; its row is one of its group's.
struct Place {
  int row, column, group;
};

__device__ __forceinline__ Place place_of(const WeightResult& of, int tile) {
  const int fast = of.rows_first ? of.row_tiles : of.column_tiles;
  const int slow = divide(tile, of.by_row), rest = tile - slow * fast;
  const int row = of.rows_first ? rest : slow, column = of.rows_first ? slow : rest;
  const int group = divide(row, of.by_group);
  return {row - group * of.group_tiles, column, group};
}

// The rows and columns of a tile that a thread holds: two columns of each fragment, in rows `k` and k +
// 8; the next 64 rows are in its next fragments.
struct Own {
  int first_box, k, column, group;

  __device__ __forceinline__ Own(const WeightResult& of, int tile, int warpgroup, int thread) {
    const Place place = place_of(of, tile);
    group = place.group;
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

__device__ __forceinline__ i64 result_at(const WeightResult& of, int group, int k, const Box& box) {
  return group * of.w_stride[0] + k * of.w_stride[1] + box.c * of.w_stride[2] + box.t * of.w_stride[3] +
         box.r * of.w_stride[4] + box.s * of.w_stride[5];
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
    store_pair(w + at, first, second);
  }
}

}  // namespace convgrad
