// Operand loaders of implicit_gemm.cu for channels-first float32 tensors, read in place: the pixels of a
// plane are adjacent, channels are planes apart. K of fprop and dgrad, and N of wgrad, are channels x taps, taps
// fastest, as in a channels-first weight. Threads copy single elements; the lanes of a warp copy adjacent ones,
// of one row of a tile.
#pragma once

#include "conv/implicit_gemm_positions.cuh"

namespace convgrad {

// A set of taps: bits for the tap's index along each dimension.
struct TapSet {
  static constexpr int kMost = 10;  // taps along a dimension; host: MAX_PLANE_TAPS
  u32 bits;

  __device__ static __forceinline__ TapSet of(int d, int h, int w) {
    return {1u << (2 * kMost + d) | 1u << (kMost + h) | 1u << w};
  }
  // Those that read inside the source, from a position at displacement 0.
  __device__ __forceinline__ TapSet(const ImplicitGemmArgs& args, const Phases& phases, int d, int h, int w)
      : bits(inside_along(args.axis[0], phases.d->taps, d) << 2 * kMost |
             inside_along(args.axis[1], phases.h->taps, h) << kMost |
             inside_along(args.axis[2], phases.w->taps, w)) {}
  __device__ __forceinline__ TapSet(u32 bits) : bits(bits) {}
  __device__ __forceinline__ bool has(u32 tap) const { return (bits & tap) == tap; }

 private:
  __device__ static __forceinline__ u32 inside_along(const GatherAxis& axis, int taps, int from) {
    u32 found = 0;
#pragma unroll 1
    for (int j = 0; j < taps; ++j, from += axis.x_tap) {
      found |= static_cast<u32>(inside(from, axis.size)) << j;
    }
    return found;
  }
};

// An index of (channel, tap), taps fastest.
struct ChannelTap {
  int channel, d, h, w;

  __device__ __forceinline__ ChannelTap(const Phases& phases, int index) {
    const int rest_w = divide(index, phases.w->by_taps), rest_h = divide(rest_w, phases.h->by_taps);
    channel = divide(rest_h, phases.d->by_taps);
    w = index - rest_w * phases.w->taps;
    h = rest_w - rest_h * phases.h->taps;
    d = rest_h - channel * phases.d->taps;
  }
  // Bytes in an image of the source, below 2^31.
  __device__ __forceinline__ int in_source(const ImplicitGemmArgs& args) const {
    return channel * static_cast<int>(args.source_stride[2]) +
           d * args.axis[0].x_tap * static_cast<int>(args.source_stride[3]) +
           h * args.axis[1].x_tap * static_cast<int>(args.source_stride[4]) +
           w * args.axis[2].x_tap * static_cast<int>(args.source_stride[5]);
  }
  __device__ __forceinline__ u32 tap() const { return TapSet::of(d, h, w).bits; }
};

// The position in the source that a pixel of the phase has at displacement 0.
struct SourcePosition {
  int d, h, w;

  __device__ __forceinline__ SourcePosition(const ImplicitGemmArgs& args, const Phases& phases,
                                            const Position& at)
      : d(phases.d->x0 + at.d * args.axis[0].x_step),
        h(phases.h->x0 + at.h * args.axis[1].x_step),
        w(phases.w->x0 + at.w * args.axis[2].x_step) {}
  __device__ __forceinline__ const char* in(const ImplicitGemmArgs& args, const char* image) const {
    return image + d * args.source_stride[3] + h * args.source_stride[4] + w * args.source_stride[5];
  }
  __device__ __forceinline__ TapSet taps(const ImplicitGemmArgs& args, const Phases& phases) const {
    return TapSet(args, phases, d, h, w);
  }
};

// fprop and dgrad. A has a row for each element of K, of a tile's pixels; B a row for each result channel.
template <class Gemm>
class PlaneGather {
  using A = Chunks<typename Gemm::TileA, Gemm::kThreads, 1>;
  using B = Chunks<typename Gemm::TileB, Gemm::kThreads, 1>;

 public:
  static constexpr int kWords = 1, kCopies = A::kCount + B::kCount;

