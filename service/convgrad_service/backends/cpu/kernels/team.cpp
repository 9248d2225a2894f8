// The thread pool. Helper threads stay in native code, so that starting and finishing a launch
// needs neither the GIL nor a wake-up through the interpreter: a helper starts within microseconds
// even while Python is busy.
//
// A launch claims a slot of the team, opens it, runs the kernel itself, closes the slot, and waits
// for the helpers inside. A helper joins any open slot with a free seat, runs the kernel until no
// task is left, and looks again; if no slot is open, it spins briefly and then sleeps.
//
// Waking a thread takes tens of microseconds, as long as many a launch. So a host that knows that a
// launch will follow wakes helpers while it prepares it.
//
// With few helpers, a launch first excludes them from the caller's core. The scheduler would wake
// them on the core where they last ran or where their waker runs; there they would wait for the
// caller, and a launch of a millisecond would be over before they migrated.
//
// Requires: the host gives each slot to one launch at a time, keeps arguments and scratch alive
// until team_run returns, and the team until every team_work has returned.
#include "conv_args.hpp"

extern "C" long syscall(long number, ...);
extern "C" int sched_getcpu();

namespace convgrad {
namespace {

#if defined(__x86_64__)
constexpr long kFutex = 202, kGetThread = 186, kSetAffinity = 203, kGetAffinity = 204;
#else
constexpr long kFutex = 98, kGetThread = 178, kSetAffinity = 122, kGetAffinity = 123;
#endif
constexpr int kWaitPrivate = 128, kWakePrivate = 129;
constexpr int kSlots = 16;
constexpr int kPlaced = 8;  // maximum number of helpers whose affinity is set
constexpr int kMaskWords = 16;
// About a hundred microseconds, in which a helper awaits the next launch, and ten, in which a caller
// awaits its helpers.
constexpr int kSpins = 10000, kBriefSpins = 1000;

using Kernel = void (*)(const void*, Control*, void*);

// gate: bit 62 is set if open; bits 32 and up count seats taken, the low 32 helpers inside.
constexpr uint64_t kOpen = uint64_t(1) << 62;
constexpr uint64_t kSeat = uint64_t(1) << 32;

struct Slot {
  uint64_t gate;
  Kernel kernel;
  const void* args;
  Control* control;
  void** scratch;  // [0] for the caller, the others for helpers
  uint64_t seats;  // maximum number of helpers
};

struct Team {
  uint32_t sequence;  // incremented by every launch
  uint32_t stopping;
  uint32_t helpers;  // number started
  int32_t avoided;   // 1 + the core that they were last excluded from
  uint32_t threads[kPlaced];
  Slot slots[kSlots];
};

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  __asm__ volatile("yield");
#endif
}

// Joins the slot if it is open and has a free seat. Returns the seat's number from 1 on, or 0.
uint64_t join(Slot* slot) {
  uint64_t gate = __atomic_load_n(&slot->gate, __ATOMIC_ACQUIRE);
  for (;;) {
    if (!(gate & kOpen)) return 0;
    const uint64_t taken = (gate & ~kOpen) >> 32;
    if (taken >= slot->seats) return 0;
    if (__atomic_compare_exchange_n(&slot->gate, &gate, gate + kSeat + 1, false, __ATOMIC_ACQ_REL,
                                    __ATOMIC_ACQUIRE)) {
      return taken + 1;
    }
  }
}

// Sets the helpers' affinity to the caller's, without the caller's current core.
void place(Team* team) {
  const int core = sched_getcpu();
  if (core < 0 || __atomic_load_n(&team->avoided, __ATOMIC_RELAXED) == core + 1) return;
  const uint32_t helpers = __atomic_load_n(&team->helpers, __ATOMIC_ACQUIRE);
  uint64_t mask[kMaskWords] = {};
  if (helpers > kPlaced || core >= kMaskWords * 64) return;
  if (syscall(kGetAffinity, 0, sizeof(mask), mask) <= 0) return;
  mask[core / 64] &= ~(uint64_t(1) << (core % 64));
  uint64_t left = 0;
  for (const uint64_t word : mask) left |= word;
  if (left == 0) return;
  for (uint32_t i = 0; i < helpers; ++i) {
    const uint32_t thread = __atomic_load_n(&team->threads[i], __ATOMIC_ACQUIRE);
    if (thread != 0) syscall(kSetAffinity, thread, sizeof(mask), mask);
  }
  __atomic_store_n(&team->avoided, core + 1, __ATOMIC_RELAXED);
}

bool help(Team* team) {
  bool helped = false;
  for (Slot& slot : team->slots) {
    const uint64_t seat = join(&slot);
    if (!seat) continue;
    slot.kernel(slot.args, slot.control, slot.scratch[seat]);
    __atomic_fetch_sub(&slot.gate, 1, __ATOMIC_RELEASE);
    helped = true;
  }
  return helped;
}

}  // namespace
}  // namespace convgrad

