// Keeps a process alive when a client shortens a memory file that is mapped here.
//
// A page that the file does not have any more raises SIGBUS in whoever touches it, a kernel in the
// middle of a problem too, and ends the process with every other client's work. The handler puts
// zeros in the place of what is gone and notes that it did: the kernel goes on, and its request is
// refused afterwards.
//
// Relies on its caller for: guarding a range before anything touches it, and for as long as it is
// mapped. Everything is lock-free, because the handler may interrupt any thread anywhere.

#include "conv_args.hpp"

#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

namespace {

struct Range {
    uintptr_t base;  // 0: a free slot
    uintptr_t size;
    int64_t lost;  // offset of the first page that was missing; -1: none was
};

constexpr int64_t kRanges = 4096;
Range ranges[kRanges];
uintptr_t page_bytes;
struct sigaction before;

Range* range_of(uintptr_t address) {
    for (Range& range : ranges) {
        const uintptr_t base = __atomic_load_n(&range.base, __ATOMIC_ACQUIRE);
        if (base != 0 && address - base < range.size) {
            return &range;
        }
    }
    return nullptr;
}

void note(Range& range, int64_t offset) {
    int64_t known = __atomic_load_n(&range.lost, __ATOMIC_RELAXED);
    while ((known < 0 || offset < known) &&
           !__atomic_compare_exchange_n(&range.lost, &known, offset, false, __ATOMIC_RELEASE,
                                        __ATOMIC_RELAXED)) {
    }
}

bool put_zeros(uintptr_t address) {
    Range* range = range_of(address);
    if (range == nullptr) {
        return false;
    }
    // All that is behind the first missing page is missing too: one map for the rest of the range.
    const uintptr_t page = address & ~(page_bytes - 1);
    const uintptr_t rest = range->base + range->size - page;
    void* zeros = mmap(reinterpret_cast<void*>(page), rest, PROT_READ | PROT_WRITE,
                       MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (zeros == MAP_FAILED) {
        return false;
    }
    note(*range, static_cast<int64_t>(page - range->base));
    return true;
}

void on_bus_error(int number, siginfo_t* info, void*) {
    const int saved = errno;
    const bool sent = info->si_code <= 0;  // by a process, not by an access
    if (sent || !put_zeros(reinterpret_cast<uintptr_t>(info->si_addr))) {
        // Not ours. The access fails again on return, or the signal is sent again, and finds
        // whoever handled it before.
        sigaction(SIGBUS, &before, nullptr);
        if (sent) {
            raise(number);
        }
    }
    errno = saved;
}

}  // namespace

extern "C" {

// 0, or the errno that says why accesses cannot be guarded. Once per process.
CONVGRAD_EXPORT int convgrad_guard_install() {
    page_bytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    struct sigaction ours = {};
    ours.sa_sigaction = on_bus_error;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
    sigemptyset(&ours.sa_mask);
    return sigaction(SIGBUS, &ours, &before) == 0 ? 0 : errno;
}

// Guards ``size`` bytes from ``base``, a page's beginning; the range's number, -1 if there are too
// many.
CONVGRAD_EXPORT int64_t convgrad_guard_add(uintptr_t base, uintptr_t size) {
    for (int64_t number = 0; number < kRanges; ++number) {
        uintptr_t free = 0;
        // Taken with an address that no access has, and opened once it is filled in.
        if (__atomic_compare_exchange_n(&ranges[number].base, &free, UINTPTR_MAX, false,
                                        __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) {
            ranges[number].size = size;
            ranges[number].lost = -1;
            __atomic_store_n(&ranges[number].base, base, __ATOMIC_RELEASE);
            return number;
        }
    }
    return -1;
}

// Where the range's first missing page was; -1 while none was missing.
CONVGRAD_EXPORT int64_t convgrad_guard_lost(int64_t number) {
    return __atomic_load_n(&ranges[number].lost, __ATOMIC_ACQUIRE);
}

// Ends the guard of a range that nothing touches any more.
CONVGRAD_EXPORT void convgrad_guard_remove(int64_t number) {
    __atomic_store_n(&ranges[number].base, 0, __ATOMIC_RELEASE);
}

}  // extern "C"
