#include "launch_plan.hpp"

#include "lock.hpp"

namespace convgrad {
namespace {

// A bit of a tensor map that old drivers must not see set; see kernels/core/tensor_maps.py.
constexpr int kSmallWord = 1;
constexpr uint64_t kSmallBit = uint64_t(1) << 21;

// Points a step's arguments at these buffers; sets `moved` if they pointed elsewhere.
int point(const Driver& driver, Step& step, const uint64_t* buffers, bool* moved) {
  for (uint32_t i = 0; i < step.pointer_count; ++i) {
    const Pointer& pointer = step.pointers[i];
    const uint64_t address = buffers[pointer.buffer] + pointer.offset;
    *moved |= step.block[pointer.word] != address;
    step.block[pointer.word] = address;
  }
  for (uint32_t i = 0; i < step.map_count; ++i) {
    Map& map = step.maps[i];
    const uint64_t address = buffers[map.buffer];
    if (address == map.at) continue;
    uint64_t* words = step.block + map.byte / 8;
    const int status =
        driver.replace_address(words, reinterpret_cast<void*>(address + map.offset));
    if (status != 0) return status;
    if (map.clears_bit) words[kSmallWord] &= ~kSmallBit;
    map.at = address;
    *moved = true;
  }
  return 0;
}

int run(const Driver& driver, Branch& branch, uint64_t* buffers, int zeros, void* stream) {
  buffers[zeros] = branch.zeros;
  for (uint64_t i = 0; i < branch.count; ++i) {
    Step& step = branch.steps[i];
    int status;
    if (step.function == nullptr) {
      status = driver.clear(buffers[step.clear_buffer], 0, step.clear_bytes, stream);
    } else {
      bool moved = false;
      status = point(driver, step, buffers, &moved);
      if (status != 0) return status;
      step.config->stream = stream;
      void* arguments[1] = {step.block};
      status = driver.launch(step.config, step.function, arguments, nullptr);
    }
    if (status != 0) return status;
  }
  return 0;
}

// One call enqueues all kernels, and those whose arguments have not changed need no other.
int run_graph(const Driver& driver, LaunchPlan& plan, uint64_t* buffers, int zeros, void* stream) {
  for (uint64_t i = 0; i < plan.branch_count; ++i) {
    Branch& branch = plan.branches[i];
    buffers[zeros] = branch.zeros;
    for (Step* step = branch.steps; step != branch.steps + branch.count; ++step) {
      bool moved = false;
      int status = point(driver, *step, buffers, &moved);
      if (status == 0 && moved) status = driver.set_kernel(plan.graph, step->node, step->kernel);
      if (status != 0) {
        plan.graph = nullptr;  // its arguments are no longer those of the steps
        return status;
      }
    }
  }
  return driver.launch_graph(plan.graph, stream);
}

int run_all(const Driver& driver, LaunchPlan& plan, uint64_t* buffers, int zeros, void* stream) {
  if (plan.graph != nullptr) return run_graph(driver, plan, buffers, zeros, stream);
  const uint64_t alone = plan.forks ? 2 : plan.branch_count;  // on the caller's stream
  int status = run(driver, plan.branches[0], buffers, zeros, stream);
  if (plan.forks && status == 0) {
    status = driver.record(plan.start, stream);
    for (uint64_t i = alone; i < plan.branch_count && status == 0; ++i) {
      status = driver.wait(plan.branches[i].stream, plan.start, 0);
    }
  }
  for (uint64_t i = 1; i < plan.branch_count && status == 0; ++i) {
    Branch& branch = plan.branches[i];
    status = run(driver, branch, buffers, zeros, i < alone ? stream : branch.stream);
  }
  for (uint64_t i = alone; i < plan.branch_count; ++i) {  // join, whatever happened
    const int recorded = driver.record(plan.branches[i].event, plan.branches[i].stream);
    const int waited = driver.wait(stream, plan.branches[i].event, 0);
    if (status == 0) status = recorded != 0 ? recorded : waited;
  }
  return status;
}

Lock lock;

}  // namespace

int launch(const Driver& driver, LaunchPlan& plan, uint64_t* buffers, int tensors,
           uint64_t workspace, void* stream) {
  int zeros = tensors;
  for (uint64_t i = 0; i < plan.workspace_count; ++i) {
    buffers[zeros++] = workspace + plan.workspace[i];
  }
  lock.take();
  const int status = run_all(driver, plan, buffers, zeros, stream);
  lock.give();
  return status;
}

}  // namespace convgrad
