// Depthwise convolution with one tap and stride 1, forward or the gradient of its input: every channel times its
// weight, in tensors whose channels are adjacent, or whose planes are. Host side: depthwise_scale.py.
//
// y[i] = finish(w[channel of i] * x[i]), see core/epilogue.cuh, and one rounding. A thread has a chunk of 16 bytes
// of x, which may be part of several planes.
// Block: THREADS threads. Grid: chunks. No shared memory. Deterministic: a product for each result.
// Preconditions: contiguous tensors, aligned to 16 bytes, with the same strides; fewer than 2^31 elements. A
// dependent launch may start with this kernel (ptx/pdl.cuh).
#include "core/divider.cuh"
#include "core/vectors.cuh"
#include "depthwise/depthwise_activation.cuh"
#include "ptx/pdl.cuh"

namespace convgrad {

struct DepthwiseScaleArgs {
  const void* x;     // the source: input, or grad_output
  const void* w;     // one for each channel
  void* y;           // the result: output, or grad_input
  const void* accumulate;  // like y, or null
  const void* bias;        // one for each channel, or null
  float alpha;
  float beta;
  int activation;
  int finishes;  // whether a result is anything but its product
  int elements;
  int channels;
  int inner;  // elements of a channel before those of the next: a plane, or 1
  Divider by_channels, by_inner;
};

}  // namespace convgrad

using namespace convgrad;

using T = ELEMENT;
constexpr int kChunk = 16 / sizeof(T);
using Chunk = Vector<T, kChunk>;

extern "C" __global__ void __launch_bounds__(THREADS)
    depthwise_scale(const __grid_constant__ DepthwiseScaleArgs args) {
  launch_dependent_grids();
  const i64 begin = (static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x) * kChunk;
  if (begin >= args.elements) return;
  const int first = static_cast<int>(begin), count = min(kChunk, args.elements - first);
  const auto load = [&](const void* tensor) {
    const T* const from = static_cast<const T*>(tensor) + first;
    if (count == kChunk) return Chunk::load(from);
    Chunk part = Chunk::zero();
#pragma unroll
    for (int e = 0; e < kChunk; ++e) {
      if (e < count) part.at[e] = from[e];
    }
    return part;
  };
  const Chunk x = load(args.x);
  const int plane = divide(first, args.by_inner), at = first - plane * args.inner;
  const int channel = plane - divide(plane, args.by_channels) * args.channels;
  // What the chunk's elements find in a vector with an element for each channel.
  const auto of_channels = [&](const void* vector) {
    const T* const from = static_cast<const T*>(vector);
    Chunk found;
    if (args.inner >= kChunk) {
      const T own = from[channel], next = from[channel + 1 < args.channels ? channel + 1 : 0];
#pragma unroll
      for (int e = 0; e < kChunk; ++e) found.at[e] = at + e < args.inner ? own : next;
    } else if (args.inner == 1 && args.channels % kChunk == 0) {
      found = Chunk::load(from + channel);
    } else {
      int c = channel, left = args.inner - at;
#pragma unroll
      for (int e = 0; e < kChunk; ++e) {
        found.at[e] = from[c];
        if (--left > 0) continue;
        left = args.inner;
        c = c + 1 < args.channels ? c + 1 : 0;
      }
    }
    return found;
  };
  const Chunk weights = of_channels(args.w);
  float sums[kChunk];
#pragma unroll
  // A sum that starts with zero, as those of other kernels.
  for (int e = 0; e < kChunk; ++e) sums[e] = fmaf(widen(x.at[e]), widen(weights.at[e]), 0.0f);
  if (args.finishes) {
    Chunk bias = Chunk::zero(), added = Chunk::zero();
    if (args.bias != nullptr) bias = of_channels(args.bias);
    if (args.accumulate != nullptr) added = load(args.accumulate);
#pragma unroll
    for (int e = 0; e < kChunk; ++e) {
      const float sum = finish<T, float>(sums[e], args.alpha, args.beta, args.accumulate != nullptr ? &added.at[e] : nullptr,
                                         args.bias != nullptr ? &bias.at[e] : nullptr, kNone);
      sums[e] = args.activation == kNone ? sum : activated(sum, args.activation);
    }
  }
  Chunk y;
#pragma unroll
  for (int e = 0; e < kChunk; ++e) y.at[e] = narrow<T>(sums[e]);
  y.store_part(static_cast<T*>(args.y) + first, count == kChunk, [&](int e) { return e < count; });
}
