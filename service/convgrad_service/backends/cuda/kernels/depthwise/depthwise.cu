// Depthwise convolution, forward or the gradient of its input, on channels-last tensors.
//
// forward   y[n, p, q, c] = sum over (r, s) of
//                           x[n, p*STRIDE + r - pad, q*STRIDE + s - pad, c] * w[c, r, s]
// backward  y[n, u - pad, v - pad, c] = sum over u = p*STRIDE + r, v = q*STRIDE + s
//                                       of x[n, p, q, c] * w[c, r, s]
// then finish() of core/epilogue.cuh, and one rounding.
// Warps: depthwise_args.cuh; each computes one item. A row of x is added to every row of the result
// that it meets; unfinished rows are in a ring of accumulators whose slots are compile-time constants.
// Shared memory: KERNEL_H * KERNEL_W * LANES * VECTOR weights in float32, then STAGES rows per warp.
// Relies on its launcher for channels and strides in multiples of PIECE, and an image's extent below
// 2^31 elements. Deterministic: sums are in the order of rows, then planes of the kernel, then taps.
// Padding is read as zeros, and so are taps of KERNEL_W that the kernel lacks. A dependent launch may
// start with this kernel (ptx/pdl.cuh).
#include "depthwise/depthwise_args.cuh"
#include "ptx/pdl.cuh"

using namespace convgrad;

namespace {

using T = ELEMENT;
using S = ElementAccumulator<T>;
using Channels = Vector<T, VECTOR>;

constexpr int kChannels = LANES * VECTOR;
constexpr int kTaps = KERNEL_H * KERNEL_W;  // taps of one plane
// Keep taps in registers if there are few.
constexpr bool kWeightsInRegisters = !PLANES && kTaps * VECTOR * sizeof(S) <= 80;
constexpr int kStrideH = KERNEL_H == 1 ? 1 : STRIDE;
constexpr int kReachH = (KERNEL_H + kStrideH - 1) / kStrideH;
#if BACKWARD
constexpr int kReachW = (KERNEL_W + STRIDE - 1) / STRIDE;
constexpr int kOwn = COLUMNS * STRIDE;        // columns of the result
constexpr int kRead = COLUMNS + kReachW - 1;  // columns of x
constexpr int kSlots = kReachH * kStrideH;    // unfinished rows of the result
constexpr int kTurn = kReachH;                // rows of x after which ring slots repeat
constexpr int kApart = 1;                     // columns of x between adjacent results
#else
constexpr int kOwn = COLUMNS;
constexpr int kRead = (COLUMNS - 1) * STRIDE + KERNEL_W;
constexpr int kSlots = kReachH;
constexpr int kTurn = kReachH * kStrideH;
constexpr int kApart = STRIDE;
#endif
constexpr int kStrips = 32 / LANES;
constexpr int kColumns = (kStrips - 1) * COLUMNS * kApart + kRead;  // columns of x that a warp reads
using Copier = RowCopier<T, PIECE, kChannels, kColumns>;
constexpr int kStageBytes = Copier::kElements * sizeof(T);
// Whether to skip rows at a chunk's edge that some or all taps do not need, which
// costs register moves.
constexpr bool kSkipTaps = KERNEL_H >= 5;

// Whether the first tap of a sum initializes it; with skipped taps, another may be the first.
constexpr bool kBegins = !PLANES && !kSkipTaps && (!BACKWARD || STRIDE == 1);

// Unpacking one of two elements in a word takes one instruction.
template <class E>
__device__ __forceinline__ void widen_all(ElementAccumulator<E> (&to)[VECTOR],
                                          const Vector<E, VECTOR>& from) {
  if constexpr (VECTOR == 2 && sizeof(E) == 2) {
    to[0] = widen(E{static_cast<unsigned short>(from.raw)});
    to[1] = widen(E{static_cast<unsigned short>(from.raw >> 16)});
  } else {
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) to[v] = widen(from.at[v]);
  }
}

// Start of image n, or of plane n over all images.
__device__ __forceinline__ i64 image_at(const DepthwiseArgs& args, int n, i64 image, i64 plane) {
#if PLANES
  const int above = n / args.planes.y;
  return above * image + (n - above * args.planes.y) * plane;
#else
  return n * image;
#endif
}

