// The weight gradient of a convolution with few input channels, as in a network's first layer.
//
// GEMM view: M = terms (taps x input channels), N = output channels, K = output pixels. It is
// vectorised over output channels, since input channels would not fill a vector. K is split into
// `chunks` of equal numbers of tiles. A task is one chunk of one group for a share of the output
// channels. For each tile, it packs the input region into a slab (channels last, widened,
// zero-padded), in which adjacent taps in W are contiguous and form the rows of a register tile;
// then it packs grad_output a few rows at a time, as many as fit the L1 cache, unless it is stored
// as packed and read in place. Phase 1 sums the chunks in order, applies alpha and beta *
// accumulate and rounds once.
//
// Deterministic: chunks and tiles depend only on the problem. Padding is multiplied as zeros,
// within an output channel.
//
// Requires: a workspace of chunks * groups * terms * padded K accumulators; scratch as laid out in
// plans/cpu_first.py; block[] = {chunks, rows per tile, columns per tile, rows of grad_output per
// cache block, output channels per share (a multiple of a vector)}.
#include "brgemm.hpp"
#include "conv_args.hpp"
#include "matrix_copy.hpp"

namespace convgrad {
namespace {

constexpr int kErrorScratch = 1;

CONVGRAD_INLINE i64 ceil_div(i64 a, i64 b) { return (a + b - 1) / b; }
CONVGRAD_INLINE i64 round_up(i64 a, i64 to) { return ceil_div(a, to) * to; }

// Terms that are contiguous in the slab.
struct Run {
  i64 slab;
  i64 term;
  i64 terms;
};

template <class E>
struct FirstGradient {
  using S = typename E::Storage;
  using T = typename E::Acc;
  static constexpr i64 L = kLanes<T>;

  const ConvArgs& args;
  i64 chunks, tile_rows, tile_columns, group_rows, k_share, k_shares;
  i64 row_tiles, column_tiles, units, terms, padded_k;
  i64 slab_width, slab_rows, slab_plane, y_pixel;
  i64 y_end;  // elements of y that may be read in place
  Run* runs;
  i64 run_count = 0;
  Segment* segments;
  T* slab;
  T* y_tile;
  i64 scratch_needed;

  FirstGradient(const ConvArgs& a, void* scratch)
      : args(a), chunks(a.block[0]), tile_rows(a.block[1]), tile_columns(a.block[2]),
        group_rows(a.block[3]), k_share(a.block[4]) {
    k_shares = ceil_div(a.out_channels, k_share);
    row_tiles = ceil_div(a.output[1], tile_rows);
    column_tiles = ceil_div(a.output[2], tile_columns);
    units = a.batch * a.output[0] * row_tiles * column_tiles;
    const i64 taps = a.kernel[0] * a.kernel[1] * a.kernel[2];
    terms = taps * a.in_channels;
    padded_k = round_up(a.out_channels, L);
    slab_width = ((tile_columns - 1) * a.stride[2] + (a.kernel[2] - 1) * a.dilation[2] + 1) *
                 a.in_channels;
    slab_rows = (tile_rows - 1) * a.stride[1] + (a.kernel[1] - 1) * a.dilation[1] + 1;
    slab_plane = slab_rows * slab_width;
    // An odd number of cache lines spreads pixels over all L1 cache sets.
    const i64 line = 64 / static_cast<i64>(sizeof(T));
    y_pixel = (ceil_div(k_share, line) | 1) * line;
    y_end = in_place<E>(a.y) ? span(a.y, a.batch, a.groups, a.out_channels, a.output) : 0;
    char* at = static_cast<char*>(scratch);
    const auto take = [&](i64 bytes) {
      char* p = at;
      at += round_up(bytes, 64);
      return p;
    };
    const i64 size = static_cast<i64>(sizeof(T));
    runs = reinterpret_cast<Run*>(take(taps * static_cast<i64>(sizeof(Run))));
    segments = reinterpret_cast<Segment*>(take(group_rows * static_cast<i64>(sizeof(Segment))));
    slab = reinterpret_cast<T*>(take(a.kernel[0] * slab_plane * size));
    y_tile = reinterpret_cast<T*>(take(group_rows * tile_columns * y_pixel * size));
    scratch_needed = at - static_cast<char*>(scratch);
    if (scratch_needed > a.scratch_bytes) return;
    for (i64 t = 0; t < a.kernel[0]; ++t) {
      for (i64 r = 0; r < a.kernel[1]; ++r) {
        for (i64 s = 0; s < a.kernel[2]; ++s) {
          const i64 from = t * slab_plane + r * a.dilation[1] * slab_width +
                           s * a.dilation[2] * a.in_channels;
          Run* last = run_count > 0 ? runs + run_count - 1 : nullptr;
          if (last != nullptr && last->slab + last->terms == from) {
            last->terms += a.in_channels;
            continue;
          }
          const i64 term = ((t * a.kernel[1] + r) * a.kernel[2] + s) * a.in_channels;
          runs[run_count++] = Run{from, term, a.in_channels};
        }
      }
    }
  }

