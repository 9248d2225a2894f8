// The gradient of a dense convolution with respect to its weight:
//
//   grad_weight[g, k, c, t] = alpha * sum over n, o of
//                                 grad_output[n, g, k, o] * input[n, g, c, o * stride
//                                                                 + t * dilation - pad]
//                             + beta * accumulate
//
// GEMM view, for each tap: M = output channels, N = input channels, K = output pixels, split into
// `chunks` (split K) of equal numbers of pixel rows (n, z, p, tile of q). Each chunk has its own
// partial gradient, and phase 1 sums the partials in order; a single chunk is the gradient itself
// if that is stored as a partial one is. A task of phase 0 computes one chunk for a share of the
// output channels and a share of the input channels. For each tile, rows of a plane or several
// small planes, it packs grad_output and input (channels last, widened) into scratch, then runs
// brgemm_tile for each tap over groups of rows that fit the L1 cache. A tensor that is stored so
// already is read in place.
//
// Only pairs inside the tensors are multiplied: each tap has its own range of q in each row. So
// padding is not multiplied, and non-finite values propagate as in the definition.
//
// Deterministic: chunks, tiles and row groups depend only on the problem, not on the threads, and
// the shares do not affect the order of summation.
//
// Requires: a workspace of chunks * groups * taps * K * padded C accumulators; scratch as laid out
// in the constructor; block[] = {chunks, rows per tile, columns per tile, rows per group, output
// channels per share, input channels per share (a multiple of kTileColumns or all), planes per tile}.
#include "brgemm.hpp"
#include "conv_args.hpp"
#include "matrix_copy.hpp"
#include "weight_tile.hpp"

namespace convgrad {
namespace {

constexpr int kErrorScratch = 1;
constexpr i64 kFetchedBytes = 1 << 20;
constexpr i64 kReduceTaps = 64;      // block size of the transposition in `reduce`
constexpr i64 kReduceChannels = 128;

template <class E>
struct WeightGradient {
  using Sums = WeightSums<typename E::Acc>;
  using Tile = WeightTile<typename E::Acc>;
  using S = typename E::Storage;
  using T = typename E::Acc;
  static constexpr i64 kColumns = kTileColumns<T>;

  const ConvArgs& args;
  i64 chunks, tile_rows, tile_columns, group_rows, k_share, c_share, planes;
  i64 k_shares, c_shares, q_tiles, units;
  i64 taps, padded_c;  // padded_c: row pitch of a partial gradient
  i64 y_pixel, x_pixel, slab_width, slab_rows;
  bool y_in_place, x_in_place;
  bool y_fetched;  // y is read in place, and too large for the L2 cache
  i64 x_end;  // elements of x that may be read in place
  Segment* segments;
  Piece* pieces;
  T* y_tile;
  T* x_slab;
  i64 scratch_needed;

