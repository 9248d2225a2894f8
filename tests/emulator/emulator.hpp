// A block of a GPU, or the blocks of a cluster, on one thread of the CPU: their threads take turns. A
// lane that reaches something that its warp does together waits for the other lanes; a thread at a
// barrier waits for the block. launch.hpp hands out the turns; cuda.hpp has CUDA's own names.
#pragma once

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Objects in shared memory of fixed size, between two marks of the linker.
__attribute__((section("convgrad_shared"), used, retain)) static char fixed_shared[16];
extern "C" char __start_convgrad_shared[] __attribute__((visibility("hidden")));
extern "C" char __stop_convgrad_shared[] __attribute__((visibility("hidden")));

namespace emulator {

constexpr unsigned kBlockThreads = 1024, kMostBlocks = 8, kLanes = 32;  // of a block; of a cluster
constexpr unsigned kMostThreads = kBlockThreads * kMostBlocks;
constexpr unsigned kMostShared = (228 + 4) * 1024;
static unsigned current;  // the thread whose turn it is: of block current / kBlockThreads
static unsigned cluster_blocks;
static inline unsigned current_block() { return current / kBlockThreads; }
// Says what was wrong, and ends the launch.
static void fail(const char* what);
// The same of an access outside the buffers.
static void fail_at(const char* address);
// Until all threads of the block are here.
static void wait_for_block();
static int votes[kMostBlocks], decided[kMostBlocks];
// Until all threads of the cluster are here.
static void wait_for_cluster_threads();

// Of the block whose turn it is; that of the others is put aside. Addresses count from the window's
// start. As on Hopper its first 1,024 bytes are the system's, then comes what has a fixed size (here
// it lies elsewhere), so what a launch asks for starts at a multiple of 128 and of no more.
constexpr unsigned kFirstDynamic = 1024 + 128;
alignas(1024) static char shared_memory[kFirstDynamic + kMostShared];
static char* const shared_window = shared_memory;
static char* const dynamic_shared = shared_window + kFirstDynamic;
static unsigned dynamic_bytes;
// What a kernel may address besides: the launch's buffers.
struct Stretch {
  const char *begin, *end, *name;
};
static const Stretch* stretches;
static unsigned stretch_count;

// What each lane of a warp brings to what they do together, and takes away.
struct Lane {
  unsigned mask;
  const void* what;
  alignas(8) unsigned given[16], taken[16];
};
static Lane all_lanes[kMostThreads];
static unsigned arrived[kMostThreads / kLanes];
static void wait_for_warp();
static void wait_for_some();
static void wake(unsigned thread);

// Barriers with a number, at which some threads wait and others only come by.
struct NamedBarrier {
  unsigned expected, come, waiting;
  unsigned waiters[kBlockThreads];
};
static NamedBarrier named_barriers[kMostBlocks][16];
static void fail(const char* what);
static void come_to(int number, int threads, bool waits) {
  NamedBarrier& barrier = named_barriers[current_block()][number];
  if (barrier.come == 0) barrier.expected = threads;
  if (barrier.expected != static_cast<unsigned>(threads)) {
    fail("threads expect different numbers at one barrier");
  }
  if (waits) barrier.waiters[barrier.waiting++] = current;
  if (++barrier.come == barrier.expected) {
    for (unsigned i = 0; i < barrier.waiting; ++i) {
      if (barrier.waiters[i] != current) wake(barrier.waiters[i]);
    }
    barrier.come = barrier.waiting = 0;
    return;
  }
  if (waits) wait_for_some();
}

// Waits for the lanes of `mask`, which must all be at the same place; the last to come does
// `together(lanes)` for all of them.
template <class Together>
static inline void meet(unsigned mask, Together together) {
  static const char kPlace = 0;  // one for each kind of meeting
  const unsigned warp = current / kLanes, lane = current % kLanes;
  Lane* const lanes = all_lanes + warp * kLanes;
  if (!(mask >> lane & 1)) fail("a lane is not in its own mask");
  lanes[lane].mask = mask;
  lanes[lane].what = &kPlace;
  arrived[warp] |= 1u << lane;
  if ((arrived[warp] & mask) != mask) return wait_for_warp();
  for (unsigned i = 0; i < kLanes; ++i) {
    if (!(mask >> i & 1)) continue;
    if (lanes[i].mask != mask) fail("lanes of a warp meet with different masks");
    if (lanes[i].what != &kPlace) fail("lanes of a warp are at different instructions");
  }
  together(lanes);
  arrived[warp] &= ~mask;
  for (unsigned i = 0; i < kLanes; ++i) {
    if ((mask >> i & 1) && i != lane) wake(warp * kLanes + i);
  }
}

// Lane i takes what lane source(i) gives, or its own.
template <class T, class Source>
static inline T shuffled(unsigned mask, T value, int width, Source source) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  Lane& own = all_lanes[current];
  memcpy(own.given, &value, sizeof value);
  const int lane = current % kLanes, first = lane & -width;
  const int from = source(lane, first);
  own.given[2] = from < first || from >= first + width ? lane : from;
  meet(mask, [&](Lane* lanes) {
    for (unsigned i = 0; i < kLanes; ++i) {
      if (!(mask >> i & 1)) continue;
      if (!(mask >> lanes[i].given[2] & 1)) fail("a shuffle from a lane outside the mask");
      memcpy(lanes[i].taken, lanes[lanes[i].given[2]].given, sizeof(T));
    }
  });
  memcpy(&value, own.taken, sizeof value);
  return value;
}

