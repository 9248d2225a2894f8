// Depthwise convolution, forward and backward with respect to data, where channels are contiguous.
//
// One channel a group on both sides, so vectors run over channels and nothing is copied: for eight
// columns of a row of the result and a vector of channels, all taps are summed in registers. The
// channels go innermost, then columns: the source columns of a tile stay in the first-level cache.
//
// Relies on: PlanarArgs with src_channels = dst_channels = 1, stride[1] = 1 of src, dst (and
// accumulate), tile[0] = rows a task; scratch for [tap][channel] weights and one RowTap a tap.
// Deterministic. Only taps that meet the source are multiplied, so no value crosses the padding.
#include "depthwise.hpp"

namespace convgrad {
namespace {

template <class E>
struct Row {
  using T = typename E::Acc;
  using S = typename E::Storage;
  const RowTap<S, T>* met;
  i64 count;
  i64 source_step;
  S* target;
  i64 target_step;
  const S* add;
  i64 add_step;
  const T* bias;
  const Epilogue<T>& epilogue;

  // Q columns from t on, channels [c, c + lanes). With `check`, only taps that meet the column.
  template <int Q, bool whole, bool check>
  CONVGRAD_INLINE void columns(i64 t, i64 c, int lanes) const {
    const auto read = [&](const S* p) {
      if constexpr (whole) return load<E>(p);
      return load_first<E>(p, lanes);
    };
    Vec<T> sum[Q];
#pragma clang loop unroll(full)
    for (int q = 0; q < Q; ++q) sum[q] = splat(T(0));
    for (i64 j = 0; j < count; ++j) {
      if (check && (t < met[j].low || t >= met[j].high)) continue;
      const S* source = met[j].source + t * source_step + c;
      // The weights have room for whole vectors.
      const Vec<T> w = load_raw<Vec<T>>(met[j].weight + c);
#pragma clang loop unroll(full)
      for (int q = 0; q < Q; ++q) sum[q] += read(source + q * source_step) * w;
    }
    const Vec<T> shift = load_raw<Vec<T>>(bias + c);
#pragma clang loop unroll(full)
    for (int q = 0; q < Q; ++q) {
      Vec<T> more = splat(T(0));
      if (add != nullptr) more = read(add + (t + q) * add_step + c);
      const Vec<T> result = epilogue(sum[q], more, shift);
      S* to = target + (t + q) * target_step + c;
      if constexpr (whole) {
        store<E>(to, result);
      } else {
        store_first<E>(to, result, lanes);
      }
    }
  }

  template <int Q, bool check>
  void all_channels(i64 t, i64 channels) const {
    constexpr int L = kLanes<T>;
    i64 c = 0;
    for (; c + L <= channels; c += L) columns<Q, true, check>(t, c, L);
    if (c < channels) columns<Q, false, check>(t, c, static_cast<int>(channels - c));
  }
};

template <class E>
void correlate_rows(const PlanarArgs& args, Control* control, void* scratch) {
  using T = typename E::Acc;
  using S = typename E::Storage;
  constexpr i64 L = kLanes<T>;
  const i64 channels = args.groups;
  Arena arena{static_cast<char*>(scratch)};
  auto* met = arena.take<RowTap<S, T>>(args.taps);
  T* bias = arena.take<T>(channels + L);
  T* weights = arena.take<T>(args.taps * channels + L);
  for (i64 i = 0; i < args.taps; ++i) {
    const S* w = static_cast<const S*>(args.weight.data) + args.tap[i].weight;
    for (i64 c = 0; c < channels; ++c) {
      weights[i * channels + c] = load_one<E>(w + c * args.weight.stride[0]);
    }
  }
  for (i64 c = 0; c < channels; ++c) {
    const S* b = static_cast<const S*>(args.bias.data);
    bias[c] = b == nullptr ? T(0) : load_one<E>(b + c * args.bias.stride[0]);
  }
  const Epilogue<T> epilogue(args);
  const bool adds = Epilogue<T>::accumulates(args);

  i64 extent[3];
  for (int d = 0; d < 3; ++d) extent[d] = ceil_div(args.dst_size[d], args.dst_step[d]);
  const i64 rows = args.batch * extent[0] * extent[1];
  const i64 tasks = ceil_div(rows, args.tile[0]);
  for (i64 task; (task = take_task(control, 0, tasks)) >= 0;) {
    const i64 last = (task + 1) * args.tile[0] < rows ? (task + 1) * args.tile[0] : rows;
    for (i64 row = task * args.tile[0]; row < last; ++row) {
      const i64 t1 = row % extent[1], t0 = row / extent[1] % extent[0];
      const i64 n = row / extent[1] / extent[0];
      for (i64 p = 0; p < args.dst_phases; ++p) {
        const int64_t* phase = args.dst_phase + p * 3;
        const i64 i0 = t0 * args.dst_step[0] + phase[0], i1 = t1 * args.dst_step[1] + phase[1];
        if (i0 >= args.dst_size[0] || i1 >= args.dst_size[1]) continue;
        const i64 columns = ceil_div(args.dst_size[2] - phase[2], args.dst_step[2]);
        const i64 count = row_taps<S, T>(args, n, t0, t1, columns, p, weights, met);
        const auto at = [&](const View& view) {
          return n * view.stride[0] + i0 * view.stride[3] + i1 * view.stride[4] +
                 phase[2] * view.stride[5];
        };
        const Row<E> out{met,
                         count,
                         args.src_step[2] * args.src.stride[5],
                         static_cast<S*>(args.dst.data) + at(args.dst),
                         args.dst_step[2] * args.dst.stride[5],
                         adds ? static_cast<const S*>(args.accumulate.data) + at(args.accumulate)
                              : nullptr,
                         args.dst_step[2] * args.accumulate.stride[5],
                         bias,
                         epilogue};
        i64 low, high, t = 0;
        common_columns(met, count, columns, low, high);
        for (; t < low && t < columns; ++t) out.template all_channels<1, true>(t, channels);
        for (; t + 8 <= high; t += 8) out.template all_channels<8, false>(t, channels);
        for (; t + 2 <= high; t += 2) out.template all_channels<2, false>(t, channels);
        for (; t < columns; ++t) out.template all_channels<1, true>(t, channels);
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
    case kFloat16: return correlate_rows<F16>(*args, control, scratch);
    case kBfloat16: return correlate_rows<BF16>(*args, control, scratch);
    case kFloat32: return correlate_rows<F32>(*args, control, scratch);
    case kFloat64: return correlate_rows<F64>(*args, control, scratch);
  }
}