// Finishes a sum.
__device__ __forceinline__ T finished(const DepthwiseArgs& args, S sum, int n, int c, int row,
                                      int column) {
#if EPILOGUE
  const T* accumulate = static_cast<const T*>(args.accumulate);
  // Lanes may have channels past the last one.
  c = min(c, args.channels - 1);
  if (accumulate != nullptr) {
    accumulate += image_at(args, n, args.accumulate_stride[0], args.planes.accumulate_stride) +
                  row * args.accumulate_stride[1] + column * args.accumulate_stride[2] + c;
  }
  const T* bias = static_cast<const T*>(args.bias);
  if (bias != nullptr) bias += c;
  sum = finish<T, S>(sum, S(args.alpha), S(args.beta), accumulate, bias, args.activation);
#endif
  return narrow<T>(sum);
}

struct Strip {
  const DepthwiseArgs& args;
  // At this image, this thread's channels and the strip's first column; in row 0, or with
  // few taps in the next row.
  T* y;
  int n, c, column;
  u32 inside;  // with few taps: one bit for each column inside the result

  // Lanes past the last channel take part in copies, compute with zeros and write nothing.
  __device__ __forceinline__ Strip(const DepthwiseArgs& args, int n, int c, int first_row,
                                   int column)
      : args(args),
        y(static_cast<T*>(args.y) + image_at(args, n, args.y_stride[0], args.planes.y_stride) +
          column * args.y_stride[2] + c),
        n(n),
        c(c),
        column(c < args.channels ? column : args.y_size[1]),
        inside(0) {
    if constexpr (kSkipTaps) return;
    y += first_row * args.y_stride[1];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int at = this->column + i;
      inside |= static_cast<u32>(at >= 0 && at < args.y_size[1]) << i;
    }
    inside = opaque_value(inside);
  }

  // Stores the next row of sums.
  __device__ __forceinline__ void put(const S (&sums)[kOwn][VECTOR], int row) {
    const bool there = row >= 0 && row < args.y_size[0];
    const u32 columns = there ? inside : 0;
    const int low = there ? -column : kOwn, high = args.y_size[1] - column;
    T* to = y;
    if constexpr (kSkipTaps) {
      to += row * args.y_stride[1];
    } else {
      y += args.y_stride[1];
    }
    const int pitch = static_cast<int>(args.y_stride[2]);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      Channels result;
      const bool wanted = kSkipTaps ? i >= low && i < high : (columns & 1u << i) != 0;
#if EPILOGUE
      if (wanted)
#endif
      {
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) {
          result.at[v] = finished(args, sums[i][v], n, c + v, row, column + i);
        }
      }
      // Whichever needs fewer registers.
      if constexpr (kSkipTaps && !BACKWARD) {
        store_if(wanted, to, result.raw);
        to += pitch;
      } else {
        store_if(wanted, to + static_cast<i64>(pitch) * i, result.raw);
      }
    }
  }
};

__device__ __forceinline__ int floor_div(int a, int b) {
  return a >= 0 ? a / b : -((-a + b - 1) / b);
}

// The planes of the source that plane n of the result meets: the first, the distance to the next, how
// many, and the kernel's planes that they meet. Where there is none, one that is not inside.
struct Met {
  int image, first, next, count, tap, next_tap;
  bool inside;

