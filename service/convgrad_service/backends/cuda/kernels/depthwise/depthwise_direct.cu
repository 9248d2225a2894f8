// Depthwise convolution, forward or the gradient of its input, of tensors with one to three spatial
// dimensions, channels last or, with VECTOR = 1, in any order, without staging pixels in shared memory: a small problem takes little
// longer than its first loads do.
//
// forward   y[n, z, p, q, c] = sum over (t, r, s) of w[c, t, r, s] *
//           x[n, z*sd + t*dd - pd, p*sh + r*dh - ph, q*STRIDE + s*dw - pw, c / multiplier]
// backward  y[n, i, j, k, c] = sum over (t, r, s) and (z, p, q) with i = z*sd + t*dd - pd, ... of
//           w[c, t, r, s] * x[n, z, p, q, c]
// then finish() of core/epilogue.cuh, and one rounding. A thread has VECTOR adjacent channels of a tile
// of results (depthwise_direct.cuh). Backward with stride 1 along W is forward along W, with flipped
// taps; with ROWS > 0 along H too. BACKWARD is the other.
// ROWS > 0: KERNEL_H x KERNEL taps with the same stride in H and W, and ROWS x COLUMNS results
// (BACKWARD: times STRIDE both ways), for which it loads AHEAD rows of x before it waits for weights.
// With KERNEL_H = 1, a row of at most KERNEL taps.
// ROWS = 0: any kernel, as rows of KERNEL taps (longer ones in parts), and COLUMNS results of a row,
// as far apart as the taps. For each row of taps it loads the elements of x that its results read,
// AHEAD rows before their use. With STRIDE = 0, of any stride along W, a result has elements of x of its
// own, KERNEL at a time; BACKWARD is 0, and `backward` says which.
// Block: `vectors` vectors of channels, then positions; with in_planes, the other way round. Grid: tiles
// of channels, positions.
// Shared memory: the weights of the tile's channels as they are in memory, or with H and W exchanged
// (`transposed`); then, if `staged`, a row of results of each thread. A thread's are an odd number
// of words apart where the number of taps is odd, so that reads have no conflicts.
// Deterministic: sums are in the order of x's rows, then columns (ROWS = 0: of t, r and parts, then
// columns). Padding is read as zeros.
// Preconditions: contiguous weights; strides and channels in multiples of VECTOR; an
// image's extent below 2^31 elements; positions below 2^31; VECTOR = 1 with a multiplier;
// backward: no dimension that is both strided and dilated. BACKWARD: parts in multiples of STRIDE. A dependent launch may
// start with this kernel (ptx/pdl.cuh).
#include "depthwise/depthwise_direct_rows.cuh"
#include "ptx/pdl.cuh"

using namespace convgrad;

