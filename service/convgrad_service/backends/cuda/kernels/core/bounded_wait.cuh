// Waits with an end: in a debug build (BOUNDED_WAITS defined, as GPU tests have it) a wait that takes
// longer than any kernel becomes a fault, and a test that would hang fails. Every loop that reads what
// another thread is to change asks `Wait::go_on` each time round; otherwise that is nothing.
#pragma once

#include "core/elements.cuh"

namespace convgrad {

#ifdef BOUNDED_WAITS
struct Wait {
  static constexpr u64 kLongestNs = 4'000'000'000;

  __device__ __forceinline__ Wait() : begun_ns(now_ns()) {}
  __device__ __forceinline__ void go_on() const {
    if (now_ns() - begun_ns > kLongestNs) asm volatile("trap;");
  }

 private:
  __device__ __forceinline__ static u64 now_ns() {
    u64 time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
    return time;
  }
  u64 begun_ns;
};
#else
struct Wait {
  __device__ __forceinline__ void go_on() const {}
};
#endif

}  // namespace convgrad