  __device__ __forceinline__ Met(const DepthwiseArgs& args, int n) {
    const Planes& of = args.planes;
    image = n / of.y;
    const int at = n - image * of.y;
#if BACKWARD
    const int from = at + of.pad;
    tap = from % of.stride, next_tap = of.stride;
    first = from / of.stride, next = -1;
#else
    tap = 0, next_tap = 1;
    first = at * of.stride - of.pad, next = of.dilation;
#endif
    while (tap < of.kernel && (first < 0 || first >= of.x)) tap += next_tap, first += next;
    count = 0;
    for (int t = tap, z = first; t < of.kernel && z >= 0 && z < of.x; t += next_tap, z += next) ++count;
    inside = count > 0;
    if (!inside) tap = 0, first = 0, count = 1;
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS)
    depthwise(const __grid_constant__ DepthwiseArgs args) {
  launch_dependent_grids();
  extern __shared__ __align__(16) unsigned char shared[];
  S* const weights = reinterpret_cast<S*>(shared);
  const Tiling& tiling = args.tiling;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int stages = opaque_value(warp * STAGES * Copier::kElements);
  const int all_taps = PLANES ? args.planes.kernel * kTaps : kTaps;
  T* const all_stages = reinterpret_cast<T*>(weights + all_taps * kChannels);
  const int first_channel = blockIdx.x % tiling.channel_tiles * kChannels;
  const ItemAt item = item_at(tiling, blockIdx.x / tiling.channel_tiles * WARPS + warp);
  const int n = item.n;
  const bool has_item = n < args.batch;

  // Rows of the result; backward in units of STRIDE, from the last multiple of STRIDE up to pad.
  int first_row = item.chunk * tiling.rows;
  int first_column = item.group * kStrips * COLUMNS;
#if BACKWARD
  first_row += floor_div(args.pad[0], kStrideH);
  first_column += floor_div(args.pad[1], STRIDE);
  const int top = first_row - (kReachH - 1), left = first_column - (kReachW - 1);
  const int steps = tiling.rows + kReachH - 1;
#else
  const int top = first_row * kStrideH - args.pad[0], left = first_column * STRIDE - args.pad[1];
  const int steps = (tiling.rows - 1) * kStrideH + KERNEL_H;
#endif
#if PLANES
  // One row of each plane that meets the result.
  const Met met(args, has_item ? n : 0);
  const int planes = met.count;
  const i64 next_plane = met.next * args.planes.x_stride;
  const i64 next_row = args.x_stride[1] - (planes - 1) * next_plane;
  int to_copy = 0;  // planes of the next row
  Copier copier(all_stages + stages,
                static_cast<const T*>(args.x) + met.image * args.x_stride[0] +
                    met.first * args.planes.x_stride,
                args.x_stride, top, met.inside ? args.x_size[0] : 0, left, args.x_size[1],
                first_channel, args.channels, lane);
  const auto copy = [&](int row) {
    if (row < steps * planes) {
      const bool last = ++to_copy == planes;
      if (last) to_copy = 0;
      copier.copy(row % STAGES * kStageBytes, last ? next_row : next_plane, last);
    }
    cp_async_commit();
  };
#else
  Copier copier(all_stages + stages,
                static_cast<const T*>(args.x) + (has_item ? n : 0) * args.x_stride[0],
                args.x_stride, top, args.x_size[0], left, args.x_size[1], first_channel,
                args.channels, lane);
  const auto copy = [&](int row) {
    if (row < steps) copier.copy(row % STAGES * kStageBytes);
    cp_async_commit();
  };
#endif
  if (has_item) {
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) copy(stage);
  }
#pragma unroll 4
  for (int i = threadIdx.x; i < kChannels * all_taps; i += WARPS * 32) {
    const int channel = i / all_taps, tap = i % all_taps;
    int s = tap % KERNEL_W;
    bool there = first_channel + channel < args.channels;
    if constexpr (KERNEL_H == 1) {
      const int own = s / args.dilation;
      there = there && own * args.dilation == s && own < args.columns;
      s = own;
    }
    S weight = 0;
    if (there) {
      weight = widen(static_cast<const T*>(args.w)[(first_channel + channel) * args.w_stride[0] +
                                                   (tap / KERNEL_W) * args.w_stride[1] +
                                                   s * args.w_stride[2]]);
    }
    weights[tap * kChannels + channel] = weight;
  }
  __syncthreads();
  if (!has_item) return;

  const int strip = lane / LANES, own = lane % LANES * VECTOR;
  const int c = first_channel + own;
  const S* const all_weights = weights + own;
  S kept[kWeightsInRegisters ? kTaps : 1][VECTOR];
  if constexpr (kWeightsInRegisters) {
#pragma unroll
    for (int tap = 0; tap < kTaps; ++tap) {
#pragma unroll
      for (int v = 0; v < VECTOR; ++v) kept[tap][v] = all_weights[tap * kChannels + v];
    }
  }
  const int own_row = opaque_value(stages + strip * COLUMNS * kApart * kChannels + own);
  first_column += strip * COLUMNS;
#if BACKWARD
  const int column = first_column * STRIDE - args.pad[1];
#else
  const int column = first_column;
#endif
#if BACKWARD
  Strip result(args, n, c, first_row * kStrideH - args.pad[0], column);
#else
  Strip result(args, n, c, first_row, column);
#endif

