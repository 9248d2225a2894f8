// Phases, positions and taps of a convolution, and the assignment of a tile's chunks to threads.
#pragma once

#include "conv/implicit_gemm_args.cuh"
#include "core/opaque.cuh"
#include "ptx/mma.cuh"

namespace convgrad {

// Of a 1x1 layer with stride 1, channels last in whole chunks, whose result is the sums, all else is left out.
constexpr bool kPointwise = POINTWISE;

__device__ __forceinline__ bool inside(int position, int size) {
  return static_cast<u32>(position) < static_cast<u32>(size);
}

// Copies a chunk in vectors of kVector bytes, or fills it with zeros unless `there`. Vectors
// shorter than 16 bytes are zeros past the first `real` bytes. A 16-byte chunk is copied whole: its
// tensor has whole chunks, or is padded with zeros.
template <int kVector>
__device__ __forceinline__ void copy_vectors(u32 to, const char* from, bool there, int real) {
  if constexpr (kVector == 16) {
    cp_async_zfill(to, from, there);
  } else {
#pragma unroll
    for (int at = 0; at < 16; at += kVector) {
      cp_async<kVector>(to + at, from + at, there && at < real ? kVector : 0);
    }
  }
}

// The phase of a block along each dimension.
struct Phases {
  const GatherPhase *d, *h, *w;

  __device__ __forceinline__ Phases(const ImplicitGemmArgs& args, u32 number)
      : d(&args.phase[0][0]), h(&args.phase[0][1]), w(&args.phase[0][2]) {
    if (kPointwise || number == 0) return;
    const u32 outer = number / static_cast<u32>(args.axis[2].phases);
    w = &args.phase[number - outer * args.axis[2].phases][2];
    d = &args.phase[outer / static_cast<u32>(args.axis[1].phases)][0];
    h = &args.phase[outer % static_cast<u32>(args.axis[1].phases)][1];
  }
  __device__ __forceinline__ int taps() const {
    return kPointwise ? 1 : d->taps * h->taps * w->taps;
  }
};

// A pixel's image, and its coordinates in the phases.
struct Position {
  int n, d, h, w;

  Position() = default;
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

// A chunk of channels at a tap: a part of K in fprop and dgrad, of N in wgrad.
template <class T>
struct TapChunk {
  static constexpr int kElements = 16 / static_cast<int>(sizeof(T));
  int tap, channel;

  TapChunk() = default;
  __device__ __forceinline__ TapChunk(const ImplicitGemmArgs& args, int chunk) {
    tap = divide(chunk, args.by_tap_chunks);
    channel = (chunk - tap * args.tap_chunks) * kElements;
  }
  // Advances to the next k-tile; returns whether the tap changes.
  __device__ __forceinline__ bool advance(const ImplicitGemmArgs& args) {
    channel += 8 * kElements;
    const int end = args.tap_chunks * kElements;
    if (channel < end) return false;
    if (end < 8 * kElements) {
      const int taps = divide(channel / kElements, args.by_tap_chunks);
      tap += taps, channel -= taps * end;
    } else {
      ++tap, channel -= end;
    }
    return true;
  }
  // The number of source channels from this chunk to the last.
  __device__ __forceinline__ int left(const ImplicitGemmArgs& args) const {
    return args.source_channels - channel;
  }
};

// The thread map of a tile: each thread copies one column of vectors of kWords elements, in every
// kThreadRows-th row.
template <class Tile, int kThreads, int kWords_ = 4>
class Chunks {
 public:
  static constexpr int kWords = kWords_;
  static constexpr int kColumns = Tile::kChunks * 4 / kWords;
  static constexpr int kThreadRows = kThreads / kColumns;
  static constexpr int kCount = Tile::kRows > kThreadRows ? Tile::kRows / kThreadRows : 1;
  // Whether every thread has a row.
  static constexpr bool kAll = kThreadRows <= Tile::kRows;
  static_assert(kThreads % kColumns == 0 && Tile::kRows % kCount == 0, "whole rounds");

  __device__ static __forceinline__ int column() { return threadIdx.x % kColumns; }
  __device__ static __forceinline__ int row() { return threadIdx.x / kColumns; }
  __device__ static __forceinline__ bool exists() { return kAll || row() < Tile::kRows; }
  // Offset in the tile of this thread's vector in its i-th row. The bits of a row that are swizzled are those
  // of the first row and of its distance, which have none in common.
  __device__ __forceinline__ u32 at(int i) const {
    static_assert((kThreadRows & (kThreadRows - 1)) == 0, "a power of two");
    const int beyond = i * kThreadRows;
    return (first_ ^ (beyond / Tile::kLineRows & Tile::kMask) * 16) + beyond * Tile::kRowBytes;
  }

 private:
  static constexpr int kVector = kWords * 4;
  // Opaque, or the compiler recomputes it for every k-tile.
  const u32 first_ = static_cast<u32>(opaque_value(Tile::offset(row(), column() * kVector / 16) +
                                                   column() * kVector % 16));
};

}  // namespace convgrad