  i64 partial() const { return args.groups * terms * padded_k; }
  T* partial_of(i64 chunk, i64 g) const {
    return static_cast<T*>(args.workspace) + chunk * partial() + g * terms * padded_k;
  }

  void run_chunk(i64 g, i64 chunk, i64 share) const {
    const i64 k0 = share * k_share, k_count = least(k_share, args.out_channels - k0);
    T* sums = partial_of(chunk, g) + k0;
    for (i64 term = 0; term < terms; ++term) {
      __builtin_memset(sums + term * padded_k, 0,
                       static_cast<u64>(round_up(k_count, L)) * sizeof(T));
    }
    const i64 stop = units * (chunk + 1) / chunks;
    for (i64 unit = units * chunk / chunks; unit < stop; ++unit) {
      i64 rest = unit;
      const i64 q0 = rest % column_tiles * tile_columns;
      rest /= column_tiles;
      const i64 p0 = rest % row_tiles * tile_rows;
      rest /= row_tiles;
      const i64 z = rest % args.output[0], n = rest / args.output[0];
      const i64 rows = least(tile_rows, args.output[1] - p0);
      const i64 columns = least(tile_columns, args.output[2] - q0);
      pack_slab(n, g, z, p0, q0, rows, columns);
      for (i64 first = 0; first < rows; first += group_rows) {
        const i64 group = least(group_rows, rows - first);
        const Rows y = y_of(n, g, z, p0 + first, q0, group, columns, k0, k_count);
        multiply(slab + first * args.stride[1] * slab_width, y, group, columns, k_count, sums);
      }
    }
  }

  void pack_slab(i64 n, i64 g, i64 z, i64 p0, i64 q0, i64 rows, i64 columns) const {
    const View& x = args.x;
    const S* base = static_cast<const S*>(x.data) + n * x.stride[0] + g * x.stride[1];
    const i64 width = (columns - 1) * args.stride[2] + (args.kernel[2] - 1) * args.dilation[2] + 1;
    const i64 height = (rows - 1) * args.stride[1] + (args.kernel[1] - 1) * args.dilation[1] + 1;
    const i64 left = q0 * args.stride[2] - args.pad[2];
    const i64 begin = least(most(left, 0), left + width);
    const i64 end = most(least(left + width, args.input[2]), begin);
    const i64 channels = args.in_channels;
    for (i64 t = 0; t < args.kernel[0]; ++t) {
      const i64 d = z * args.stride[0] + t * args.dilation[0] - args.pad[0];
      for (i64 i = 0; i < height; ++i) {
        const i64 h = p0 * args.stride[1] - args.pad[1] + i;
        T* row = slab + t * slab_plane + i * slab_width;
        if (d < 0 || d >= args.input[0] || h < 0 || h >= args.input[1]) {
          __builtin_memset(row, 0, static_cast<u64>(width * channels) * sizeof(T));
          continue;
        }
        __builtin_memset(row, 0, static_cast<u64>((begin - left) * channels) * sizeof(T));
        read_matrix<E>(base + d * x.stride[3] + h * x.stride[4] + begin * x.stride[5], x.stride[5],
                       x.stride[2], end - begin, channels, row + (begin - left) * channels,
                       channels);
        __builtin_memset(row + (end - left) * channels, 0,
                         static_cast<u64>((left + width - end) * channels) * sizeof(T));
      }
    }
  }

  // Rows of grad_output: the first element, and the steps from row to row and pixel to pixel.
  struct Rows {
    const T* data;
    i64 row;
    i64 pixel;
  };

  // In place, the last vector of a pixel's channels extends into the next pixel: into columns of
  // the product that nobody reads, but not beyond the tensor.
  Rows y_of(i64 n, i64 g, i64 z, i64 p0, i64 q0, i64 rows, i64 columns, i64 k0,
            i64 k_count) const {
    const View& y = args.y;
    const i64 at = n * y.stride[0] + g * y.stride[1] + k0 * y.stride[2] + z * y.stride[3] +
                   p0 * y.stride[4] + q0 * y.stride[5];
    const S* from = static_cast<const S*>(y.data) + at;
    if (at + (rows - 1) * y.stride[4] + (columns - 1) * y.stride[5] + round_up(k_count, L) <=
        y_end) {
      return {reinterpret_cast<const T*>(from), y.stride[4], y.stride[5]};
    }
    const bool joined = y.stride[4] == columns * y.stride[5];
    const i64 at_once = joined ? rows : 1;
    for (i64 i = 0; i < rows; i += at_once) {
      read_matrix<E>(from + i * y.stride[4], y.stride[5], y.stride[2], at_once * columns, k_count,
                     y_tile + i * columns * y_pixel, y_pixel);
    }
    return {y_tile, columns * y_pixel, y_pixel};
  }

