#pragma once

#ifdef TRACE
extern "C" __device__ unsigned long long convgrad_trace[132 * 4 * 16];
__device__ __forceinline__ void trace(int i) {
  unsigned long long ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  unsigned long long cycles;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(cycles));
  convgrad_trace[(blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z)) % 528 * 16 + i] = (ns << 32) | (cycles & 0xffffffff);
}
#define TRACED(i) if (true) trace(i)
#else
#define TRACED(i)
#endif

