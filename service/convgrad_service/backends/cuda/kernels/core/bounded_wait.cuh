// Timeouts for spin loops. With BOUNDED_WAITS (debug builds, as in the GPU tests) a wait that takes longer
// than any kernel traps, so that a test fails instead of hanging; otherwise this is a no-op. Every loop
// that polls what another thread writes calls BoundedWait::check in each iteration.
#pragma once

#include "core/elements.cuh"

namespace convgrad {

#ifdef BOUNDED_WAITS
struct BoundedWait {
  static constexpr u64 kTimeoutNs = 4'000'000'000;

  __device__ __forceinline__ BoundedWait() : start_ns(now_ns()) {}
  __device__ __forceinline__ void check() const {
    if (now_ns() - start_ns > kTimeoutNs) asm volatile("trap;");
  }

 private:
  __device__ __forceinline__ static u64 now_ns() {
    u64 time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
    return time;
  }
  u64 start_ns;
};
#else
struct BoundedWait {
  __device__ __forceinline__ void check() const {}
};
#endif

}  // namespace convgrad
