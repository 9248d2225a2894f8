// The activation of kernels that finish many results in unrolled code.
#pragma once

#include "core/epilogue.cuh"

namespace convgrad {

// Not inlined, as it would be most of their code.
__device__ __noinline__ float activated(float sum, int activation) { return activate(sum, activation); }

}  // namespace convgrad
