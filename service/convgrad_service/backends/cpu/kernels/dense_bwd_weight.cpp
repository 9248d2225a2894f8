// The gradient of a dense convolution with respect to its weight:
//
//   grad_weight[g, k, c, t] = alpha * sum over n, o of
//                                 grad_output[n, g, k, o] * input[n, g, c, o * stride
//                                                                 + t * dilation - pad]
//                             + beta * accumulate
//
// GEMM view, for each tap: M = output channels, N = input channels, K = output pixels, split into
// `chunks` (split K) of equal numbers of pixel rows (n, z, p, tile of q). Each chunk has its own
// partial gradient, and phase 1 sums the partials in order. A task of phase 0 computes one chunk
// for a share of the output channels and a share of the input channels. For each tile, it packs
// grad_output and input (channels last, widened) into scratch, then runs brgemm_tile for each tap
// over groups of rows that fit the L1 cache. A tensor that is stored so already is read in place.
//
// Only pairs inside the tensors are multiplied: each tap has its own range of q in each row. So
// padding is not multiplied, and non-finite values propagate as in the definition.
//
// Deterministic: chunks, tiles and row groups depend only on the problem, not on the threads, and
// the shares do not affect the order of summation.
//
// Requires: a workspace of chunks * groups * taps * K * padded C accumulators; scratch as laid out
// in the constructor; block[] = {chunks, rows per tile, columns per tile, rows per group, output
// channels per share, input channels per share}, the last a multiple of kTileColumns or all.
#include "brgemm.hpp"
#include "conv_args.hpp"
#include "matrix_copy.hpp"

namespace convgrad {
namespace {

constexpr int kErrorScratch = 1;
constexpr i64 kReduceTaps = 64;      // block size of the transposition in `reduce`
constexpr i64 kReduceChannels = 128;

CONVGRAD_INLINE i64 floor_div(i64 a, i64 b) { return a >= 0 ? a / b : -((-a + b - 1) / b); }
CONVGRAD_INLINE i64 ceil_div(i64 a, i64 b) { return -floor_div(-a, b); }
CONVGRAD_INLINE i64 round_up(i64 a, i64 to) { return (a + to - 1) / to * to; }

// Pitch of packed pixels, in elements: an odd number of cache lines, to spread the pixels of a row
// over all L1 cache sets.
template <class T>
CONVGRAD_INLINE i64 pixel_size(i64 channels) {
  const i64 line = 64 / static_cast<i64>(sizeof(T));
  return (ceil_div(channels, line) | 1) * line;
}

template <class E>
struct WeightGradient {
  using S = typename E::Storage;
  using T = typename E::Acc;
  static constexpr i64 kColumns = kTileColumns<T>;

  const ConvArgs& args;
  i64 chunks, tile_rows, tile_columns, group_rows, k_share, c_share;
  i64 k_shares, c_shares, q_tiles, units;
  i64 taps, padded_c;  // padded_c: row pitch of a partial gradient
  i64 y_pixel, x_pixel, slab_width, slab_rows;
  bool y_in_place, x_in_place;
  i64 x_end;  // elements of x that may be read in place
  Segment* segments;
  T* y_tile;
  T* x_slab;
  i64 scratch_needed;

  WeightGradient(const ConvArgs& a, void* scratch)
      : args(a), chunks(a.block[0]), tile_rows(a.block[1]), tile_columns(a.block[2]),
        group_rows(a.block[3]), k_share(a.block[4]), c_share(a.block[5]) {
    k_shares = ceil_div(a.out_channels, k_share);
    c_shares = ceil_div(a.in_channels, c_share);
    q_tiles = ceil_div(a.output[2], tile_columns);
    units = a.batch * a.output[0] * a.output[1] * q_tiles;
    taps = a.kernel[0] * a.kernel[1] * a.kernel[2];
    padded_c = round_up(a.in_channels, kLanes<T>);
    y_pixel = pixel_size<T>(k_share);
    x_pixel = pixel_size<T>(c_share);
    slab_width = (tile_columns - 1) * a.stride[2] + (a.kernel[2] - 1) * a.dilation[2] + 1;
    slab_rows = (tile_rows - 1) * a.stride[1] + (a.kernel[1] - 1) * a.dilation[1] + 1;
    y_in_place = in_place<E>(a.y);
    x_in_place = in_place<E>(a.x);
    x_end = x_in_place ? span(a.x, a.batch, a.groups, a.in_channels, a.input) : 0;
    char* at = static_cast<char*>(scratch);
    segments = reinterpret_cast<Segment*>(at);
    at += round_up(group_rows * static_cast<i64>(sizeof(Segment)), 64);
    y_tile = reinterpret_cast<T*>(at);
    at += round_up(tile_rows * tile_columns * y_pixel * static_cast<i64>(sizeof(T)), 64);
    x_slab = reinterpret_cast<T*>(at);
    at += a.kernel[0] * slab_rows * slab_width * x_pixel * static_cast<i64>(sizeof(T));
    scratch_needed = at - static_cast<char*>(scratch);
    scratch_needed = most(scratch_needed,
                          kReduceTaps * kReduceChannels * static_cast<i64>(sizeof(T)));
  }

