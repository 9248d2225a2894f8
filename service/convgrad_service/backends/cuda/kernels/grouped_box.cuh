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

// a / b for 0 <= a < 2^20 and 0 < b, in a fraction of a division's time: a + 1/2 is at least
// 1 / (2b) of b's multiples away, which is more than what rounding twice may err.
__device__ __forceinline__ int quick_divide(int a, int b) {
  return static_cast<int>(__fdividef(static_cast<float>(a) + 0.5f, static_cast<float>(b)));
}

// A number in the digits of a box: images, D, H, W. Divides once, and then counts on by `by`.
struct Walk {
  int n, d, h, w;
  int step_n, step_d, step_h, step_w;

  __device__ __forceinline__ Walk(const int (&radix)[4], int first, int by) {
    split(radix, first, n, d, h, w);
    split(radix, by, step_n, step_d, step_h, step_w);
  }
  __device__ __forceinline__ static void split(const int (&radix)[4], int number, int& n, int& d,
                                               int& h, int& w) {
    const int rows = quick_divide(number, radix[3]);
    const int planes = quick_divide(rows, radix[2]);
    n = quick_divide(planes, radix[1]);
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
// A thread keeps its column and chunk and goes down the rows, which costs a few instructions each.
template <int kThreads>
__device__ __forceinline__ void copy_box(u32 to, const Box& box, const char* tensor,
                                         const BoxStrides& stride, int image, int batch,
                                         const int (&from)[3], const int (&step)[3],
                                         const int (&size)[3], int real_chunks) {
  const int thread = threadIdx.x;
  const int across = box.extent[3] * box.chunks, lanes = min(across, kThreads);
  const int at_once = quick_divide(kThreads, lanes), first_row = quick_divide(thread, lanes);
  if (first_row >= at_once) return;
  const int row_pitch = box.extent[3] * box.pitch;
  const i64 row_bytes = static_cast<i64>(step[1]) * stride.spatial[1] * at_once;
#pragma unroll 1
  for (int slot = thread - first_row * lanes; slot < across; slot += kThreads) {
    const int column = quick_divide(slot, box.chunks), chunk = slot - column * box.chunks;
    const int w = from[2] + column * step[2];
    const bool real = chunk < real_chunks && static_cast<u32>(w) < static_cast<u32>(size[2]);
    const char* const first = tensor + chunk * 16 + static_cast<i64>(w) * stride.spatial[2] +
                              static_cast<i64>(from[1] + first_row * step[1]) * stride.spatial[1];
    u32 plane_to = to + column * box.pitch + chunk * 16 + first_row * row_pitch;
#pragma unroll 1
    for (int n = 0; n < box.extent[0]; ++n) {
      const char* const of_image = first + (image + n) * stride.image;
#pragma unroll 1
      for (int i = 0; i < box.extent[1]; ++i, plane_to += box.extent[2] * row_pitch) {
        const int d = from[0] + i * step[0];
        const bool plane = real && image + n < batch &&
                           static_cast<u32>(d) < static_cast<u32>(size[0]);
        const char* row = of_image + static_cast<i64>(d) * stride.spatial[0];
        u32 target = plane_to;
        int h = from[1] + first_row * step[1];
#pragma unroll 4
        for (int j = first_row; j < box.extent[2]; j += at_once) {
          const bool there = plane && static_cast<u32>(h) < static_cast<u32>(size[1]);
          copy_chunk(target, there ? row : tensor, there);
          row += row_bytes;
          target += at_once * row_pitch;
          h += at_once * step[1];
        }
      }
    }
  }
}

// Brings a chunk of weights to shared memory, of which only the channels of one group are real:
// `from` points to the group's channel 0, the chunk starts at `channel`. `vector` is how many
// channels one copy may take, 1 where they do not lie side by side.
template <class T>
__device__ __forceinline__ void copy_weights(char* to, const T* from, int channel, int channels,
                                             int vector, i64 stride) {
  constexpr int kCount = 16 / sizeof(T);
  const u32 limit = channels, at = shared_address(to);
  if (vector == kCount) {
    const bool there = static_cast<u32>(channel) < limit;
    copy_async<16>(at, there ? from + channel : from, there ? 16 : 0);
  } else if (vector * 2 == kCount) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int c = channel + i * (kCount / 2);
      const bool there = static_cast<u32>(c) < limit;
      copy_async<8>(at + i * 8, there ? from + c : from, there ? 8 : 0);
    }
  } else {
    union {
      uint4 raw;
      T element[kCount];
    } chunk;
    chunk.raw = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      if (static_cast<u32>(channel + e) < limit) chunk.element[e] = from[(channel + e) * stride];
    }
    *reinterpret_cast<uint4*>(to) = chunk.raw;
  }
}

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
