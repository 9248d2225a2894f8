// The epilogue of dense_gather.cu, from accumulators in shared memory.
#pragma once

#include "conv/dense_gather_args.cuh"
#include "core/epilogue.cuh"
#include "core/vectors.cuh"

namespace convgrad {

// Accumulators of a tile in shared memory. The pitch avoids bank conflicts both for four
// consecutive pixels of eight runs x four channels, and for a warp's mma fragments.
template <int kPixels, int kChannels>
struct FinishedSums {
  static constexpr int kPitch = kChannels + 8, kBytes = kPixels * (kPitch + 1) * 4;

  __device__ static __forceinline__ int at(int pixel, int column) {
    return pixel * kPitch + (pixel & ~3) + column;
  }
};

// A vector of consecutive results along pixels or channels.
template <int kCount_, bool kOfPixels_>
struct Run {
  static constexpr int kCount = kCount_;
  static constexpr bool kOfPixels = kOfPixels_;
};

// The epilogue before rounding. With an activation, `activate_sums` has applied all of it
// beforehand: the code of an activation, unrolled over a run, would not fit into the instruction
// cache.
template <class T>
struct Finisher {
  const T* accumulate;  // this group's, or null
  const T* bias;        // likewise
  float alpha, beta;

  __device__ __forceinline__ Finisher(const DenseGatherArgs& args, int group, bool done)
      : accumulate(done || args.accumulate == nullptr
                       ? nullptr
                       : static_cast<const T*>(args.accumulate) + group * args.y_stride[1]),
        bias(done || args.bias == nullptr
                 ? nullptr
                 : static_cast<const T*>(args.bias) + group * args.out_channels),
        alpha(done ? 1.0f : args.alpha),
        beta(args.beta) {}

  __device__ __forceinline__ float operator()(float sum, i64 at, int channel) const {
    sum *= alpha;
    if (accumulate != nullptr) sum += beta * widen(accumulate[at]);
    if (bias != nullptr) sum += widen(bias[channel]);
    return sum;
  }
};

// Applies the whole epilogue to a tile of accumulators in place, by kThreads threads.
template <class T, int kPixels, int kChannels, int kThreads>
__device__ __forceinline__ void activate_sums(const DenseGatherArgs& args, float* sums,
                                              const i64* result_at, int group, int first_channel) {
  const Finisher<T> finished(args, group, false);
#pragma unroll 1
  for (int i = threadIdx.x; i < kPixels * kChannels; i += kThreads) {
    const int pixel = i / kChannels, column = i % kChannels, channel = first_channel + column;
    if (result_at[pixel] < 0 || channel >= args.out_channels) continue;
    float& sum = sums[FinishedSums<kPixels, kChannels>::at(pixel, column)];
    const i64 at = result_at[pixel] + channel * args.y_stride[2];
    sum = activate(finished(sum, at, channel), args.activation);
  }
  __syncthreads();
}

// Stores the kPixels x kChannels results of a tile in runs, by kThreads threads. `result_at` is the
// offset of each pixel's channel 0, negative past the last pixel.
template <class T, int kPixels, int kChannels, int kThreads, class Run>
__device__ __forceinline__ void store_runs(const DenseGatherArgs& args, const float* sums,
                                           const i64* result_at, int group, int first_channel) {
  using Sums = FinishedSums<kPixels, kChannels>;
  constexpr int kRun = Run::kCount;
  constexpr bool kOfPixels = Run::kOfPixels;
  T* const y = static_cast<T*>(args.y) + group * args.y_stride[1];
  const Finisher<T> finished(args, group, args.activation != kNone);
  using Neighbours = Vector<T, kRun>;
  // Runs of pixels: a warp reads eight runs of four channels, without bank conflicts.
  constexpr int kAlong = (kOfPixels ? kPixels : kChannels) / kRun;
  constexpr int kGroup = kOfPixels && kRun > 1 ? 8 : kAlong;
  constexpr int kBeside = kOfPixels && kRun > 1 ? 4 : 1;
  // Runs of a thread in flight at once.
  constexpr int kBatch = kRun == 1 ? 8 : 4;
  static_assert(kPixels * kChannels / kRun % (kThreads * kBatch) == 0, "whole batches");
#pragma unroll 1
  for (int i = threadIdx.x; i < kPixels * kChannels / kRun; i += kThreads * kBatch) {
    int pixel[kBatch], column[kBatch];
    bool there[kBatch], whole[kBatch];
    i64 at[kBatch];
    Neighbours before[kBatch];
#pragma unroll
    for (int r = 0; r < kBatch; ++r) {
      const int index = i + r * kThreads;
      const int part = index / (kGroup * kBeside), within = index % (kGroup * kBeside);
      const int beside = (part % (kAlong / kGroup) * kGroup + within % kGroup) * kRun;
      const int across = part / (kAlong / kGroup) * kBeside + within / kGroup;
      pixel[r] = kOfPixels ? beside : across, column[r] = kOfPixels ? across : beside;
      const i64 pixel_at = result_at[pixel[r]];
      at[r] = pixel_at + (first_channel + column[r]) * args.y_stride[2];
      there[r] = pixel_at >= 0 && first_channel + column[r] < args.out_channels;
      // A run of pixels may cross into another row, or past the last pixel.
      whole[r] = kRun == 1 || !kOfPixels ||
                 (result_at[pixel[r] + kRun - 1] - pixel_at == kRun - 1 &&
                  reinterpret_cast<u64>(y + at[r]) % sizeof(Neighbours) == 0);
      if (there[r] && whole[r] && finished.accumulate != nullptr) {
        before[r] = Neighbours::load(finished.accumulate + at[r]);
      }
    }
#pragma unroll
    for (int r = 0; r < kBatch; ++r) {
      if (!there[r]) continue;
      const float* const from = sums + Sums::at(pixel[r], column[r]);
      if (!whole[r]) {
#pragma unroll 1
        for (int e = 0; e < kRun; ++e) {
          const i64 pixel_at = result_at[pixel[r] + e];
          const int channel = first_channel + column[r];
          const i64 here = pixel_at + channel * args.y_stride[2];
          if (pixel_at < 0) continue;
          y[here] = narrow<T>(finished(from[e * Sums::kPitch], here, channel));
        }
        continue;
      }
      float values[kRun];
      if constexpr (kOfPixels || kRun == 1) {
        // The pitch adds no padding within four pixels.
        static_assert(kRun <= 4, "as it is where runs are of pixels");
#pragma unroll
        for (int e = 0; e < kRun; ++e) values[e] = from[e * Sums::kPitch];
      } else {
#pragma unroll
        for (int e = 0; e < kRun; e += 4) {
          const float4 four = *reinterpret_cast<const float4*>(from + e);
          values[e] = four.x, values[e + 1] = four.y;
          values[e + 2] = four.z, values[e + 3] = four.w;
        }
      }
#pragma unroll
      for (int e = 0; e < kRun; ++e) values[e] *= finished.alpha;
      if (finished.accumulate != nullptr) {
#pragma unroll
        for (int e = 0; e < kRun; ++e) values[e] += finished.beta * widen(before[r].at[e]);
      }
      if (finished.bias != nullptr) {
        const T* const bias = finished.bias + first_channel + column[r];
#pragma unroll
        for (int e = 0; e < kRun; ++e) values[e] += widen(bias[kOfPixels ? 0 : e]);
      }
      Neighbours done;
#pragma unroll
      for (int e = 0; e < kRun; ++e) done.at[e] = narrow<T>(values[e]);
      done.store(y + at[r]);
    }
  }
}

}  // namespace convgrad
