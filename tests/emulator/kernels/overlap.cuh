// Stands in for kernels/overlap.cuh: one kernel ends before the next one starts.
#pragma once

namespace convgrad {

inline void start_next() {}
inline void wait_for_previous() {}

}  // namespace convgrad
