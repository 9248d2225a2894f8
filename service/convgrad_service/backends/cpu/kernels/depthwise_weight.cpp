// Depthwise convolution: backward weight.
//
// A task is a few vectors of channels, for one of `splits` parts of the images and tiles of
// positions (depthwise.hpp). For some blocks of columns of a row of grad_output, it goes through the
// vectors and the runs of taps: the taps of a run are summed in registers, loading each input vector
// once for all taps that use it, and added to the sums [vector][tap] of the thread. These are added
// to the split's partial sums in the workspace after a fixed number of positions, so that no chain
// of additions is long. A second phase sums the splits in order, applies alpha and beta * accumulate
// and rounds once.
//
// Requires: PlanarArgs with one input and output channel per group and dst = grad_output; tile,
// scratch and splits from plans/cpu_depthwise.py; a workspace of splits * taps * groups
// accumulators, groups rounded up to full vectors. Deterministic: the splits depend only on the
// problem. Padding along W and columns past the end of a row are multiplied as zeros, within a
// channel.
#include "depthwise.hpp"

namespace convgrad {
namespace {

// Positions after which a thread's sums are added to the partial sums, so that errors stay small.
constexpr i64 kPositions = 512;

// grad_output at a block of columns, of which `valid` exist.
template <class T>
struct Gradient {
  const T* first;
  i64 column;
  i64 valid;
};

// Runs of S taps that are summed together: enough accumulators to hide latency, and few enough for
// registers.
template <int S>
inline constexpr int kRunsTogether = S == 1 ? 4 : S < 4 ? 3 : S < 6 ? 2 : 1;

// For G runs: sums[s] += sum over `blocks` blocks of Q columns of the input at tap s times
// grad_output. With few accumulators, even and odd columns have separate ones.
template <class T, int Q, bool inside, int S, int G>
CONVGRAD_INLINE void contract_runs(Met<T> met, const MetRun<T>* run, const Gradient<T>& y,
                                   i64 blocks, i64 offset, T* sums) {
  constexpr int L = kLanes<T>, A = S * G < 8 ? 2 : 1;
  Vec<T> sum[G][S][A];
#pragma clang loop unroll(full)
  for (int g = 0; g < G; ++g) {
#pragma clang loop unroll(full)
    for (int s = 0; s < S; ++s) sum[g][s][0] = sum[g][s][A - 1] = splat(T(0));
  }
  const T* from = y.first + offset;
  do {
    Vec<T> gradient[Q];
#pragma clang loop unroll(full)
    for (int q = 0; q < Q; ++q, from += y.column) {
      gradient[q] = inside || q < y.valid ? load_raw<Vec<T>>(from) : splat(T(0));
    }
    if (met.step == 1) {
#pragma clang loop unroll(full)
      for (int g = 0; g < G; ++g) {
        const Columns<T, inside> x(met, run[g], offset);
#pragma clang loop unroll(full)
        for (int c = 0; c < Q + S - 1; ++c) {
          if (!x.has(0, c)) continue;
          const Vec<T> value = x.at(0, c);
#pragma clang loop unroll(full)
          for (int s = 0; s < S; ++s) {
            const int q = c - s;
            if (q >= 0 && q < Q) sum[g][s][q % A] += value * gradient[q];
          }
        }
      }
    } else {
#pragma clang loop unroll(full)
      for (int g = 0; g < G; ++g) {
        const Columns<T, inside> x(met, run[g], offset);
#pragma clang loop unroll(full)
        for (int q = 0; q < Q; ++q) {
#pragma clang loop unroll(full)
          for (int s = 0; s < S; ++s) {
            if (x.has(q, s)) sum[g][s][q % A] += x.at(q, s) * gradient[q];
          }
        }
      }
    }
    met.t += Q;
  } while (inside && --blocks > 0);
#pragma clang loop unroll(full)
  for (int g = 0; g < G; ++g) {
#pragma clang loop unroll(full)
    for (int s = 0; s < S; ++s) {
      const Vec<T> total = A == 2 ? sum[g][s][0] + sum[g][s][A - 1] : sum[g][s][0];
      T* to = sums + run[g].weight + s * L;
      store_raw(to, load_raw<Vec<T>>(to) + total);
    }
  }
}

template <class T, int Q, bool inside, int S, int G = kRunsTogether<S>>
CONVGRAD_INLINE void contract_some(i64 count, const Met<T>& met, const MetRun<T>* run,
                                   const Gradient<T>& y, i64 blocks, i64 offset, T* sums) {
  if (count == G) {
    contract_runs<T, Q, inside, S, G>(met, run, y, blocks, offset, sums);
  } else if constexpr (G > 1) {
    contract_some<T, Q, inside, S, G - 1>(count, met, run, y, blocks, offset, sums);
  }
}

// For runs of S taps, for all vectors.
template <class T, int Q, bool inside, int S = kRunTaps>
void contract_blocks(const Met<T>& met, const Gradient<T>& y, i64 blocks,
                     const Vectors<T>& vectors, T* sums, i64 vector_sums) {
  if (met.run->taps == S) {
    for (i64 v = 0; v < vectors.count; ++v, sums += vector_sums) {
      const i64 offset = vectors.start(v);
      for (i64 j = 0, n; j < met.count; j += n) {
        n = least(met.count - j, kRunsTogether<S>);
        contract_some<T, Q, inside, S>(n, met, met.run + j, y, blocks, offset, sums);
      }
    }
  } else if constexpr (S > 1) {
    contract_blocks<T, Q, inside, S - 1>(met, y, blocks, vectors, sums, vector_sums);
  }
}

template <class T, bool inside>
CONVGRAD_INLINE void contract_any(i64 together, Met<T> met, const Gradient<T>& y, i64 blocks,
                                  const Vectors<T>& vectors, T* sums, i64 vector_sums) {
  const auto contract = together == 8   ? contract_blocks<T, 8, inside>
                        : together == 7 ? contract_blocks<T, 7, inside>
                                        : contract_blocks<T, 4, inside>;
  const MetRun<T>* end = met.run + met.count;
  for (; met.run < end; met.run += met.count) {
    met.count = 1;
    while (met.run + met.count < end && met.run[met.count].taps == met.run->taps) ++met.count;
    contract(met, y, blocks, vectors, sums, vector_sums);
  }
}

// Sums the splits for one vector of channels, and writes the result.
template <class E, class Result>
void finish_vector(const PlanarArgs& args, const Runs& runs, bool direct, i64 block,
                   typename E::Acc* matrix) {
  using T = typename E::Acc;
  using R = typename Result::Storage;
  constexpr i64 L = kLanes<T>;
  const i64 of_block = args.taps * L, each = ceil_div(args.groups, L) * of_block;
  const T* sums = static_cast<const T*>(args.workspace) + block * of_block;
  const i64 c = direct ? least(block * L, args.groups - L) : block * L;
  const i64 lanes = least(args.groups - c, L), channel = args.weight.stride[0];
  const bool packed = taps_are_packed(args, matrix);
  R* weights = static_cast<R*>(args.weight.data) + c * channel;
  // The host ensures that accumulate has the strides of the weight.
  const R* add = args.beta != 0.0 ? static_cast<const R*>(args.accumulate.data) : nullptr;
  if (add != nullptr) add += c * channel;
  const auto write = [&](const T* from, i64 rows, i64 at) {
    write_matrix<Result>(from, L, rows, lanes,
                         {weights + at, 1, channel, add == nullptr ? nullptr : add + at, 1, channel,
                          nullptr, 0, static_cast<T>(args.alpha), static_cast<T>(args.beta)});
  };
  for (i64 i = 0; i < args.taps; ++i) {
    const T* from = sums + runs.packed[i] * L;
    Vec<T> total = splat(T(0));
    for (i64 split = 0; split < args.splits; ++split) {
      total += load_raw<Vec<T>>(from + split * each);
    }
    store_raw(matrix + (packed ? args.tap[i].weight : 0) * L, total);
    if (!packed) write(matrix, 1, args.tap[i].weight);
  }
  if (packed) write(matrix, args.taps, 0);
}

template <class E, class Result>
void contract(const PlanarArgs& args, Control* control, void* scratch) {
  using T = typename E::Acc;
  constexpr i64 L = kLanes<T>;
  Arena arena{static_cast<char*>(scratch)};
  const Runs runs = make_runs(args, arena);
  auto* met = arena.take<MetRun<T>>(args.taps);
  T* matrix = arena.take<T>(args.taps * L);
  T* sums = arena.take<T>(args.taps * args.group_block);
  const bool direct = in_place<E>(args, args.src) && in_place<E>(args, args.dst);
  i64 positions = 1;
  for (int d = 0; d < 3; ++d) {
    positions *= (args.tile[d] - 1) * args.src_step[d] + runs.high[d] - runs.low[d] + 1;
  }
  const i64 position = args.group_block;
  T* source_block = arena.take<T>(direct ? 0 : positions * position);
  T* gradient_block = arena.take<T>(0);

  const i64 units = args.batch * tiles_of(args);
  const i64 parts = ceil_div(args.groups, args.group_block), tasks = parts * args.splits;
  const i64 blocks = ceil_div(args.groups, L), of_block = args.taps * L;
  for (i64 task; (task = take_task(control, 0, tasks)) >= 0;) {
    // Channels are innermost in task order: contiguous channels share cache lines.
    const i64 block = task % parts, split = task / parts;
    const i64 last = (split + 1) * units / args.splits;
    T* partials = static_cast<T*>(args.workspace) +
                  (split * blocks + block * (args.group_block / L)) * of_block;
    const i64 held = ceil_div(least(args.groups - block * args.group_block, args.group_block), L) *
                     of_block;
    i64 summed = 0;
    bool adds = false;
    const auto flush = [&] {
      for (i64 i = 0; i < held; i += L) {
        const Vec<T> sum = load_raw<Vec<T>>(sums + i);
        store_raw(partials + i, adds ? sum + load_raw<Vec<T>>(partials + i) : sum);
      }
      fill_zero(sums, held);
      summed = 0;
      adds = true;
    };
    fill_zero(sums, held);
    for (i64 unit = split * units / args.splits; unit < last; ++unit) {
      const TileOrigin tile = tile_at(args, block, unit);
      i64 first[3], extent[3];
      for (int d = 0; d < 3; ++d) {
        first[d] = tile.start[d] * args.src_step[d] + runs.low[d];
        extent[d] = (tile.extent[d] - 1) * args.src_step[d] + runs.high[d] - runs.low[d] + 1;
      }
      const Grid<const T> source = read_grid<E>(args.src, args.src_size, tile, first, extent,
                                                direct, source_block, position);
      const Grid<const T> gradient = read_grid<E>(args.dst, args.dst_size, tile, tile.start,
                                                  tile.extent, direct, gradient_block, position);
      const Vectors<T> vectors{ceil_div(tile.groups, L), tile.groups, direct};
      const i64 several = blocks_together(vectors.count);
      const i64 columns = tile.extent[2], together = columns_together(columns);
      // Columns past the end of a row must not read what is not in the block, which may be padding
      // alone.
      const i64 width = most(0, least(args.src_size[2], first[2] + extent[2]));
      for (i64 v0 = 0; v0 < tile.extent[0]; ++v0) {
        for (i64 v1 = 0; v1 < tile.extent[1]; ++v1) {
          const i64 t[2] = {tile.start[0] + v0, tile.start[1] + v1};
          i64 count = 0;
          for (i64 j = 0; j < runs.first[1]; ++j) {
            const TapRun& run = runs.run[j];
            const i64 u0 = t[0] * args.src_step[0] + run.source[0];
            const i64 u1 = t[1] * args.src_step[1] + run.source[1];
            if (u0 < 0 || u0 >= args.src_size[0] || u1 < 0 || u1 >= args.src_size[1]) continue;
            met[count++] = {source.at(u0, u1, 0), run.source[2], run.first * L, run.taps};
          }
          const auto inside = [&](i64 next) {
            const i64 t2 = tile.start[2] + next;
            return next + together <= columns && t2 * args.src_step[2] + runs.left[0] >= 0 &&
                   (t2 + together - 1) * args.src_step[2] + runs.right[0] < args.src_size[2];
          };
          for (i64 next = 0, n; next < columns; next += n * together) {
            const i64 t2 = tile.start[2] + next;
            const Met<T> row{met, count, t2, args.src_step[2], source.step[2], width};
            const Gradient<T> y{gradient.at(t[0], t[1], t2), gradient.step[2], columns - next};
            n = 0;
            while (n < several && inside(next + n * together)) ++n;
            if (n > 0) {
              contract_any<T, true>(together, row, y, n, vectors, sums, of_block);
            } else {
              contract_any<T, false>(together, row, y, n = 1, vectors, sums, of_block);
            }
          }
          summed += columns;
          if (summed >= kPositions) flush();
        }
      }
    }
    flush();
    finish_task(control, 0);
  }
  if (!wait_phase(control, 0, tasks)) return;
  for (i64 block; (block = take_task(control, 1, blocks)) >= 0;) {
    finish_vector<E, Result>(args, runs, direct, block, matrix);
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
      return single ? contract<F16, F32>(*args, control, scratch)
                    : contract<F16, F16>(*args, control, scratch);
    case kBfloat16:
      return single ? contract<BF16, F32>(*args, control, scratch)
                    : contract<BF16, BF16>(*args, control, scratch);
    case kFloat32: return contract<F32, F32>(*args, control, scratch);
    case kFloat64: return contract<F64, F64>(*args, control, scratch);
  }
}
