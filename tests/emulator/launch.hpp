// Runs one launch of the kernel ENTRY(ARGUMENTS), which stands above this in the file.
#pragma once

static constexpr unsigned long kCoroutineStack = 256 * 1024, kCoroutines = 1024;

struct Coroutine {
  void* stack;
  bool done;
};
static Coroutine coroutines[kCoroutines];
static void* scheduler;
static unsigned current;
static const ARGUMENTS* arguments;

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

static void pass_turn() {
  const unsigned self = current;
  convgrad_switch(&coroutines[self].stack, scheduler);
  threadIdx.x = self;
}

static void thread_main() {
  ENTRY(*arguments);
  coroutines[current].done = true;
  convgrad_switch(&coroutines[current].stack, scheduler);
  abort();
}

// Returns 1 where some threads of a block ended while others waited at a barrier.
extern "C" int launch(const void* given, unsigned blocks, unsigned threads) {
  static char* stacks = nullptr;
  if (stacks == nullptr) {
    stacks = static_cast<char*>(aligned_alloc(4096, kCoroutineStack * kCoroutines));
  }
  arguments = static_cast<const ARGUMENTS*>(given);
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
    for (unsigned thread = 0; thread < threads; ++thread) {
      // As if thread_main had been called: a return address, then six saved registers.
      void** top = reinterpret_cast<void**>(stacks + (thread + 1) * kCoroutineStack);
      *--top = nullptr;
      *--top = reinterpret_cast<void*>(thread_main);
      for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
      coroutines[thread] = {top, false};
    }
    unsigned waiting = threads;
    while (waiting > 0) {
      votes = 0;
      waiting = 0;
      for (current = 0; current < threads; ++current) {
        threadIdx.x = current;
        convgrad_switch(&scheduler, coroutines[current].stack);
        waiting += !coroutines[current].done;
      }
      if (waiting != 0 && waiting != threads) return 1;
      decided = votes;
    }
  }
  return 0;
}
