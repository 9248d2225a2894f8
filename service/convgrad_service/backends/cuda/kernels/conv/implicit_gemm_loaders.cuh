// Operand loaders of implicit_gemm.cu. A loader issues a thread's copies of one k-tile from the
// convolution's tensors. Chunks outside a tensor are filled with zeros.
#pragma once

#include "conv/implicit_gemm_positions.cuh"

namespace convgrad {

// Loaders are called once per k-tile, in order. They compute the addresses of the next k-tile after
// issuing the copies of the current one, so that copies never wait for addresses. at(i) is the offset of this
// thread's copy i in the tile.

// A of fprop and dgrad: rows are pixels of the result, columns are source channels at a tap.
template <class T, class Tile, int kThreads, int kVector>
class PixelRows {
 public:
  using Own = Chunks<Tile, kThreads>;

  __device__ __forceinline__ PixelRows(const ImplicitGemmArgs& args, const Phases& phases,
                                       int group, int first, int pixels, int step)
      : args_(args), chunk_(args, step * 8 + Own::column()) {
    first += Own::row();
    const char* const from =
        static_cast<const char*>(args.source) + group * args.source_stride[1];
#pragma unroll
    for (int i = 0; i < Own::kCount; ++i) {
      const int pixel = first + i * Own::kThreadRows;
      const bool exists = pixel < pixels && Own::exists();
      if (kPointwise || args.linear_source) {
        from_[i] = from + pixel * args.source_stride[5];
        w_[i] = exists ? 0 : kOutside;
        continue;
      }
      const Position at(phases, pixel);
      d_[i] = phases.d->x0 + at.d * args.axis[0].x_step;
      h_[i] = phases.h->x0 + at.h * args.axis[1].x_step;
      w_[i] = phases.w->x0 + at.w * args.axis[2].x_step;
      from_[i] = from + at.n * args.source_stride[0] + d_[i] * args.source_stride[3] +
                 h_[i] * args.source_stride[4] + w_[i] * args.source_stride[5];
      if (!exists) w_[i] = kOutside;
    }
    find_tap(phases);
  }
  __device__ __forceinline__ u32 at(int i) const { return own_.at(i); }
  __device__ __forceinline__ void load(u32 tile, const Phases& phases) {
    const int real = chunk_.left(args_) * static_cast<int>(sizeof(T));
#pragma unroll
    for (int i = 0; i < Own::kCount; ++i) {
      if (!Own::exists()) continue;
      copy_vectors<kVector>(tile + own_.at(i), from_[i] + shift_, meets_ >> i & 1, real);
    }
    shift_ += 128;
    if (chunk_.advance(args_)) find_tap(phases);
  }

 private:
  const Own own_;
  static constexpr int kOutside = -(1 << 30);  // outside the source at every tap

  __device__ __forceinline__ void find_tap(const Phases& phases) {
    meets_ = 0;
    shift_ = chunk_.channel * static_cast<int>(sizeof(T));
    if (chunk_.tap >= phases.taps()) return;
    if (kPointwise || args_.linear_source) {
#pragma unroll
      for (int i = 0; i < Own::kCount; ++i) meets_ |= static_cast<u32>(w_[i] == 0) << i;
      return;
    }
    const Tap tap(phases, chunk_.tap);
    const int d = tap.d * args_.axis[0].x_tap, h = tap.h * args_.axis[1].x_tap;
    const int w = tap.w * args_.axis[2].x_tap;
    shift_ += d * args_.source_stride[3] + h * args_.source_stride[4] + w * args_.source_stride[5];
#pragma unroll
    for (int i = 0; i < Own::kCount; ++i) {
      const bool meets = inside(d_[i] + d, args_.axis[0].size) &&
                         inside(h_[i] + h, args_.axis[1].size) &&
                         inside(w_[i] + w, args_.axis[2].size);
      meets_ |= static_cast<u32>(meets) << i;
    }
  }

