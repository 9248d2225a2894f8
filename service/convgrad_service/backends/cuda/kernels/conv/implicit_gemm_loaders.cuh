// The operands of implicit_gemm.cu, copied from where they lie in a convolution's tensors. A loader
// starts a thread's copies of one step; chunks that do not exist are filled with zeros.
#pragma once

#include "conv/implicit_gemm_args.cuh"
#include "tensor_core.cuh"

namespace convgrad {

__device__ __forceinline__ bool inside(int position, int size) {
  return static_cast<u32>(position) < static_cast<u32>(size);
}

// A chunk, of which the first `real` bytes exist, by copies of kVector bytes.
template <int kVector>
__device__ __forceinline__ void copy_vectors(u32 to, const char* from, int real) {
  if constexpr (kVector == 16) {
    copy_async<16>(to, from, real);
  } else {
#pragma unroll
    for (int at = 0; at < 16; at += kVector) {
      copy_async<kVector>(to + at, from + at, at < real ? kVector : 0);
    }
  }
}

// The phase of a block along each dimension.
struct Phases {
  const GatherPhase *d, *h, *w;

  __device__ __forceinline__ Phases(const ImplicitGemmArgs& args, u32 number)
      : d(args.phase[0]), h(args.phase[1]), w(args.phase[2]) {
    if (number == 0) return;
    const u32 outer = number / static_cast<u32>(args.axis[2].phases);
    w += number - outer * args.axis[2].phases;
    d += outer / static_cast<u32>(args.axis[1].phases);
    h += outer % static_cast<u32>(args.axis[1].phases);
  }
  __device__ __forceinline__ int taps() const { return d->taps * h->taps * w->taps; }
};

// A position of the phases: an image, and a place in it.
struct Position {
  int n, d, h, w;

  __device__ __forceinline__ Position(const Phases& phases, int pixel) {
    const int rest_w = divide(pixel, phases.w->by_count);
    const int rest_h = divide(rest_w, phases.h->by_count);
    n = divide(rest_h, phases.d->by_count);
    w = pixel - rest_w * phases.w->count;
    h = rest_w - rest_h * phases.h->count;
    d = rest_h - n * phases.d->count;
  }
};

struct Tap {
  int d, h, w;

  __device__ __forceinline__ Tap(const Phases& phases, int tap) {
    const int rest = divide(tap, phases.w->by_taps);
    d = divide(rest, phases.h->by_taps);
    w = tap - rest * phases.w->taps;
    h = rest - d * phases.h->taps;
  }
};

// A chunk of the reduction of fprop and dgrad: channels of the source at one tap.
template <class T>
struct TapChunk {
  int tap, channel;
  int real;  // bytes

  __device__ __forceinline__ TapChunk(const ImplicitGemmArgs& args, int taps, int chunk) {
    tap = divide(chunk, args.by_tap_chunks);
    channel = (chunk - tap * args.tap_chunks) * (16 / static_cast<int>(sizeof(T)));
    const int left = (args.source_channels - channel) * static_cast<int>(sizeof(T));
    real = tap < taps ? min(left, 16) : 0;
  }
};

// How a block's threads take the chunks of a tile: each always the same column of it.
template <class Tile, int kThreads>
struct Chunks {
  static constexpr int kThreadRows = kThreads / Tile::kChunks;
  static constexpr int kCount = Tile::kRows > kThreadRows ? Tile::kRows / kThreadRows : 1;
  static_assert(kThreads % Tile::kChunks == 0 && Tile::kRows % kCount == 0, "whole rounds");

