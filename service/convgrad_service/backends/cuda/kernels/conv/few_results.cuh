// Kernel parameters of few_results.cu.
#pragma once

#include "conv/implicit_gemm_args.cuh"

namespace convgrad {

// Strides count elements, as do those in shared memory.
struct FewResultsArgs {
  const void* source;
  const void* weight;
  void* result;
  const void* accumulate;  // like the result, or null
  const void* bias;        // one per channel of the result, or null
  i64 source_stride[5];    // N C D H W
  i64 result_stride[5];
  i64 weight_stride[5];    // channels of the source and of the result, T R S
  GatherAxis axis[2];      // D, H
  GatherPhase phase[kMaxPhases][2];
  int source_channels, result_channels;
  int activation;
  float alpha, beta;
  // Along W, group g of the result is the `group` positions from g*group + shift on. It reads the source at g + first + t,
  // t < steps, with its b-th position through tap b + (steps - 1 - t)*group, or in a forward pass through tap t. With
  // the first step, taps are left for `first_columns` of its positions x channels.
  int source_w, result_w, kernel_w, group, shift, first, steps, first_columns, backward;
  int column_blocks;          // of a group's positions x channels
  // A block's threads: roles (a phase along H and a block of columns) x shares of the channels x planes x rows x strips.
  int roles, shares, planes, rows, strips;
  int all_roles, role_blocks;
  int tiles_w, tiles_h, tiles_d;
  int first_h;                // row of the source that a tile's first one reads, relative to its number times x_step
  int source_rows;            // in a stage
  int row_pitch, channel_pitch, tap_pitch;
  int weights, stage;         // elements of a channel's weights, and of a stage
  int depth_taps, height_taps;  // the most of a phase
  int channels_last;          // of the source
  int result_last;            // of the result
  Divider by_row_pitch, by_rows, by_weights, by_channels, by_width, by_group, by_result_rows, by_planes;
};

}  // namespace convgrad