  __device__ __forceinline__ PlaneGather(const ImplicitGemmArgs& args, const Phases& phases, int group,
                                         int row, int rows, int column, int first_step)
      : args_(args),
        phases_(phases),
        index_(first_step * Gemm::kTileK + B::column()),
        end_(args.source_channels * phases.taps()),
        channels_(args.result_channels - column - B::row()),
        weights_(static_cast<const char*>(args.other) + group * args.other_stride[0] +
                 (column + B::row()) * args.other_stride[1]) {
    static_assert(B::kColumns == 32 && A::kColumns % 32 == 0 && A::kAll && B::kAll,
                  "a lane has an element of K");
    const int pixel = row + A::column();
    const Position at(phases, pixel);
    const SourcePosition from(args, phases, at);
    from_ = from.in(args, static_cast<const char*>(args.source) + at.n * args.source_stride[0] +
                              group * args.source_stride[1]);
    if (pixel < rows) met_ = from.taps(args, phases);
  }
  __device__ __forceinline__ u32 own(int i) const {
    return i < A::kCount ? a_.at(i) : Gemm::TileA::kBytes + b_.at(i - A::kCount);
  }
  __device__ __forceinline__ void operator()(u32 stage) {
    const ChannelTap now(phases_, index_);
    const bool there = index_ < end_;
    const int source = now.in_source(args_);
    const u32 tap = there ? now.tap() : kNowhere;
#pragma unroll
    for (int i = 0; i < A::kCount; ++i) {
      const int row = A::row() + i * A::kThreadRows;  // the same for all lanes
      const int at = __shfl_sync(~0u, source, row);
      const u32 needed = __shfl_sync(~0u, tap, row);
      cp_async<4>(stage + a_.at(i), from_ + at, met_.has(needed) ? 4 : 0);
    }
    const char* from = weights_ + now.channel * args_.other_stride[2] +
                       (phases_.d->r0 + now.d * args_.axis[0].r_step) * args_.other_stride[3] +
                       (phases_.h->r0 + now.h * args_.axis[1].r_step) * args_.other_stride[4] +
                       (phases_.w->r0 + now.w * args_.axis[2].r_step) * args_.other_stride[5];
    const int channels = there ? channels_ : 0;
#pragma unroll
    for (int i = 0; i < B::kCount; ++i, from += B::kThreadRows * args_.other_stride[1]) {
      cp_async<4>(stage + Gemm::TileA::kBytes + b_.at(i), from, i * B::kThreadRows < channels ? 4 : 0);
    }
    index_ += Gemm::kTileK;
  }

 private:
  static constexpr u32 kNowhere = ~0u;

  const ImplicitGemmArgs& args_;
  const Phases& phases_;
  const A a_;
  const B b_;
  int index_;  // this lane's element of K
  const int end_, channels_;
  const char* const weights_;
  const char* from_;
  TapSet met_ = 0u;
};

// wgrad. A has a row for each channel of grad_output, B for each channel and tap of the input; a lane has a
// pixel, which is K.
template <class Gemm>
class PlaneWgrad {
  using A = Chunks<typename Gemm::TileA, Gemm::kThreads, 1>;
  using B = Chunks<typename Gemm::TileB, Gemm::kThreads, 1>;

 public:
  static constexpr int kWords = 1, kCopies = A::kCount + B::kCount;

  __device__ __forceinline__ PlaneWgrad(const ImplicitGemmArgs& args, const Phases& phases, int group, int row,
                                        int pixels, int column, int first_step)
      : args_(args),
        phases_(phases),
        pixel_(first_step * Gemm::kTileK + A::column()),
        pixels_(pixels),
        channels_(args.result_channels - row - A::row()),
        gradient_(static_cast<const char*>(args.other) + group * args.other_stride[1] +
                  (row + A::row()) * args.other_stride[2]),
        source_(static_cast<const char*>(args.source) + group * args.source_stride[1]) {
    static_assert(A::kColumns == 32 && B::kColumns == 32 && A::kAll && B::kAll && B::kCount <= 32,
                  "a lane has a pixel, and a row of B");
    // Of this warp's rows, lane i has the i-th.
    const int own = column + B::row() + static_cast<int>(threadIdx.x & 31) * B::kThreadRows;
    const ChannelTap of(phases, own);
    at_ = of.in_source(args);
    tap_ = own < args.columns ? of.tap() : ~0u;
  }
  __device__ __forceinline__ u32 own(int i) const {
    return i < A::kCount ? a_.at(i) : Gemm::TileA::kBytes + b_.at(i - A::kCount);
  }
  __device__ __forceinline__ void operator()(u32 stage) {
    const Position at(phases_, pixel_);
    const bool there = pixel_ < pixels_;
    const char* from = gradient_ + at.n * args_.other_stride[0] + at.d * args_.other_stride[3] +
                       at.h * args_.other_stride[4] + at.w * args_.other_stride[5];
    const int channels = there ? channels_ : 0;
#pragma unroll
    for (int i = 0; i < A::kCount; ++i, from += A::kThreadRows * args_.other_stride[2]) {
      cp_async<4>(stage + a_.at(i), from, i * A::kThreadRows < channels ? 4 : 0);
    }
    const SourcePosition position(args_, phases_, at);
    const char* const pixel = position.in(args_, source_ + at.n * args_.source_stride[0]);
    const TapSet met = there ? position.taps(args_, phases_) : TapSet(0u);
#pragma unroll
    for (int i = 0; i < B::kCount; ++i) {
      const int shift = __shfl_sync(~0u, at_, i);
      const u32 needed = __shfl_sync(~0u, tap_, i);
      cp_async<4>(stage + Gemm::TileA::kBytes + b_.at(i), pixel + shift, met.has(needed) ? 4 : 0);
    }
    pixel_ += Gemm::kTileK;
  }

 private:
  const ImplicitGemmArgs& args_;
  const Phases& phases_;
  const A a_;
  const B b_;
  int pixel_;
  const int pixels_, channels_;
  const char *const gradient_, *const source_;
  int at_;
  u32 tap_;
};

}  // namespace convgrad
