// The main loop of depthwise_direct.cu with ROWS = 0: rows of taps one by one.
#pragma once

#include "depthwise/depthwise_direct.cuh"

namespace convgrad {

#if ROWS == 0

constexpr int kOwnRows = 1, kEarly = 4;

// The taps of one dimension that contribute to a result, and the positions of x that they read.
struct Taps {
  int tap, step, count, at, at_step;
  Taps() = default;
  __device__ __forceinline__ Taps(const DepthwiseDirectArgs& args, int dim, int result) {
    if (args.backward) {
      const int from = result + args.pad[dim];
      const int quotient = divide(from, args.by_stride[dim]);
      tap = from - quotient * args.stride[dim], step = args.stride[dim];
      count = divide(args.kernel[dim] - tap + step - 1, args.by_stride[dim]);
      at = quotient, at_step = -args.dilation[dim];
    } else {
      tap = 0, step = 1, count = args.kernel[dim];
      at = result * args.stride[dim] - args.pad[dim], at_step = args.dilation[dim];
    }
  }
};

// Adjacent results of a thread share what they read of a row; with STRIDE = 0, of any stride along W, a result has
// elements of x of its own.
class Mainloop {
 public:
  __device__ __forceinline__ Mainloop(const DepthwiseDirectArgs& args, const Place& at, int c,
                                      bool active)
      : args_(args),
        pitch_(static_cast<int>(args.x_stride[3])),
        deep_(args, 0, at.z),
        down_(args, 1, at.row),
        part_(0),
        r_(0),
        t_(0) {
#if STRIDE == 0
#pragma unroll
    for (int b = 0; b < COLUMNS; ++b) across_[b] = Taps(args, 2, at.column + b);
#elif BACKWARD
    left_ = at.column + args.base[1] - (kReach - 1);
#else
    left_ = at.column * STRIDE - args.pad[2];
#endif
    image_ = static_cast<const T*>(args.x) + at.n * args.x_stride[0] +
             channel_offset<VECTOR>(divide(c, args.by_multiplier), args.x_channel);
    steps_ = active ? deep_.count * down_.count * args.parts : 0;
  }

  __device__ __forceinline__ void load_first() {
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) load(i, i < steps_);
  }

  __device__ __forceinline__ void run(const unsigned char* own, int taps,
                                      float (&sums)[1][kOwnColumns][VECTOR]) {
    const T* const weights = reinterpret_cast<const T*>(own);
#pragma unroll 1
    for (int step = 0; step < steps_; step += AHEAD) {
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        if (step + i >= steps_) break;
        float wide[kReadColumns][VECTOR];
#pragma unroll
        for (int j = 0; j < kReadColumns; ++j) widen_word<T>(read_[i][j], wide[j]);
        const T* const of_row = weights + first_tap_[i];
        const int loaded = loaded_[i];
        if (step + AHEAD < steps_) load(i, step + AHEAD + i < steps_);
#if STRIDE == 0
#pragma unroll
        for (int b = 0; b < COLUMNS; ++b) {
          const Taps& own_taps = across_[b];
#pragma unroll
          for (int s = 0; s < KERNEL; ++s) {
            const bool there = loaded + s < own_taps.count;
            const T* const at = of_row + own_taps.tap + (loaded + s) * own_taps.step;
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) {
              const float weight = there ? widen(at[v * taps]) : 0.0f;
              sums[0][b][v] += wide[b * KERNEL + s][v] * weight;
            }
          }
        }
#else
#pragma unroll
        for (int s = 0; s < KERNEL; ++s) {
#pragma unroll
          for (int v = 0; v < VECTOR; ++v) {
            const float weight = s < loaded ? widen(of_row[v * taps + s]) : 0.0f;
#pragma unroll
            for (int j = 0; j < kReadColumns; ++j) {
#pragma unroll
              for (int b = 0; b < kOwnColumns; ++b) {
                if (tap_of(b, j, kReach) == s) sums[0][b][v] += wide[j][v] * weight;
              }
            }
          }
        }
#endif
      }
    }
  }

 private:
  // The next part of a row of taps.
  __device__ __forceinline__ void load(int i, bool wanted) {
    const int d = deep_.at + t_ * deep_.at_step, h = down_.at + r_ * down_.at_step;
    const int first = part_ * (STRIDE > 0 ? args_.part : KERNEL);
#if STRIDE == 0
    loaded_[i] = first;
#else
    loaded_[i] = min(args_.part, args_.kernel[2] - first);
#endif
    first_tap_[i] = ((deep_.tap + t_ * deep_.step) * args_.kernel[1] + down_.tap + r_ * down_.step) *
                        args_.kernel[2] +
                    (STRIDE > 0 ? first : 0);
#if STRIDE == 0
    constexpr int from = 0;
#elif BACKWARD
    const int from = left_ - first / STRIDE;
#else
    const int from = left_ + first * args_.spread;
#endif
    const bool there = wanted && static_cast<u32>(d) < static_cast<u32>(args_.x_size[0]) &&
                       static_cast<u32>(h) < static_cast<u32>(args_.x_size[1]);
    const u32 columns = there ? args_.x_size[2] : 0;
    const T* const line_of_x = image_ + (d * static_cast<int>(args_.x_stride[1]) +
                                         h * static_cast<int>(args_.x_stride[2]) + from * pitch_);
#pragma unroll
    for (int j = 0; j < kReadColumns; ++j) {
#if STRIDE == 0
      const Taps& own = across_[j / KERNEL];
      const int tap = first + j % KERNEL, at = own.at + tap * own.at_step;
      load_ahead_if(tap < own.count && static_cast<u32>(at) < columns, line_of_x + at * pitch_,
                    read_[i][j]);
#else
      load_ahead_if(static_cast<u32>(from + j * args_.spread) < columns,
                    line_of_x + j * args_.spread * pitch_, read_[i][j]);
#endif
    }
    if (++part_ == args_.parts) {
      part_ = 0;
      if (++r_ == down_.count) r_ = 0, ++t_;
    }
  }

  const DepthwiseDirectArgs& args_;
  const int pitch_;
  const Taps deep_, down_;
#if STRIDE == 0
  Taps across_[COLUMNS];  // of each result
#else
  int left_;
#endif
  int part_, r_, t_;  // of the next taps
  int steps_;
  const T* image_;
  Raw read_[AHEAD][kReadColumns];
  // The first tap's number, and how many there are; with STRIDE = 0 the row's first, and the number in the row.
  int first_tap_[AHEAD], loaded_[AHEAD];
};

#endif

}  // namespace convgrad
