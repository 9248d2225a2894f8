// Asynchronous stores to the shared memory of another block of the cluster (st.async, DSMEM). Needs
// sm_90. The emulator's twin is tests/emulator/kernels/ptx/st_async.cuh.
#pragma once

#include "ptx/tma.cuh"

namespace convgrad {

// Stores 16 bytes at address `to` in block `rank` of the cluster and completes as many transaction bytes
// on that block's mbarrier at address `barrier` (which expects them by mbarrier_arrive_expect_tx). Needs
// no fence: whoever waits on that mbarrier sees the values.
__device__ __forceinline__ void st_async(u32 to, const float (&values)[4], u32 barrier,
                                            u32 rank) {
  asm volatile(
      "{.reg .b32 there, counted; mapa.shared::cluster.u32 there, %0, %6; "
      "mapa.shared::cluster.u32 counted, %5, %6; "
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [there], {%1,%2,%3,%4}, "
      "[counted];}" ::"r"(to),
      "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3]), "r"(barrier), "r"(rank)
      : "memory");
}

}  // namespace convgrad
