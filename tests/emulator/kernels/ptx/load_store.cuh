// What the kernels' ptx/load_store.cuh does, on the CPU.
#pragma once

#include "ptx/mma.cuh"

namespace convgrad {

template <class Raw>
static inline void load_shared(u32 from, Raw& raw) {
  memcpy(&raw, emulator::in_shared(from, sizeof raw, sizeof raw), sizeof raw);
}
template <class Raw>
static inline void store_if(bool wanted, void* to, Raw raw) {
  if (!wanted) return;
  emulator::check_global(to, sizeof raw, sizeof raw);
  memcpy(to, &raw, sizeof raw);
}
template <class Raw>
static inline void load_if(bool wanted, const void* from, Raw& raw) {
  raw = {};
  if (!wanted) return;
  emulator::check_global(from, sizeof raw, sizeof raw);
  memcpy(&raw, from, sizeof raw);
}
template <int kCount>
static inline void reread(const float* from, float (&to)[kCount]) {
  memcpy(to, from, sizeof to);
}
template <class T>
static inline T choose(bool first, T a, T b) {
  return first ? a : b;
}

}  // namespace convgrad
