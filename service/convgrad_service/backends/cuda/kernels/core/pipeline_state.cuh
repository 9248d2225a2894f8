// A position in a ring of pipeline stages, CUTLASS's PipelineState.
#pragma once

#include "core/elements.cuh"

namespace convgrad {

// The stage's index, and the parity of the mbarrier phase to wait for. A consumer starts with parity 0. A
// producer that waits on "empty" barriers starts with parity 1, with which its first waits return at once.
struct PipelineState {
  int index = 0;
  u32 parity = 0;

  __device__ __forceinline__ void advance(int stages) {
    if (++index == stages) index = 0, parity ^= 1;
  }
  template <int kStages>
  __device__ __forceinline__ void advance_by(int count) {
    const u32 next = index + count, wraps = next / kStages;
    index = next - wraps * kStages, parity ^= wraps & 1;
  }
};

}  // namespace convgrad
