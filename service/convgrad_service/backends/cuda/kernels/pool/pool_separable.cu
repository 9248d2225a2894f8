// The gradient of max pooling from its input, any windows, channels last. The host's side is
// pool_separable.py.
//
// grad_x[i] = sum of grad[o] over the windows o whose maximum is at i. With the keys of pool_keys.cuh,
// the maximum of a window can be taken along W, then H, then D, and its gradient is routed back the
// same way. Each line of a box in shared memory has a thread, which takes the maxima of all windows of
// the line with three comparisons per position, whatever their length.
//
// Block: CHANNELS adjacent channels of a tile of the input. The box around it contains all windows
// that overlap the tile, and all of their positions.
//   1. Along W: positions become keys, which the row's maxima replace; then along H and D likewise.
//   2. Along D: each window's gradient, with the position of the maximum, to the maximum's plane.
//   3. Along H: from planes to rows. 4. Along W: from rows to positions, which are stored.
// Only a line's thread writes to the line, so the order of additions is fixed.
// Dynamic shared memory: keys (later sums of rows), sums of planes (later of positions), two boxes of
// positions of maxima. Grid: images, tiles of channels, tiles along D, H, W, the last ones fastest.
// Relies on its launcher for contiguous channels, boxes below 65,535 positions, an image's extent
// below 2^31 elements. Deterministic, no atomics, sums in float32.
#include "core/elements.cuh"
#include "pool/pool_keys.cuh"

namespace convgrad {

struct PoolSeparableArgs {
  const void* x;
  const void* grad;
  void* grad_x;
  i64 x_stride[4];  // N D H W, in elements
  i64 grad_stride[4];
  i64 grad_x_stride[4];
  int channels;
  int channel_tiles;
  int x_size[3];
  int y_size[3];
  int kernel[3];
  int stride[3];
  int dilation[3];
  int pad[3];
  int own[3];    // positions in a tile
  int box[3];    // of the largest box; odd along W to avoid bank conflicts between lines
  int tiles[3];
  int sums_at, places_at;  // in shared memory
};

}  // namespace convgrad

using namespace convgrad;

namespace {

using T = ELEMENT;
using Key = Keys<T>::type;

constexpr int kThreads = THREADS, kLanes = CHANNELS, kTeams = kThreads / kLanes;
constexpr unsigned short kNowhere = 0xffff;

// The windows and the box of a block along one dimension.
struct Axis {
  int own, own_count;    // the tile
  int first, windows;    // windows that overlap it
  int begin, positions;  // the box, which may start outside the input

