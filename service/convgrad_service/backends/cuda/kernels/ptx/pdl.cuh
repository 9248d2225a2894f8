// Kernels one after another, where the second one is launched to overlap the first (Launch.overlaps):
// it may start as soon as every block of the first has called launch_dependent_grids or ended, and waits itself
// for all that the first one wrote. Without such a launch, and before sm_90, neither does anything.
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