  const ImplicitGemmArgs& args_;
  TapChunk<T> chunk_;
  i64 shift_;
  u32 meets_;  // one bit per row: whether it reads inside the source
  const char* from_[Own::kCount];
  int d_[Own::kCount], h_[Own::kCount], w_[Own::kCount];
};

__device__ __forceinline__ i64 weight_tap_at(const ImplicitGemmArgs& args, const Phases& phases,
                                             int number) {
  if (kPointwise) return 0;
  if (phases.taps() == 1) {
    return phases.d->r0 * args.other_stride[3] + phases.h->r0 * args.other_stride[4] +
           phases.w->r0 * args.other_stride[5];
  }
  const Tap tap(phases, number);
  return (phases.d->r0 + tap.d * args.axis[0].r_step) * args.other_stride[3] +
         (phases.h->r0 + tap.h * args.axis[1].r_step) * args.other_stride[4] +
         (phases.w->r0 + tap.w * args.axis[2].r_step) * args.other_stride[5];
}

// B of fprop: rows are result channels, columns are source channels at a tap (K-major).
template <class T, class Tile, int kThreads, int kVector>
class WeightRows {
 public:
  using Own = Chunks<Tile, kThreads>;

  __device__ __forceinline__ WeightRows(const ImplicitGemmArgs& args, const Phases& phases,
                                        int group, int first, int, int step)
      : args_(args),
        rows_(args.result_channels - first - Own::row()),
        chunk_(args, step * 8 + Own::column()),
        row_(static_cast<const char*>(args.other) + group * args.other_stride[0] +
             (first + Own::row()) * args.other_stride[1]) {
    find_tap(phases);
  }
  __device__ __forceinline__ u32 at(int i) const { return own_.at(i); }
  __device__ __forceinline__ void load(u32 tile, const Phases& phases) {
    const int real = chunk_.left(args_) * static_cast<int>(sizeof(T));
    const char* from = from_;
#pragma unroll
    for (int i = 0; i < Own::kCount; ++i, from += Own::kThreadRows * args_.other_stride[1]) {
      if (!Own::exists()) continue;
      copy_vectors<kVector>(tile + own_.at(i), from, i * Own::kThreadRows < there_, real);
    }
    from_ += 128;
    if (chunk_.advance(args_)) find_tap(phases);
  }

 private:
  const Own own_;
  __device__ __forceinline__ void find_tap(const Phases& phases) {
    there_ = chunk_.tap < phases.taps() ? rows_ : 0;
    from_ = row_ + weight_tap_at(args_, phases, chunk_.tap) +
            chunk_.channel * static_cast<int>(sizeof(T));
  }

  const ImplicitGemmArgs& args_;
  const int rows_;
  int there_;
  TapChunk<T> chunk_;
  const char *const row_, *from_;
};

// B of dgrad: rows are source channels at a tap, columns are result channels (N-major).
template <class T, class Tile, int kThreads, int kVector>
class WeightColumns {
 public:
  using Own = Chunks<Tile, kThreads>;

  __device__ __forceinline__ WeightColumns(const ImplicitGemmArgs& args, const Phases& phases,
                                           int group, int first, int, int step)
      : args_(args),
        columns_(args.result_channels - first - Own::column() * kChunk),
        element_(step * 8 * kChunk + Own::row()),
        column_(static_cast<const char*>(args.other) + group * args.other_stride[0] +
                (first + Own::column() * kChunk) * static_cast<int>(sizeof(T))) {
    find_tap(phases);
  }
  __device__ __forceinline__ u32 at(int i) const { return own_.at(i); }
  __device__ __forceinline__ void load(u32 tile, const Phases& phases) {
    const int real = columns_ * static_cast<int>(sizeof(T));
    const char* from = from_;
    if (kPointwise || within_ + 8 * kChunk - Own::row() <= args_.tap_chunks * kChunk) {
      const int rows = columns_ > 0 ? there_ : 0;
#pragma unroll
      for (int i = 0; i < Own::kCount; ++i, from += Own::kThreadRows * args_.other_stride[2]) {
        if (!Own::exists()) continue;
        copy_vectors<kVector>(tile + own_.at(i), from, i * Own::kThreadRows < rows, real);
      }
    } else {
      // If the k-tile spans two taps, each row is looked up.
#pragma unroll 1
      for (int i = 0; i < Own::kCount; ++i) {
        if (!Own::exists()) continue;
        bool there;
        const char* const own = look_up(phases, element_ + i * Own::kThreadRows, there);
        copy_vectors<kVector>(tile + own_.at(i), own, there && columns_ > 0, real);
      }
    }
    element_ += 8 * kChunk, within_ += 8 * kChunk;
    there_ -= 8 * kChunk, from_ += 8 * kChunk * args_.other_stride[2];
    if (!kPointwise && within_ >= args_.tap_chunks * kChunk) find_tap(phases);
  }

