// The gradient of max pooling from its input, for overlapping windows (dilation 1). The host's side
// is pool_lines.py.
//
// grad_x[i] = sum of grad[o] over the windows o whose maximum is at i. With the keys of pool_keys.cuh,
// the maximum of a window can be taken along W, then H, then D. Its gradient is routed back the same
// way, in 2*(T + R + S) steps per element instead of 2*T*R*S.
//
// A block owns a tile of the input: CHANNELS channels by TILE_H x TILE_W positions, inside a box of
// LINES_H x LINES_W (the rest is halo), and a range of planes along D. For each window plane:
//   1. Along W, one thread per line: keys are reduced along D (a ring of KERNEL_D planes of keys in
//      shared memory), then along the line; row maxima go to shared memory.
//   2. Along H, one thread per column: window maxima; gradients to the rows that they come from.
//   3. Along W: the rows' sums to positions, then to planes; finished planes are written.
// If LINES_H is TILE_H (LINES_W is TILE_W), the box is the whole input along H (W): there is no halo,
// and the padding PAD_H (PAD_W) is a constant.
// Shared memory: KERNEL_D boxes of keys and a box of row maxima (or sums).
// Channels last: adjacent threads hold adjacent channels. Channels first (FIRST): the whole block
// reads and writes the box along W, through the memory of the keys.
// Relies on its launcher for tiles that cover the input; with KERNEL_D = 1 for one plane per block,
// STRIDE_D = 1 and no padding along D; for planes * box below 2^16 positions, and an image's extent
// below 2^31 elements. Deterministic, no atomics, sums in float32.
#include "pool/max_pool.cuh"
#include "pool/pool_keys.cuh"
#include "core/vectors.cuh"

using namespace convgrad;

