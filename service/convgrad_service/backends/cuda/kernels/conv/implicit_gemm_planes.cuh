// Operand loaders of implicit_gemm.cu for channels-first float32 tensors, read in place: the pixels of a
// plane are adjacent, channels are planes apart. K of fprop and dgrad, and N of wgrad, are channels x taps, taps
// fastest, as in a channels-first weight. Threads copy single elements; the lanes of a warp copy adjacent ones,
// of one row of a tile. Flat planes, of 1x1 without stride or padding, are copied in chunks of 16 bytes.
#pragma once

#include "conv/implicit_gemm_positions.cuh"

namespace convgrad {

constexpr u32 kNoTap = ~0u;

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
  __device__ __forceinline__ bool inside_of(const ImplicitGemmArgs& args) const {
    return inside(d, args.axis[0].size) && inside(h, args.axis[1].size) && inside(w, args.axis[2].size);
  }
  __device__ __forceinline__ TapSet taps(const ImplicitGemmArgs& args, const Phases& phases) const {
    return TapSet(args, phases, d, h, w);
  }
};

// A of fprop and dgrad: rows are elements of K, columns are pixels of the result.
template <class Tile, int kThreads>
class PlanePixels {
 public:
  using Own = Chunks<Tile, kThreads, 1>;
  static_assert(Tile::kRows == 32 && Own::kColumns % 32 == 0, "a warp has one row, a lane an element of K");

  __device__ __forceinline__ PlanePixels(const ImplicitGemmArgs& args, const Phases& phases, int group,
                                         int first, int pixels, int step)
      : args_(args),
        index_(step * Tile::kRows + static_cast<int>(threadIdx.x & 31)),
        end_(args.source_channels * phases.taps()) {
    const int pixel = first + Own::column();
    const Position at(phases, pixel);
    const SourcePosition from(args, phases, at);
    from_ = from.in(args, static_cast<const char*>(args.source) + at.n * args.source_stride[0] +
                              group * args.source_stride[1]);
    if (pixel < pixels) met_ = from.taps(args, phases);
  }
  __device__ __forceinline__ u32 at(int i) const { return own_.at(i); }
  __device__ __forceinline__ void load(u32 tile, const Phases& phases) {
    const ChannelTap now(phases, index_);
    const int source = now.in_source(args_);
    const u32 tap = index_ < end_ ? now.tap() : kNoTap;
#pragma unroll
    for (int i = 0; i < Own::kCount; ++i) {
      const int row = Own::row() + i * Own::kThreadRows;
      const int shift = __shfl_sync(~0u, source, row);
      const u32 needed = __shfl_sync(~0u, tap, row);
      cp_async<4>(tile + own_.at(i), from_ + shift, met_.has(needed) ? 4 : 0);
    }
    index_ += Tile::kRows;
  }

 private:
  const Own own_;
  const ImplicitGemmArgs& args_;
  int index_;  // this lane's element of K
  const int end_;
  const char* from_;
  TapSet met_ = 0u;
};

// B of fprop and dgrad: rows are result channels, columns are elements of K.
template <class Tile, int kThreads>
class PlaneWeights {
 public:
  using Own = Chunks<Tile, kThreads, 1>;