  i64 partial() const { return args.groups * taps * args.out_channels * padded_c; }
  i64 workspace_needed() const { return chunks * partial() * static_cast<i64>(sizeof(T)); }
  T* partial_of(i64 chunk, i64 g) const {
    return static_cast<T*>(args.workspace) + chunk * partial() +
           g * taps * args.out_channels * padded_c;
  }

  void run_chunk(i64 g, i64 chunk, i64 k_part, i64 c_part) const {
    const i64 k0 = k_part * k_share, k_count = least(k_share, args.out_channels - k0);
    const i64 c0 = c_part * c_share, c_count = least(c_share, args.in_channels - c0);
    const i64 padded = c0 + c_count == args.in_channels ? padded_c - c0 : c_count;
    T* sums = partial_of(chunk, g) + k0 * padded_c + c0;
    for (i64 tap = 0; tap < taps; ++tap) {
      for (i64 k = 0; k < k_count; ++k) {
        __builtin_memset(sums + (tap * args.out_channels + k) * padded_c, 0,
                         static_cast<u64>(padded) * sizeof(T));
      }
    }
    const i64 stop = units * (chunk + 1) / chunks;
    for (i64 unit = units * chunk / chunks; unit < stop;) {
      const i64 q_tile = unit % q_tiles, row = unit / q_tiles;
      Tile tile;
      tile.p = row % args.output[1];
      const i64 plane = row / args.output[1];
      // A tile consists of consecutive whole rows of one plane.
      tile.rows = 1;
      if (q_tiles == 1) {
        tile.rows = least(least(tile_rows, stop - unit), args.output[1] - tile.p);
      }
      tile.q0 = q_tile * tile_columns;
      tile.q1 = least(tile.q0 + tile_columns, args.output[2]);
      tile.n = plane / args.output[0];
      tile.z = plane % args.output[0];
      tile.y = y_of(tile, g, k0, k_count);
      tile.x = x_of(tile, g, c0, c_count);
      const Cut groups = cut_rows(tile.rows, group_rows);
      i64 first = 0;
      for (i64 i = 0; i < groups.tiles; ++i) {
        const i64 last = first + groups.base + (i < groups.extra);
        multiply(tile, first, last, k_count, c_count, sums);
        first = last;
      }
      unit += tile.rows;
    }
  }

  // An operand of a tile: its first element, and the steps along its dimensions.
  struct Operand {
    const T* data;
    i64 plane;
    i64 row;
    i64 pixel;
  };
  struct Tile {
    i64 n, z, p, rows, q0, q1;
    Operand y, x;
  };

  Operand y_of(const Tile& tile, i64 g, i64 k0, i64 k_count) const {
    const View& y = args.y;
    const S* from = static_cast<const S*>(y.data) + tile.n * y.stride[0] + g * y.stride[1] +
                    k0 * y.stride[2] + tile.z * y.stride[3] + tile.p * y.stride[4] +
                    tile.q0 * y.stride[5];
    if (y_in_place) {
      return {reinterpret_cast<const T*>(from), 0, y.stride[4], y.stride[5]};
    }
    const i64 width = tile.q1 - tile.q0;
    const bool joined = y.stride[4] == width * y.stride[5];
    const i64 together = joined ? tile.rows : 1;
    for (i64 i = 0; i < tile.rows; i += together) {
      read_matrix<E>(from + i * y.stride[4], y.stride[5], y.stride[2], together * width, k_count,
                     y_tile + i * width * y_pixel, y_pixel);
    }
    return {y_tile, 0, width * y_pixel, y_pixel};
  }

