// From a block's finished sums in shared memory to dense_gather.cu's results.
#pragma once

#include "dense_gather_args.cuh"
#include "epilogue.cuh"
#include "vectors.cuh"

namespace convgrad {

// Sums of a tile lie apart by so much that neither four neighbouring pixels of eight runs and four
// channels, nor what a warp's mma leaves, meet in a bank.
template <int kPixels, int kChannels>
struct FinishedSums {
  static constexpr int kPitch = kChannels + 8, kBytes = kPixels * (kPitch + 1) * 4;

  __device__ static __forceinline__ int at(int pixel, int column) {
    return pixel * kPitch + (pixel & ~3) + column;
  }
};

// So many results side by side, of pixels or of channels.
template <int kCount_, bool kOfPixels_>
struct Run {
  static constexpr int kCount = kCount_;
  static constexpr bool kOfPixels = kOfPixels_;
};

// Finishes all sums of a tile of kPixels x kChannels, in runs of neighbours, by kThreads threads
// together. `result_at` says where a pixel's channel 0 is; negative past the last pixel.
template <class T, int kPixels, int kChannels, int kThreads, class Run>
__device__ __forceinline__ void finish_runs(const DenseGatherArgs& args, const float* sums,
                                            const i64* result_at, int group, int first_channel) {
  using Sums = FinishedSums<kPixels, kChannels>;
  constexpr int kRun = Run::kCount;
  constexpr bool kOfPixels = Run::kOfPixels;
  T* const y = static_cast<T*>(args.y) + group * args.y_stride[1];
  // Not to be read where they are null.
  const T* const accumulate = static_cast<const T*>(args.accumulate) + group * args.y_stride[1];
  const T* const bias = static_cast<const T*>(args.bias) + group * args.out_channels;
  using Neighbours = Vector<T, kRun>;
  // Runs of pixels are taken eight of a channel and four channels at a time: from all banks.
  constexpr int kAlong = (kOfPixels ? kPixels : kChannels) / kRun;
  constexpr int kGroup = kOfPixels && kRun > 1 ? 8 : kAlong;
  constexpr int kBeside = kOfPixels && kRun > 1 ? 4 : 1;
  // So many runs of a thread are under way together.
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
      at[r] = result_at[pixel[r]] + (first_channel + column[r]) * args.y_stride[2];
      there[r] = result_at[pixel[r]] >= 0 && first_channel + column[r] < args.out_channels;
      // Pixels may go on in another row, or end.
      whole[r] = kRun == 1 || !kOfPixels ||
                 (result_at[pixel[r] + kRun - 1] - result_at[pixel[r]] == kRun - 1 &&
                  reinterpret_cast<u64>(y + at[r]) % sizeof(Neighbours) == 0);
      if (there[r] && whole[r] && args.accumulate != nullptr) {
        before[r] = Neighbours::load(accumulate + at[r]);
      }
    }
#pragma unroll
    for (int r = 0; r < kBatch; ++r) {
      if (!there[r]) continue;
      const float* const from = sums + Sums::at(pixel[r], column[r]);
      float values[kRun];
#pragma unroll
      for (int e = 0; e < kRun; e += 4) {
        if constexpr (kOfPixels || kRun == 1) {
          // Within four pixels nothing is added to the pitch.
#pragma unroll
          for (int f = e; f < kRun && f < e + 4; ++f) values[f] = from[f * Sums::kPitch];
        } else {
          const float4 four = *reinterpret_cast<const float4*>(from + e);
          values[e] = four.x, values[e + 1] = four.y;
          values[e + 2] = four.z, values[e + 3] = four.w;
        }
      }
      // Where the elements are one by one.
      auto at_of = [&](int e) {
        return result_at[pixel[r] + e] + (first_channel + column[r]) * args.y_stride[2];
      };
      auto each = [&](auto change) {
#pragma unroll
        for (int e = 0; e < kRun; ++e) change(values[e], e);
      };
      each([&](float& value, int) { value *= args.alpha; });
      if (args.accumulate != nullptr) {
        each([&](float& value, int e) {
          if (!whole[r] && result_at[pixel[r] + e] < 0) return;
          value += args.beta * widen(whole[r] ? before[r].at[e] : accumulate[at_of(e)]);
        });
      }
      if (args.bias != nullptr) {
        each([&](float& value, int e) {
          value += widen(bias[first_channel + column[r] + (kOfPixels ? 0 : e)]);
        });
      }
      if (args.activation != kNone) {
        each([&](float& value, int) { value = activate(value, args.activation); });
      }
      Neighbours done;
      each([&](float& value, int e) { done.at[e] = narrow<T>(value); });
      if (whole[r]) {
        done.store(y + at[r]);
      } else {
        each([&](float&, int e) {
          if (result_at[pixel[r] + e] >= 0) y[at_of(e)] = done.at[e];
        });
      }
    }
  }
}

}  // namespace convgrad