  WeightGradient(const ConvArgs& a, void* scratch)
      : args(a), chunks(a.block[0]), tile_rows(a.block[1]), tile_columns(a.block[2]),
        group_rows(a.block[3]), k_share(a.block[4]), c_share(a.block[5]), planes(a.block[6]) {
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
    const i64 y_elements = units * tile_columns * a.groups * a.out_channels;
    y_fetched = y_in_place && y_elements * static_cast<i64>(sizeof(T)) > kFetchedBytes;
    x_end = x_in_place ? span(a.x, a.batch, a.groups, a.in_channels, a.input) : 0;
    char* at = static_cast<char*>(scratch);
    segments = reinterpret_cast<Segment*>(at);
    at += round_up(planes * group_rows * static_cast<i64>(sizeof(Segment)), 64);
    pieces = reinterpret_cast<Piece*>(at);
    at += round_up(planes * static_cast<i64>(sizeof(Piece)), 64);
    y_tile = reinterpret_cast<T*>(at);
    at += round_up(planes * tile_rows * tile_columns * y_pixel * static_cast<i64>(sizeof(T)), 64);
    x_slab = reinterpret_cast<T*>(at);
    at += planes * a.kernel[0] * slab_rows * slab_width * x_pixel * static_cast<i64>(sizeof(T));
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

  // Whether the only chunk is summed in the result.
  bool sums_in_place() const {
    return chunks == 1 && args.result_dtype == args.dtype && sizeof(S) == sizeof(T) &&
           args.w.stride[2] == 1 && args.in_channels % kLanes<T> == 0 && args.alpha == 1 &&
           !(args.accumulate.data && args.beta != 0) && taps_joined(args.w, args.kernel);
  }
  Sums sums_of(i64 chunk, i64 g, i64 k0, i64 c0) const {
    if (!sums_in_place()) {
      return {partial_of(chunk, g) + k0 * padded_c + c0, args.out_channels * padded_c, padded_c};
    }
    T* result = static_cast<T*>(args.w.data) + g * args.w.stride[0] + k0 * args.w.stride[1] + c0;
    return {result, args.w.stride[5], args.w.stride[1]};
  }

  void run_chunk(i64 g, i64 chunk, i64 k_part, i64 c_part) const {
    const i64 k0 = k_part * k_share, k_count = least(k_share, args.out_channels - k0);
    const i64 c0 = c_part * c_share, c_count = least(c_share, args.in_channels - c0);
    const Sums sums = sums_of(chunk, g, k0, c0);
    const i64 stop = units * (chunk + 1) / chunks;
    bool empty = true;
    for (i64 unit = units * chunk / chunks; unit < stop;) {
      const i64 q_tile = unit % q_tiles;
      Tile tile;
      tile.q0 = q_tile * tile_columns;
      tile.q1 = least(tile.q0 + tile_columns, args.output[2]);
      // A tile consists of consecutive whole rows of one plane, or of several planes.
      for (tile.count = 0; tile.count < planes && unit < stop; ++tile.count) {
        const i64 row = unit / q_tiles, plane = row / args.output[1];
        Piece& piece = pieces[tile.count];
        piece.n = plane / args.output[0];
        piece.z = plane % args.output[0];
        piece.p = row % args.output[1];
        piece.rows = 1;
        if (q_tiles == 1) {
          piece.rows = least(least(tile_rows, stop - unit), args.output[1] - piece.p);
        }
        tile.rows = tile.count == 0 ? piece.rows : most(tile.rows, piece.rows);
        unit += piece.rows;
      }
      find_y(&tile, g, k0, k_count);
      find_x(&tile, g, c0, c_count);
      const Cut groups = cut_rows(tile.rows, group_rows);
      i64 first = 0;
      for (i64 i = 0; i < groups.tiles; ++i) {
        const i64 last = first + groups.base + (i < groups.extra);
        multiply(tile, first, last, k_count, c_count, sums, empty);
        first = last;
        empty = false;
      }
    }
    if (empty) multiply(Tile{}, 0, 0, k_count, c_count, sums, true);
  }

  void find_y(Tile* tile, i64 g, i64 k0, i64 k_count) const {
    const View& y = args.y;
    const S* base = static_cast<const S*>(y.data) + g * y.stride[1] + k0 * y.stride[2] +
                    tile->q0 * y.stride[5];
    const i64 width = tile->q1 - tile->q0;
    const bool joined = y.stride[4] == width * y.stride[5];
    tile->y = {y_tile, 0, width * y_pixel, y_pixel};
    if (y_in_place) tile->y = {reinterpret_cast<const T*>(base), 0, y.stride[4], y.stride[5]};
    i64 packed = 0;
    for (Piece* piece = pieces; piece < pieces + tile->count; ++piece) {
      const i64 at = piece->n * y.stride[0] + piece->z * y.stride[3] + piece->p * y.stride[4];
      piece->y = y_in_place ? at : packed * y_pixel;
      if (y_in_place) continue;
      const i64 together = joined ? piece->rows : 1;
      for (i64 i = 0; i < piece->rows; i += together) {
        read_matrix<E>(base + at + i * y.stride[4], y.stride[5], y.stride[2], together * width,
                       k_count, y_tile + (packed + i * width) * y_pixel, y_pixel);
      }
      packed += piece->rows * width;
    }
  }

  // The input regions of the pieces. Positions outside the tensor are not initialised or read. In
  // place, the last vector of a pixel's channels extends into the next pixel: into columns of the
  // product that nobody reads, but not beyond the tensor.
  void find_x(Tile* tile, i64 g, i64 c0, i64 c_count) const {
    const View& x = args.x;
    const i64 base = g * x.stride[1] + c0 * x.stride[2];
    const i64 left = tile->q0 * args.stride[2] - args.pad[2];
    const i64 width = (tile->q1 - tile->q0 - 1) * args.stride[2] +
                      (args.kernel[2] - 1) * args.dilation[2] + 1;
    const i64 begin = most(left, 0), end = least(left + width, args.input[2]);
    bool direct = x_in_place;
    for (Piece* piece = pieces; piece < pieces + tile->count; ++piece) {
      const i64 front = piece->z * args.stride[0] - args.pad[0];
      const i64 top = piece->p * args.stride[1] - args.pad[1];
      const i64 deepest = front + (args.kernel[0] - 1) * args.dilation[0];
      const i64 lowest = top + (piece->rows - 1) * args.stride[1] +
                         (args.kernel[1] - 1) * args.dilation[1];
      piece->x = piece->n * x.stride[0] + front * x.stride[3] + top * x.stride[4] +
                 left * x.stride[5];
      const i64 last = base + piece->n * x.stride[0] +
                       least(deepest, args.input[0] - 1) * x.stride[3] +
                       least(lowest, args.input[1] - 1) * x.stride[4] + (end - 1) * x.stride[5];
      direct = direct && last + round_up(c_count, kLanes<T>) <= x_end;
    }
    const S* from = static_cast<const S*>(x.data) + base;
    if (direct) {
      tile->x = {reinterpret_cast<const T*>(from), args.dilation[0] * x.stride[3], x.stride[4],
                 x.stride[5]};
      return;
    }
    const i64 row = slab_width * x_pixel, plane = slab_rows * row;
    tile->x = {x_slab, plane, row, x_pixel};
    for (i64 i = 0; i < tile->count; ++i) {
      Piece& piece = pieces[i];
      const i64 top = piece.p * args.stride[1] - args.pad[1];
      const i64 height = (piece.rows - 1) * args.stride[1] +
                         (args.kernel[1] - 1) * args.dilation[1] + 1;
      piece.x = i * args.kernel[0] * plane;
      for (i64 t = 0; begin < end && t < args.kernel[0]; ++t) {
        const i64 d = piece.z * args.stride[0] + t * args.dilation[0] - args.pad[0];
        if (d < 0 || d >= args.input[0]) continue;
        for (i64 h = most(top, 0); h < least(top + height, args.input[1]); ++h) {
          read_matrix<E>(from + piece.n * x.stride[0] + d * x.stride[3] + h * x.stride[4] +
                             begin * x.stride[5],
                         x.stride[5], x.stride[2], end - begin, c_count,
                         x_slab + piece.x + t * plane + (h - top) * row + (begin - left) * x_pixel,
                         x_pixel);
        }
      }
    }
  }

  // Lists what one tap multiplies in rows [first, last) of the pieces, columns [begin, end).
  i64 list(const Tile& tile, i64 t, i64 r, i64 s, i64 first, i64 last, i64 begin, i64 end) const {
    const i64 b_step = args.stride[2] * tile.x.pixel;
    i64 count = 0;
    for (const Piece* piece = pieces; piece < pieces + tile.count; ++piece) {
      const i64 d = piece->z * args.stride[0] + t * args.dilation[0] - args.pad[0];
      if (d < 0 || d >= args.input[0]) continue;
      for (i64 i = first; i < least(last, piece->rows); ++i) {
        const i64 row = i * args.stride[1] + r * args.dilation[1];
        const i64 h = piece->p * args.stride[1] - args.pad[1] + row;
        if (h < 0 || h >= args.input[1]) continue;
        const i64 a = piece->y + i * tile.y.row + (begin - tile.q0) * tile.y.pixel;
        const i64 across = (begin - tile.q0) * args.stride[2] + s * args.dilation[2];
        const i64 b = piece->x + t * tile.x.plane + row * tile.x.row + across * tile.x.pixel;
        if (count > 0) {
          Segment& before = segments[count - 1];
          if (before.a + before.k * tile.y.pixel == a && before.b + before.k * b_step == b) {
            before.k += end - begin;
            continue;
          }
        }
        segments[count++] = Segment{a, b, end - begin};
      }
    }
    return count;
  }

  // Adds what rows [first, last) of the pieces contribute to every tap; to `empty` sums, which are
  // not initialised, for the first time.
  void multiply(const Tile& tile, i64 first, i64 last, i64 k_count, i64 c_count, const Sums& sums,
                bool empty) const {
    i64 tap = 0;
    for (i64 t = 0; t < args.kernel[0]; ++t) {
      for (i64 r = 0; r < args.kernel[1]; ++r) {
        for (i64 s = 0; s < args.kernel[2]; ++s, ++tap) {
          // Range of q for which this tap is inside the input.
          const i64 shift = args.pad[2] - s * args.dilation[2];
          const i64 begin = most(tile.q0, ceil_div(shift, args.stride[2]));
          const i64 end =
              least(tile.q1, floor_div(args.input[2] - 1 + shift, args.stride[2]) + 1);
          const i64 count = begin < end ? list(tile, t, r, s, first, last, begin, end) : 0;
          if (count == 0 && !empty) continue;
          T* to = sums.data + tap * sums.tap;
          const Cut cut = cut_rows(k_count, kTileRows);
          for (i64 c = 0; c < c_count; c += kColumns) {
            const int vectors = c_count - c > kLanes<T> ? 2 : 1;
            i64 k = 0;
            for (i64 i = 0; i < cut.tiles; ++i) {
              const i64 rows = cut.base + (i < cut.extra);
              Product<T> product{tile.y.data + k, 1, tile.y.pixel, tile.x.data + c,
                                 args.stride[2] * tile.x.pixel, segments, count,
                                 to + k * sums.row + c, sums.row, !empty, 0, 0};
              // The last channel of the next rows, which before the first pass are in no cache.
              if (y_fetched && c == 0 && i + 1 < cut.tiles) product.fetched = 2 * rows - 1;
              brgemm<T, Walk::kUnitRow>(product, static_cast<int>(rows), vectors);
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
  if (work.sums_in_place() || !wait_phase(control, 0, total)) return;
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
