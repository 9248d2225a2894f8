// What implicit_gemm.cu is given. The host's side is implicit_gemm.py.
#pragma once

#include "core/divider.cuh"

namespace convgrad {

enum class Operation { kFprop, kDgrad, kWgrad };

constexpr int kMaxPhases = 8;  // of dgrad, along one dimension

// Positions y0 + m*y_step of one dimension (m below `count`) and the taps that meet them: the j-th
// (of `taps`) is r0 + j*r_step, and meets the source at x0 + m*x_step + j*x_tap. fprop and wgrad have
// one phase, dgrad one for each residue of the stride.
struct GatherPhase {
  int taps, r0, x0, y0, count;
  Divider by_taps, by_count;
};
struct GatherAxis {
  int size, x_step, x_tap, y_step, r_step, phases;  // size: of the source
};

struct ImplicitGemmArgs {
  const void* source;      // fprop: input, dgrad: grad_output, wgrad: input
  const void* other;       // fprop, dgrad: weight; wgrad: grad_output
  void* result;            //
  const void* accumulate;  // like the result, or null
  const void* bias;        // one for each channel of fprop's or dgrad's result, or null
  float* partials;         // [tile][splits of the workspace][kM * kN], where there is more than one
  u32* counters;           // of the blocks whose partial sums are there, zero between launches
  i64 source_stride[6];    // N G C D H W, in bytes; channels are side by side
  // In bytes. Weights: G, result channel, source channel, T R S; grad_output: as the source's.
  i64 other_stride[6];
  i64 result_stride[6];  // in elements; as the source's, or for wgrad G K C T R S
  int rows, columns;     // M of the largest phase, N: of the GEMM of one group
  int source_channels;   // of one group
  int result_channels;   // of one group; wgrad: grad_output's
  int tap_chunks;        // chunks of 16 bytes that hold the source's channels
  int cluster_log;       // blocks of a cluster share a tile's reduction: 1, 2, 4 or 8
  int workspace;         // and so many clusters do
  int ring_bytes;        // of the stages that the steps of a block fill
  // Pixel p lies at p times the stride of W: of the source, where it has one tap and one phase (fprop,
  // dgrad) or one tap (wgrad); of grad_output (wgrad); of the result (fprop, dgrad).
  int linear_source, linear_other, linear_result;
  int plain;              // the result is the sum itself
  int result_in_vectors;  // channels of the result are side by side in aligned chunks of 16 bytes
  int pixels_fastest;     // the result's pixels are side by side, its channels are not
  int wide_result;        // float32, whatever is read
  int batch;
  int activation;
  float alpha, beta;
  Divider by_column_tiles, by_tap_chunks, by_splits;
  GatherAxis axis[3];
  GatherPhase phase[kMaxPhases][3];
};

}  // namespace convgrad
