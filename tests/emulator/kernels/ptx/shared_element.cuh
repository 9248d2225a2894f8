// The emulator's ptx/shared_element.cuh.
#pragma once

#include "ptx/mma.cuh"

namespace convgrad {

template <class E>
static inline E element_at(u32 from) {
  E element;
  memcpy(&element, emulator::in_shared(from, sizeof element, sizeof element), sizeof element);
  return element;
}
template <class E>
static inline void store_element(u32 to, E element) {
  memcpy(emulator::in_shared(to, sizeof element, sizeof element), &element, sizeof element);
}
static inline void advance(u32& address, int bytes) { address += bytes; }

}  // namespace convgrad
