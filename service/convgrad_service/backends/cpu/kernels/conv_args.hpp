// What every CPU kernel receives: tensor views, the shape of a convolution, and the task counter
// that its threads share. Mirrored field by field in ../arguments.py.
#pragma once

#include <stdint.h>

namespace convgrad {

// Element types by number, as in arguments.py.
enum DTypeCode : int32_t { kFloat16 = 0, kBfloat16 = 1, kFloat32 = 2, kFloat64 = 3 };

// A strided view; strides count elements and may be zero or negative. `data` is null where the
// tensor is absent. Dimension order:
//   activations    N, G, C/G, D, H, W   (outputs: N, G, K/G, Z, P, Q)
//   weights        G, K/G, C/G, T, R, S
//   bias           G, K/G (the rest unused)
struct View {
  void* data;
  int64_t stride[6];
};

// One convolution, always with three spatial dimensions: lower ranks lead with extents of 1,
// stride 1, dilation 1 and padding 0. Input coordinate i and output coordinate o meet at tap r
// iff i = o * stride + r * dilation - pad, 0 <= i < input, 0 <= o < output; pad may be negative.
struct ConvArgs {
  View x;           // input or grad_input
  View w;           // weight or grad_weight
  View y;           // output or grad_output
  View accumulate;  // shaped as the result; read only where beta != 0
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
  int32_t dtype;         // of x, w, y: what the kernel reads
  int32_t result_dtype;  // of what it writes (and of accumulate)
  void* workspace;       // shared by the threads, 64-byte aligned
  int64_t workspace_bytes;
  int64_t scratch_bytes;  // size of each thread's own scratch
  int64_t block[8];       // tile sizes and the like, chosen by the plan; each kernel names its own
};

// Shared by the threads of one launch, zeroed before it. A kernel goes through phases; in each,
// threads take tasks until none is left, so a thread that comes late finds less to do and nobody
// waits for one that never comes.
constexpr int kPhases = 6;
struct Control {
  int64_t cancelled;  // set by the host at any time: no further task is taken
  int64_t error;      // set by a kernel; each kernel names its own values
  int64_t next[kPhases];
  int64_t done[kPhases];
};

// The index of the next task of this phase, or -1 where none is left or the launch is cancelled.
inline int64_t take_task(Control* control, int phase, int64_t total) {
  if (__atomic_load_n(&control->cancelled, __ATOMIC_RELAXED)) return -1;
  int64_t index = __atomic_fetch_add(&control->next[phase], 1, __ATOMIC_RELAXED);
  return index < total ? index : -1;
}

// To be called after each task of a phase that a later phase waits for.
inline void finish_task(Control* control, int phase) {
  __atomic_fetch_add(&control->done[phase], 1, __ATOMIC_RELEASE);
}

extern "C" int sched_yield(void);

// Waits until every task of the phase is finished; false where the launch was cancelled instead.
inline bool wait_phase(Control* control, int phase, int64_t total) {
  for (int64_t spin = 0; __atomic_load_n(&control->done[phase], __ATOMIC_ACQUIRE) < total; ++spin) {
    if (__atomic_load_n(&control->cancelled, __ATOMIC_RELAXED)) return false;
    if (spin > 2000) sched_yield();
  }
  return true;
}

// Every kernel entry point: `extern "C" CONVGRAD_EXPORT void convgrad_<name>(const <Args>*,
// Control*, void* scratch)`, called once by each thread, `scratch` 64-byte aligned and its own.
#define CONVGRAD_EXPORT __attribute__((visibility("default")))

}  // namespace convgrad