// The main function of a helper thread; returns after team_stop.
extern "C" CONVGRAD_EXPORT void convgrad_team_work(void* pointer) {
  using namespace convgrad;
  Team* team = static_cast<Team*>(pointer);
  const uint32_t number = __atomic_fetch_add(&team->helpers, 1, __ATOMIC_ACQ_REL);
  if (number < kPlaced) {
    const auto thread = static_cast<uint32_t>(syscall(kGetThread));
    __atomic_store_n(&team->threads[number], thread, __ATOMIC_RELEASE);
    __atomic_store_n(&team->avoided, 0, __ATOMIC_RELEASE);  // this helper's affinity is not set yet
  }
  own_share = number + 1;  // a caller's is 0
  while (!__atomic_load_n(&team->stopping, __ATOMIC_ACQUIRE)) {
    const uint32_t seen = __atomic_load_n(&team->sequence, __ATOMIC_ACQUIRE);
    if (help(team)) continue;
    int spins = 0;
    while (spins < kSpins && __atomic_load_n(&team->sequence, __ATOMIC_ACQUIRE) == seen) {
      relax();
      ++spins;
    }
    if (spins == kSpins) syscall(kFutex, &team->sequence, kWaitPrivate, seen, nullptr);
  }
}

extern "C" CONVGRAD_EXPORT void convgrad_team_stop(void* pointer) {
  using namespace convgrad;
  Team* team = static_cast<Team*>(pointer);
  __atomic_store_n(&team->stopping, 1, __ATOMIC_RELEASE);
  __atomic_fetch_add(&team->sequence, 1, __ATOMIC_RELEASE);
  syscall(kFutex, &team->sequence, kWakePrivate, 0x7fffffff);
}

// Wakes helpers ahead of a launch.
extern "C" CONVGRAD_EXPORT void convgrad_team_wake(void* pointer, int64_t helpers) {
  using namespace convgrad;
  Team* team = static_cast<Team*>(pointer);
  place(team);
  syscall(kFutex, &team->sequence, kWakePrivate, helpers);
}

// Runs one launch with the helpers that join; returns when all tasks are done.
extern "C" CONVGRAD_EXPORT void convgrad_team_run(void* pointer, int64_t index, void* kernel,
                                                  const void* args, void* control, void** scratch,
                                                  int64_t helpers) {
  using namespace convgrad;
  Team* team = static_cast<Team*>(pointer);
  Slot* slot = &team->slots[index];
  slot->kernel = reinterpret_cast<Kernel>(kernel);
  slot->args = args;
  slot->control = static_cast<Control*>(control);
  slot->scratch = scratch;
  slot->seats = static_cast<uint64_t>(helpers);
  place(team);
  __atomic_store_n(&slot->gate, kOpen, __ATOMIC_RELEASE);
  __atomic_fetch_add(&team->sequence, 1, __ATOMIC_RELEASE);
  syscall(kFutex, &team->sequence, kWakePrivate, helpers);
  slot->kernel(args, slot->control, scratch[0]);
  __atomic_fetch_and(&slot->gate, ~kOpen, __ATOMIC_ACQ_REL);
  for (int spin = 0; __atomic_load_n(&slot->gate, __ATOMIC_ACQUIRE) & 0xffffffffu; ++spin) {
    if (spin > kBriefSpins) {
      sched_yield();
    } else {
      relax();
    }
  }
}