 private:
  const Own own_;
  static constexpr int kChunk = TapChunk<T>::kElements;

  // The address of the weights of an element of K, and whether the element exists.
  __device__ __forceinline__ const char* look_up(const Phases& phases, int element, bool& there) {
    const TapChunk<T> chunk(args_, element / kChunk);
    const int channel = chunk.channel + element % kChunk;
    there = chunk.tap < phases.taps() && channel < args_.source_channels;
    return column_ + weight_tap_at(args_, phases, chunk.tap) + channel * args_.other_stride[2];
  }
  __device__ __forceinline__ void find_tap(const Phases& phases) {
    const TapChunk<T> chunk(args_, element_ / kChunk);
    within_ = chunk.channel + element_ % kChunk;
    there_ = chunk.tap < phases.taps() ? args_.source_channels - within_ : 0;
    from_ = column_ + weight_tap_at(args_, phases, chunk.tap) + within_ * args_.other_stride[2];
  }

  const ImplicitGemmArgs& args_;
  const int columns_;
  // This thread's first row: its element of K, the element within its tap, and those remaining.
  int element_, within_, there_;
  const char *const column_, *from_;
};

// Iterates over the pixels of grad_output, wgrad's K, by k-tiles.
template <class Own, int kDepth>
class PixelWalk {
 public:
  // With `linear`, positions are not computed.
  __device__ __forceinline__ PixelWalk(const Phases& phases, int step, int pixels, bool linear)
      : phases_(phases), linear_(linear), left_(pixels - step * kDepth - Own::row()) {
    if (linear) return;
#pragma unroll
    for (int i = 0; i < Own::kCount; ++i) {
      at_[i] = Position(phases, step * kDepth + Own::row() + i * Own::kThreadRows);
    }
  }
  __device__ __forceinline__ bool there(int i) const { return i * Own::kThreadRows < left_; }
  __device__ __forceinline__ const Position& at(int i) const { return at_[i]; }
  __device__ __forceinline__ void advance() {
    left_ -= kDepth;
    if (linear_) return;
    const Position by(phases_, kDepth);
#pragma unroll
    for (int i = 0; i < Own::kCount; ++i) {
      Position& at = at_[i];
      at.w += by.w, at.h += by.h, at.d += by.d, at.n += by.n;
      if (at.w >= phases_.w->count) at.w -= phases_.w->count, ++at.h;
      if (at.h >= phases_.h->count) at.h -= phases_.h->count, ++at.d;
      if (at.d >= phases_.d->count) at.d -= phases_.d->count, ++at.n;
    }
  }

 private:
  const Phases& phases_;
  const bool linear_;
  int left_;
  Position at_[Own::kCount];
};

// A of wgrad: rows are pixels of grad_output, columns are its channels.
template <class T, class Tile, int kThreads, int kVector>
class GradientPixels {
 public:
  using Own = Chunks<Tile, kThreads>;

