// Where the sums of a grouped weight gradient go.
#pragma once

#include "core/bits16.cuh"
#include "core/epilogue.cuh"
#include "ptx/mma.cuh"

namespace convgrad {

struct WeightResult {
  int in_channels;   // of a group, or of the part of one that a block has
  int out_channels;
  int items;         // of a block
  int wide;          // w is float32 for any type of x and y
  int bfloat16;      // the type of Bits16
  int quads;         // four adjacent channels of w are results of one group and one aligned vector
  float alpha;
  float beta;
  float* partials;
  void* w;
  const void* accumulate;  // like w, or null
  u32* met;                // zeros, one for the blocks of each x and y; left zero
  i64 w_stride[6];         // G K C T R S
};

}  // namespace convgrad
