// Keeps the process alive if a client truncates a memory file that is mapped here.
//
// Accessing a page beyond the end of the file, also from a kernel, raises SIGBUS, which would
// terminate the process with the work of all clients. The handler maps zeros in place of the
// missing pages and records the event: the kernel continues, and its request is rejected
// afterwards.
//
// Requires: the caller guards a range before it is first accessed and for as long as it is mapped.
// Everything is lock-free, since the handler may interrupt any thread anywhere.

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
    int64_t lost;  // offset of the first missing page that was accessed, or -1
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
    // All pages after the first missing one are missing too: one mapping covers the rest.
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
        // Not a guarded range. The access faults again on return, or the signal is sent again, and
        // the previous handler receives it.
        sigaction(SIGBUS, &before, nullptr);
        if (sent) {
            raise(number);
        }
    }
    errno = saved;
}

}  // namespace

extern "C" {

// Installs the handler; call once per process. Returns 0, or the errno on failure.
CONVGRAD_EXPORT int convgrad_guard_install() {
    page_bytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    struct sigaction ours = {};
    ours.sa_sigaction = on_bus_error;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
    sigemptyset(&ours.sa_mask);
    return sigaction(SIGBUS, &ours, &before) == 0 ? 0 : errno;
}

// Guards `size` bytes from `base`, which is page-aligned. Returns the range's number, or -1 if
// there are too many.
CONVGRAD_EXPORT int64_t convgrad_guard_add(uintptr_t base, uintptr_t size) {
    for (int64_t number = 0; number < kRanges; ++number) {
        uintptr_t free = 0;
        // Reserved with an address that no access has, until the other fields are set.
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

// Returns the offset of the first missing page that was accessed, or -1.
CONVGRAD_EXPORT int64_t convgrad_guard_lost(int64_t number) {
    return __atomic_load_n(&ranges[number].lost, __ATOMIC_ACQUIRE);
}

// Removes a guard. The range must not be accessed afterwards.
CONVGRAD_EXPORT void convgrad_guard_remove(int64_t number) {
    __atomic_store_n(&ranges[number].base, 0, __ATOMIC_RELEASE);
}

}  // extern "C"
