// Kernel arguments: tensor views, the shape of a convolution, and the task counters that threads
// share. Mirrored field by field in ../arguments.py.
#pragma once

#include <stdint.h>

namespace convgrad {

// Element types, numbered as in arguments.py.
enum DTypeCode : int32_t { kFloat16 = 0, kBfloat16 = 1, kFloat32 = 2, kFloat64 = 3 };

// A strided view; strides are in elements and may be zero or negative. `data` is null if the tensor
// is absent. Dimension order:
//   activations    N, G, C/G, D, H, W   (outputs: N, G, K/G, Z, P, Q)
//   weights        G, K/G, C/G, T, R, S
//   bias           G, K/G (the rest unused)
struct View {
  void* data;
  int64_t stride[6];
};

// One convolution with three spatial dimensions; missing ones lead, with extent 1, stride 1,
// dilation 1 and padding 0. Tap r connects input coordinate i and output coordinate o iff
// i = o * stride + r * dilation - pad, 0 <= i < input, 0 <= o < output. pad may be negative.
struct ConvArgs {
  View x;           // input or grad_input
  View w;           // weight or grad_weight
  View y;           // output or grad_output
  View accumulate;  // shape of the result; read only if beta != 0
  View bias;        // bias (added to a forward result) or grad_bias (written)
  int64_t batch;
  int64_t groups;
  int64_t in_channels;   // C / G
  int64_t out_channels;  // K / G
  int64_t input[3];
  int64_t kernel[3];
  int64_t output[3];
  int64_t stride[3];
  int64_t dilation[3];
  int64_t pad[3];
  double alpha;
  double beta;
  int32_t dtype;         // of the tensors that the kernel reads
  int32_t result_dtype;  // of the result and accumulate
  void* workspace;       // shared by the threads, 64-byte aligned
  int64_t workspace_bytes;
  int64_t scratch_bytes;  // per thread
  int64_t block[8];       // blocking parameters from the plan, documented by each kernel
};

// Shared by the threads of one launch, zero but for `shares`. A kernel runs in phases, in each of
// which threads claim tasks until none is left. So a thread that arrives late finds fewer tasks, and
// no thread waits for one that never arrives. Each phase's tasks are divided into equal shares of
// consecutive ones. A thread claims those of its own share first, the same in every launch, so that
// what it reads and writes stays in its caches, then those of others.
constexpr int kPhases = 6, kShares = 8;
struct Control {
  int64_t cancelled;  // set by the host at any time: no further tasks are claimed
  int64_t error;      // set by kernels, which document the values
  int64_t shares;     // 1 to kShares
  int64_t next[kPhases][kShares];
  int64_t done[kPhases];
};

// The calling thread's share, modulo their number; team.cpp sets it.
inline thread_local int64_t own_share = 0;

// Returns the next task of a phase, or -1 if none is left or the launch is cancelled.
inline int64_t take_task(Control* control, int phase, int64_t total) {
  if (__atomic_load_n(&control->cancelled, __ATOMIC_RELAXED)) return -1;
  const int64_t shares = control->shares, each = total / shares, rest = total % shares;
  for (int64_t i = 0; i < shares; ++i) {
    const int64_t share = (own_share + i) % shares;
    int64_t* next = &control->next[phase][share];
    const int64_t count = each + (share < rest);
    if (__atomic_load_n(next, __ATOMIC_RELAXED) >= count) continue;
    const int64_t index = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED);
    if (index < count) return share * each + (share < rest ? share : rest) + index;
  }
  return -1;
}

// Call after each task of a phase that wait_phase waits for.
inline void finish_task(Control* control, int phase) {
  __atomic_fetch_add(&control->done[phase], 1, __ATOMIC_RELEASE);
}

extern "C" int sched_yield(void);

// Waits until all tasks of the phase are finished. Returns false if the launch was cancelled.
inline bool wait_phase(Control* control, int phase, int64_t total) {
  for (int64_t spin = 0; __atomic_load_n(&control->done[phase], __ATOMIC_ACQUIRE) < total; ++spin) {
    if (__atomic_load_n(&control->cancelled, __ATOMIC_RELAXED)) return false;
    if (spin > 2000) sched_yield();
  }
  return true;
}

// Kernel entry points are `extern "C" CONVGRAD_EXPORT void convgrad_<name>(const <Args>*, Control*,
// void* scratch)`. Each thread calls it once, with private, 64-byte aligned scratch.
#define CONVGRAD_EXPORT __attribute__((visibility("default")))

}  // namespace convgrad
