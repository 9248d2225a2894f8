// The main loop of depthwise_direct.cu with STRIDE = 0, for any stride along W: a result has elements of x
// of its own.
#pragma once

#include "depthwise/depthwise_direct.cuh"

namespace convgrad {

#if STRIDE == 0

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
#pragma unroll
    for (int b = 0; b < COLUMNS; ++b) across_[b] = Taps(args, 2, at.column + b);
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
        const int first = first_[i];
        if (step + AHEAD < steps_) load(i, step + AHEAD + i < steps_);
#pragma unroll
        for (int b = 0; b < COLUMNS; ++b) {
          const Taps& own_taps = across_[b];
#pragma unroll
          for (int s = 0; s < KERNEL; ++s) {
            const bool there = first + s < own_taps.count;
            const T* const at = of_row + own_taps.tap + (first + s) * own_taps.step;
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) {
              const float weight = there ? widen(at[v * taps]) : 0.0f;
              sums[0][b][v] += wide[b * KERNEL + s][v] * weight;
            }
          }
        }
      }
    }
  }

 private:
  // The next KERNEL taps of each result, of the same row.
  __device__ __forceinline__ void load(int i, bool wanted) {
    const int d = deep_.at + t_ * deep_.at_step, h = down_.at + r_ * down_.at_step;
    const int first = first_[i] = part_ * KERNEL;
    first_tap_[i] = ((deep_.tap + t_ * deep_.step) * args_.kernel[1] + down_.tap + r_ * down_.step) *
                    args_.kernel[2];
    const bool there = wanted && static_cast<u32>(d) < static_cast<u32>(args_.x_size[0]) &&
                       static_cast<u32>(h) < static_cast<u32>(args_.x_size[1]);
    const u32 columns = there ? args_.x_size[2] : 0;
    const T* const line_of_x = image_ + (d * static_cast<int>(args_.x_stride[1]) +
                                         h * static_cast<int>(args_.x_stride[2]));
#pragma unroll
    for (int j = 0; j < kReadColumns; ++j) {
      const Taps& own = across_[j / KERNEL];
      const int tap = first + j % KERNEL, at = own.at + tap * own.at_step;
      load_ahead_if(tap < own.count && static_cast<u32>(at) < columns, line_of_x + at * pitch_,
                    read_[i][j]);
    }
    if (++part_ == args_.parts) {
      part_ = 0;
      if (++r_ == down_.count) r_ = 0, ++t_;
    }
  }

  const DepthwiseDirectArgs& args_;
  const int pitch_;
  const Taps deep_, down_;
  Taps across_[COLUMNS];  // of each result
  int part_, r_, t_;      // of the next taps
  int steps_;
  const T* image_;
  Raw read_[AHEAD][kReadColumns];
  int first_tap_[AHEAD], first_[AHEAD];
};

#endif

}  // namespace convgrad