  __device__ __forceinline__ PlaneWeights(const ImplicitGemmArgs& args, const Phases& phases, int group,
                                          int first, int, int step)
      : args_(args),
        index_(step * Own::kColumns + Own::column()),
        end_(args.source_channels * phases.taps()),
        rows_(args.result_channels - first - Own::row()),
        row_(static_cast<const char*>(args.other) + group * args.other_stride[0] +
             (first + Own::row()) * args.other_stride[1]) {}
  __device__ __forceinline__ u32 at(int i) const { return own_.at(i); }
  __device__ __forceinline__ void load(u32 tile, const Phases& phases) {
    const ChannelTap now(phases, index_);
    const char* from = row_ + now.channel * args_.other_stride[2] +
                       (phases.d->r0 + now.d * args_.axis[0].r_step) * args_.other_stride[3] +
                       (phases.h->r0 + now.h * args_.axis[1].r_step) * args_.other_stride[4] +
                       (phases.w->r0 + now.w * args_.axis[2].r_step) * args_.other_stride[5];
    const int rows = index_ < end_ ? rows_ : 0;
#pragma unroll
    for (int i = 0; i < Own::kCount; ++i, from += Own::kThreadRows * args_.other_stride[1]) {
      cp_async<4>(tile + own_.at(i), from, i * Own::kThreadRows < rows ? 4 : 0);
    }
    index_ += Own::kColumns;
  }

 private:
  const Own own_;
  const ImplicitGemmArgs& args_;
  int index_;  // this thread's element of K
  const int end_, rows_;
  const char* const row_;
};

// A of wgrad: rows are channels of grad_output, columns are pixels.
template <class Tile, int kThreads>
class PlaneGradient {
 public:
  using Own = Chunks<Tile, kThreads, 1>;

  __device__ __forceinline__ PlaneGradient(const ImplicitGemmArgs& args, const Phases&, int group, int first,
                                           int pixels, int step)
      : args_(args),
        pixel_(step * Own::kColumns + Own::column()),
        pixels_(pixels),
        rows_(args.result_channels - first - Own::row()),
        row_(static_cast<const char*>(args.other) + group * args.other_stride[1] +
             (first + Own::row()) * args.other_stride[2]) {}
  __device__ __forceinline__ u32 at(int i) const { return own_.at(i); }
  __device__ __forceinline__ void load(u32 tile, const Phases& phases) {
    const Position at(phases, pixel_);
    const char* from = row_ + at.n * args_.other_stride[0] + at.d * args_.other_stride[3] +
                       at.h * args_.other_stride[4] + at.w * args_.other_stride[5];
    const int rows = pixel_ < pixels_ ? rows_ : 0;
#pragma unroll
    for (int i = 0; i < Own::kCount; ++i, from += Own::kThreadRows * args_.other_stride[2]) {
      cp_async<4>(tile + own_.at(i), from, i * Own::kThreadRows < rows ? 4 : 0);
    }
    pixel_ += Own::kColumns;
  }

 private:
  const Own own_;
  const ImplicitGemmArgs& args_;
  int pixel_;
  const int pixels_, rows_;
  const char* const row_;
};

// B of wgrad: rows are input channels at a tap, columns are pixels.
template <class Tile, int kThreads>
class PlaneTaps {
 public:
  using Own = Chunks<Tile, kThreads, 1>;
  static_assert(Own::kColumns == 32 && Own::kCount <= 32, "a warp has one row, a lane one of its rows");

  __device__ __forceinline__ PlaneTaps(const ImplicitGemmArgs& args, const Phases& phases, int group, int first,
                                       int pixels, int step)
      : args_(args),
        pixel_(step * Own::kColumns + Own::column()),
        pixels_(pixels),
        source_(static_cast<const char*>(args.source) + group * args.source_stride[1]) {
    // Of this warp's rows, lane i knows the i-th.
    const int row = first + Own::row() + Own::column() * Own::kThreadRows;
    const ChannelTap of(phases, row);
    shift_ = of.in_source(args);
    tap_ = row < args.columns ? of.tap() : kNoTap;
  }
  __device__ __forceinline__ u32 at(int i) const { return own_.at(i); }
  __device__ __forceinline__ void load(u32 tile, const Phases& phases) {
    const Position at(phases, pixel_);
    const SourcePosition position(args_, phases, at);
    const char* const from = position.in(args_, source_ + at.n * args_.source_stride[0]);
    const TapSet met = pixel_ < pixels_ ? position.taps(args_, phases) : TapSet(0u);
#pragma unroll
    for (int i = 0; i < Own::kCount; ++i) {
      const int shift = __shfl_sync(~0u, shift_, i);
      const u32 needed = __shfl_sync(~0u, tap_, i);
      cp_async<4>(tile + own_.at(i), from + shift, met.has(needed) ? 4 : 0);
    }
    pixel_ += Own::kColumns;
  }