  __device__ static __forceinline__ int column() { return threadIdx.x % Tile::kChunks; }
  // Rows so many apart, or neighbours.
  __device__ static __forceinline__ int spread_row(int i) {
    return threadIdx.x / Tile::kChunks + i * kThreadRows;
  }
  __device__ static __forceinline__ int neighbour_row(int i) {
    return threadIdx.x / Tile::kChunks * kCount + i;
  }
  // Whether a row is of the tile at all, where there are more threads than chunks.
  __device__ static __forceinline__ bool exists(int row) {
    return kThreadRows <= Tile::kRows || row < Tile::kRows;
  }
};

// A of fprop and dgrad: rows are pixels of the result, each with the source's channels at a tap.
template <class T, class Tile, int kThreads, int kVector>
class PixelRows {
 public:
  __device__ __forceinline__ PixelRows(const ImplicitGemmArgs& args, const Phases& phases,
                                       int group, int first, int pixels)
      : args_(args) {
#pragma unroll
    for (int i = 0; i < Own::kCount; ++i) {
      const int pixel = first + Own::spread_row(i);
      const Position at(phases, pixel);
      d_[i] = phases.d->x0 + at.d * args.axis[0].x_step;
      h_[i] = phases.h->x0 + at.h * args.axis[1].x_step;
      // Outside whatever the tap.
      w_[i] = pixel < pixels ? phases.w->x0 + at.w * args.axis[2].x_step : -(1 << 30);
      from_[i] = static_cast<const T*>(args.source) + group * args.source_stride[1] +
                 at.n * args.source_stride[0] + d_[i] * args.source_stride[3] +
                 h_[i] * args.source_stride[4] +
                 (phases.w->x0 + at.w * args.axis[2].x_step) * args.source_stride[5];
    }
  }
  __device__ __forceinline__ void load(u32 tile, const Phases& phases, const TapChunk<T>& chunk) {
    const Tap tap(phases, chunk.tap);
    const int d = tap.d * args_.axis[0].x_tap, h = tap.h * args_.axis[1].x_tap;
    const int w = tap.w * args_.axis[2].x_tap;
    const i64 shift = d * args_.source_stride[3] + h * args_.source_stride[4] +
                      w * args_.source_stride[5] + chunk.channel;
#pragma unroll
    for (int i = 0; i < Own::kCount; ++i) {
      const int row = Own::spread_row(i);
      const bool meets = inside(d_[i] + d, args_.axis[0].size) &&
                         inside(h_[i] + h, args_.axis[1].size) &&
                         inside(w_[i] + w, args_.axis[2].size);
      if (!Own::exists(row)) continue;
      copy_vectors<kVector>(tile + Tile::at(row, Own::column()),
                            reinterpret_cast<const char*>(from_[i] + shift),
                            meets ? chunk.real : 0);
    }
  }

 private:
  using Own = Chunks<Tile, kThreads>;
  const ImplicitGemmArgs& args_;
  const T* from_[Own::kCount];
  int d_[Own::kCount], h_[Own::kCount], w_[Own::kCount];
};

__device__ __forceinline__ i64 weight_tap_at(const ImplicitGemmArgs& args, const Phases& phases,
                                             int number) {
  const Tap tap(phases, number);
  return (phases.d->r0 + tap.d * args.axis[0].r_step) * args.other_stride[3] +
         (phases.h->r0 + tap.h * args.axis[1].r_step) * args.other_stride[4] +
         (phases.w->r0 + tap.w * args.axis[2].r_step) * args.other_stride[5];
}

// B of fprop: rows are channels of the result, each with its weights of the source's channels.
template <class T, class Tile, int kThreads, int kVector>
class WeightRows {
 public:
  __device__ __forceinline__ WeightRows(const ImplicitGemmArgs& args, int group, int first)
      : args_(args), first_(first + Own::spread_row(0)) {
    from_ = static_cast<const T*>(args.other) + group * args.other_stride[0] +
            first_ * args.other_stride[1];
  }
  __device__ __forceinline__ void load(u32 tile, const Phases& phases, const TapChunk<T>& chunk) {
    const T* from = from_ + weight_tap_at(args_, phases, chunk.tap) + chunk.channel;
#pragma unroll
    for (int i = 0; i < Own::kCount; ++i, from += Own::kThreadRows * args_.other_stride[1]) {
      const int row = Own::spread_row(i);
      const bool there = first_ + i * Own::kThreadRows < args_.result_channels;
      if (!Own::exists(row)) continue;
      copy_vectors<kVector>(tile + Tile::at(row, Own::column()),
                            reinterpret_cast<const char*>(from), there ? chunk.real : 0);
    }
  }

 private:
  using Own = Chunks<Tile, kThreads>;
  const ImplicitGemmArgs& args_;
  const int first_;
  const T* from_;
};

// B of dgrad: rows are elements of the reduction, the source's channels at a tap, each with its
// weights of the result's channels. A thread has neighbouring rows, of one chunk of the reduction.
template <class T, class Tile, int kThreads, int kVector>
class WeightColumns {
 public:
  __device__ __forceinline__ WeightColumns(const ImplicitGemmArgs& args, int group, int first)
      : args_(args) {
    const int channel = first + Own::column() * kChunk;
    const int left = (args.result_channels - channel) * static_cast<int>(sizeof(T));
    real_ = max(min(left, 16), 0);
    from_ = static_cast<const T*>(args.other) + group * args.other_stride[0] + channel;
  }
  __device__ __forceinline__ void load(u32 tile, const Phases& phases, int taps, int step) {
#pragma unroll
    for (int begin = 0; begin < Own::kCount; begin += kTogether) {
      const int first = Own::neighbour_row(begin);
      const TapChunk<T> chunk(args_, taps, step * 8 + first / kChunk);
      const int channel = chunk.channel + first % kChunk;
      const T* from = from_ + weight_tap_at(args_, phases, chunk.tap) +
                      channel * args_.other_stride[2];
#pragma unroll
      for (int i = 0; i < kTogether; ++i, from += args_.other_stride[2]) {
        const bool there = chunk.real > 0 && channel + i < args_.source_channels;
        if (!Own::exists(first)) continue;
        copy_vectors<kVector>(tile + Tile::at(first + i, Own::column()),
                              reinterpret_cast<const char*>(from), there ? real_ : 0);
      }
    }
  }

