// The emulator's ptx/st_async.cuh.
#pragma once

#include "ptx/tma.cuh"

namespace convgrad {

static inline void st_async(u32 to, const float (&values)[4], u32 barrier, u32 rank) {
  memcpy(emulator::shared_of(rank, to, 16, 16), values, 16);
  emulator::count_at(rank, barrier, 0, -16);
}

}  // namespace convgrad