  void multiply(const T* under, const Rows& y, i64 rows, i64 columns, i64 k_count,
                T* sums) const {
    for (i64 i = 0; i < rows; ++i) {
      segments[i] = Segment{i * args.stride[1] * slab_width, i * y.row, columns};
    }
    for (i64 k = 0; k < k_count; k += kTileColumns<T>) {
      const int vectors = k_count - k > L ? 2 : 1;
      for (const Run* run = runs; run < runs + run_count; ++run) {
        const Cut cut = cut_rows(run->terms, kTileRows);
        i64 term = 0;
        for (i64 tile = 0; tile < cut.tiles; ++tile) {
          const i64 count = cut.base + (tile < cut.extra);
          const Product<T> product{under + run->slab + term,
                                   1,
                                   args.stride[2] * args.in_channels,
                                   y.data + k,
                                   y.pixel,
                                   segments,
                                   rows,
                                   sums + (run->term + term) * padded_k + k,
                                   padded_k,
                                   true,
                                   0,
                                   0};
          brgemm<T, Walk::kUnitRow>(product, static_cast<int>(count), vectors);
          term += count;
        }
      }
    }
  }

  // Sums the chunks for a vector of output channels and writes the result type.
  template <class R>
  void reduce(i64 g, i64 k0) const {
    const View& w = args.w;
    const View& add = args.accumulate;
    const bool adds = add.data != nullptr && args.beta != 0;
    const T alpha = static_cast<T>(args.alpha), beta = static_cast<T>(args.beta);
    const i64 count = least(L, args.out_channels - k0);
    const auto offset = [&](const View& view, i64 term) {
      const i64 c = term % args.in_channels, tap = term / args.in_channels;
      const i64 s = tap % args.kernel[2], r = tap / args.kernel[2] % args.kernel[1];
      const i64 t = tap / args.kernel[2] / args.kernel[1];
      return g * view.stride[0] + k0 * view.stride[1] + c * view.stride[2] + t * view.stride[3] +
             r * view.stride[4] + s * view.stride[5];
    };
    for (i64 term = 0; term < terms; ++term) {
      const i64 at = term * padded_k + k0;
      Vec<T> sum = load_raw<Vec<T>>(partial_of(0, g) + at);
      for (i64 chunk = 1; chunk < chunks; ++chunk) {
        sum += load_raw<Vec<T>>(partial_of(chunk, g) + at);
      }
      sum *= alpha;
      auto* result = static_cast<typename R::Storage*>(w.data) + offset(w, term);
      const auto* more = static_cast<const typename R::Storage*>(add.data) + offset(add, term);
      for (i64 k = 0; k < count; ++k) {
        T value = sum[k];
        if (adds) value += beta * static_cast<T>(load_one<R>(more + k * add.stride[1]));
        store_one<R>(result + k * w.stride[1], value);
      }
    }
  }
};

template <class E>
void first_gradient(const ConvArgs& args, Control* control, void* scratch) {
  using T = typename E::Acc;
  const FirstGradient<E> work(args, scratch);
  const i64 workspace_needed = work.chunks * work.partial() * static_cast<i64>(sizeof(T));
  if (work.scratch_needed > args.scratch_bytes || workspace_needed > args.workspace_bytes) {
    __atomic_store_n(&control->error, kErrorScratch, __ATOMIC_RELAXED);
    return;
  }
  const i64 total = args.groups * work.chunks * work.k_shares;
  for (i64 task; (task = take_task(control, 0, total)) >= 0;) {
    const i64 rest = task / work.k_shares;
    work.run_chunk(rest / work.chunks, rest % work.chunks, task % work.k_shares);
    finish_task(control, 0);
  }
  if (!wait_phase(control, 0, total)) return;
  const i64 vectors = ceil_div(args.out_channels, work.L);
  for (i64 task; (task = take_task(control, 1, args.groups * vectors)) >= 0;) {
    const i64 g = task / vectors, k0 = task % vectors * work.L;
    if (args.result_dtype == args.dtype) {
      work.template reduce<E>(g, k0);
    } else if constexpr (sizeof(T) == sizeof(float)) {
      work.template reduce<F32>(g, k0);
    }
  }
}

}  // namespace
}  // namespace convgrad

extern "C" CONVGRAD_EXPORT void convgrad_first_bwd_weight(const convgrad::ConvArgs* args,
                                                          convgrad::Control* control,
                                                          void* scratch) {
  using namespace convgrad;
  switch (args->dtype) {
    case kFloat16: return first_gradient<F16>(*args, control, scratch);
    case kBfloat16: return first_gradient<BF16>(*args, control, scratch);
    case kFloat32: return first_gradient<F32>(*args, control, scratch);
    case kFloat64: return first_gradient<F64>(*args, control, scratch);
  }
}