 private:
  using Own = Chunks<Tile, kThreads>;
  static constexpr int kChunk = 16 / static_cast<int>(sizeof(T));
  static constexpr int kTogether = Own::kCount < kChunk ? Own::kCount : kChunk;
  const ImplicitGemmArgs& args_;
  int real_;
  const T* from_;
};

// A of wgrad: rows are pixels of grad_output, each with its channels.
template <class T, class Tile, int kThreads, int kVector>
class GradientPixels {
 public:
  __device__ __forceinline__ GradientPixels(const ImplicitGemmArgs& args, int group, int first)
      : args_(args) {
    const int channel = first + Own::column() * (16 / static_cast<int>(sizeof(T)));
    const int left = (args.result_channels - channel) * static_cast<int>(sizeof(T));
    real_ = max(min(left, 16), 0);
    from_ = static_cast<const T*>(args.other) + group * args.other_stride[1] + channel;
  }
  __device__ __forceinline__ void load(u32 tile, const Phases& phases, int first, int pixels) {
#pragma unroll
    for (int i = 0; i < Own::kCount; ++i) {
      const int row = Own::spread_row(i), pixel = first + row;
      if (!Own::exists(row)) continue;
      copy_vectors<kVector>(tile + Tile::at(row, Own::column()),
                            reinterpret_cast<const char*>(from_ + offset(phases, pixel)),
                            pixel < pixels ? real_ : 0);
    }
  }

 private:
  using Own = Chunks<Tile, kThreads>;
  __device__ __forceinline__ i64 offset(const Phases& phases, int pixel) const {
    if (args_.linear_other) return pixel * args_.other_stride[5];
    const Position at(phases, pixel);
    return at.n * args_.other_stride[0] + at.d * args_.other_stride[3] +
           at.h * args_.other_stride[4] + at.w * args_.other_stride[5];
  }
  const ImplicitGemmArgs& args_;
  int real_;
  const T* from_;
};

// B of wgrad: rows are pixels of grad_output, each with what it meets of the input: the channels of
// one tap in each chunk.
template <class T, class Tile, int kThreads, int kVector>
class TapColumns {
 public:
  __device__ __forceinline__ TapColumns(const ImplicitGemmArgs& args, const Phases& phases,
                                        int group, int first)
      : args_(args) {
    const int chunk = first / (16 / static_cast<int>(sizeof(T))) + Own::column();
    const TapChunk<T> own(args, phases.taps(), chunk);
    const Tap tap(phases, own.tap);
    real_ = own.real;
    d_ = phases.d->x0 + tap.d * args.axis[0].x_tap;
    h_ = phases.h->x0 + tap.h * args.axis[1].x_tap;
    w_ = phases.w->x0 + tap.w * args.axis[2].x_tap;
    from_ = static_cast<const T*>(args.source) + group * args.source_stride[1] + own.channel;
  }
  __device__ __forceinline__ void load(u32 tile, const Phases& phases, int first, int pixels) {
#pragma unroll
    for (int i = 0; i < Own::kCount; ++i) {
      const int row = Own::spread_row(i), pixel = first + row;
      bool meets = pixel < pixels;
      i64 offset;
      if (args_.linear_source) {
        offset = pixel * args_.source_stride[5];
      } else {
        const Position at(phases, pixel);
        const int d = d_ + at.d * args_.axis[0].x_step, h = h_ + at.h * args_.axis[1].x_step;
        const int w = w_ + at.w * args_.axis[2].x_step;
        meets = meets && inside(d, args_.axis[0].size) && inside(h, args_.axis[1].size) &&
                inside(w, args_.axis[2].size);
        offset = at.n * args_.source_stride[0] + d * args_.source_stride[3] +
                 h * args_.source_stride[4] + w * args_.source_stride[5];
      }
      if (!Own::exists(row)) continue;
      copy_vectors<kVector>(tile + Tile::at(row, Own::column()),
                            reinterpret_cast<const char*>(from_ + offset), meets ? real_ : 0);
    }
  }

 private:
  using Own = Chunks<Tile, kThreads>;
  const ImplicitGemmArgs& args_;
  int real_, d_, h_, w_;
  const T* from_;
};

}  // namespace convgrad
