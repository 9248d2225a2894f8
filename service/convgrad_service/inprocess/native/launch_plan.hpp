// A plan's launches, with their arguments filled in: pointed at buffers and enqueued by one call.
//
// The structures are made by inprocess/launch_plan.py, which keeps all that they point to alive.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace convgrad {

// Functions of CUDA's driver; they return a CUresult.
struct Driver {
  int (*launch)(const void* config, void* function, void** arguments, void** extra);
  int (*clear)(uint64_t address, unsigned char value, size_t bytes, void* stream);
  int (*replace_address)(void* map, void* address);
  int (*record)(void* event, void* stream);
  int (*wait)(void* stream, void* event, unsigned flags);
  int (*is_capturing)(void* stream, int* status);
  int (*context)(void** context);
  int (*set_kernel)(void* graph, void* node, const void* kernel);
  int (*launch_graph)(void* graph, void* stream);
};

// A pointer in a kernel's argument structure: the buffer's address plus an offset.
struct Pointer {
  uint32_t word, buffer;
  uint64_t offset;
};

// A tensor map in it, encoded for a buffer at the address `at`.
struct Map {
  uint32_t byte, buffer;
  uint64_t offset, at, clears_bit;
};

// CUlaunchConfig.
struct Config {
  uint32_t grid[3], block[3], shared_bytes;
  void* stream;
  void* attributes;
  uint32_t attribute_count;
};

// CUDA_KERNEL_NODE_PARAMS.
struct KernelNode {
  void* function;
  uint32_t grid[3], block[3], shared_bytes;
  void** arguments;
  void **extra, *kernel, *context;
};

// A launch of a kernel, or, if `function` is null, a memset to zero.
struct Step {
  Config* config;
  void* function;
  uint64_t* block;
  const Pointer* pointers;
  Map* maps;
  uint32_t pointer_count, map_count;
  uint64_t clear_bytes, clear_buffer;
  void* node;  // of the plan's graph, if it has one
  const KernelNode* kernel;
};

// Steps that run one after another. Kernels count arrivals in `zeros`.
struct Branch {
  Step* steps;
  uint64_t count, zeros;
  void* stream;  // of branches after the second, if branches run side by side
  void* event;
};

constexpr int kMaxBuffers = 48;

// If it forks, branches after the first run side by side, and the first before all of them.
struct LaunchPlan {
  Branch* branches;
  uint64_t branch_count, forks;
  const uint64_t* workspace;  // offsets of its buffers
  uint64_t workspace_count;
  void* start;  // an event
  void* graph;  // all steps, one after another, as an executable CUDA graph; or null
};

// Points the plan at these buffers (tensors, workspace, zeros) and enqueues it. Returns a CUresult.
// Requires: room for kMaxBuffers. Calls take turns, since plans share events.
int launch(const Driver& driver, LaunchPlan& plan, uint64_t* buffers, int tensors,
           uint64_t workspace, void* stream);

}  // namespace convgrad
