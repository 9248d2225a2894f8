// Dense convolution forward, and its gradient with respect to the input, as one "gather":
//
//   result[n, g, j, u] = alpha * sum over taps t, channels c of
//                            source[n, g, c, u's coordinate at t] * weight[g, j, c, t]
//                        + beta * accumulate + bias[g, j]
//
// Forward: result coordinate u reads source coordinate u * stride + t * dilation - pad. Backward
// data: u reads (u + pad - t * dilation) / stride if that is an integer. So u has `stride` phases
// per dimension, each a gather with unit step over a subset of the taps; no inserted zeros are
// multiplied.
//
// GEMM view: M = result pixels of one row and phase, N = result channels, K = taps x source
// channels. A task computes one tile of pixels for some channel blocks. It packs the source region
// of the tile into a slab (channels last, widened, zero-padded in W), runs brgemm_tile for each
// row, and writes the staged tile in the result's layout. Rows and planes outside the tensor are
// skipped, not multiplied. A source that is stored as the slab would be, and of which no tap reads
// beyond the ends of a row, is read in place, and a result that is stored as the stage is, is
// written at once. If rows are short, a task computes two images, whose rows share a register tile.
//
// Phase 0 packs the weights into panels [tap][source channel][tile columns].
//
// Deterministic: each result is summed in the order of taps and channels, in the blocks of
// brgemm.hpp, independent of tiles and threads.
//
// Requires: a workspace of groups * blocks * taps * channels * tile columns accumulators; scratch
// as laid out in the constructor; block[] = {tile planes, tile rows, tile columns (in steps of the
// phases), channel blocks per task, slab pixel pitch, images per task: 1 or 2}; a slab of fewer than
// 2^62 elements.
#include "brgemm.hpp"
#include "gather_axis.hpp"
#include "weight_panel.hpp"

namespace convgrad {
namespace {

constexpr int kErrorScratch = 1;
constexpr i64 kPassBytes = 160 * 1024;
constexpr i64 kFetchedBytes = 4096;  // how far ahead of its stores a result's lines are fetched

template <class E>
struct Gather {
  using S = typename E::Storage;
  using T = typename E::Acc;
  static constexpr i64 kColumns = kTileColumns<T>;

  const ConvArgs& args;
  Axis d, h, w;
  View source, weight, result;  // weight dimensions 1 and 2: result and source channels
  i64 source_channels, result_channels, blocks, taps;
  bool reads_in_place;
  i64 images, pixel, slab_row, slab_plane, slab_image;
  i64 stage_w, stage_h;  // tile pixels along W and H
  i64 stage_image;       // elements
  T* panels;
  i64 panel;  // elements of one panel
  Segment* segments;
  T* slab;
  T* stage;

  Gather(const ConvArgs& a, bool backward, void* scratch)
      : args(a), d(make_axis(a, 0, backward)), h(make_axis(a, 1, backward)),
        w(make_axis(a, 2, backward)), source(backward ? a.y : a.x), weight(a.w),
        result(backward ? a.x : a.y) {
    source_channels = backward ? a.out_channels : a.in_channels;
    result_channels = backward ? a.in_channels : a.out_channels;
    if (backward) {
      const i64 swap = weight.stride[1];
      weight.stride[1] = weight.stride[2];
      weight.stride[2] = swap;
    }
    blocks = (result_channels + kColumns - 1) / kColumns;
    taps = d.taps * h.taps * w.taps;
    const i64 last_step = (w.result + w.phases - 1) / w.phases - 1;
    reads_in_place = in_place<E>(source) && w.lowest >= 0 &&
                     last_step * w.step + w.highest < w.source;
    images = least(a.block[5], a.batch);
    pixel = reads_in_place ? source.stride[5] : a.block[4];
    slab_row = reads_in_place ? source.stride[4] : w.slab() * pixel;
    slab_plane = reads_in_place ? source.stride[3] : h.slab() * slab_row;
    slab_image = reads_in_place ? source.stride[0] : d.slab() * slab_plane;
    stage_w = least(w.tile * w.phases, w.result);
    stage_h = least(h.tile * h.phases, h.result);
    stage_image = least(d.tile * d.phases, d.result) * stage_h * stage_w * kColumns;
    panels = static_cast<T*>(a.workspace);
    panel = taps * source_channels * kColumns;
    // Scratch: segments, slab, stage, each 64-byte aligned.
    char* at = static_cast<char*>(scratch);
    segments = reinterpret_cast<Segment*>(at);
    at += (taps * static_cast<i64>(sizeof(Segment)) + 63) / 64 * 64;
    slab = reinterpret_cast<T*>(at);
    const i64 packed = d.slab() * h.slab() * w.slab() * a.block[4];
    at += (images * packed * static_cast<i64>(sizeof(T)) + 127) / 64 * 64;
    stage = reinterpret_cast<T*>(at);
    at += images * stage_image * static_cast<i64>(sizeof(T));
    scratch_needed = at - static_cast<char*>(scratch);
  }
  i64 scratch_needed;
  i64 workspace_needed() const {
    return args.groups * blocks * panel * static_cast<i64>(sizeof(T));
  }

