// Runs one launch of the kernel ENTRY(ARGUMENTS), which stands above this in the file.
#pragma once

#include <signal.h>
#include <ucontext.h>

#include "transfers.hpp"

namespace emulator {

// Not a power of two apart, so that the stacks do not meet in the CPU's caches.
static constexpr unsigned long kStackBytes = 256 * 1024 + 1088;

enum class Turn : unsigned char { kReady, kAtWarp, kAtBlock, kAtCluster, kAtSome, kDone };
constexpr unsigned kTurns = 6;
struct Coroutine {
  void* stack;
  Turn turn;
};
static Coroutine coroutines[kMostThreads];
static void* scheduler;
static const ARGUMENTS* arguments;
static const char* failure;

// Saves the callee's registers and the stack on one side, and takes up the other.
extern "C" void convgrad_switch(void** from, void* to);
asm(R"(
.text
.globl convgrad_switch
.hidden convgrad_switch
convgrad_switch:
  push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp
  ret
)");

static void pass_turn(Turn until) {
  const unsigned self = current;
  coroutines[self].turn = until;
  convgrad_switch(&coroutines[self].stack, scheduler);
}
static void wait_for_block() { pass_turn(Turn::kAtBlock); }
static void wait_for_warp() { pass_turn(Turn::kAtWarp); }
static void wait_for_some() { pass_turn(Turn::kAtSome); }
static void wait_for_cluster_threads() { pass_turn(Turn::kAtCluster); }
static void wake(unsigned thread) { coroutines[thread].turn = Turn::kReady; }
static void fail(const char* what) {
  failure = what;
  pass_turn(Turn::kDone);
  abort();
}
static void fail_at(const char* address) {
  static char said[160];
  const Stretch* nearest = stretches;
  auto away = [&](const Stretch& of) {
    return address < of.begin ? of.begin - address : address >= of.end ? address - of.end : 0;
  };
  for (unsigned i = 1; i < stretch_count; ++i) {
    if (away(stretches[i]) < away(*nearest)) nearest = stretches + i;
  }
  snprintf(said, sizeof said, "an access outside the buffers: at byte %lld of the %lld of %s",
           static_cast<long long>(address - nearest->begin),
           static_cast<long long>(nearest->end - nearest->begin), nearest->name);
  fail(said);
}

// ---- Accesses that nobody checks one by one. The compiler looks at what they are aligned to, and at
// indices of arrays; the fences between buffers fault. The thread that did it fails.

// What the compiler says of a place in the source.
struct Place {
  const char* file;
  unsigned line, column;
};
extern "C" void __ubsan_handle_out_of_bounds(const Place* place, unsigned long index) {
  static char said[160];
  snprintf(said, sizeof said, "%s:%u: index %ld is beyond the array", place->file, place->line,
           static_cast<long>(index));
  fail(said);
}
extern "C" void __ubsan_handle_type_mismatch_v1(const Place* place, unsigned long address) {
  static char said[160];
  snprintf(said, sizeof said, "%s:%u: an access that is not aligned to its type: ...%03lx",
           place->file, place->line, address & 0xfff);
  fail(said);
}

static const char* faulted_at;
static void fail_for_fault() { fail_at(faulted_at); }
static bool in_thread;  // of a kernel, not the scheduler
static struct sigaction before_us;
static void on_fault(int, siginfo_t* info, void* where) {
  if (!in_thread) {
    sigaction(SIGSEGV, &before_us, nullptr);  // whose matter it is, when it happens again
    return;
  }
  faulted_at = static_cast<const char*>(info->si_addr);
  auto& registers = static_cast<ucontext_t*>(where)->uc_mcontext.gregs;
  // Goes on there, as if called from where it happened, below what may lie beyond the stack's end.
  registers[REG_RIP] = reinterpret_cast<long long>(fail_for_fault);
  registers[REG_RSP] = ((registers[REG_RSP] - 128) & ~15ll) - 8;
}
struct CaughtFaults {
  CaughtFaults() {
    struct sigaction ours = {};
    ours.sa_sigaction = on_fault;
    ours.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &ours, &before_us);
  }
  ~CaughtFaults() { sigaction(SIGSEGV, &before_us, nullptr); }
};

static void thread_main() {
  ::ENTRY(*arguments);
  pass_turn(Turn::kDone);
  abort();
}

// Runs a warp until nobody in it can go on alone.
static void run_warp(unsigned first, unsigned end, bool backwards) {
  for (bool moved = true; moved && failure == nullptr;) {
    moved = false;
    for (unsigned i = first; i < end && failure == nullptr; ++i) {
      const unsigned thread = backwards ? end - 1 - (i - first) : i;
      if (coroutines[thread].turn != Turn::kReady) continue;
      moved = true;
      current = thread;
      threadIdx.x = thread % kBlockThreads;
      in_thread = true;
      convgrad_switch(&scheduler, coroutines[thread].stack);
      in_thread = false;
    }
  }
}

// Shared memory starts as NaN, whatever the block before left: what a product reads before it is
// written shows, even where it meets zeros.
static constexpr char kSpoiled = static_cast<char>(0xff);
static void spoil_shared() {
  memset(dynamic_shared, kSpoiled, dynamic_bytes + kMarginBytes);
  memset(__start_convgrad_shared, kSpoiled, __stop_convgrad_shared - __start_convgrad_shared);
}

// Gives a block of the cluster its turn: its shared memory, and its place in the grid.
static unsigned first_block;
static void turn_to(unsigned block) {
  blockIdx.x = first_block + block;
  if (block == resident) return;
  put_aside(resident);
  bring_back(block);
}