  // The input region of the tile. Positions outside the tensor are not initialised or read. In
  // place, the last vector of a pixel's channels extends into the next pixel: into columns of the
  // product that nobody reads, but not beyond the tensor.
  Operand x_of(const Tile& tile, i64 g, i64 c0, i64 c_count) const {
    const View& x = args.x;
    const i64 base = tile.n * x.stride[0] + g * x.stride[1] + c0 * x.stride[2];
    const i64 left = tile.q0 * args.stride[2] - args.pad[2];
    const i64 top = tile.p * args.stride[1] - args.pad[1];
    const i64 front = tile.z * args.stride[0] - args.pad[0];
    const i64 width = (tile.q1 - tile.q0 - 1) * args.stride[2] +
                      (args.kernel[2] - 1) * args.dilation[2] + 1;
    const i64 height = (tile.rows - 1) * args.stride[1] +
                       (args.kernel[1] - 1) * args.dilation[1] + 1;
    const i64 begin = most(left, 0), end = least(left + width, args.input[2]);
    const i64 deepest = least(front + (args.kernel[0] - 1) * args.dilation[0], args.input[0] - 1);
    const i64 lowest = least(top + height, args.input[1]) - 1;
    if (x_in_place && base + deepest * x.stride[3] + lowest * x.stride[4] +
                              (end - 1) * x.stride[5] + round_up(c_count, kLanes<T>) <=
                          x_end) {
      const S* from = static_cast<const S*>(x.data) + base + front * x.stride[3] +
                      top * x.stride[4] + left * x.stride[5];
      return {reinterpret_cast<const T*>(from), args.dilation[0] * x.stride[3], x.stride[4],
              x.stride[5]};
    }
    const Operand packed{x_slab, slab_rows * slab_width * x_pixel, slab_width * x_pixel, x_pixel};
    for (i64 t = 0; begin < end && t < args.kernel[0]; ++t) {
      const i64 d = front + t * args.dilation[0];
      if (d < 0 || d >= args.input[0]) continue;
      for (i64 i = 0; i < height; ++i) {
        const i64 h = top + i;
        if (h < 0 || h >= args.input[1]) continue;
        const i64 at = base + d * x.stride[3] + h * x.stride[4] + begin * x.stride[5];
        read_matrix<E>(static_cast<const S*>(x.data) + at, x.stride[5], x.stride[2], end - begin,
                       c_count,
                       x_slab + t * packed.plane + i * packed.row + (begin - left) * x_pixel,
                       x_pixel);
      }
    }
    return packed;
  }

  // Accumulates the contribution of tile rows [first, last) to every tap.
  void multiply(const Tile& tile, i64 first, i64 last, i64 k_count, i64 c_count, T* sums) const {
    const Operand &y = tile.y, &x = tile.x;
    const i64 b_step = args.stride[2] * x.pixel;
    i64 tap = 0;
    for (i64 t = 0; t < args.kernel[0]; ++t) {
      const i64 d = tile.z * args.stride[0] + t * args.dilation[0] - args.pad[0];
      if (d < 0 || d >= args.input[0]) {
        tap += args.kernel[1] * args.kernel[2];
        continue;
      }
      for (i64 r = 0; r < args.kernel[1]; ++r) {
        for (i64 s = 0; s < args.kernel[2]; ++s, ++tap) {
          // Range of q for which this tap is inside the input.
          const i64 shift = args.pad[2] - s * args.dilation[2];
          const i64 begin = most(tile.q0, ceil_div(shift, args.stride[2]));
          const i64 end =
              least(tile.q1, floor_div(args.input[2] - 1 + shift, args.stride[2]) + 1);
          if (begin >= end) continue;
          i64 count = 0;
          for (i64 i = first; i < last; ++i) {
            const i64 row = i * args.stride[1] + r * args.dilation[1];
            const i64 h = tile.p * args.stride[1] - args.pad[1] + row;
            if (h < 0 || h >= args.input[1]) continue;
            const i64 a = i * y.row + (begin - tile.q0) * y.pixel;
            const i64 b = t * x.plane + row * x.row +
                          ((begin - tile.q0) * args.stride[2] + s * args.dilation[2]) * x.pixel;
            if (count > 0) {
              Segment& before = segments[count - 1];
              if (before.a + before.k * y.pixel == a && before.b + before.k * b_step == b) {
                before.k += end - begin;
                continue;
              }
            }
            segments[count++] = Segment{a, b, end - begin};
          }
          if (count == 0) continue;
          T* to = sums + tap * args.out_channels * padded_c;
          const Cut cut = cut_rows(k_count, kTileRows);
          for (i64 c = 0; c < c_count; c += kColumns) {
            const int vectors = c_count - c > kLanes<T> ? 2 : 1;
            i64 k = 0;
            for (i64 i = 0; i < cut.tiles; ++i) {
              const i64 rows = cut.base + (i < cut.extra);
              const Product<T> product{y.data + k, 1,        y.pixel, x.data + c,
                                       b_step,     segments, count,   to + k * padded_c + c,
                                       padded_c};
              brgemm<T, Walk::kUnitRow, true>(product, static_cast<int>(rows), vectors);
              k += rows;
            }
          }
        }
      }
    }
  }

