// How blocks meet that leave each other partial sums and then add them up, each a part of them.
//
// A word counts the parties (units of a tile, blocks of a slice): those that have begun, those whose
// partial sums are there, of these the ones whose blocks do not wait for the others, and the blocks
// that have seen all: eight bits each, so at most 255. A block waits only if it finds all to have
// begun: each of them then has a place on the device and waits for nobody before its sums are there.
// (Of a grid no larger than the device all mostly have. Kernels beside this one may keep some out.)
// What would be the part of those that left is added up by the others; the one that began last always
// waits. Whoever sees last leaves the word as it was, zero.
#pragma once

#include "core/elements.cuh"
#include "core/bounded_wait.cuh"

namespace convgrad {

constexpr u32 kBegun = 1, kThere = 1 << 8, kLeft = 1 << 16, kSeen = 1 << 24;

// All of these by one thread.
__device__ __forceinline__ void begin_party(u32* word) { atomicAdd(word, kBegun); }
__device__ __forceinline__ u32 begun_by_now(const u32* word) {
  return *static_cast<const volatile u32*>(word);
}

// The rank of this block among those that add up, and how many these are; none if this one left.
struct Met {
  int rank, blocks;
};

// After the block's partial sums have been written and a barrier of those who did; `begun` as it was a
// little before.
__device__ __forceinline__ Met meet(u32* word, u32 begun, u32 parties) {
  const volatile u32* const now = word;
  const bool waits = (begun & 255) == parties;
  __threadfence();
  const u32 more = waits ? kThere : kThere + kLeft;
  u32 found = atomicAdd(word, more);
  if (!waits) return {0, 0};
  const int rank = (found >> 8 & 255) - (found >> 16 & 255);
  found += more;
  for (const Wait wait; (found >> 8 & 255) != parties; wait.go_on()) found = *now;
  __threadfence();
  return {rank, static_cast<int>(parties - (found >> 16 & 255))};
}

// After the block has read all that it adds up.
__device__ __forceinline__ void leave_meeting(u32* word, const Met& met) {
  const u32 found = atomicAdd(word, kSeen);
  if (static_cast<int>(found >> 24) == met.blocks - 1) atomicExch(word, 0u);
}

}  // namespace convgrad
