// Runs one launch of the kernel ENTRY(ARGUMENTS), which stands above this in the file.
#pragma once

namespace emulator {

// Not a power of two apart, so that the stacks do not meet in the CPU's caches.
static constexpr unsigned long kStackBytes = 256 * 1024 + 1088;

enum class Turn : unsigned char { kReady, kAtWarp, kAtBlock, kAtNamed, kDone };
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
static void wait_for_some() { pass_turn(Turn::kAtNamed); }
static void wake(unsigned thread) { coroutines[thread].turn = Turn::kReady; }
static void fail(const char* what) {
  failure = what;
  pass_turn(Turn::kDone);
  abort();
}

static void thread_main() {
  ENTRY(*arguments);
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
      current = threadIdx.x = thread;
      convgrad_switch(&scheduler, coroutines[thread].stack);
    }
  }
}

// So much more than was asked for must stay as it is.
static constexpr unsigned kMarginBytes = 4096;

// Shared memory starts as large numbers, whatever the block before left: sums that are not finite
// would be taken again, and right.
static constexpr char kSpoiled = 0x4b;
static void spoil_shared() {
  memset(dynamic_shared, kSpoiled, dynamic_bytes + kMarginBytes);
  memset(__start_convgrad_shared, kSpoiled, __stop_convgrad_shared - __start_convgrad_shared);
}

static const char* run_block(unsigned threads, char* stacks) {
  spoil_shared();
  memset(arrived, 0, sizeof arrived);
  forget_copies(threads);
  memset(named_barriers, 0, sizeof named_barriers);
  for (unsigned thread = 0; thread < threads; ++thread) {
    // As if thread_main had been called: a return address, then six saved registers.
    void** top = reinterpret_cast<void**>(stacks + (thread + 1) * kStackBytes);
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(thread_main);
    for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
    coroutines[thread] = {top, Turn::kReady};
  }
  // Every other time from the last warp on and the last lane on: what lacks a barrier shows.
  const unsigned warps = (threads + kLanes - 1) / kLanes;
  for (bool backwards = false;; backwards = !backwards) {
    votes = 0;
    for (unsigned i = 0; i < warps; ++i) {
      const unsigned first = (backwards ? warps - 1 - i : i) * kLanes;
      run_warp(first, first + kLanes < threads ? first + kLanes : threads, backwards);
      if (failure != nullptr) return failure;
    }
    unsigned done = 0, waiting = 0, named = 0, ready = 0;
    for (unsigned thread = 0; thread < threads; ++thread) {
      done += coroutines[thread].turn == Turn::kDone;
      waiting += coroutines[thread].turn == Turn::kAtBlock;
      named += coroutines[thread].turn == Turn::kAtNamed;
      ready += coroutines[thread].turn == Turn::kReady;
    }
    if (done == threads) break;
    if (named + ready > 0) {
      if (ready == 0) return "nobody comes to a barrier that threads wait at";
      continue;
    }
    if (done + waiting != threads) return "not all lanes of a warp meet";
    if (waiting != threads) return "not all of a block meets at a barrier";
    decided = votes;
    for (unsigned thread = 0; thread < threads; ++thread) wake(thread);
  }
  for (unsigned i = dynamic_bytes; i < dynamic_bytes + kMarginBytes; ++i) {
    if (dynamic_shared[i] != kSpoiled) return "a write past the shared memory that was asked for";
  }
  return nullptr;
}

struct Launch {
  const void* arguments;
  const char *arena, *arena_end;
  unsigned grid[3];
  unsigned threads;
  unsigned shared_bytes;
};

// Returns what went wrong, or null.
extern "C" const char* launch(const Launch* how) {
  static char* stacks = nullptr;
  if (stacks == nullptr) {
    stacks = static_cast<char*>(aligned_alloc(64, kStackBytes * kMostThreads));
  }
  arguments = static_cast<const ARGUMENTS*>(how->arguments);
  arena = how->arena;
  arena_end = how->arena_end;
  dynamic_bytes = how->shared_bytes;
  if (how->threads > kMostThreads) return "more than 1024 threads in a block";
  if (dynamic_bytes + kMarginBytes > kMostShared) return "more shared memory than there is";
  failure = nullptr;
  gridDim = {how->grid[0], how->grid[1], how->grid[2]};
  blockDim = {how->threads, 1, 1};
  threadIdx = {};
  for (blockIdx.z = 0; blockIdx.z < gridDim.z; ++blockIdx.z) {
    for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y) {
      for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
        const char* const wrong = run_block(how->threads, stacks);
        if (wrong != nullptr) return wrong;
      }
    }
  }
  return nullptr;
}

}  // namespace emulator