// Where an address in shared memory is, for so many bytes aligned to `alignment`.
__attribute__((noinline)) static char* in_shared(unsigned address, unsigned bytes, unsigned alignment) {
  const int offset = static_cast<int>(address);
  if (address % alignment != 0) fail("an address in shared memory is not aligned");
  char* const at = shared_window + offset;
  const bool fixed = at >= __start_convgrad_shared && at + bytes <= __stop_convgrad_shared;
  if (!fixed && (at < dynamic_shared || at + bytes > dynamic_shared + dynamic_bytes)) {
    fail("an address outside shared memory");
  }
  return at;
}
__attribute__((noinline)) static void check_global(const void* at, unsigned bytes, unsigned alignment) {
  const char* const first = static_cast<const char*>(at);
  if (reinterpret_cast<uintptr_t>(at) % alignment != 0) {
    fail("an address in global memory is not aligned");
  }
  static unsigned latest;  // most accesses are to the buffer of the one before
  for (unsigned i = 0; i < stretch_count; ++i) {
    const Stretch& of = stretches[(latest + i) % stretch_count];
    if (first < of.begin || first + bytes > of.end) continue;
    latest = (latest + i) % stretch_count;
    return;
  }
  fail_at(first);
}

// Asynchronous copies of one thread, in the order in which they were started.
struct Copies {
  static constexpr unsigned kMost = 512;
  struct {
    char* to;
    const void* from;
    int bytes, real;
    unsigned group;
  } all[kMost];
  unsigned count, group;
};
static Copies copies_of[kMostThreads];

static void forget_copies(unsigned thread) {
  copies_of[thread].count = copies_of[thread].group = 0;
}

template <class T, class Change>
static inline T changed(T* at, Change change) {
  const T before = *at;
  *at = change(before);
  return before;
}

template <class To, class From>
static inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

// What the instructions of core/elements.cuh do.
static inline float half_to_float(unsigned short bits) {
  return static_cast<float>(bits_as<_Float16>(bits));
}
static inline unsigned short float_to_half(float value) {
  return bits_as<unsigned short>(static_cast<_Float16>(value));
}
static inline unsigned short float_to_bfloat(float value) {
  if (value != value) return 0x7fff;
  const unsigned bits = bits_as<unsigned>(value);
  return static_cast<unsigned short>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

}  // namespace emulator