  // Vectors of a block's channels: the rows of its panel are as wide, within room for full ones.
  int vectors_of(i64 block) const {
    return result_channels - block * kColumns > kLanes<T> ? kTileVectors : 1;
  }

  void pack_panel(i64 g, i64 block) const {
    const i64 first = block * kColumns;
    const S* from = static_cast<const S*>(weight.data) + g * weight.stride[0] +
                    first * weight.stride[1];
    pack_weights<E>(from, weight, args.kernel, source_channels,
                    least(kColumns, result_channels - first), vectors_of(block) * kLanes<T>,
                    w.backward, panels + (g * blocks + block) * panel);
  }

  // Returns the source region of one tile, packed into the slab of the task's `image`-th image if it
  // is not read in place.
  const T* region_of(i64 n, i64 image, i64 g, i64 d0, i64 h0, i64 w0, i64 w_steps) const {
    const S* base =
        static_cast<const S*>(source.data) + (n + image) * source.stride[0] + g * source.stride[1];
    T* const region = slab + image * slab_image;
    if (reads_in_place) {
      return reinterpret_cast<const T*>(base + (d0 * d.step + d.lowest) * slab_plane +
                                        (h0 * h.step + h.lowest) * slab_row +
                                        (w0 * w.step + w.lowest) * pixel);
    }
    const i64 width = (w_steps - 1) * w.step + w.highest - w.lowest + 1;
    const i64 left = w0 * w.step + w.lowest;  // source coordinate of the slab's first column
    const i64 begin = least(most(left, 0), left + width);
    const i64 end = most(least(left + width, w.source), begin);
    for (i64 z = 0; z < d.slab(); ++z) {
      const i64 source_d = d0 * d.step + d.lowest + z;
      if (source_d < 0 || source_d >= d.source || !d.reads(z)) continue;
      for (i64 y = 0; y < h.slab(); ++y) {
        const i64 source_h = h0 * h.step + h.lowest + y;
        if (source_h < 0 || source_h >= h.source || !h.reads(y)) continue;
        T* row = region + z * slab_plane + y * slab_row;
        const i64 before = begin - left, after = left + width - end;
        __builtin_memset(row, 0, before * pixel * sizeof(T));
        read_matrix<E>(base + source_d * source.stride[3] + source_h * source.stride[4] +
                           begin * source.stride[5],
                       source.stride[5], source.stride[2], end - begin, source_channels,
                       row + before * pixel, pixel);
        __builtin_memset(row + (before + end - begin) * pixel, 0, after * pixel * sizeof(T));
      }
    }
    return region;
  }

