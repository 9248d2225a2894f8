// Results that are written past the caches: if one is so large that it does not stay there, reading its
// lines before they are written costs more than it helps who reads the result.
#pragma once

#include "conv_args.hpp"
#include "elements.hpp"

namespace convgrad {

// Of results of 7 MB and more, a depthwise gradient and a copy of its result take 0.5 to 0.95 of the
// time, of 5 MB 1.1 (one thread of a processor with 1 MB of L2 and 32 MB of L3).
inline constexpr i64 kStreamedBytes = 6 << 20;

// Whether whole vectors at p and at multiples of `stride` elements can be streamed.
template <class T>
CONVGRAD_INLINE bool streams_at(const T* p, i64 stride) {
  return reinterpret_cast<u64>(p) % sizeof(Vec<T>) == 0 && stride % kLanes<T> == 0;
}

// Stores an aligned vector without reading its cache line. Before another thread may read such
// stores, finish_streams().
template <class T, class V>
CONVGRAD_INLINE void stream_raw(T* p, V v) {
  __builtin_nontemporal_store(v, reinterpret_cast<V*>(p));
}
CONVGRAD_INLINE void finish_streams() {
#if defined(__x86_64__)
  __builtin_ia32_sfence();
#else
  __atomic_thread_fence(__ATOMIC_RELEASE);
#endif
}

}  // namespace convgrad