  __device__ __forceinline__ Axis(const PoolSeparableArgs& args, int dim, int tile) {
    const int stride = args.stride[dim], reach = (args.kernel[dim] - 1) * args.dilation[dim];
    own = tile * args.own[dim];
    own_count = min(args.own[dim], args.x_size[dim] - own);
    const int top = own + args.pad[dim] - reach;
    first = top <= 0 ? 0 : (top + stride - 1) / stride;
    const int last = min((own + own_count - 1 + args.pad[dim]) / stride, args.y_size[dim] - 1);
    windows = max(last - first + 1, 0);
    begin = first * stride - args.pad[dim];
    positions = windows > 0 ? (windows - 1) * stride + reach + 1 : 0;
  }
};

__device__ __forceinline__ Key larger(Key a, Key b) { return a > b ? a : b; }

// Replaces the first positions of a line, `step` keys apart, by the maxima of its windows.
__device__ __forceinline__ void reduce_line(const PoolSeparableArgs& args, int dim, const Axis& axis,
                                            Key* line, int step) {
  const int kernel = args.kernel[dim], stride = args.stride[dim], dilation = args.dilation[dim];
  if (kernel == 1 && stride == 1) return;
  if (dilation > 1 || kernel <= 4 * stride) {
    // No window contains the positions where earlier maxima are stored.
    for (int q = 0; q < axis.windows; ++q) {
      const Key* const at = line + q * stride * step;
      Key most = at[0];
#pragma unroll 4
      for (int s = 1; s < kernel; ++s) most = larger(most, at[s * dilation * step]);
      line[q * step] = most;
    }
    return;
  }
  // A window is a suffix of one block of as many positions and a prefix of the next. The maxima of
  // all suffixes are stored in their block; those of prefixes are computed on the way.
  int q = 0;
  for (int block = 0; block < axis.positions; block += kernel) {
    const int end = min(block + kernel, axis.positions);
    Key most = Keys<T>::kNone;
#pragma unroll 4
    for (int i = block; i < end; ++i) {
      most = larger(most, line[i * step]);
      const int start = i - (kernel - 1);
      if (start < 0 || start != q * stride) continue;
      line[q * step] = start == block ? most : larger(most, line[start * step]);
      ++q;
    }
    // The maximum of the whole block is no longer needed; its slot may hold a window's already.
    Key rest = line[(end - 1) * step];
#pragma unroll 4
    for (int i = end - 2; i > block; --i) {
      rest = larger(rest, line[i * step]);
      line[i * step] = rest;
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    pool_separable(const __grid_constant__ PoolSeparableArgs args) {
  extern __shared__ __align__(16) unsigned char shared[];
  const int c = threadIdx.x % kLanes, team = threadIdx.x / kLanes;
  Key* const keys = reinterpret_cast<Key*>(shared) + c;
  float* const row_sums = reinterpret_cast<float*>(shared) + c;  // after the keys have been read
  float* const plane_sums = reinterpret_cast<float*>(shared + args.sums_at) + c;
  const int slots = args.box[0] * args.box[1] * args.box[2] * kLanes;
  // Of what a plane, or a row, got from a window along the last dimension: the place of its maximum.
  unsigned short* const of_plane = reinterpret_cast<unsigned short*>(shared + args.places_at) + c;
  unsigned short* const of_row = of_plane + slots;

  u32 block = blockIdx.x;
  const auto next = [&](int count) {
    const int at = block % static_cast<u32>(count);
    block /= static_cast<u32>(count);
    return at;
  };
  const Axis w(args, 2, next(args.tiles[2])), h(args, 1, next(args.tiles[1])), d(args, 0, next(args.tiles[0]));
  const int channel = next(args.channel_tiles) * kLanes + c, n = block;
  const bool real = channel < args.channels;
  const T* const x = static_cast<const T*>(args.x) + n * args.x_stride[0] + channel;
  const T* const grad = static_cast<const T*>(args.grad) + n * args.grad_stride[0] + channel;
  T* const grad_x = static_cast<T*>(args.grad_x) + n * args.grad_x_stride[0] + channel;
  const int step_w = kLanes, step_h = args.box[2] * kLanes, step_d = args.box[1] * step_h;

  // Along W.
  for (int line = team; line < d.positions * h.positions; line += kTeams) {
    const int z = line / h.positions, y = line - z * h.positions;
    const int at_d = d.begin + z, at_h = h.begin + y;
    const bool inside = real && at_d >= 0 && at_d < args.x_size[0] && at_h >= 0 && at_h < args.x_size[1];
    const T* const from = x + at_d * args.x_stride[1] + at_h * args.x_stride[2];
    Key* const to = keys + z * step_d + y * step_h;
    const int first = (z * h.positions + y) * w.positions;
#pragma unroll 8
    for (int i = 0; i < w.positions; ++i) {
      const int at = w.begin + i;
      Key key = Keys<T>::kNone;
      if (inside && at >= 0 && at < args.x_size[2]) {
        key = Keys<T>::of(from[at * args.x_stride[3]], first + i);
      }
      to[i * step_w] = key;
    }
    reduce_line(args, 2, w, to, step_w);
  }
  __syncthreads();
  // Along H.
  for (int line = team; line < d.positions * w.windows; line += kTeams) {
    const int z = line / w.windows, q = line - z * w.windows;
    reduce_line(args, 1, h, keys + z * step_d + q * step_w, step_h);
  }
  __syncthreads();
  // Along D, and back.
  for (int line = team; line < h.windows * w.windows; line += kTeams) {
    const int p = line / w.windows, q = line - p * w.windows, at = p * step_h + q * step_w;
    reduce_line(args, 0, d, keys + at, step_d);
    for (int z = 0; z < d.positions; ++z) of_plane[z * step_d + at] = kNowhere;
    const T* const from = grad + (h.first + p) * args.grad_stride[2] + (w.first + q) * args.grad_stride[3];
#pragma unroll 4
    for (int i = 0; i < d.windows && real; ++i) {
      const float value = widen(from[(d.first + i) * args.grad_stride[1]]);
      const int place = Keys<T>::position(keys[i * step_d + at]);
      const int z = place / (h.positions * w.positions), to = z * step_d + at;
      const bool begins = of_plane[to] == kNowhere;
      of_plane[to] = static_cast<unsigned short>(place - z * (h.positions * w.positions));
      plane_sums[to] = begins ? value : plane_sums[to] + value;
    }
  }
  __syncthreads();
  // Along H, of the tile's planes.
  for (int line = team; line < d.own_count * w.windows; line += kTeams) {
    const int own = line / w.windows, q = line - own * w.windows, z = d.own + own - d.begin;
    if (z < 0 || z >= d.positions) continue;
    const int at = z * step_d + q * step_w;
    for (int y = 0; y < h.positions; ++y) of_row[y * step_h + at] = kNowhere;
#pragma unroll 4
    for (int p = 0; p < h.windows; ++p) {
      const int place = of_plane[p * step_h + at];
      if (place == kNowhere) continue;
      const float value = plane_sums[p * step_h + at];
      const int y = place / w.positions, to = y * step_h + at;
      const bool begins = of_row[to] == kNowhere;
      of_row[to] = static_cast<unsigned short>(place - y * w.positions);
      row_sums[to] = begins ? value : row_sums[to] + value;
    }
  }
  __syncthreads();
  // Along W, of the tile's rows.
  for (int line = team; line < d.own_count * h.own_count; line += kTeams) {
    const int own_d = line / h.own_count, own_h = line - own_d * h.own_count;
    const int z = d.own + own_d - d.begin, y = h.own + own_h - h.begin;
    const bool inside = z >= 0 && z < d.positions && y >= 0 && y < h.positions;
    const int at = z * step_d + y * step_h;
    if (inside) {
      for (int i = 0; i < w.positions; ++i) plane_sums[at + i * step_w] = 0;
#pragma unroll 4
      for (int q = 0; q < w.windows; ++q) {
        const int place = of_row[at + q * step_w];
        if (place != kNowhere) plane_sums[at + place * step_w] += row_sums[at + q * step_w];
      }
    }
    T* const to = grad_x + (d.own + own_d) * args.grad_x_stride[1] + (h.own + own_h) * args.grad_x_stride[2];
#pragma unroll 4
    for (int i = 0; i < w.own_count && real; ++i) {
      const int own = w.own + i - w.begin;
      const bool reached = inside && own >= 0 && own < w.positions;
      to[(w.own + i) * args.grad_x_stride[3]] = narrow<T>(reached ? plane_sums[at + own * step_w] : 0.0f);
    }
  }
}