  // Lists the given taps' rows [low, high) of a panel, without taps that read only padding in all
  // steps from `first_step` to `last_step` along W. Taps that are contiguous in both slab and panel
  // are merged into one segment.
  i64 list_taps(Progression t, const Progression& taps_h, const Progression& taps_w, i64 first_step,
                i64 last_step, i64 low, i64 high) const {
    i64 count = 0;
    for (; t.count > 0; t.advance()) {
      for (Progression r = taps_h; r.count > 0; r.advance()) {
        for (Progression s = taps_w; s.count > 0; s.advance()) {
          if (last_step * w.step + s.base < 0 || first_step * w.step + s.base >= w.source) continue;
          const i64 a = (t.base - d.lowest) * slab_plane + (r.base - h.lowest) * slab_row +
                        (s.base - w.lowest) * pixel;
          const i64 tap = (t.tap * h.taps + r.tap) * w.taps + s.tap;
          const i64 b = (w.backward ? taps - 1 - tap : tap) * source_channels;
          const i64 begin = most(b, low), rows = least(b + source_channels, high) - begin;
          if (rows <= 0) continue;
          if (count > 0) {
            Segment& last = segments[count - 1];
            if (last.a + last.k == a + begin - b && last.b + last.k == begin) {
              last.k += rows;
              continue;
            }
          }
          segments[count++] = Segment{a + begin - b, begin, rows};
        }
      }
    }
    return count;
  }

  template <int lines>  // images, from n on
  void run_tile(i64 n, i64 g, i64 td, i64 th, i64 tw, i64 first_block, i64 last_block) const {
    const i64 d0 = td * d.tile, h0 = th * h.tile, w0 = tw * w.tile;
    const i64 w_steps = least(w.tile, (w.result + w.phases - 1) / w.phases - w0);
    const T* region = region_of(n, 0, g, d0, h0, w0, w_steps);
    if (lines == 2) region_of(n, 1, g, d0, h0, w0, w_steps);
    const i64 ud0 = d0 * d.phases, ud1 = least(ud0 + d.tile * d.phases, d.result);
    const i64 uh0 = h0 * h.phases, uh1 = least(uh0 + h.tile * h.phases, h.result);
    const i64 uw0 = w0 * w.phases, uw1 = least(uw0 + w.tile * w.phases, w.result);
    const i64 width = uw1 - uw0;
    // Rows of pixels with contiguous channels are written as soon as they are computed.
    const bool in_rows = result.stride[2] == 1;
    const bool far = w.taps > 1 && 2 * w.apart() >= kTileRows;
    const bool at_once = in_rows && sizeof(S) == sizeof(T) && args.alpha == 1 &&
                         !args.bias.data && !(args.accumulate.data && args.beta != 0);
    // Of a large panel, all rows of the tile multiply what fits the L2 cache beside the slab, before
    // the next part. A row that is staged alone takes the whole panel.
    constexpr i64 size = sizeof(T);
    const i64 panel_rows = taps * source_channels;
    const i64 parts = at_once || !in_rows ? (panel * size + kPassBytes - 1) / kPassBytes : 1;
    const i64 pass = ((panel_rows + parts - 1) / parts + kBlock - 1) / kBlock * kBlock;
    i64 segment_count = 0;
    Progression listed_d{}, listed_h{};
    bool again = true;
    for (i64 block = first_block; block < last_block; ++block) {
      const i64 columns = least(kColumns, result_channels - block * kColumns);
      const int vectors = vectors_of(block);
      const i64 ahead = most(kTileRows, kFetchedBytes / (columns * static_cast<i64>(sizeof(S))));
      const i64 stored = at_once ? result.stride[5] : kColumns;
      Product<T> product{nullptr, w.step * pixel, 1,
                         panels + (g * blocks + block) * panel, 0, segments, segment_count,
                         nullptr, w.phases * stored, false, slab_image,
                         at_once ? result.stride[0] : stage_image};
      if (at_once) product.last = static_cast<int>(columns - (vectors - 1) * kLanes<T>);
      for (i64 low = 0; low < panel_rows; low += pass) {
        product.adds = low > 0;
        again = true;
        for (i64 ud = ud0; ud < ud1; ++ud) {
          const i64 jd = ud / d.phases;
          const Progression taps_d = d.inside(d.taps_of(ud % d.phases), jd);
          for (i64 uh = uh0; uh < uh1; ++uh) {
            const i64 jh = uh / h.phases;
            const Progression taps_h = h.inside(h.taps_of(uh % h.phases), jh);
            const T* from = region + (jd - d0) * d.step * slab_plane + (jh - h0) * h.step * slab_row;
            T* row = stage + (in_rows ? 0 : ((ud - ud0) * stage_h + uh - uh0) * width * kColumns);
            if (at_once) row = reinterpret_cast<T*>(result_at(n, g, block, ud, uh, uw0));
            // Most rows have the taps of the one before.
            again = again || far || w.phases > 1 || !taps_d.same(listed_d) || !taps_h.same(listed_h);
            for (i64 fw = 0; fw < w.phases && uw0 + fw < uw1; ++fw) {
              const i64 steps = (width - fw + w.phases - 1) / w.phases;
              const Progression taps_w = w.taps_of(fw);
              for (i64 j = 0; j < steps;) {
                // Taps far apart reach padding in other steps: each run of steps has its own list.
                const i64 until = far ? least(steps, w.unchanged(taps_w, w0 + j) - w0) : steps;
                if (again || far) {
                  segment_count = list_taps(taps_d, taps_h, taps_w, w0 + j, w0 + until - 1, low,
                                            low + pass);
                  product.segment_count = segment_count;
                }
                if (low > 0 && segment_count == 0) {
                  j = until;
                  continue;
                }
                const Cut cut = cut_rows(until - j, kTileRows / lines);
                for (i64 tile = 0; tile < cut.tiles; ++tile) {
                  const i64 rows = cut.base + (tile < cut.extra);
                  product.a = from + j * w.step * pixel;
                  product.c = row + (fw + j * w.phases) * stored;
                  if (in_rows && low == 0) {
                    fetch_pixels<lines>(n, g, block, columns, ud, uh,
                                        uw0 + fw + (at_once ? j + ahead : j) * w.phases, rows);
                  }
                  brgemm<T, Walk::kUnitStep, lines>(product, static_cast<int>(lines * rows), vectors);
                  j += rows;
                }
              }
            }
            again = false;
            listed_d = taps_d;
            listed_h = taps_h;
            if (in_rows && !at_once) {
              write_tile(lines, n, g, block, columns, ud, ud + 1, uh, uh + 1, uw0, width);
            }
          }
        }
      }
      if (!in_rows) write_tile(lines, n, g, block, columns, ud0, ud1, uh0, uh1, uw0, width);
    }
  }