  // Sums the partials of one output channel and writes the gradient in the result type.
  template <class R>
  void reduce(i64 g, i64 k, T* block) const {
    const View& w = args.w;
    const View& add = args.accumulate;
    const bool adds = add.data != nullptr && args.beta != 0;
    const i64 *kernel = args.kernel;
    const bool joined = taps_joined(w, kernel) && (!adds || taps_joined(add, kernel));
    const i64 run = joined ? taps : kernel[2];
    for (i64 start = 0; start < taps; start += run) {
      for (i64 tap = start; tap < start + run; tap += kReduceTaps) {
        const i64 tap_count = least(kReduceTaps, start + run - tap);
        for (i64 c = 0; c < args.in_channels; c += kReduceChannels) {
          const i64 c_count = least(kReduceChannels, args.in_channels - c);
          for (i64 i = 0; i < tap_count; ++i) {
            const i64 at = ((tap + i) * args.out_channels + k) * padded_c + c;
            for (i64 j = 0; j < c_count; j += kLanes<T>) {
              Vec<T> sum = load_raw<Vec<T>>(partial_of(0, g) + at + j);
              for (i64 chunk = 1; chunk < chunks; ++chunk) {
                sum += load_raw<Vec<T>>(partial_of(chunk, g) + at + j);
              }
              store_raw(block + i * kReduceChannels + j, sum);
            }
          }
          Destination<R> to{};
          to.result = static_cast<typename R::Storage*>(w.data) + weight_offset(w, g, k, c, tap);
          to.row = w.stride[5];
          to.column = w.stride[2];
          if (adds) {
            to.accumulate = static_cast<const typename R::Storage*>(add.data) +
                            weight_offset(add, g, k, c, tap);
            to.accumulate_row = add.stride[5];
            to.accumulate_column = add.stride[2];
          }
          to.alpha = static_cast<T>(args.alpha);
          to.beta = static_cast<T>(args.beta);
          write_matrix<R>(block, kReduceChannels, tap_count, c_count, to);
        }
      }
    }
  }

  static bool taps_joined(const View& w, const i64* kernel) {
    return (kernel[1] == 1 || w.stride[4] == w.stride[5] * kernel[2]) &&
           (kernel[0] == 1 || w.stride[3] == w.stride[5] * kernel[2] * kernel[1]);
  }
  i64 weight_offset(const View& w, i64 g, i64 k, i64 c, i64 tap) const {
    const i64 s = tap % args.kernel[2], r = tap / args.kernel[2] % args.kernel[1];
    const i64 t = tap / args.kernel[2] / args.kernel[1];
    return g * w.stride[0] + k * w.stride[1] + c * w.stride[2] + t * w.stride[3] +
           r * w.stride[4] + s * w.stride[5];
  }
};

template <class E>
void weight_gradient(const ConvArgs& args, Control* control, void* scratch) {
  using T = typename E::Acc;
  const WeightGradient<E> work(args, scratch);
  if (work.scratch_needed > args.scratch_bytes || work.workspace_needed() > args.workspace_bytes) {
    __atomic_store_n(&control->error, kErrorScratch, __ATOMIC_RELAXED);
    return;
  }
  const i64 total = args.groups * work.chunks * work.k_shares * work.c_shares;
  for (i64 task; (task = take_task(control, 0, total)) >= 0;) {
    i64 rest = task;
    const i64 k_part = rest % work.k_shares;
    rest /= work.k_shares;
    const i64 c_part = rest % work.c_shares;
    rest /= work.c_shares;
    work.run_chunk(rest / work.chunks, rest % work.chunks, k_part, c_part);
    finish_task(control, 0);
  }
  if (!wait_phase(control, 0, total)) return;
  const i64 channels = args.groups * args.out_channels;
  for (i64 task; (task = take_task(control, 1, channels)) >= 0;) {
    const i64 g = task / args.out_channels, k = task % args.out_channels;
    T* block = static_cast<T*>(scratch);
    if (args.result_dtype == args.dtype) {
      work.template reduce<E>(g, k, block);
    } else if constexpr (sizeof(T) == sizeof(float)) {
      work.template reduce<F32>(g, k, block);
    }
  }
}

}  // namespace
}  // namespace convgrad

extern "C" CONVGRAD_EXPORT void convgrad_dense_bwd_weight(const convgrad::ConvArgs* args,
                                                          convgrad::Control* control,
                                                          void* scratch) {
  using namespace convgrad;
  switch (args->dtype) {
    case kFloat16:
      return weight_gradient<F16>(*args, control, scratch);
    case kBfloat16:
      return weight_gradient<BF16>(*args, control, scratch);
    case kFloat32:
      return weight_gradient<F32>(*args, control, scratch);
    case kFloat64:
      return weight_gradient<F64>(*args, control, scratch);
  }
}
