// The second convolution of the fused kernels, on tensor cores: M = output channels, N = the pixels
// of a tile, K = a chunk of 64 channels, both operands in shared memory in rows of 128 bytes.
// 16-byte chunk c of row r is stored at chunk c ^ (r & 7).
// Rows of weights in shared memory are permuted so that a thread ends with neighbouring channels.
// WARPGROUP: products by wgmma, which runs by itself; else by mma.sync.
#pragma once

#include "core/epilogue.cuh"
#include "ptx/mma.cuh"
#if WARPGROUP
#include "ptx/warpgroup.cuh"
#endif

namespace convgrad {

using Element = ELEMENT;
constexpr int kGroups = GROUPS;  // of four warps
constexpr int kParts = PARTS;    // 64 output channels of a group
constexpr int kPixels = PIXELS;
constexpr int kThreads = kGroups * 128;
constexpr int kOutputs = kGroups * kParts * 64;
constexpr int kFragments = kPixels / 8;
constexpr int kRowBytes = 128, kChunk = 64, kDepth = 16;
constexpr int kWeightBytes = kOutputs * kRowBytes, kMiddleBytes = kPixels * kRowBytes;

using Sums = float[kParts][kFragments][4];

// The output channel of a pass whose weights are row `row` of a tile in shared memory. Bits of one
// move to bits of the other, so it is additive over bits.
__host__ __device__ constexpr int output_of_row(int row) {
  constexpr int kWide = 2 * kParts;  // neighbouring outputs of a thread
  const int group = row / (64 * kParts), part = row / 64 % kParts, warp = row / 16 % 4;
  const int high = row / 8 % 2, low = row % 8;
  return group * 64 * kParts + warp * 8 * kWide + low * kWide + part * 2 + high;
}

#if WARPGROUP
struct Product {
  u64 weights, middle;

  __device__ __forceinline__ Product(u32 weights_at, u32 middle_at)
      : weights(rows_of_128_bytes(weights_at + threadIdx.x / 128 * kParts * 64 * kRowBytes)),
        middle(rows_of_128_bytes(middle_at)) {}

  __device__ __forceinline__ void start(Sums& sums, u32 weights_step, u32 middle_step, int depth,
                                        bool first) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) hold_sums(sums[part]);
    begin_products();
#pragma unroll
    for (int k = 0; k < kChunk / kDepth; ++k) {
      if (k >= depth) break;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        WarpgroupMma<Element, kFragments>::start(
            sums[part], weights + ((weights_step + part * 64 * kRowBytes + k * 32) >> 4),
            middle + ((middle_step + k * 32) >> 4), !(first && k == 0));
      }
    }
    commit_products();
  }
  __device__ __forceinline__ void finish(Sums& sums) {
    wait_products<0>();
#pragma unroll
    for (int part = 0; part < kParts; ++part) hold_sums(sums[part]);
  }
};
#else
struct Product {
  u32 weights, middle;
  int weights_row, middle_row, weights_chunk, middle_chunk;

  __device__ __forceinline__ Product(u32 weights_at, u32 middle_at) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    weights_row = warp / 4 * kParts * 64 + warp % 4 * 16 + (lane & 15);
    weights_chunk = lane >> 4;
    middle_row = (lane & 7) + (lane >> 4) * 8;
    middle_chunk = lane >> 3 & 1;
    weights = weights_at + weights_row * kRowBytes;
    middle = middle_at + middle_row * kRowBytes;
  }

  __device__ __forceinline__ void start(Sums& sums, u32 weights_step, u32 middle_step, int depth,
                                        bool first) {
    if (first) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
#pragma unroll
        for (int j = 0; j < kFragments; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) sums[part][j][e] = 0.0f;
        }
      }
    }
#pragma unroll
    for (int k = 0; k < kChunk / kDepth; ++k) {
      if (k >= depth) break;
      u32 a[kParts][4];
      const u32 of_weights = ((k * 2 + weights_chunk) ^ (weights_row & 7)) * 16;
      const u32 of_middle = ((k * 2 + middle_chunk) ^ (middle_row & 7)) * 16;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        load_matrices(a[part], weights + weights_step + part * 64 * kRowBytes + of_weights);
      }
#pragma unroll
      for (int j = 0; j < kFragments; j += 2) {
        u32 b[4];
        load_matrices(b, middle + middle_step + j * 8 * kRowBytes + of_middle);
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          mma<Element>(sums[part][j], a[part], b[0], b[1]);
          mma<Element>(sums[part][j + 1], a[part], b[2], b[3]);
        }
      }
    }
  }
  __device__ __forceinline__ void finish(Sums&) {}
};
#endif

