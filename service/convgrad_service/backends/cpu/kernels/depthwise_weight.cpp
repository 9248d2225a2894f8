// Depthwise convolution: backward weight.
//
// A task is a few vectors of channels, for one of `splits` parts of the images and tiles of
// positions. It packs input and grad_output into blocks (depthwise.hpp), one per vector, sums the
// taps of a run over a tile in registers, loading each input vector once for all taps that use it,
// and adds them to the split's partial sums [tap][channel] in the workspace. A second phase sums
// the splits in order, applies alpha and beta * accumulate and rounds once.
//
// Requires: PlanarArgs with one input and output channel per group and dst = grad_output; tile,
// scratch and splits from plans/cpu_depthwise.py; a workspace of splits * taps * groups
// accumulators, groups rounded up to full vectors. Deterministic: the splits depend only on the
// problem. Padding along W and columns past the end of a row are multiplied as zeros, within a
// channel.
#include "depthwise.hpp"

namespace convgrad {
namespace {

// The rows of grad_output in a tile, and the input rows that one run of taps multiplies them with.
template <class T>
struct Meeting {
  const T* y;
  const T* x;
  i64 y_row;  // row pitches, in elements
  i64 x_row;
  i64 rows;
  i64 columns;  // a multiple of Q
  i64 step;     // input columns from one column to the next
};

// sums[s] += sum over rows and columns of the input at tap s times grad_output. Even and odd
// columns have separate accumulators, so that multiply-adds overlap.
template <class T, int Q, int S>
void contract_run(const Meeting<T>& met, T* sums) {
  constexpr int L = kLanes<T>;
  Vec<T> sum[S][2];
#pragma clang loop unroll(full)
  for (int s = 0; s < S; ++s) sum[s][0] = sum[s][1] = splat(T(0));
  for (i64 i = 0; i < met.rows; ++i) {
    const T* y = met.y + i * met.y_row;
    const T* x = met.x + i * met.x_row;
    for (i64 t = 0; t < met.columns; t += Q, y += Q * L, x += Q * met.step * L) {
      Vec<T> gradient[Q];
#pragma clang loop unroll(full)
      for (int q = 0; q < Q; ++q) gradient[q] = load_raw<Vec<T>>(y + q * L);
      if (met.step == 1) {
#pragma clang loop unroll(full)
        for (int c = 0; c < Q + S - 1; ++c) {
          const Vec<T> value = load_raw<Vec<T>>(x + c * L);
#pragma clang loop unroll(full)
          for (int s = 0; s < S; ++s) {
            const int q = c - s;
            if (q >= 0 && q < Q) sum[s][q % 2] += value * gradient[q];
          }
        }
      } else {
#pragma clang loop unroll(full)
        for (int q = 0; q < Q; ++q) {
#pragma clang loop unroll(full)
          for (int s = 0; s < S; ++s) {
            sum[s][q % 2] += load_raw<Vec<T>>(x + (q * met.step + s) * L) * gradient[q];
          }
        }
      }
    }
  }
#pragma clang loop unroll(full)
  for (int s = 0; s < S; ++s) {
    T* to = sums + s * L;
    store_raw(to, load_raw<Vec<T>>(to) + (sum[s][0] + sum[s][1]));
  }
}

template <class T, int Q, int S = kRunTaps>
CONVGRAD_INLINE void contract_any_run(i64 taps, const Meeting<T>& met, T* sums) {
  if (taps == S) {
    contract_run<T, Q, S>(met, sums);
  } else if constexpr (S > 1) {
    contract_any_run<T, Q, S - 1>(taps, met, sums);
  }
}

// Sums the splits for one tap and block of channels, and writes the result.
template <class E, class Result>
void finish_tap(const PlanarArgs& args, const typename E::Acc* sums, i64 each, i64 block, i64 i) {
  using T = typename E::Acc;
  using R = typename Result::Storage;
  const T alpha = static_cast<T>(args.alpha), beta = static_cast<T>(args.beta);
  R* weights = static_cast<R*>(args.weight.data) + args.tap[i].weight;
  const R* add = args.beta != 0.0 ? static_cast<const R*>(args.accumulate.data) : nullptr;
  constexpr int L = kLanes<T>;
  Vec<T> total = splat(T(0));
  for (i64 split = 0; split < args.splits; ++split) {
    total += load_raw<Vec<T>>(sums + split * each);
  }
  total *= alpha;
  for (i64 c = 0; c < L && block * L + c < args.groups; ++c) {
    const i64 at = (block * L + c) * args.weight.stride[0];
    T sum = total[c];
    // The host ensures that accumulate has the strides of the weight.
    if (add != nullptr) {
      sum += beta * static_cast<T>(load_one<Result>(add + args.tap[i].weight + at));
    }
    store_one<Result>(weights + at, sum);
  }
}

template <class E, class Result>
void contract_blocks(const PlanarArgs& args, Control* control, void* scratch) {
  using T = typename E::Acc;
  using S = typename E::Storage;
  constexpr i64 L = kLanes<T>;
  Arena arena{static_cast<char*>(scratch)};
  const Runs runs = make_runs(args, arena);
  const i64 together = columns_together(args.tile[2]);
  const i64 y_width = ceil_div(args.tile[2], together) * together;
  const i64 gradient_block = args.tile[0] * args.tile[1] * y_width * L;
  i64 positions = 1;
  for (int d = 0; d < 3; ++d) {
    positions *= (args.tile[d] - 1) * args.src_step[d] + runs.high[d] - runs.low[d] + 1;
  }
  const i64 source_block = (positions + kWide * args.src_step[2]) * L;
  const i64 vectors = args.group_block / L;
  T* gradient = arena.take<T>(vectors * gradient_block);
  T* source = arena.take<T>(vectors * source_block);

  const i64 units = args.batch * tiles_of(args);
  const i64 parts = ceil_div(args.groups, args.group_block), tasks = parts * args.splits;
  T* partials = static_cast<T*>(args.workspace);
  const i64 blocks = ceil_div(args.groups, L), of_block = args.taps * L;
  const i64 each = blocks * of_block;
  for (i64 task; (task = take_task(control, 0, tasks)) >= 0;) {
    // Channels are innermost in task order: contiguous channels share cache lines.
    const i64 block = task % parts, split = task / parts;
    const i64 held = least(vectors, blocks - block * vectors);
    T* sums = partials + split * each + block * vectors * of_block;
    fill_zero(sums, held * of_block);
    const i64 last = (split + 1) * units / args.splits;
    for (i64 unit = split * units / args.splits; unit < last; ++unit) {
      const TileOrigin tile = tile_at(args, block, unit);
      i64 first[3], extent[3];
      for (int d = 0; d < 3; ++d) {
        first[d] = tile.start[d] * args.src_step[d] + runs.low[d];
        extent[d] = (tile.extent[d] - 1) * args.src_step[d] + runs.high[d] - runs.low[d] + 1;
      }
      // Input read by columns past a row's end is multiplied by zeros, so it must be finite.
      read_source_blocks<E>(args, tile, first, extent, kWide * args.src_step[2], source,
                            source_block);
      const i64 width = tile.extent[2];
      const View& y = args.dst;
      const bool whole = y.stride[4] == width * y.stride[5];
      const i64 rows = whole ? tile.extent[1] : 1;
      for (i64 v0 = 0; v0 < tile.extent[0]; ++v0) {
        for (i64 v1 = 0; v1 < tile.extent[1]; v1 += rows) {
          read_positions<E>(block_at<const S>(y, tile, tile.start[0] + v0, tile.start[1] + v1,
                                              tile.start[2]),
                            y, tile.groups, rows * width, width,
                            gradient + (v0 * tile.extent[1] + v1) * y_width * L, y_width,
                            gradient_block);
        }
      }
      for (i64 c = 0; c < held; ++c) {
        for (i64 v = 0; width < y_width && v < tile.extent[0] * tile.extent[1]; ++v) {
          fill_zero(gradient + c * gradient_block + (v * y_width + width) * L,
                    (y_width - width) * L);
        }
      }
      for (i64 j = 0; j < runs.first[1]; ++j) {
        const TapRun& run = runs.run[j];
        for (i64 v0 = 0; v0 < tile.extent[0]; ++v0) {
          const i64 u0 = (tile.start[0] + v0) * args.src_step[0] + run.source[0];
          if (u0 < 0 || u0 >= args.src_size[0]) continue;
          // Range of tile rows whose input row is inside the tensor.
          const i64 base = tile.start[1] * args.src_step[1] + run.source[1];
          const i64 low = base >= 0 ? 0 : ceil_div(-base, args.src_step[1]);
          const i64 room = args.src_size[1] - 1 - base;
          const i64 high = room < 0 ? 0 : least(tile.extent[1], room / args.src_step[1] + 1);
          if (low >= high) continue;
          const i64 at = ((u0 - first[0]) * extent[1] + base + low * args.src_step[1] - first[1]) *
                             extent[2] + run.source[2] - runs.low[2];
          Meeting<T> met{gradient + (v0 * tile.extent[1] + low) * y_width * L, source + at * L,
                         y_width * L, args.src_step[1] * extent[2] * L, high - low,
                         ceil_div(width, together) * together, args.src_step[2]};
          for (i64 c = 0; c < held; ++c, met.y += gradient_block, met.x += source_block) {
            T* to = sums + c * of_block + run.first * L;
            if (together == kWide) {
              contract_any_run<T, kWide>(run.taps, met, to);
            } else {
              contract_any_run<T, kNarrow>(run.taps, met, to);
            }
          }
        }
      }
    }
    finish_task(control, 0);
  }
  if (!wait_phase(control, 0, tasks)) return;
  for (i64 block; (block = take_task(control, 1, blocks)) >= 0;) {
    for (i64 i = 0; i < args.taps; ++i) {
      finish_tap<E, Result>(args, partials + block * of_block + runs.packed[i] * L, each, block, i);
    }
  }
}

}  // namespace
}  // namespace convgrad

extern "C" CONVGRAD_EXPORT void convgrad_depthwise_bwd_weight(const convgrad::PlanarArgs* args,
                                                              convgrad::Control* control,
                                                              void* scratch) {
  using namespace convgrad;
  const bool single = args->result_dtype == kFloat32;
  switch (args->dtype) {
    case kFloat16:
      return single ? contract_blocks<F16, F32>(*args, control, scratch)
                    : contract_blocks<F16, F16>(*args, control, scratch);
    case kBfloat16:
      return single ? contract_blocks<BF16, F32>(*args, control, scratch)
                    : contract_blocks<BF16, BF16>(*args, control, scratch);
    case kFloat32: return contract_blocks<F32, F32>(*args, control, scratch);
    case kFloat64: return contract_blocks<F64, F64>(*args, control, scratch);
  }
}
