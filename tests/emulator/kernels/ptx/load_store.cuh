// The emulator's ptx/load_store.cuh.
#pragma once

#include "ptx/mma.cuh"

namespace convgrad {

template <class Raw>
static inline void ld_shared(u32 from, Raw& raw) {
  memcpy(&raw, emulator::in_shared(from, sizeof raw, sizeof raw), sizeof raw);
}
template <class Raw>
static inline void store_if(bool pred, void* to, Raw raw) {
  if (!pred) return;
  emulator::check_global(to, sizeof raw, sizeof raw);
  memcpy(to, &raw, sizeof raw);
}
template <class Raw>
static inline void load_if(bool pred, const void* from, Raw& raw) {
  raw = {};
  if (!pred) return;
  emulator::check_global(from, sizeof raw, sizeof raw);
  memcpy(&raw, from, sizeof raw);
}
template <class Raw>
static inline void load_ahead_if(bool pred, const void* from, Raw& raw) {
  load_if(pred, from, raw);
}
template <int kCount>
static inline void ld_shared_volatile(const float* from, float (&to)[kCount]) {
  memcpy(to, from, sizeof to);
}
template <class T>
static inline T select(bool pred, T a, T b) {
  return pred ? a : b;
}

}  // namespace convgrad
