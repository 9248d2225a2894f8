// Boxes of positions of channels-last tensors in shared memory, for the grouped tensor-core kernels.
//
// A box is [images][D][H][W] positions of so many 16-byte chunks of channels, `pitch` bytes apart.
// The pitch is an odd number of chunks, so that eight neighbouring positions of one chunk, which a
// matrix load reads, lie in eight different 16-byte banks. Positions and channels that the tensor
// does not have are zeros.
#pragma once

#include "epilogue.cuh"
#include "tensor_core.cuh"

namespace convgrad {

struct Box {
  int extent[4];  // images, D, H, W
  int chunks;     // of a position
  int pitch;      // in bytes
};

// A tensor's strides in bytes, of N and of D, H, W.
struct BoxStrides {
  i64 image;
  int spatial[3];
};

// A number in the digits of a box: images, D, H, W. Divides once, and then counts on by `by`.
struct Walk {
  int n, d, h, w;
  int step_n, step_d, step_h, step_w;

  __device__ __forceinline__ Walk(const int (&radix)[4], int first, int by) {
    split(radix, first, n, d, h, w);
    split(radix, by, step_n, step_d, step_h, step_w);
  }
  __device__ __forceinline__ static void split(const int (&radix)[4], u32 number, int& n, int& d,
                                               int& h, int& w) {
    const u32 rows = number / static_cast<u32>(radix[3]);
    const u32 planes = rows / static_cast<u32>(radix[2]);
    n = planes / static_cast<u32>(radix[1]);
    d = planes - n * radix[1];
    h = rows - planes * radix[2];
    w = number - rows * radix[3];
  }
  __device__ __forceinline__ void next(const int (&radix)[4]) {
    w += step_w;
    h += step_h;
    d += step_d;
    n += step_n;
    if (w >= radix[3]) w -= radix[3], ++h;
    if (h >= radix[2]) h -= radix[2], ++d;
    if (d >= radix[1]) d -= radix[1], ++n;
  }
};

// Starts the copies of the box whose first image is `image` and whose first position is `from`,
// the next ones `step` further; `tensor` points to the first channel, of which `real_chunks` exist.
template <int kThreads>
__device__ __forceinline__ void copy_box(u32 to, const Box& box, const char* tensor,
                                         const BoxStrides& stride, int image, int batch,
                                         const int (&from)[3], const int (&step)[3],
                                         const int (&size)[3], int real_chunks) {
  const int thread = threadIdx.x;
  const int at_once = kThreads / box.chunks, slot = thread / box.chunks;
  const int chunk = thread - slot * box.chunks;
  const int positions = box.extent[0] * box.extent[1] * box.extent[2] * box.extent[3];
  if (slot >= at_once) return;
  // No image is real where the channel is not.
  const int images = chunk < real_chunks ? batch - image : 0;
  const char* const channel = tensor + image * stride.image + chunk * 16;
  u32 target = to + slot * box.pitch + chunk * 16;
  const int target_step = at_once * box.pitch;
  Walk at(box.extent, slot, at_once);
#pragma unroll 2
  for (int position = slot; position < positions; position += at_once) {
    const int d = from[0] + at.d * step[0], h = from[1] + at.h * step[1];
    const int w = from[2] + at.w * step[2];
    const bool there = at.n < images && static_cast<u32>(d) < static_cast<u32>(size[0]) &&
                       static_cast<u32>(h) < static_cast<u32>(size[1]) &&
                       static_cast<u32>(w) < static_cast<u32>(size[2]);
    const i64 offset = at.n * stride.image + static_cast<i64>(d) * stride.spatial[0] +
                       static_cast<i64>(h) * stride.spatial[1] +
                       static_cast<i64>(w) * stride.spatial[2];
    copy_chunk(target, there ? channel + offset : tensor, there);
    target += target_step;
    at.next(box.extent);
  }
}

// A chunk of weights, of which only the channels of one group are read.
template <class T>
union Chunk {
  uint4 raw;
  uint2 half[2];
  static constexpr int kCount = 16 / sizeof(T);
  T at[kCount];

  // `from` points to channel 0, the chunk starts at `channel`; `vector` is what one load takes.
  __device__ __forceinline__ void load(const T* from, int channel, int channels, int vector,
                                       i64 stride) {
    const u32 limit = channels;
    if (vector == kCount) {
      if (static_cast<u32>(channel) < limit) {
        raw = *reinterpret_cast<const uint4*>(from + channel);
      }
    } else if (vector * 2 == kCount) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int c = channel + i * (kCount / 2);
        if (static_cast<u32>(c) < limit) half[i] = *reinterpret_cast<const uint2*>(from + c);
      }
    } else {
#pragma unroll
      for (int e = 0; e < kCount; ++e) {
        if (static_cast<u32>(channel + e) < limit) at[e] = from[(channel + e) * stride];
      }
    }
  }
};

// Two neighbouring results, rounded.
template <class T>
__device__ __forceinline__ void store_pair(T* to, float first, float second) {
  if constexpr (sizeof(T) == 4) {
    *reinterpret_cast<float2*>(to) = make_float2(first, second);
  } else {
    *reinterpret_cast<u32*>(to) = narrow_two<T>(first, second);
  }
}

}  // namespace convgrad