namespace {

using T = ELEMENT;
using Key = Keys<T>::type;

// The box is the whole input; it and the windows start at 0.
constexpr bool kFullH = LINES_H == TILE_H, kFullW = LINES_W == TILE_W;
constexpr int kWindowsH = WINDOWS_H, kWindowsW = WINDOWS_W;
// Distance of adjacent positions in shared memory; odd if a warp runs along them.
constexpr int kStep = CHANNELS + (FIRST ? 1 : 0);
// Row pitch without bank conflicts between the lines of a warp.
constexpr int padded(int extent) {
  return FIRST ? extent : extent + (extent % (2 * CHANNELS) == CHANNELS ? 0 : CHANNELS);
}
constexpr int kKeyRow = padded(LINES_W * kStep);
constexpr int kMaximumRow = padded(kWindowsW * kStep);
constexpr int kPlane = LINES_H * kKeyRow;
// Loads of a thread in flight; the sums of a ring of planes leave few registers.
constexpr int kAhead = KERNEL_D > 1 ? 10 : LINES_W;

struct LineArgs {
  const void* x;
  const void* grad;
  void* grad_x;
  i64 x_stride[5];  // N C D H W, in elements
  i64 grad_stride[5];
  i64 grad_x_stride[5];
  int channels;
  int channel_tiles;
  int x_size[3];
  int y_size[3];
  int pad[3];
  int planes;       // planes of the input that a block owns
  int tiles[3];     // along D H W
  int box_offset[2];     // H W: the first position of tile 0's box
  int window_offset[2];  // H W: the first window of tile 0
};

// Hides a value from the compiler, which would otherwise hoist multiples of a stride out of a loop
// into one register per position.
__device__ __forceinline__ int opaque(i64 value) {
  int same = static_cast<int>(value);
  asm volatile("" : "+r"(same));
  return same;
}

__device__ __forceinline__ Key larger(Key a, Key b) { return a > b ? a : b; }

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    pool_lines(const __grid_constant__ LineArgs args) {
  extern __shared__ __align__(16) unsigned char shared[];
  Key* const keys = reinterpret_cast<Key*>(shared);
  Key* const maxima = keys + KERNEL_D * kPlane;

  u32 block = blockIdx.x;
  const int tile_w = block % args.tiles[2];
  block /= args.tiles[2];
  const int tile_h = block % args.tiles[1];
  block /= args.tiles[1];
  const int channel_tile = block % args.channel_tiles;
  block /= args.channel_tiles;
  const int tile_d = block % args.tiles[0];
  const int n = block / args.tiles[0];

  const int first_channel = channel_tile * CHANNELS;
  const int own_h = tile_h * TILE_H, own_w = tile_w * TILE_W;
  const int box_h = own_h + args.box_offset[0], box_w = own_w + args.box_offset[1];
  const int window_h = own_h / STRIDE_H + args.window_offset[0];
  const int window_w = own_w / STRIDE_W + args.window_offset[1];
  const int plane_begin = tile_d * args.planes;
  const int plane_end = min(plane_begin + args.planes, args.x_size[0]);

  const T* const x = static_cast<const T*>(args.x) + n * args.x_stride[0] +
                     first_channel * args.x_stride[1];
  const T* const grad = static_cast<const T*>(args.grad) + n * args.grad_stride[0] +
                        first_channel * args.grad_stride[1];
  T* const grad_x = static_cast<T*>(args.grad_x) + n * args.grad_x_stride[0] +
                    first_channel * args.grad_x_stride[1];

  // This thread's line along W, and its column along H.
  const int line = threadIdx.x / CHANNELS, line_c = threadIdx.x % CHANNELS;
  const bool has_line = line < LINES_H;
  const int column = FIRST ? threadIdx.x % kWindowsW : threadIdx.x / CHANNELS;
  const int column_c = FIRST ? threadIdx.x / kWindowsW : threadIdx.x % CHANNELS;
  const bool has_column = FIRST ? column_c < CHANNELS : column < kWindowsW;
  const bool line_channel = first_channel + line_c < args.channels;
  const bool column_channel = first_channel + column_c < args.channels;
  Key* const line_keys = keys + line * kKeyRow + line_c;
  Key* const line_maxima = maxima + line * kMaximumRow + line_c;
  Key* const column_maxima = maxima + column * kStep + column_c;

  // Window planes that overlap the planes of this block, and the first plane that they contain.
  const int top = plane_begin + args.pad[0] - (KERNEL_D - 1);
  const int first_window = top <= 0 ? 0 : (top + STRIDE_D - 1) / STRIDE_D;
  const int last_window = min((plane_end - 1 + args.pad[0]) / STRIDE_D, args.y_size[0] - 1);
  const int base = first_window * STRIDE_D - args.pad[0];

  // Loads a plane of the box as keys into its slot of the ring. `d` may be outside.
  const auto load_plane = [&](int d, int slot) {
    const bool plane_inside = d >= 0 && d < args.x_size[0];
    const int base_position = (d - base) * (LINES_H * LINES_W);
    const int plane_at = d * static_cast<int>(args.x_stride[2]);
#if FIRST
    for (int i = threadIdx.x; i < CHANNELS * LINES_H * LINES_W; i += THREADS) {
      const int j = i % LINES_W, row = i / LINES_W % LINES_H, c = i / (LINES_W * LINES_H);
      const int h = box_h + row, w = box_w + j;
      Key key = Keys<T>::kNone;
      if (plane_inside && h >= 0 && h < args.x_size[1] && w >= 0 && w < args.x_size[2] &&
          first_channel + c < args.channels) {
        key = Keys<T>::of(x[c * args.x_stride[1] + (plane_at + h * static_cast<int>(args.x_stride[3]) +
                                                    w * static_cast<int>(args.x_stride[4]))],
                          base_position + row * LINES_W + j);
      }
      keys[slot * kPlane + row * kKeyRow + j * kStep + c] = key;
    }
#else
    if (!has_line) return;
    const int h = box_h + line;
    const bool row_inside = plane_inside && h >= 0 && h < args.x_size[1] && line_channel;
    const T* from = x + line_c + plane_at + h * static_cast<int>(args.x_stride[3]) +
                          box_w * static_cast<int>(args.x_stride[4]);
    const int pitch = opaque(args.x_stride[4]);
    const int low = kFullW ? 0 : opaque(-box_w);
    const int high = opaque(row_inside ? args.x_size[2] - box_w : low);
#pragma unroll
    for (int start = 0; start < LINES_W; start += kAhead) {
      Vector<T, 1> values[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int j = start + i;
        if (j >= LINES_W) continue;
        load_if(j >= low && j < high, from, values[i].raw);
        from += pitch;
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int j = start + i;
        if (j >= LINES_W) continue;
        const bool inside = j >= low && j < high;
        line_keys[slot * kPlane + j * kStep] =
            select(inside, Keys<T>::of(values[i].at[0], base_position + line * LINES_W + j),
                   Key(Keys<T>::kNone));
      }
    }
#endif
  };

  // Returns the maximum along D at a position of this thread's line.
  const auto reduce_planes = [&](int slot, int j) {
    Key most = line_keys[slot * kPlane + j * kStep];
#pragma unroll
    for (int t = 1; t < KERNEL_D; ++t) {
      const int other = slot + t < KERNEL_D ? slot + t : slot + t - KERNEL_D;
      most = larger(most, line_keys[other * kPlane + j * kStep]);
    }
    return most;
  };

  float sums[KERNEL_D][LINES_W] = {};  // for the planes in the ring
  // Writes a finished plane; the keys in `slot` are no longer needed.
  const auto write_plane = [&](int d, int slot, const float (&plane)[LINES_W]) {
    const bool owned = d >= plane_begin && d < plane_end;
    const int plane_at = d * static_cast<int>(args.grad_x_stride[2]);
#if FIRST
    if (has_line) {
#pragma unroll
      for (int j = 0; j < LINES_W; ++j) {
        reinterpret_cast<float&>(line_keys[slot * kPlane + j * kStep]) = plane[j];
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < CHANNELS * LINES_H * LINES_W; i += THREADS) {
      const int j = i % LINES_W, row = i / LINES_W % LINES_H, c = i / (LINES_W * LINES_H);
      const int h = box_h + row, w = box_w + j;
      if (!owned || h < own_h || h >= own_h + TILE_H || h >= args.x_size[1] || w < own_w ||
          w >= own_w + TILE_W || w >= args.x_size[2] || first_channel + c >= args.channels) {
        continue;
      }
      const float sum =
          reinterpret_cast<float&>(keys[slot * kPlane + row * kKeyRow + j * kStep + c]);
      grad_x[c * args.grad_x_stride[1] +
             (plane_at + h * static_cast<int>(args.grad_x_stride[3]) +
              w * static_cast<int>(args.grad_x_stride[4]))] = narrow<T>(sum);
    }
    __syncthreads();
#else
    const int h = box_h + line;
    if (!owned || !has_line || !line_channel || h < own_h || h >= own_h + TILE_H ||
        h >= args.x_size[1]) {
      return;
    }
    T* to = grad_x + line_c + plane_at + h * static_cast<int>(args.grad_x_stride[3]) +
                  box_w * static_cast<int>(args.grad_x_stride[4]);
    const int pitch = opaque(args.grad_x_stride[4]);
    const int low = kFullW ? 0 : opaque(own_w - box_w);
    const int high = opaque(min(own_w + TILE_W, args.x_size[2]) - box_w);
#pragma unroll
    for (int j = 0; j < LINES_W; ++j) {
      Vector<T, 1> result;
      result.at[0] = narrow<T>(plane[j]);
      store_if(j >= low && j < high, to, result.raw);
      to += pitch;
    }
#endif
  };

  // Planes before those of the first window get no gradient.
  const float nothing[LINES_W] = {};
  if constexpr (KERNEL_D > 1) {
    for (int d = plane_begin; d < min(base, plane_end); ++d) write_plane(d, 0, nothing);
  }

  int slot = 0;  // of plane `base` + (window - first_window)*STRIDE_D
  for (int window = first_window; window <= last_window; ++window) {
    const int front = window * STRIDE_D - args.pad[0];
    const int fresh = window == first_window ? 0 : KERNEL_D - STRIDE_D;
#pragma unroll
    for (int t = 0; t < KERNEL_D; ++t) {
      if (t >= fresh) load_plane(front + t, slot + t < KERNEL_D ? slot + t : slot + t - KERNEL_D);
    }
    if (FIRST) __syncthreads();

    // In the three passes below, values are read just before their first use and written just after
    // their last, so that few registers are live.
    if (has_line) {
      Key reduced[LINES_W];
#pragma unroll
      for (int q = 0; q < kWindowsW; ++q) {
        Key most = Keys<T>::kNone;
#pragma unroll
        for (int s = 0; s < KERNEL_W; ++s) {
          const int j = q * STRIDE_W + s - PAD_W;
          if (j < 0 || j >= LINES_W) continue;
          if (q == 0 || s >= KERNEL_W - STRIDE_W) reduced[j] = reduce_planes(slot, j);
          most = larger(most, reduced[j]);
        }
        line_maxima[q * kStep] = most;
      }
    }
    __syncthreads();

    if (has_column) {
      const T* from = grad + column_c * args.grad_stride[1] +
                            window * args.grad_stride[2] + window_h * args.grad_stride[3] +
                            (window_w + column) * args.grad_stride[4];
      const bool inside = column_channel && window_w + column >= 0 &&
                          window_w + column < args.y_size[2];
      const int pitch = opaque(args.grad_stride[3]);
      const int low = kFullH ? 0 : opaque(-window_h);
      const int high = opaque(inside ? args.y_size[1] - window_h : low);
      Vector<T, 1> given[kWindowsH];
#pragma unroll
      for (int p = 0; p < kWindowsH; ++p) {
        if (p >= kAhead) continue;
        load_if(p >= low && p < high, from, given[p].raw);
        from += pitch;
      }
      Key rows[LINES_H];
      float routed[LINES_H] = {};
#pragma unroll
      for (int p = 0; p < kWindowsH; ++p) {
        if (p + kAhead < kWindowsH) {
          load_if(p + kAhead >= low && p + kAhead < high, from, given[p + kAhead].raw);
          from += pitch;
        }
        const float value = widen(given[p].at[0]);
        Key most = Keys<T>::kNone;
#pragma unroll
        for (int r = 0; r < KERNEL_H; ++r) {
          const int h = p * STRIDE_H + r - PAD_H;
          if (h < 0 || h >= LINES_H) continue;
          if (p == 0 || r >= KERNEL_H - STRIDE_H) rows[h] = column_maxima[h * kMaximumRow];
          most = larger(most, rows[h]);
        }
#pragma unroll
        for (int r = 0; r < KERNEL_H; ++r) {
          const int h = p * STRIDE_H + r - PAD_H;
          if (h >= 0 && h < LINES_H && Keys<T>::same(rows[h], most)) routed[h] += value;
        }
        const int done = p + 1 == kWindowsH ? LINES_H : (p + 1) * STRIDE_H - PAD_H;
#pragma unroll
        for (int h = 0; h < LINES_H; ++h) {
          if (h >= (p == 0 ? 0 : p * STRIDE_H - PAD_H) && h < done) {
            reinterpret_cast<float&>(column_maxima[h * kMaximumRow]) = routed[h];
          }
        }
      }
    }
    __syncthreads();

    if (has_line) {
      Key reduced[LINES_W];
      float line_sums[LINES_W] = {};
#pragma unroll
      for (int q = 0; q < kWindowsW; ++q) {
        const float routed = reinterpret_cast<float&>(line_maxima[q * kStep]);
        Key most = Keys<T>::kNone;
#pragma unroll
        for (int s = 0; s < KERNEL_W; ++s) {
          const int j = q * STRIDE_W + s - PAD_W;
          if (j < 0 || j >= LINES_W) continue;
          if (q == 0 || s >= KERNEL_W - STRIDE_W) reduced[j] = reduce_planes(slot, j);
          most = larger(most, reduced[j]);
        }
#pragma unroll
        for (int s = 0; s < KERNEL_W; ++s) {
          const int j = q * STRIDE_W + s - PAD_W;
          if (j >= 0 && j < LINES_W && Keys<T>::same(reduced[j], most)) line_sums[j] += routed;
        }
        const int reached = q * STRIDE_W + KERNEL_W - PAD_W;
        const int done = q + 1 == kWindowsW ? reached : (q + 1) * STRIDE_W - PAD_W;
#pragma unroll
        for (int j = 0; j < LINES_W; ++j) {
          if (j < (q == 0 ? 0 : q * STRIDE_W - PAD_W) || j >= done || j >= reached) continue;
#pragma unroll
          for (int t = 0; t < KERNEL_D; ++t) {
            const int of = slot + t < KERNEL_D ? slot + t : slot + t - KERNEL_D;
            if (KERNEL_D == 1) {
              sums[t][j] = line_sums[j];
            } else if (Keys<T>::same(line_keys[of * kPlane + j * kStep], reduced[j])) {
              sums[t][j] += line_sums[j];
            }
          }
        }
      }
    }
    // Planes that no later window contains.
#pragma unroll
    for (int t = 0; t < STRIDE_D; ++t) {
      write_plane(front + t, slot + t < KERNEL_D ? slot + t : slot + t - KERNEL_D, sums[t]);
    }
#pragma unroll
    for (int t = 0; t < KERNEL_D; ++t) {
#pragma unroll
      for (int j = 0; j < LINES_W; ++j) {
        sums[t][j] = t + STRIDE_D < KERNEL_D ? sums[t + STRIDE_D < KERNEL_D ? t + STRIDE_D : 0][j]
                                             : 0.0f;
      }
    }
    if (KERNEL_D == 1) return;  // one plane per block
    slot = slot + STRIDE_D < KERNEL_D ? slot + STRIDE_D : slot + STRIDE_D - KERNEL_D;
  }
  // Planes that the last windows left unfinished, and planes past them.
  const int open = (last_window + 1) * STRIDE_D - args.pad[0];
#pragma unroll
  for (int t = 0; t + STRIDE_D < KERNEL_D; ++t) {
    if (last_window >= first_window) {
      write_plane(open + t, slot + t < KERNEL_D ? slot + t : slot + t - KERNEL_D, sums[t]);
    }
  }
  const int rest = last_window >= first_window ? open + KERNEL_D - STRIDE_D : max(base, plane_begin);
  for (int d = max(rest, plane_begin); d < plane_end; ++d) write_plane(d, 0, nothing);
}
