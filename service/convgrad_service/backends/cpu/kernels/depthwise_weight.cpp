// Depthwise convolution backward with respect to the weight, where channels are contiguous.
//
// Vectors run over channels. A task is one of `splits` runs of rows of grad_output; for a chunk of
// a row's columns and a vector of channels, up to nine taps are summed in registers and added to the
// split's [tap][channel] sums in the workspace. A second phase adds the splits up in their order,
// applies alpha and beta * accumulate and rounds once.
//
// Relies on: PlanarArgs as for grouped_weight.cpp with one channel a group, stride[1] = 1 of src and
// dst, workspace of splits * (taps * groups + a vector) sums, scratch for one RowTap a tap.
// Deterministic: the splits depend on the problem alone. Only pairs that meet are multiplied.
#include "depthwise.hpp"

namespace convgrad {
namespace {

inline constexpr i64 kChunk = 16;

// J taps, columns [begin, end) that they all meet.
template <class E, int J, bool whole>
CONVGRAD_INLINE void contract_columns(const RowTap<typename E::Storage, typename E::Acc>* met,
                                      i64 source_step, const typename E::Storage* y, i64 y_step,
                                      i64 begin, i64 end, i64 c, int lanes) {
  using T = typename E::Acc;
  using S = typename E::Storage;
  const auto read = [&](const S* p) {
    if constexpr (whole) return load<E>(p);
    return load_first<E>(p, lanes);
  };
  Vec<T> sum[J];
  const S* source[J];
#pragma clang loop unroll(full)
  for (int j = 0; j < J; ++j) {
    sum[j] = splat(T(0));
    source[j] = met[j].source + begin * source_step + c;
  }
  for (i64 t = begin; t < end; ++t) {
    const Vec<T> gradient = read(y + t * y_step + c);
#pragma clang loop unroll(full)
    for (int j = 0; j < J; ++j) {
      sum[j] += read(source[j]) * gradient;
      source[j] += source_step;
    }
  }
#pragma clang loop unroll(full)
  for (int j = 0; j < J; ++j) {
    // Lanes past the last channel add zeros to the next tap's sums.
    T* to = met[j].weight + c;
    store_raw(to, load_raw<Vec<T>>(to) + sum[j]);
  }
}

template <class E, int J>
void contract_channels(const RowTap<typename E::Storage, typename E::Acc>* met, i64 source_step,
                       const typename E::Storage* y, i64 y_step, i64 begin, i64 end,
                       i64 channels) {
  constexpr int L = kLanes<typename E::Acc>;
  i64 c = 0;
  for (; c + L <= channels; c += L) {
    contract_columns<E, J, true>(met, source_step, y, y_step, begin, end, c, L);
  }
  if (c < channels) {
    contract_columns<E, J, false>(met, source_step, y, y_step, begin, end, c,
                                  static_cast<int>(channels - c));
  }
}

template <class E>
void contract_row(const PlanarArgs& args,
                  const RowTap<typename E::Storage, typename E::Acc>* met, i64 count,
                  const typename E::Storage* y, i64 columns) {
  constexpr int J = kVectorRegisters == 32 ? 9 : 6;
  const i64 source_step = args.src_step[2] * args.src.stride[5], y_step = args.dst.stride[5];
  i64 low, high;
  common_columns(met, count, columns, low, high);
  if (low > high) low = high = columns;
  for (i64 begin = low; begin < high; begin += kChunk) {
    const i64 end = begin + kChunk < high ? begin + kChunk : high;
    i64 j = 0;
    for (; j + J <= count; j += J) {
      contract_channels<E, J>(met + j, source_step, y, y_step, begin, end, args.groups);
    }
    for (; j + 3 <= count; j += 3) {
      contract_channels<E, 3>(met + j, source_step, y, y_step, begin, end, args.groups);
    }
    for (; j < count; ++j) {
      contract_channels<E, 1>(met + j, source_step, y, y_step, begin, end, args.groups);
    }
  }
  for (i64 j = 0; j < count; ++j) {
    const i64 before = met[j].high < low ? met[j].high : low;
    if (met[j].low < before) {
      contract_channels<E, 1>(met + j, source_step, y, y_step, met[j].low, before, args.groups);
    }
    const i64 after = met[j].low > high ? met[j].low : high;
    if (after < met[j].high) {
      contract_channels<E, 1>(met + j, source_step, y, y_step, after, met[j].high, args.groups);
    }
  }
}

template <class E, class Result>
void finish_tap(const PlanarArgs& args, const typename E::Acc* partials, i64 each, i64 i) {
  using T = typename E::Acc;
  using R = typename Result::Storage;
  const T alpha = static_cast<T>(args.alpha), beta = static_cast<T>(args.beta);
  R* weights = static_cast<R*>(args.weight.data) + args.tap[i].weight;
  const R* add = args.beta != 0.0 ? static_cast<const R*>(args.accumulate.data) : nullptr;
  constexpr int L = kLanes<T>;
  for (i64 first = 0; first < args.groups; first += L) {
    // The partials have room for whole vectors.
    Vec<T> sums = splat(T(0));
    for (i64 split = 0; split < args.splits; ++split) {
      sums += load_raw<Vec<T>>(partials + split * each + i * args.groups + first);
    }
    T all[L];
    store_raw(all, sums * alpha);
    for (i64 c = first; c < args.groups && c < first + L; ++c) {
      const i64 at = c * args.weight.stride[0];
      T sum = all[c - first];
      if (add != nullptr) {
        sum += beta * static_cast<T>(load_one<Result>(add + args.tap[i].weight + at));
      }
      store_one<Result>(weights + at, sum);
    }
  }
}

template <class E, class Result>
void contract_rows(const PlanarArgs& args, Control* control, void* scratch) {
  using T = typename E::Acc;
  using S = typename E::Storage;
  auto* met = static_cast<RowTap<S, T>*>(scratch);
  T* partials = static_cast<T*>(args.workspace);
  const i64 each = args.taps * args.groups + kLanes<T>;
  const i64 rows = args.batch * args.dst_size[0] * args.dst_size[1];
  for (i64 split; (split = take_task(control, 0, args.splits)) >= 0;) {
    T* sums = partials + split * each;
    fill_zero(sums, each);
    const i64 last = (split + 1) * rows / args.splits;
    for (i64 row = split * rows / args.splits; row < last; ++row) {
      const i64 t1 = row % args.dst_size[1], t0 = row / args.dst_size[1] % args.dst_size[0];
      const i64 n = row / args.dst_size[1] / args.dst_size[0];
      const i64 columns = args.dst_size[2];
      const i64 count = row_taps<S, T>(args, n, t0, t1, columns, 0, sums, met);
      const S* y = static_cast<const S*>(args.dst.data) + n * args.dst.stride[0] +
                   t0 * args.dst.stride[3] + t1 * args.dst.stride[4];
      contract_row<E>(args, met, count, y, columns);
    }
    finish_task(control, 0);
  }
  if (!wait_phase(control, 0, args.splits)) return;
  for (i64 i; (i = take_task(control, 1, args.taps)) >= 0;) {
    finish_tap<E, Result>(args, partials, each, i);
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
      return single ? contract_rows<F16, F32>(*args, control, scratch)
                    : contract_rows<F16, F16>(*args, control, scratch);
    case kBfloat16:
      return single ? contract_rows<BF16, F32>(*args, control, scratch)
                    : contract_rows<BF16, BF16>(*args, control, scratch);
    case kFloat32: return contract_rows<F32, F32>(*args, control, scratch);
    case kFloat64: return contract_rows<F64, F64>(*args, control, scratch);
  }
}
