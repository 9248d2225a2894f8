// Kernel parameters of few_gather.cu.
#pragma once

#include "conv/implicit_gemm_args.cuh"

namespace convgrad {

// Strides count elements.
struct FewGatherArgs {
  const void* source;
  const void* weight;
  void* result;
  const void* accumulate;  // like the result, or null
  const void* bias;        // one per channel of the result, or null
  i64 source_stride[5];    // N C D H W
  i64 result_stride[5];
  i64 weight_stride[5];    // channels of the source and of the result, T R S
  int source_channels, result_channels;
  int batch;
  int activation;
  float alpha, beta;
  GatherAxis axis[3];
  GatherPhase phase[kMaxPhases][3];
};

}  // namespace convgrad