 private:
  const Own own_;
  const ImplicitGemmArgs& args_;
  int pixel_;
  const int pixels_;
  const char* const source_;
  int shift_;
  u32 tap_;
};

// A of fprop and dgrad of one tap: rows are source channels, columns are kWords adjacent pixels of the result.
template <class Tile, int kThreads, int kWords>
class PointwisePixels {
 public:
  using Own = Chunks<Tile, kThreads, kWords>;

  __device__ __forceinline__ PointwisePixels(const ImplicitGemmArgs& args, const Phases& phases, int group,
                                             int first, int pixels, int step)
      : args_(args), rows_(args.source_channels - step * Tile::kRows - Own::row()) {
    const int pixel = first + Own::column() * kWords;
    const Position at(phases, pixel);
    const SourcePosition from(args, phases, at);
    from_ = from.in(args, static_cast<const char*>(args.source) + group * args.source_stride[1] +
                              at.n * args.source_stride[0]) +
            (step * Tile::kRows + Own::row()) * args.source_stride[2];
    if (pixel >= pixels || !from.inside_of(args)) rows_ = 0;
  }
  __device__ __forceinline__ u32 at(int i) const { return own_.at(i); }
  __device__ __forceinline__ void load(u32 tile, const Phases&) {
    const char* from = from_;
#pragma unroll
    for (int i = 0; i < Own::kCount; ++i, from += Own::kThreadRows * args_.source_stride[2]) {
      const bool there = i * Own::kThreadRows < rows_;
      if constexpr (kWords == 4) {
        cp_async_zfill(tile + own_.at(i), from, there);
      } else {
        cp_async<4>(tile + own_.at(i), from, there ? 4 : 0);
      }
    }
    rows_ -= Tile::kRows;
    from_ += Tile::kRows * args_.source_stride[2];
  }

 private:
  const Own own_;
  const ImplicitGemmArgs& args_;
  int rows_;  // from this thread's first row to the last channel
  const char* from_;
};

// An operand of wgrad in flat planes, grad_output or the input: rows are its channels, columns are pixels.
template <class Tile, int kThreads, bool kGradient>
class FlatPixels {
 public:
  using Own = Chunks<Tile, kThreads>;

  __device__ __forceinline__ FlatPixels(const ImplicitGemmArgs& args, const Phases&, int group, int first,
                                        int pixels, int step)
      : stride_(kGradient ? args.other_stride : args.source_stride),
        pixel_(step * 32 + Own::column() * 4),
        pixels_(pixels),
        rows_((kGradient ? args.result_channels : args.source_channels) - first - Own::row()),
        row_(static_cast<const char*>(kGradient ? args.other : args.source) + group * stride_[1] +
             (first + Own::row()) * stride_[2]) {}
  __device__ __forceinline__ u32 at(int i) const { return own_.at(i); }
  __device__ __forceinline__ void load(u32 tile, const Phases& phases) {
    const Position at(phases, pixel_);
    const char* from =
        row_ + at.n * stride_[0] + at.d * stride_[3] + at.h * stride_[4] + at.w * stride_[5];
    const int rows = pixel_ < pixels_ ? rows_ : 0;
#pragma unroll
    for (int i = 0; i < Own::kCount; ++i, from += Own::kThreadRows * stride_[2]) {
      cp_async_zfill(tile + own_.at(i), from, i * Own::kThreadRows < rows);
    }
    pixel_ += 32;
  }

 private:
  const Own own_;
  const i64* const stride_;
  int pixel_;
  const int pixels_, rows_;
  const char* const row_;
};

}  // namespace convgrad
