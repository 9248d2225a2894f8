// Depthwise convolution: forward and backward data.
//
// A task is a tile of positions of one image, for a few vectors of channels. It packs the source
// into blocks (depthwise.hpp), one per vector, and sums all taps in register blocks of seven or
// eight columns of a row. In a run of taps, each source vector is loaded once for all columns that
// use it.
//
// Requires: PlanarArgs with one input and output channel per group; tile and scratch from
// plans/cpu_depthwise.py. Deterministic: each element is one chain of multiply-adds in the order of
// the runs. Padding along W is multiplied as zeros, within a channel.
#include "depthwise.hpp"

namespace convgrad {
namespace {

// sum[q] += sum over s of weight[s] * x[q * step + s], for the S taps of a run.
template <class T, int Q, int S>
CONVGRAD_INLINE void add_run(const T* x, i64 step, const T* weight, Vec<T> (&sum)[Q]) {
  constexpr int L = kLanes<T>;
  Vec<T> w[S];
#pragma clang loop unroll(full)
  for (int s = 0; s < S; ++s) w[s] = load_raw<Vec<T>>(weight + s * L);
  if (step == 1) {
#pragma clang loop unroll(full)
    for (int c = 0; c < Q + S - 1; ++c) {
      const Vec<T> value = load_raw<Vec<T>>(x + c * L);
#pragma clang loop unroll(full)
      for (int s = 0; s < S; ++s) {
        if (c - s >= 0 && c - s < Q) sum[c - s] += value * w[s];
      }
    }
    return;
  }
#pragma clang loop unroll(full)
  for (int s = 0; s < S; ++s) {
#pragma clang loop unroll(full)
    for (int q = 0; q < Q; ++q) sum[q] += load_raw<Vec<T>>(x + (q * step + s) * L) * w[s];
  }
}

template <class T, int Q, int S = kRunTaps>
CONVGRAD_INLINE void add_any_run(i64 taps, const T* x, i64 step, const T* weight,
                                 Vec<T> (&sum)[Q]) {
  if (taps == S) {
    add_run<T, Q, S>(x, step, weight, sum);
  } else if constexpr (S > 1) {
    add_any_run<T, Q, S - 1>(taps, x, step, weight, sum);
  }
}

// A run that is valid for one row of the result: offsets of its source at column 0 and its weights.
struct MetRun {
  i64 source;
  i64 weight;
  i64 taps;
};

template <class T, int Q>
void row_of_sums(const MetRun* met, i64 count, const T* source, const T* weights, i64 step,
                 i64 columns, T* out, i64 out_step) {
  constexpr int L = kLanes<T>;
  for (i64 t = 0; t < columns; t += Q) {
    Vec<T> sum[Q];
#pragma clang loop unroll(full)
    for (int q = 0; q < Q; ++q) sum[q] = splat(T(0));
    for (i64 j = 0; j < count; ++j) {
      add_any_run<T, Q>(met[j].taps, source + met[j].source + t * step * L, step,
                        weights + met[j].weight, sum);
    }
#pragma clang loop unroll(full)
    for (int q = 0; q < Q; ++q) store_raw(out + (t + q) * out_step * L, sum[q]);
  }
}

// Packs the weights of all channels as [vector of channels][tap in run order][lane], and the bias.
template <class E>
void pack_channels(const PlanarArgs& args, const Runs& runs, typename E::Acc* weights,
                   typename E::Acc* bias) {
  using T = typename E::Acc;
  constexpr i64 L = kLanes<T>;
  const auto* w = static_cast<const typename E::Storage*>(args.weight.data);
  const auto* b = static_cast<const typename E::Storage*>(args.bias.data);
  const i64 channel = args.weight.stride[0];
  for (i64 c = 0; c < args.groups; c += L, weights += args.taps * L) {
    const int lanes = static_cast<int>(least(args.groups - c, L));
    for (i64 i = 0; i < args.taps; ++i) {
      store_raw(weights + runs.packed[i] * L,
                load_strided<E>(w + c * channel + args.tap[i].weight, channel, lanes));
    }
    Vec<T> shift = splat(T(0));
    if (b != nullptr) shift = load_strided<E>(b + c * args.bias.stride[0], args.bias.stride[0], lanes);
    store_raw(bias + c, shift);
  }
}

template <class E>
void correlate_blocks(const PlanarArgs& args, Control* control, void* scratch) {
  using T = typename E::Acc;
  using S = typename E::Storage;
  constexpr i64 L = kLanes<T>;
  Arena arena{static_cast<char*>(scratch)};
  const Runs runs = make_runs(args, arena);
  auto* met = arena.take<MetRun>(args.taps);
  const i64 channels = ceil_div(args.groups, L) * L;
  T* bias = arena.take<T>(channels);
  T* weights = arena.take<T>(args.taps * channels);
  i64 positions = 1, results = 1;
  for (int d = 0; d < 3; ++d) {
    positions *= (args.tile[d] - 1) * args.src_step[d] + runs.high[d] - runs.low[d] + 1;
    results *= args.tile[d] * args.dst_step[d];
  }
  // Block sizes include the columns read and written past the end of the last row.
  const i64 source_block = (positions + kWide * args.src_step[2]) * L;
  const i64 result_block = (results + most(kWide * args.dst_step[2], L)) * L;
  const i64 vectors = args.group_block / L;
  T* source = arena.take<T>(vectors * source_block);
  T* sums = arena.take<T>(vectors * result_block);
  const Epilogue<T> epilogue(args);
  const bool adds = Epilogue<T>::accumulates(args);

  const i64 units = args.batch * tiles_of(args);
  const i64 blocks = ceil_div(args.groups, args.group_block);
  pack_channels<E>(args, runs, weights, bias);
  i64 column_phases = 1;
  while (column_phases < args.dst_phases &&
         args.dst_phase[column_phases * 3] == args.dst_phase[0] &&
         args.dst_phase[column_phases * 3 + 1] == args.dst_phase[1]) {
    ++column_phases;
  }
  for (i64 task; (task = take_task(control, 0, units * blocks)) >= 0;) {
    // Channels are innermost in task order: contiguous channels share cache lines.
    const TileOrigin tile = tile_at(args, task % blocks, task / blocks);
    i64 first[3], extent[3], start[3], end[3];
    for (int d = 0; d < 3; ++d) {
      first[d] = tile.start[d] * args.src_step[d] + runs.low[d];
      extent[d] = (tile.extent[d] - 1) * args.src_step[d] + runs.high[d] - runs.low[d] + 1;
      start[d] = tile.start[d] * args.dst_step[d];
      end[d] = least((tile.start[d] + tile.extent[d]) * args.dst_step[d], args.dst_size[d]);
    }
    read_source_blocks<E>(args, tile, first, extent, 0, source, source_block);
    const i64 width = end[2] - start[2];
    const i64 together = columns_together(tile.extent[2]);
    // Rows are computed in order, so that columns computed past a row's end are overwritten.
    const i64 held = ceil_div(tile.groups, L);
    i64 row = 0;
    for (i64 i0 = start[0]; i0 < end[0]; ++i0) {
      for (i64 i1 = start[1]; i1 < end[1]; ++i1, row += width * L) {
        const i64 t[2] = {i0 / args.dst_step[0], i1 / args.dst_step[1]};
        // The column phases of a row are consecutive.
        i64 p = 0;
        while (args.dst_phase[p * 3] != i0 - t[0] * args.dst_step[0] ||
               args.dst_phase[p * 3 + 1] != i1 - t[1] * args.dst_step[1]) {
          p += column_phases;
        }
        for (i64 past = p + column_phases; p < past; ++p) {
          const i64 phase = args.dst_phase[p * 3 + 2];
          i64 count = 0;
          for (i64 j = runs.first[p]; j < runs.first[p + 1]; ++j) {
            const TapRun& run = runs.run[j];
            const i64 u0 = t[0] * args.src_step[0] + run.source[0];
            const i64 u1 = t[1] * args.src_step[1] + run.source[1];
            if (u0 < 0 || u0 >= args.src_size[0] || u1 < 0 || u1 >= args.src_size[1]) continue;
            const i64 at = ((u0 - first[0]) * extent[1] + u1 - first[1]) * extent[2] +
                           run.source[2] - runs.low[2];
            met[count++] = {at * L, run.first * L, run.taps};
          }
          const i64 columns = ceil_div(width - phase, args.dst_step[2]);
          for (i64 c = 0; c < held; ++c) {
            const T* x = source + c * source_block;
            const T* w = weights + (tile.group + c * L) * args.taps;
            T* out = sums + c * result_block + row + phase * L;
            if (together == kWide) {
              row_of_sums<T, kWide>(met, count, x, w, args.src_step[2], columns, out,
                                    args.dst_step[2]);
            } else {
              row_of_sums<T, kNarrow>(met, count, x, w, args.src_step[2], columns, out,
                                      args.dst_step[2]);
            }
          }
        }
      }
    }
    const auto joined = [&](const View& view) { return view.stride[4] == width * view.stride[5]; };
    const bool whole = joined(args.dst) && (!adds || joined(args.accumulate));
    const i64 rows = whole ? end[1] - start[1] : 1;
    const T* from = sums;
    for (i64 i0 = start[0]; i0 < end[0]; ++i0) {
      for (i64 i1 = start[1]; i1 < end[1]; i1 += rows, from += rows * width * L) {
        write_positions<E>(from, result_block, tile.groups, rows * width, block_at<S>(args.dst, tile, i0, i1, start[2]),
                           args.dst,
                           adds ? block_at<const S>(args.accumulate, tile, i0, i1, start[2])
                                : nullptr,
                           args.accumulate, epilogue, bias + tile.group);
      }
    }
  }
}

}  // namespace
}  // namespace convgrad

extern "C" CONVGRAD_EXPORT void convgrad_depthwise_correlate(const convgrad::PlanarArgs* args,
                                                             convgrad::Control* control,
                                                             void* scratch) {
  using namespace convgrad;
  switch (args->dtype) {
    case kFloat16: return correlate_blocks<F16>(*args, control, scratch);
    case kBfloat16: return correlate_blocks<BF16>(*args, control, scratch);
    case kFloat32: return correlate_blocks<F32>(*args, control, scratch);
    case kFloat64: return correlate_blocks<F64>(*args, control, scratch);
  }
}
