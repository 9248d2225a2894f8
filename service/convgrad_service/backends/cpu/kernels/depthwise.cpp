// Depthwise convolution: forward and backward data.
//
// A task is a tile of positions of one image, for a few vectors of channels (depthwise.hpp). It
// sums all taps of a block of up to eight columns of a result row in registers, vector by vector.
// In a run of taps, each source vector is loaded once for all columns that use it. The sums are
// stored through the epilogue if source and result are accessed in place, else in a block that is
// unpacked at the end. Large results that are accessed in place are written past the caches.
//
// Requires: PlanarArgs with one input and output channel per group; tile and scratch from
// plans/cpu_depthwise.py. Deterministic: each element is one chain of multiply-adds in the order of
// the runs. Padding along W is multiplied as zeros, within a channel.
#include "depthwise.hpp"

namespace convgrad {
namespace {

// sum[q] += sum over s of weight[s] * x[q * step + s], for the S taps of a run.
template <class T, int Q, bool inside, int S>
CONVGRAD_INLINE void add_run(const Met<T>& met, const MetRun<T>& run, i64 offset, const T* weight,
                             Vec<T> (&sum)[Q]) {
  constexpr int L = kLanes<T>;
  const Columns<T, inside> x(met, run, offset);
  Vec<T> w[S];
#pragma clang loop unroll(full)
  for (int s = 0; s < S; ++s) w[s] = load_raw<Vec<T>>(weight + s * L);
  if (met.step == 1) {
#pragma clang loop unroll(full)
    for (int c = 0; c < Q + S - 1; ++c) {
      if (!x.has(0, c)) continue;
      const Vec<T> value = x.at(0, c);
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
    for (int q = 0; q < Q; ++q) {
      if (x.has(q, s)) sum[q] += x.at(q, s) * w[s];
    }
  }
}

template <class T, int Q, bool inside, int S = kRunTaps>
CONVGRAD_INLINE void add_any_run(const Met<T>& met, const MetRun<T>& run, i64 offset,
                                 const T* weight, Vec<T> (&sum)[Q]) {
  if (run.taps == S) {
    add_run<T, Q, inside, S>(met, run, offset, weight, sum);
  } else if constexpr (S > 1) {
    add_any_run<T, Q, inside, S - 1>(met, run, offset, weight, sum);
  }
}

// Where the sums of blocks of columns go.
template <class T>
struct Target {
  T* data;
  i64 column;  // distance of columns, in elements
  i64 columns;
  const Epilogue<T>* epilogue;  // null: sums are stored as they are
  const T* bias;                // of the task's first channel
  bool streams;                 // past the caches, if vectors are aligned (streams.hpp)
};

template <class T, int Q>
__attribute__((noinline)) void finish_sums(const Epilogue<T>& epilogue, const T* bias,
                                           Vec<T> (&sum)[Q]) {
  const Vec<T> none = splat(T(0)), shift = load_raw<Vec<T>>(bias);
  for (int q = 0; q < Q; ++q) sum[q] = epilogue(sum[q], none, shift);
}

// Of `blocks` adjacent blocks of Q columns; of one, if not all that they read is inside the tensor.
// All runs have S taps, or any number if S is 0.
template <class T, int Q, bool inside, int S>
void blocks_of_sums(const Met<T>& met, i64 blocks, const Vectors<T>& vectors, const T* weights,
                    i64 vector_weights, const Target<T>& to) {
  constexpr int L = kLanes<T>;
  const i64 further = Q * met.step * met.column, column = to.column;
  for (i64 v = 0; v < vectors.count; ++v, weights += vector_weights) {
    const i64 start = vectors.start(v);
    const int lanes = static_cast<int>(start + L - v * L);
    T* out = to.data + start;
    i64 offset = start, left = blocks;
    do {
      Vec<T> sum[Q];
#pragma clang loop unroll(full)
      for (int q = 0; q < Q; ++q) sum[q] = splat(T(0));
      for (i64 j = 0; j < met.count; ++j) {
        const MetRun<T>& run = met.run[j];
        if constexpr (S > 0) {
          add_run<T, Q, inside, S>(met, run, offset, weights + run.weight, sum);
        } else {
          add_any_run<T, Q, inside>(met, run, offset, weights + run.weight, sum);
        }
      }
      if (to.epilogue != nullptr) {
        Vec<T> finished[Q];
#pragma clang loop unroll(full)
        for (int q = 0; q < Q; ++q) finished[q] = sum[q];
        finish_sums<T, Q>(*to.epilogue, to.bias + start, finished);
#pragma clang loop unroll(full)
        for (int q = 0; q < Q; ++q) sum[q] = finished[q];
      }
      const bool whole = lanes == L && (inside || to.columns == Q);
      if (whole && to.streams && streams_at(out, column)) {
#pragma clang loop unroll(full)
        for (int q = 0; q < Q; ++q) stream_raw(out + q * column, sum[q]);
      } else if (whole) {
#pragma clang loop unroll(full)
        for (int q = 0; q < Q; ++q) store_raw(out + q * column, sum[q]);
      } else {
#pragma clang loop unroll(full)
        for (int q = 0; q < Q; ++q) {
          if (q < to.columns) store_raw_last<T, L>(out + q * column, sum[q], lanes);
        }
      }
      out += Q * column;
      offset += further;
    } while (inside && --left > 0);
  }
}

template <class T, int Q, bool inside, int S = kRunTaps>
CONVGRAD_INLINE void any_taps(i64 taps, const Met<T>& met, i64 blocks, const Vectors<T>& vectors,
                              const T* weights, i64 vector_weights, const Target<T>& to) {
  if (taps == S) {
    blocks_of_sums<T, Q, inside, S>(met, blocks, vectors, weights, vector_weights, to);
  } else if constexpr (S > 0) {
    any_taps<T, Q, inside, S - 1>(taps, met, blocks, vectors, weights, vector_weights, to);
  }
}

// `taps` is the number of taps of all runs, or 0 if they differ.
template <class T, bool inside>
CONVGRAD_INLINE void any_blocks(i64 together, i64 taps, const Met<T>& met, i64 blocks,
                                const Vectors<T>& vectors, const T* weights, i64 vector_weights,
                                const Target<T>& to) {
  switch (together) {
    case 8: return any_taps<T, 8, inside>(taps, met, blocks, vectors, weights, vector_weights, to);
    case 7: return any_taps<T, 7, inside>(taps, met, blocks, vectors, weights, vector_weights, to);
    default:
      return any_taps<T, 4, inside>(taps, met, blocks, vectors, weights, vector_weights, to);
  }
}

// Packs the weights of all channels as [vector of channels][tap in run order][lane], and the bias.
// The last vector of a tensor that is accessed in place ends at the last channel.
template <class E>
void pack_channels(const PlanarArgs& args, const Runs& runs, bool direct, typename E::Acc* weights,
                   typename E::Acc* bias, typename E::Acc* matrix) {
  using T = typename E::Acc;
  constexpr i64 L = kLanes<T>;
  const auto* w = static_cast<const typename E::Storage*>(args.weight.data);
  const auto* b = static_cast<const typename E::Storage*>(args.bias.data);
  const i64 channel = args.weight.stride[0];
  const bool packed = taps_are_packed(args, matrix);
  fill_zero(matrix, args.taps * L);
  for (i64 first = 0; first < args.groups; first += L, weights += args.taps * L) {
    const i64 c = direct ? least(first, args.groups - L) : first;
    const int lanes = static_cast<int>(least(args.groups - c, L));
    if (packed) read_matrix<E>(w + c * channel, 1, channel, args.taps, lanes, matrix, L);
    for (i64 i = 0; i < args.taps; ++i) {
      const i64 at = args.tap[i].weight;
      store_raw(weights + runs.packed[i] * L,
                packed ? load_raw<Vec<T>>(matrix + at * L)
                       : load_strided<E>(w + c * channel + at, channel, lanes));
    }
    Vec<T> shift = splat(T(0));
    if (b != nullptr) shift = load_strided<E>(b + c * args.bias.stride[0], args.bias.stride[0], lanes);
    store_raw(bias + c, shift);
  }
}

template <class E>
void correlate(const PlanarArgs& args, Control* control, void* scratch) {
  using T = typename E::Acc;
  using S = typename E::Storage;
  constexpr i64 L = kLanes<T>;
  Arena arena{static_cast<char*>(scratch)};
  const Runs runs = make_runs(args, arena);
  auto* met = arena.take<MetRun<T>>(args.taps);
  const i64 channels = ceil_div(args.groups, L) * L;
  T* bias = arena.take<T>(channels);
  T* weights = arena.take<T>(args.taps * channels);
  T* matrix = arena.take<T>(args.taps * L);
  const Epilogue<T> epilogue(args);
  const bool adds = Epilogue<T>::accumulates(args);
  const bool direct = !adds && in_place<E>(args, args.src) && in_place<E>(args, args.dst);
  const bool finishes = direct && (epilogue.scales || epilogue.activation != kNone ||
                                   args.bias.data != nullptr);
  const bool streams = direct && streams_result<E>(args);
  i64 positions = 1;
  for (int d = 0; d < 3; ++d) {
    positions *= (args.tile[d] - 1) * args.src_step[d] + runs.high[d] - runs.low[d] + 1;
  }
  const i64 position = args.group_block;
  T* source_block = arena.take<T>(direct ? 0 : positions * position);
  T* sums = arena.take<T>(0);

  const i64 units = args.batch * tiles_of(args);
  const i64 blocks = ceil_div(args.groups, args.group_block);
  pack_channels<E>(args, runs, direct, weights, bias, matrix);
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
    const Grid<const T> source = read_grid<E>(args.src, args.src_size, tile, first, extent, direct,
                                              source_block, position);
    const Vectors<T> vectors{ceil_div(tile.groups, L), tile.groups, direct};
    const i64 several = blocks_together(vectors.count);
    const i64 width = end[2] - start[2];
    const Grid<T> result =
        direct ? Grid<T>{reinterpret_cast<T*>(block_at<S>(args.dst, tile, 0, 0, 0)),
                         {args.dst.stride[3], args.dst.stride[4], args.dst.stride[5]}}
               : Grid<T>{sums - ((start[0] * (end[1] - start[1]) + start[1]) * width + start[2]) *
                                    position,
                         {(end[1] - start[1]) * width * position, width * position, position}};
    for (i64 i0 = start[0]; i0 < end[0]; ++i0) {
      for (i64 i1 = start[1]; i1 < end[1]; ++i1) {
        const i64 t[2] = {i0 / args.dst_step[0], i1 / args.dst_step[1]};
        // The column phases of a row are consecutive.
        i64 p = 0;
        while (args.dst_phase[p * 3] != i0 - t[0] * args.dst_step[0] ||
               args.dst_phase[p * 3 + 1] != i1 - t[1] * args.dst_step[1]) {
          p += column_phases;
        }
        for (i64 past = p + column_phases; p < past; ++p) {
          const i64 phase = args.dst_phase[p * 3 + 2];
          i64 count = 0, taps = 0;
          for (i64 j = runs.first[p]; j < runs.first[p + 1]; ++j) {
            const TapRun& run = runs.run[j];
            const i64 u0 = t[0] * args.src_step[0] + run.source[0];
            const i64 u1 = t[1] * args.src_step[1] + run.source[1];
            if (u0 < 0 || u0 >= args.src_size[0] || u1 < 0 || u1 >= args.src_size[1]) continue;
            taps = count == 0 || taps == run.taps ? run.taps : 0;
            met[count++] = {source.at(u0, u1, 0), run.source[2], run.first * L, run.taps};
          }
          const i64 columns = ceil_div(width - phase, args.dst_step[2]);
          const i64 together = columns_together(columns);
          const T* own = weights + tile.group * args.taps;
          const auto inside = [&](i64 at) {
            const i64 t2 = tile.start[2] + at;
            return at + together <= columns && t2 * args.src_step[2] + runs.left[p] >= 0 &&
                   (t2 + together - 1) * args.src_step[2] + runs.right[p] < args.src_size[2];
          };
          for (i64 next = 0, n; next < columns; next += n * together) {
            // The last block of a row overlaps the one before, with the same results.
            const i64 at = most(0, least(next, columns - together));
            const i64 valid = least(together, columns);
            n = 0;
            while (n < several && inside(at + n * together)) ++n;
            const Met<T> row{met, count, tile.start[2] + at, args.src_step[2], source.step[2],
                             args.src_size[2]};
            const Target<T> to{result.at(i0, i1, start[2] + phase + at * args.dst_step[2]),
                               result.step[2] * args.dst_step[2], valid,
                               finishes ? &epilogue : nullptr, bias + tile.group, streams};
            if (n > 0) {
              any_blocks<T, true>(together, taps, row, n, vectors, own, args.taps * L, to);
            } else {
              any_blocks<T, false>(together, taps, row, n = 1, vectors, own, args.taps * L, to);
            }
          }
        }
      }
    }
    if (direct) continue;
    const auto joined = [&](const View& view) { return view.stride[4] == width * view.stride[5]; };
    const bool whole = joined(args.dst) && (!adds || joined(args.accumulate));
    const i64 rows = whole ? end[1] - start[1] : 1;
    const T* from = sums;
    for (i64 i0 = start[0]; i0 < end[0]; ++i0) {
      for (i64 i1 = start[1]; i1 < end[1]; i1 += rows, from += rows * width * position) {
        write_positions<E>(
            from, position, tile.groups, rows * width,
            block_at<S>(args.dst, tile, i0, i1, start[2]), args.dst,
            adds ? block_at<const S>(args.accumulate, tile, i0, i1, start[2]) : nullptr,
            args.accumulate, epilogue, bias + tile.group);
      }
    }
  }
  if (streams) finish_streams();
}

}  // namespace
}  // namespace convgrad

extern "C" CONVGRAD_EXPORT void convgrad_depthwise_correlate(const convgrad::PlanarArgs* args,
                                                             convgrad::Control* control,
                                                             void* scratch) {
  using namespace convgrad;
  switch (args->dtype) {
    case kFloat16: return correlate<F16>(*args, control, scratch);
    case kBfloat16: return correlate<BF16>(*args, control, scratch);
    case kFloat32: return correlate<F32>(*args, control, scratch);
    case kFloat64: return correlate<F64>(*args, control, scratch);
  }
}