namespace {

// Stores results such that adjacent threads have adjacent ones: those of a row of a warp's threads
// pass through shared memory.
template <class Inside>
__device__ __forceinline__ void store_staged(const DepthwiseDirectArgs& args, T* stage, i64 start,
                                             int pitch,
                                             const float (&sums)[kOwnRows][kOwnColumns][VECTOR],
                                             const Inside& inside) {
  constexpr u32 kAll = 0xffffffffu;
  const int lane = threadIdx.x % 32;
  stage += threadIdx.x / 32 * (32 * kOwnColumns);
#pragma unroll
  for (int a = 0; a < kOwnRows; ++a) {
    u32 valid = 0;
#pragma unroll
    for (int b = 0; b < kOwnColumns; ++b) {
      stage[lane * kOwnColumns + b] = narrow<T>(sums[a][b][0]);
      valid |= static_cast<u32>(inside(a, b)) << b;
    }
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kOwnColumns; ++j) {
      const int i = j * 32 + lane, from = i / kOwnColumns, b = i - from * kOwnColumns;
      const i64 row = __shfl_sync(kAll, start, from);
      Vector<T, 1> result;
      result.at[0] = stage[i];
      store_if(__shfl_sync(kAll, valid, from) >> b & 1, static_cast<T*>(args.y) + (row + b * pitch),
               result.raw);
    }
    __syncwarp();
    start += args.y_stride[2];
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    depthwise_direct(const __grid_constant__ DepthwiseDirectArgs args) {
  launch_dependent_grids();
  extern __shared__ __align__(16) unsigned char shared[];
  const int thread = threadIdx.x;
  const int first_channel = blockIdx.x * args.vectors * VECTOR;
  const int taps =
      KERNEL_H > 1 ? KERNEL_H * KERNEL : args.kernel[0] * args.kernel[1] * args.kernel[2];
  const int words = min(args.vectors, (args.channels - first_channel) / VECTOR) * taps;
  const Raw* const weights_of_tile = static_cast<const Raw*>(args.w) + first_channel / VECTOR * taps;
  T* const all_weights = reinterpret_cast<T*>(shared);
  const auto keep_weights = [&](int word, Raw raw) {
    if (!args.flipped && !(VECTOR == 1 && args.transposed)) {
      reinterpret_cast<Raw*>(all_weights)[word] = raw;
      return;
    }
    Vector<T, VECTOR> weights;
    weights.raw = raw;
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) {
      int at = word * VECTOR + v;
      if (VECTOR == 1 && args.transposed) {
        const int plane = divide(at, args.by_plane) * (args.kernel[1] * args.kernel[2]);
        const int column = divide(at - plane, args.by_rows);
        at = plane + (at - plane - column * args.kernel[1]) * args.kernel[2] + column;
      }
      if (args.flipped) at = (2 * divide(at, args.by_period) + 1) * args.period - 1 - at;
      all_weights[at] = weights.at[v];
    }
  };
  Raw early[kEarly];
#pragma unroll
  for (int i = 0; i < kEarly; ++i) {
    const int word = thread + i * THREADS;
    load_ahead_if(word < words, weights_of_tile + word, early[i]);
  }
  const PlaceVector own(thread, args.places, args.vectors, args.by_vectors,
                        VECTOR == 1 && args.in_planes, args.by_places);
  const int place = own.place, vector = own.vector;
  const int c = first_channel + vector * VECTOR, position = blockIdx.y * args.places + place;
  const bool active = place < args.places && position < args.positions && c < args.channels;
  const int line = divide(position, args.by_inner), plane = divide(line, args.by_outer);
  const int inner = position - line * args.inner, outer = line - plane * args.outer;
  Place at;
  at.n = divide(plane, args.by_planes), at.z = plane - at.n * args.y_size[0];
  at.row = (args.down_first ? inner : outer) * (ROWS > 0 ? ROWS : 1);
  const int across = args.down_first ? outer : inner, strip = divide(across, args.by_spread);
  at.column = strip * COLUMNS * args.spread + (across - strip * args.spread);
  if (!active) at.n = 0;

  Mainloop mainloop(args, at, c, active);
  mainloop.load_first();
#pragma unroll
  for (int i = 0; i < kEarly; ++i) {
    const int word = thread + i * THREADS;
    if (word < words) keep_weights(word, early[i]);
  }
  if constexpr (ROWS == 0) {
#pragma unroll 4
    for (int word = thread + kEarly * THREADS; word < words; word += THREADS) {
      keep_weights(word, weights_of_tile[word]);
    }
  }
  __syncthreads();
  float sums[kOwnRows][kOwnColumns][VECTOR] = {};
  mainloop.run(shared + vector * VECTOR * taps * static_cast<int>(sizeof(T)), taps, sums);

  if (!active && !(VECTOR == 1 && args.staged)) return;
#if BACKWARD
  if constexpr (ROWS > 0) at.row = (at.row + args.base[0]) * STRIDE - args.pad[1];
  at.column = (at.column + args.base[1]) * STRIDE - args.pad[2];
#endif
  const int spread = ROWS > 0 ? 1 : args.spread, pitch = static_cast<int>(args.y_stride[3]) * spread;
  const i64 start = at.n * args.y_stride[0] + (at.z * static_cast<int>(args.y_stride[1]) +
                                               at.row * static_cast<int>(args.y_stride[2]) +
                                               at.column * static_cast<int>(args.y_stride[3]) +
                                               channel_offset<VECTOR>(c, args.y_channel));
  const auto inside = [&](int a, int b) {
    return (VECTOR > 1 || active) &&
           static_cast<u32>(at.row + a) < static_cast<u32>(args.y_size[1]) &&
           static_cast<u32>(at.column + b * spread) < static_cast<u32>(args.y_size[2]);
  };
  if (args.finishes && (VECTOR > 1 || active)) {
    const T* const bias = static_cast<const T*>(args.bias);
    T own_bias[VECTOR] = {};
    if (bias != nullptr) {
#pragma unroll
      for (int v = 0; v < VECTOR; ++v) own_bias[v] = bias[c + v];
    }
    const T* added = static_cast<const T*>(args.accumulate) + start;
#pragma unroll
    for (int a = 0; a < kOwnRows; ++a) {
#pragma unroll
      for (int b = 0; b < kOwnColumns; ++b) {
        const bool adds = args.accumulate != nullptr && inside(a, b);
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) {
          const float sum = finish<T, float>(sums[a][b][v], args.alpha, args.beta,
                                             adds ? added + b * pitch + v : nullptr,
                                             bias != nullptr ? own_bias + v : nullptr, kNone);
          sums[a][b][v] = args.activation == kNone ? sum : activated(sum, args.activation);
        }
      }
      added += args.y_stride[2];
    }
  }
  if constexpr (VECTOR == 1) {
    if (args.staged) {
      store_staged(args, all_weights + args.vectors * taps, start, pitch, sums, inside);
      return;
    }
  }
  T* to = static_cast<T*>(args.y) + start;
#pragma unroll
  for (int a = 0; a < kOwnRows; ++a) {
#pragma unroll
    for (int b = 0; b < kOwnColumns; ++b) {
      Vector<T, VECTOR> result;
#pragma unroll
      for (int v = 0; v < VECTOR; ++v) result.at[v] = narrow<T>(sums[a][b][v]);
      store_if(inside(a, b), to + b * pitch, result.raw);
    }
    to += args.y_stride[2];
  }
}
