// Grid-level rendezvous for a split reduction: blocks leave partial sums in global memory, and those that
// are co-resident then each reduce a part of them.
//
// One word counts the participants of a tile (at most 255), eight bits each: begun; arrived (partial sums
// written); of these, exited without waiting; done reducing. A block waits for the others only if all have
// begun by then: each is then resident and writes its partial sums without waiting for any other, so the
// wait cannot deadlock. Otherwise the block exits, and the remaining ones reduce its part; the one that
// begins last always stays. (With a grid no larger than the device nearly all stay, unless concurrent
// kernels keep some out.) The last one done resets the word to zero.
#pragma once

#include "core/elements.cuh"
#include "core/bounded_wait.cuh"

namespace convgrad {

constexpr u32 kBegun = 1, kArrived = 1 << 8, kExited = 1 << 16, kDone = 1 << 24;

// All of these functions are called by one thread of the block.
__device__ __forceinline__ void rendezvous_begin(u32* word) { atomicAdd(word, kBegun); }
__device__ __forceinline__ u32 rendezvous_begun(const u32* word) {
  return *static_cast<const volatile u32*>(word);
}

// The rank of this block among those that reduce, and their number; zeros if this block exits.
struct ReducerRank {
  int rank, blocks;
};

// After the block's partial sums were written and the writing threads synchronised. `begun` is a recent
// result of rendezvous_begun.
__device__ __forceinline__ ReducerRank rendezvous_meet(u32* word, u32 begun, u32 parties) {
  const volatile u32* const counts = word;
  const bool waits = (begun & 255) == parties;
  __threadfence();
  const u32 arrival = waits ? kArrived : kArrived + kExited;
  u32 found = atomicAdd(word, arrival);
  if (!waits) return {0, 0};
  const int rank = (found >> 8 & 255) - (found >> 16 & 255);
  found += arrival;
  for (const BoundedWait wait; (found >> 8 & 255) != parties; wait.check()) found = *counts;
  __threadfence();
  return {rank, static_cast<int>(parties - (found >> 16 & 255))};
}

// After the block has read all partial sums that it reduces.
__device__ __forceinline__ void rendezvous_leave(u32* word, const ReducerRank& met) {
  const u32 found = atomicAdd(word, kDone);
  if (static_cast<int>(found >> 24) == met.blocks - 1) atomicExch(word, 0u);
}

}  // namespace convgrad