  S* result_at(i64 n, i64 g, i64 block, i64 ud, i64 uh, i64 uw) const {
    return static_cast<S*>(result.data) + n * result.stride[0] + g * result.stride[1] +
           block * kColumns * result.stride[2] + ud * result.stride[3] + uh * result.stride[4] +
           uw * result.stride[5];
  }

  // Announces the writing of pixels, steps of a phase from `uw` on, while others are computed. Those
  // past the end of a row are mostly the first of the next.
  template <int lines>
  CONVGRAD_INLINE void fetch_pixels(i64 n, i64 g, i64 block, i64 columns, i64 ud, i64 uh, i64 uw,
                                    i64 count) const {
    constexpr i64 kLine = 64 / sizeof(S);
    for (int line = 0; line < lines; ++line) {
      const S* at = result_at(n + line, g, block, ud, uh, uw);
      for (i64 i = 0; i < count; ++i, at += w.phases * result.stride[5]) {
        for (i64 c = 0; c < columns; c += kLine) __builtin_prefetch(at + c, 1);
      }
    }
  }

  void write_tile(int lines, i64 n0, i64 g, i64 block, i64 columns, i64 ud0, i64 ud1, i64 uh0,
                  i64 uh1, i64 uw0, i64 width) const {
    const i64 channel = block * kColumns;
    const bool adds = args.accumulate.data != nullptr && args.beta != 0;
    const View& add = args.accumulate;
    Destination<E> to{};
    to.row = result.stride[5];
    to.column = result.stride[2];
    to.accumulate_row = add.stride[5];
    to.accumulate_column = add.stride[2];
    to.alpha = static_cast<T>(args.alpha);
    to.beta = static_cast<T>(args.beta);
    if (args.bias.data) {
      to.bias = static_cast<const S*>(args.bias.data) + g * args.bias.stride[0] +
                channel * args.bias.stride[1];
      to.bias_column = args.bias.stride[1];
    }
    // If rows are contiguous in all tensors, they are written as one.
    const bool joined = result.stride[4] == result.stride[5] * width &&
                        (!adds || add.stride[4] == add.stride[5] * width);
    const i64 at_once = joined ? uh1 - uh0 : 1;
    for (i64 n = n0; n < n0 + lines; ++n) {
      const T* staged = stage + (n - n0) * stage_image;
      for (i64 ud = ud0; ud < ud1; ++ud) {
        for (i64 uh = uh0; uh < uh1; uh += at_once) {
          to.result = result_at(n, g, block, ud, uh, uw0);
          to.accumulate = nullptr;
          if (adds) {
            to.accumulate = static_cast<const S*>(add.data) + n * add.stride[0] +
                            g * add.stride[1] + channel * add.stride[2] + ud * add.stride[3] +
                            uh * add.stride[4] + uw0 * add.stride[5];
          }
          const T* row = staged + ((ud - ud0) * stage_h + uh - uh0) * width * kColumns;
          write_matrix<E>(row, kColumns, at_once * width, columns, to);
        }
      }
    }
  }
};

template <class E>
void gather(const ConvArgs& args, bool backward, Control* control, void* scratch) {
  const Gather<E> work(args, backward, scratch);
  if (work.scratch_needed > args.scratch_bytes || work.workspace_needed() > args.workspace_bytes) {
    __atomic_store_n(&control->error, kErrorScratch, __ATOMIC_RELAXED);
    return;
  }
  const i64 panels = args.groups * work.blocks;
  for (i64 task; (task = take_task(control, 0, panels)) >= 0;) {
    work.pack_panel(task / work.blocks, task % work.blocks);
    finish_task(control, 0);
  }
  if (!wait_phase(control, 0, panels)) return;
  const i64 per_task = args.block[3];
  const i64 shares = (work.blocks + per_task - 1) / per_task;
  const i64 tiles = work.d.tiles * work.h.tiles * work.w.tiles;
  const i64 total = (args.batch + work.images - 1) / work.images * args.groups * tiles * shares;
  for (i64 task; (task = take_task(control, 1, total)) >= 0;) {
    i64 rest = task;
    const i64 share = rest % shares;
    rest /= shares;
    const i64 tw = rest % work.w.tiles;
    rest /= work.w.tiles;
    const i64 th = rest % work.h.tiles;
    rest /= work.h.tiles;
    const i64 td = rest % work.d.tiles;
    rest /= work.d.tiles;
    const i64 n = rest / args.groups * work.images, g = rest % args.groups;
    const i64 first = share * per_task, last = least(first + per_task, work.blocks);
    if (least(work.images, args.batch - n) == 2) {
      work.template run_tile<2>(n, g, td, th, tw, first, last);
    } else {
      work.template run_tile<1>(n, g, td, th, tw, first, last);
    }
  }
}

void gather_any(const ConvArgs& args, bool backward, Control* control, void* scratch) {
  switch (args.dtype) {
    case kFloat16:
      return gather<F16>(args, backward, control, scratch);
    case kBfloat16:
      return gather<BF16>(args, backward, control, scratch);
    case kFloat32:
      return gather<F32>(args, backward, control, scratch);
    case kFloat64:
      return gather<F64>(args, backward, control, scratch);
  }
}

}  // namespace
}  // namespace convgrad

extern "C" CONVGRAD_EXPORT void convgrad_dense_fwd(const convgrad::ConvArgs* args,
                                                   convgrad::Control* control, void* scratch) {
  convgrad::gather_any(*args, false, control, scratch);
}

extern "C" CONVGRAD_EXPORT void convgrad_dense_bwd_data(const convgrad::ConvArgs* args,
                                                        convgrad::Control* control,
                                                        void* scratch) {
  convgrad::gather_any(*args, true, control, scratch);
}