static void start_thread(unsigned thread, char* stacks) {
  // As if thread_main had been called: a return address, then six saved registers.
  void** top = reinterpret_cast<void**>(stacks + (thread + 1) * kStackBytes);
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(thread_main);
  for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
  coroutines[thread] = {top, Turn::kReady};
}

// Wakes who waits for what has come to pass; returns whether anybody can go on.
static bool go_on(unsigned threads) {
  unsigned all[kTurns] = {};
  for (unsigned block = 0; block < cluster_blocks; ++block) {
    const unsigned first = block * kBlockThreads;
    unsigned at[kTurns] = {};
    for (unsigned i = 0; i < threads; ++i) ++at[static_cast<int>(coroutines[first + i].turn)];
    if (at[static_cast<int>(Turn::kAtBlock)] == threads) {
      decided[block] = votes[block];
      votes[block] = 0;
      for (unsigned i = 0; i < threads; ++i) wake(first + i);
      at[static_cast<int>(Turn::kReady)] = threads;
    }
    for (unsigned turn = 0; turn < kTurns; ++turn) all[turn] += at[turn];
  }
  if (all[static_cast<int>(Turn::kAtCluster)] == threads * cluster_blocks) {
    for (unsigned block = 0; block < cluster_blocks; ++block) {
      for (unsigned i = 0; i < threads; ++i) wake(block * kBlockThreads + i);
    }
    return true;
  }
  if (all[static_cast<int>(Turn::kReady)] > 0) return true;
  if (all[static_cast<int>(Turn::kDone)] == threads * cluster_blocks) return false;
  failure = all[static_cast<int>(Turn::kAtSome)] > 0
                ? "nobody comes to a barrier that threads wait at"
            : all[static_cast<int>(Turn::kAtWarp)] > 0 ? "not all lanes of a warp meet"
            : all[static_cast<int>(Turn::kAtCluster)] > 0
                ? "not all of a cluster meets at a barrier"
                : "not all of a block meets at a barrier";
  return false;
}

static const char* run_cluster(unsigned threads, char* stacks) {
  memset(arrived, 0, sizeof arrived);
  memset(named_barriers, 0, sizeof named_barriers);
  memset(votes, 0, sizeof votes);
  forget_transfers();
  for (unsigned block = 0; block < cluster_blocks; ++block) {
    turn_to(block);
    spoil_shared();
    for (unsigned i = 0; i < threads; ++i) {
      forget_copies(block * kBlockThreads + i);
      start_thread(block * kBlockThreads + i, stacks);
    }
  }
  // Every other time from the last warp on and the last lane on: what lacks a barrier shows.
  const unsigned warps = (threads + kLanes - 1) / kLanes;
  bool backwards = false;
  do {
    for (unsigned b = 0; b < cluster_blocks; ++b) {
      const unsigned block = backwards ? cluster_blocks - 1 - b : b;
      const unsigned begin = block * kBlockThreads, end = begin + threads;
      turn_to(block);
      for (unsigned i = 0; i < warps; ++i) {
        const unsigned first = begin + (backwards ? warps - 1 - i : i) * kLanes;
        run_warp(first, first + kLanes < end ? first + kLanes : end, backwards);
        if (failure != nullptr) return failure;
      }
    }
    backwards = !backwards;
  } while (go_on(threads));
  if (failure != nullptr) return failure;
  if (const char* const left = transfers_left(); left != nullptr) return left;
  for (unsigned block = 0; block < cluster_blocks; ++block) {
    turn_to(block);
    for (unsigned i = dynamic_bytes; i < dynamic_bytes + kMarginBytes; ++i) {
      if (dynamic_shared[i] != kSpoiled) return "a write past the shared memory that was asked for";
    }
  }
  return nullptr;
}

struct Launch {
  const void* arguments;
  const Stretch* stretches;
  unsigned stretch_count;
  unsigned grid[3];
  unsigned threads;
  unsigned shared_bytes;
  unsigned cluster;  // blocks, where the launch says it and not the kernel
};

// Returns what went wrong, or null.
extern "C" const char* launch(const Launch* how) {
  static char* stacks = nullptr;
  if (stacks == nullptr) {
    stacks = static_cast<char*>(aligned_alloc(64, kStackBytes * kMostThreads));
  }
  arguments = static_cast<const ARGUMENTS*>(how->arguments);
  stretches = how->stretches;
  stretch_count = how->stretch_count;
  dynamic_bytes = how->shared_bytes;
  cluster_blocks = how->cluster > 1 ? how->cluster : CLUSTER_BLOCKS;
  if (how->threads > kBlockThreads) return "more than 1024 threads in a block";
  if (cluster_blocks > kMostBlocks) return "more blocks in a cluster than the emulator has room for";
  if (how->grid[0] % cluster_blocks != 0) return "a grid that is no whole number of clusters";
  if (dynamic_bytes + kMarginBytes > kMostShared) return "more shared memory than there is";
  failure = nullptr;
  const CaughtFaults caught;
  gridDim = {how->grid[0], how->grid[1], how->grid[2]};
  blockDim = {how->threads, 1, 1};
  threadIdx = {};
  for (blockIdx.z = 0; blockIdx.z < gridDim.z; ++blockIdx.z) {
    for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y) {
      for (first_block = 0; first_block < gridDim.x; first_block += cluster_blocks) {
        const char* const wrong = run_cluster(how->threads, stacks);
        if (wrong != nullptr) return wrong;
      }
    }
  }
  return nullptr;
}

}  // namespace emulator
