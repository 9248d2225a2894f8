// The emulator's ptx/acquire.cuh. Threads take turns.
#pragma once

#include "core/elements.cuh"

namespace convgrad {

static inline u32 ld_acquire(const u32* from) { return *from; }
static inline u32 atomic_add_acq_rel(u32* at, u32 by) { return atomicAdd(at, by); }

}  // namespace convgrad