  __device__ __forceinline__ GradientPixels(const ImplicitGemmArgs& args, const Phases& phases,
                                            int group, int first, int pixels, int step)
      : args_(args),
        walk_(phases, step, pixels, args.linear_other != 0),
        channels_(args.result_channels - first - Own::column() * TapChunk<T>::kElements) {
    from_ = static_cast<const char*>(args.other) + group * args.other_stride[1] +
            (first + Own::column() * TapChunk<T>::kElements) * static_cast<int>(sizeof(T));
    if (args.linear_other) from_ += (step * Tile::kRows + Own::row()) * args.other_stride[5];
  }
  __device__ __forceinline__ u32 at(int i) const { return own_.at(i); }
  __device__ __forceinline__ void load(u32 tile, const Phases&) {
    const int real = channels_ * static_cast<int>(sizeof(T));
    const char* row = from_;
#pragma unroll
    for (int i = 0; i < Own::kCount; ++i, row += Own::kThreadRows * args_.other_stride[5]) {
      if (!Own::exists()) continue;
      const char* from = row;
      if (!args_.linear_other) {
        const Position& at = walk_.at(i);
        from = from_ + at.n * args_.other_stride[0] + at.d * args_.other_stride[3] +
               at.h * args_.other_stride[4] + at.w * args_.other_stride[5];
      }
      copy_vectors<kVector>(tile + own_.at(i), from, walk_.there(i) && channels_ > 0, real);
    }
    walk_.advance();
    if (args_.linear_other) from_ += Tile::kRows * args_.other_stride[5];
  }

 private:
  const Own own_;
  const ImplicitGemmArgs& args_;
  PixelWalk<Own, Tile::kRows> walk_;
  const int channels_;
  const char* from_;
};

// B of wgrad: rows are pixels of grad_output, columns are input channels at a tap, one tap per
// chunk.
template <class T, class Tile, int kThreads, int kVector>
class TapColumns {
 public:
  using Own = Chunks<Tile, kThreads>;

  __device__ __forceinline__ TapColumns(const ImplicitGemmArgs& args, const Phases& phases,
                                        int group, int first, int pixels, int step)
      : args_(args), walk_(phases, step, pixels, args.linear_source != 0) {
    const TapChunk<T> own(args, first / TapChunk<T>::kElements + Own::column());
    channels_ = own.tap < phases.taps() ? own.left(args) : 0;
    from_ = static_cast<const char*>(args.source) + group * args.source_stride[1] +
            own.channel * static_cast<int>(sizeof(T));
    if (args.linear_source) {
      from_ += (step * Tile::kRows + Own::row()) * args.source_stride[5];
      return;
    }
    const Tap tap(phases, own.tap);
    d_ = phases.d->x0 + tap.d * args.axis[0].x_tap;
    h_ = phases.h->x0 + tap.h * args.axis[1].x_tap;
    w_ = phases.w->x0 + tap.w * args.axis[2].x_tap;
  }
  __device__ __forceinline__ u32 at(int i) const { return own_.at(i); }
  __device__ __forceinline__ void load(u32 tile, const Phases&) {
    const int real = channels_ * static_cast<int>(sizeof(T));
    const char* row = from_;
#pragma unroll
    for (int i = 0; i < Own::kCount; ++i, row += Own::kThreadRows * args_.source_stride[5]) {
      if (!Own::exists()) continue;
      bool meets = walk_.there(i) && channels_ > 0;
      const char* from = row;
      if (!args_.linear_source) {
        const Position& at = walk_.at(i);
        const int d = d_ + at.d * args_.axis[0].x_step, h = h_ + at.h * args_.axis[1].x_step;
        const int w = w_ + at.w * args_.axis[2].x_step;
        meets = meets && inside(d, args_.axis[0].size) && inside(h, args_.axis[1].size) &&
                inside(w, args_.axis[2].size);
        from = from_ + at.n * args_.source_stride[0] + d * args_.source_stride[3] +
               h * args_.source_stride[4] + w * args_.source_stride[5];
      }
      copy_vectors<kVector>(tile + own_.at(i), from, meets, real);
    }
    walk_.advance();
    if (args_.linear_source) from_ += Tile::kRows * args_.source_stride[5];
  }

 private:
  const Own own_;
  const ImplicitGemmArgs& args_;
  PixelWalk<Own, Tile::kRows> walk_;
  int channels_, d_ = 0, h_ = 0, w_ = 0;
  const char* from_;
};

}  // namespace convgrad