  S sums[kSlots][kOwn][VECTOR] = {};
  for (int turn = 0; turn < steps; turn += kTurn) {
#pragma unroll
    for (int j = 0; j < kTurn; ++j) {
      const int step = turn + j;
      if (step < steps) {
        const int h = top + step;
#if PLANES
        const S* own_weights = all_weights + met.tap * (kTaps * kChannels);
#pragma unroll 1
        for (int row_at = step * planes; row_at < (step + 1) * planes;
             ++row_at, own_weights += met.next_tap * (kTaps * kChannels)) {
#else
        const S* const own_weights = all_weights;
        {
          const int row_at = step;
#endif
        wait_for_copies<STAGES - 2>();
        copy(row_at + STAGES - 1);
        if (!kSkipTaps || (h >= 0 && h < args.x_size[0])) {
          const T* const from = all_stages + own_row + row_at % STAGES * Copier::kElements;
          S row[kRead][VECTOR];
#pragma unroll
          for (int i = 0; i < kRead; ++i) {
            widen_all<T>(row[i], Channels::load(from + i * kChannels));
          }
#pragma unroll
          for (int r = 0; r < KERNEL_H; ++r) {
#if BACKWARD
            constexpr bool reached = true;
            const int slot = (j * kStrideH + r) % kSlots;
            const int to_row = (step - (kReachH - 1)) * kStrideH + r;
            const bool needed = to_row >= 0 && to_row < tiling.rows * kStrideH;
#else
            const bool reached = positive_mod(j - r, kStrideH) == 0;
            const int slot = positive_mod(j - r, kTurn) / kStrideH;
            const bool needed = step >= r && step - r <= (tiling.rows - 1) * kStrideH;
#endif
            if (!reached || (kSkipTaps && !needed)) continue;
#pragma unroll
            for (int s = 0; s < KERNEL_W; ++s) {
              S weight[VECTOR];
              if constexpr (kWeightsInRegisters) {
#pragma unroll
                for (int v = 0; v < VECTOR; ++v) weight[v] = kept[r * KERNEL_W + s][v];
              } else {
                ld_shared_volatile(own_weights + (r * KERNEL_W + s) * kChannels, weight);
              }
#if BACKWARD
#pragma unroll
              for (int i = 0; i < kRead; ++i) {
                const int to = (i - (kReachW - 1)) * STRIDE + s;
                if (to < 0 || to >= kOwn) continue;
#pragma unroll
                for (int v = 0; v < VECTOR; ++v) {
                  const bool begins = kBegins && r == KERNEL_H - 1 && s == 0;
                  const S before = begins ? S(0) : sums[slot][to][v];
                  sums[slot][to][v] = row[i][v] * weight[v] + before;
                }
              }
#else
#pragma unroll
              for (int i = 0; i < kOwn; ++i) {
#pragma unroll
                for (int v = 0; v < VECTOR; ++v) {
                  const S before = kBegins && r == 0 && s == 0 ? S(0) : sums[slot][i][v];
                  sums[slot][i][v] = row[i * STRIDE + s][v] * weight[v] + before;
                }
              }
#endif
            }
          }
        }
        }
        // Rows that no later row of x meets are finished.
#if BACKWARD
#pragma unroll
        for (int a = 0; a < kStrideH; ++a) {
          const int slot = (j * kStrideH + a) % kSlots;
          if (step >= kReachH - 1) {
            result.put(sums[slot], (top + step) * kStrideH + a - args.pad[0]);
          }
#else
        if (positive_mod(j - (KERNEL_H - 1), kStrideH) == 0) {
          const int slot = positive_mod(j - (KERNEL_H - 1), kTurn) / kStrideH;
          if (step >= KERNEL_H - 1) {
            result.put(sums[slot], first_row + (step - (KERNEL_H - 1)) / kStrideH);
          }
#endif
          if constexpr (!kBegins) {
#pragma unroll
            for (int i = 0; i < kOwn; ++i) {
#pragma unroll
              for (int v = 0; v < VECTOR; ++v) sums[slot][i][v] = 0;
            }
          }
        }
      }
    }
  }
}
