// Programmatic dependent launch (Launch.overlaps on the host). The dependent grid may start as soon as
// every block of the primary has called launch_dependent_grids or exited; wait_on_dependent_grids in the
// dependent grid returns once the primary has finished and its writes are visible. Both are no-ops in an
// ordinary launch and before sm_90.
#pragma once

namespace convgrad {

__device__ __forceinline__ void launch_dependent_grids() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_on_dependent_grids() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace convgrad