// Starts the copies of one tile of weights: those of `outputs` outputs at most from `first` on, in a
// chunk of channels. Zeros stand for what there is not.
__device__ __forceinline__ void copy_weights(const void* weights, i64 stride, int channels,
                                             int outputs, int first, u32 to, int chunk) {
  constexpr int kRows = kThreads / 8;  // at a time
  const int vector = threadIdx.x % 8, row = threadIdx.x % kThreads / 8;
  const int channel = chunk * kChunk + vector * 8;
  const int output = first + output_of_row(row);
  const Element* const from = static_cast<const Element*>(weights) + output * stride + channel;
  to += row * kRowBytes + (vector ^ (row & 7)) * 16;
#pragma unroll
  for (int i = 0; i < kOutputs / kRows; ++i) {
    const int further = output_of_row(i * kRows);
    const bool there = output + further < outputs && channel < channels;
    copy_chunk(to + i * kRows * kRowBytes, there ? from + further * stride : weights, there);
  }
}

// The same by four warps, of the rows that their own products read.
__device__ __forceinline__ void copy_own_weights(const void* weights, i64 stride, int channels,
                                                 int outputs, int first, u32 to, int chunk) {
  constexpr int kRows = 16;  // at a time
  const int vector = threadIdx.x % 8, group = threadIdx.x / 128;
  const int row = group * kParts * 64 + threadIdx.x % 128 / 8;
  const int channel = chunk * kChunk + vector * 8;
  const int output = first + output_of_row(row);
  const Element* const from = static_cast<const Element*>(weights) + output * stride + channel;
  to += row * kRowBytes + (vector ^ (row & 7)) * 16;
#pragma unroll
  for (int i = 0; i < kParts * 64 / kRows; ++i) {
    const int further = output_of_row(i * kRows);
    const bool there = output + further < outputs && channel < channels;
    copy_chunk(to + i * kRows * kRowBytes, there ? from + further * stride : weights, there);
  }
}

// The first of the kWide neighbouring outputs that this thread ends with, in a pass.
constexpr int kWide = 2 * kParts;
__device__ __forceinline__ int own_output() {
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  return output_of_row(warp / 4 * kParts * 64 + warp % 4 * 16 + lane / 4);
}

// activation(sum + bias) of all sums of a thread whose first output is `output`.
template <class Function>
__device__ __forceinline__ void change_sums(Sums& sums, const float (&bias)[kWide],
                                            Function&& function) {
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int j = 0; j < kFragments; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        sums[part][j][e] = function(sums[part][j][e] + bias[part * 2 + e / 2]);
      }
    }
  }
}
__device__ __forceinline__ void finish_sums(Sums& sums, const void* biases, int activation,
                                            int output, int outputs) {
  if (biases == nullptr && activation == kNone) return;
  float bias[kWide] = {};
  if (biases != nullptr) {
#pragma unroll
    for (int k = 0; k < kWide; ++k) {
      if (output + k < outputs) bias[k] = widen(static_cast<const Element*>(biases)[output + k]);
    }
  }
  if (activation == kRelu) {
    change_sums(sums, bias, [](float v) { return activate(v, kRelu); });
  } else if (activation == kRelu6) {
    change_sums(sums, bias, [](float v) { return activate(v, kRelu6); });
  } else if (activation == kSilu) {
    change_sums(sums, bias, [](float v) { return activate(v, kSilu); });
  } else {
    change_sums(sums, bias, [](float v) { return v; });
  }
}

// Stores what a pass ends with. `places` says where each pixel of the tile is in y, or is negative.
__device__ __forceinline__ void store_sums(const Sums& sums, void* y, const i64* places, int output,
                                           int outputs, bool wide) {
  if (output >= outputs) return;
  Element* const first = static_cast<Element*>(y) + output;
  const i64* const own = places + (threadIdx.x & 3) * 2;
#pragma unroll
  for (int j = 0; j < kFragments; ++j) {
    // Places are looked up a few ahead of when they are needed, not all before.
    if (j % 4 == 0) asm volatile("" ::: "memory");
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      const i64 at = own[j * 8 + column];
      u32 packed[kParts];
#pragma unroll
      for (int k = 0; k < kParts; ++k) {
        packed[k] = narrow_two<Element>(sums[k][j][column], sums[k][j][2 + column]);
      }
      if (at < 0) continue;
      if (wide) {
        if constexpr (kParts == 2) {
          *reinterpret_cast<uint2*>(first + at) = make_uint2(packed[0], packed[1]);
        } else {
          *reinterpret_cast<u32*>(first + at) = packed[0];
        }
      } else {
        unsigned short* const to = reinterpret_cast<unsigned short*>(first + at);
#pragma unroll
        for (int k = 0; k < kWide; ++k) {
          if (output + k < outputs) to[k] = static_cast<unsigned short>(packed[k / 2] >> k % 2 * 16);
        }
      }
    }
  }
}

}  // namespace convgrad
