// Kernel parameters of implicit_gemm.cu. Launched by implicit_gemm.py.
#pragma once

#include "core/divider.cuh"

namespace convgrad {

enum class Operation { kFprop, kDgrad, kWgrad };

// Channels first: read by element, or 1x1 planes in chunks of 16 bytes.
enum Planes { kNoPlanes, kAnyPlanes, kFlatPlanes };

constexpr int kMaxPhases = 8;  // of dgrad, along one dimension

// A phase: the positions y0 + m*y_step (m < `count`) of one dimension that have the same taps. The
// j-th of `taps` is r0 + j*r_step, and reads the source at x0 + m*x_step + j*x_tap. fprop and wgrad
// have one phase, dgrad one per residue of the stride.
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
  const void* bias;        // one per channel of fprop's or dgrad's result, or null
  float* partials;         // [tile][splits of the workspace][kM * kN], if there is more than one
  u32* counters;           // blocks whose partial sums have been written; zero between launches
  i64 source_stride[6];    // N G C D H W, in bytes; channels are contiguous
  // In bytes. Weights: G, result channel, source channel, T R S; grad_output: as the source.
  i64 other_stride[6];
  i64 result_stride[6];  // in elements; as the source's, or for wgrad G K C T R S
  int rows, columns;     // M of the largest phase, N: of the GEMM of one group
  int source_channels;   // of one group
  int result_channels;   // of one group; wgrad: grad_output's
  int tap_chunks;        // chunks of 16 bytes that hold the source's channels
  int cluster_log;       // log2 of the blocks of a cluster, which split a tile's K
  int workspace;         // clusters among which a tile's K is split
  int ring_bytes;        // bytes of the stages that a block's k-tiles fill
  // Whether pixel p is at p times the stride of W: in the source, with one tap and one phase (fprop,
  // dgrad) or one tap (wgrad); in grad_output (wgrad); in the result (fprop, dgrad).
  int linear_source, linear_other, linear_result;
  int plain;              // no epilogue
  int result_in_vectors;  // channels of the result are contiguous, in aligned 16-byte chunks
  int pixels_fastest;     // the result's pixels are contiguous, its channels are not
  int wide_result;        // the result is float32, regardless of the operands' type
  int batch;
  int activation;
  float alpha, beta;
  Divider by_column_tiles, by_tap_chunks, by_splits;
  GatherAxis axis[3];
  GatherPhase phase[kMaxPhases][3];
};

}  // namespace convgrad
