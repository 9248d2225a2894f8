// The gradient of a bias: result[g, k] = sum over n and positions of y[n, g, k, position].
//
// A task is a share of the images, for one channel or, if channels are contiguous, for a vector of
// channels. Each row is summed in vectors of floats (doubles for F64), rows and images are summed
// in double, and a second phase sums the shares in order and rounds once. So chains of float
// additions are at most a row long. Deterministic. Indices are 64-bit.
//
// Requires: ConvArgs with y, bias (the result), batch, groups, out_channels, output, dtype,
// result_dtype, block[] = {images per share}, and a workspace of shares * groups * out_channels
// doubles.
#include "conv_args.hpp"
#include "elements.hpp"

namespace convgrad {
namespace {

// Sums one channel. A row is summed in L lanes, which makes L short chains instead of a long one.
template <class E>
double sum_of_channel(const ConvArgs& args, const typename E::Storage* y) {
  using T = typename E::Acc;
  constexpr int L = kLanes<T>;
  const i64 step = args.y.stride[5];
  double total = 0;
  for (i64 p0 = 0; p0 < args.output[0]; ++p0) {
    for (i64 p1 = 0; p1 < args.output[1]; ++p1) {
      const auto* row = y + p0 * args.y.stride[3] + p1 * args.y.stride[4];
      Vec<T> sums = splat(T(0));
      i64 column = 0;
      if (step == 1) {
        Vec<T> more[3] = {sums, sums, sums};
        for (; column + 4 * L <= args.output[2]; column += 4 * L) {
          sums += load<E>(row + column);
          for (int i = 0; i < 3; ++i) more[i] += load<E>(row + column + (i + 1) * L);
        }
        sums = (sums + more[0]) + (more[1] + more[2]);
        for (; column < args.output[2]; column += L) {
          const i64 left = args.output[2] - column;
          sums += load_first<E>(row + column, static_cast<int>(left < L ? left : L));
        }
      } else {
        for (; column < args.output[2]; ++column) {
          sums[column % L] += load_one<E>(row + column * step);
        }
      }
      total += static_cast<double>(sum_lanes<T>(sums));
    }
  }
  return total;
}

// Sums a vector of contiguous channels and adds it to the result.
template <class E>
void sum_of_channels(const ConvArgs& args, const typename E::Storage* y, int channels,
                     double* result) {
  using T = typename E::Acc;
  constexpr int L = kLanes<T>;
  constexpr int kChain = 128;
  const i64 step = args.y.stride[5];
  double total[L] = {};
  for (i64 p0 = 0; p0 < args.output[0]; ++p0) {
    for (i64 p1 = 0; p1 < args.output[1]; ++p1) {
      const auto* row = y + p0 * args.y.stride[3] + p1 * args.y.stride[4];
      for (i64 begin = 0; begin < args.output[2]; begin += kChain) {
        const i64 end = begin + kChain < args.output[2] ? begin + kChain : args.output[2];
        Vec<T> sums = splat(T(0));
        for (i64 column = begin; column < end; ++column) {
          sums += channels == L ? load<E>(row + column * step)
                                : load_first<E>(row + column * step, channels);
        }
        for (int i = 0; i < channels; ++i) total[i] += static_cast<double>(sums[i]);
      }
    }
  }
  for (int i = 0; i < channels; ++i) result[i] += total[i];
}

template <class E, class Result>
void channel_sums(const ConvArgs& args, Control* control) {
  constexpr int L = kLanes<typename E::Acc>;
  const i64 all = args.groups * args.out_channels;
  const bool adjacent = all > 1 && args.y.stride[5] != 1 &&
                        (args.out_channels == 1 || args.y.stride[2] == 1) &&
                        (args.groups == 1 || args.y.stride[1] == args.out_channels);
  const i64 block = adjacent ? L : 1;
  const i64 blocks = (all + block - 1) / block;
  const i64 images = args.block[0], shares = (args.batch + images - 1) / images;
  const i64 tasks = shares * blocks;
  double* sums = static_cast<double*>(args.workspace);
  for (i64 task; (task = take_task(control, 0, tasks)) >= 0;) {
    const i64 share = task / blocks, first = task % blocks * block;
    const i64 left = all - first;
    const int channels = static_cast<int>(left < block ? left : block);
    double* to = sums + share * all + first;
    for (int i = 0; i < channels; ++i) to[i] = 0;
    const i64 end = (share + 1) * images < args.batch ? (share + 1) * images : args.batch;
    for (i64 n = share * images; n < end; ++n) {
      const auto* y = static_cast<const typename E::Storage*>(args.y.data) +
                      n * args.y.stride[0] + first / args.out_channels * args.y.stride[1] +
                      first % args.out_channels * args.y.stride[2];
      if (adjacent) {
        sum_of_channels<E>(args, y, channels, to);
      } else {
        *to += sum_of_channel<E>(args, y);
      }
    }
    finish_task(control, 0);
  }
  if (!wait_phase(control, 0, tasks)) return;
  auto* result = static_cast<typename Result::Storage*>(args.bias.data);
  for (i64 channel; (channel = take_task(control, 1, all)) >= 0;) {
    double total = sums[channel];
    for (i64 share = 1; share < shares; ++share) total += sums[share * all + channel];
    store_one<Result>(result + channel / args.out_channels * args.bias.stride[0] +
                          channel % args.out_channels * args.bias.stride[1],
                      static_cast<typename Result::Acc>(total));
  }
}

}  // namespace
}  // namespace convgrad

extern "C" CONVGRAD_EXPORT void convgrad_channel_sum(const convgrad::ConvArgs* args,
                                                     convgrad::Control* control, void*) {
  using namespace convgrad;
  const bool single = args->result_dtype == kFloat32;
  switch (args->dtype) {
    case kFloat16:
      return single ? channel_sums<F16, F32>(*args, control)
                    : channel_sums<F16, F16>(*args, control);
    case kBfloat16:
      return single ? channel_sums<BF16, F32>(*args, control)
                    : channel_sums<BF16, BF16>(*args, control);
    case kFloat32: return channel_sums<F32, F32>(*args, control);
    case kFloat64: return channel_sums<F64, F64>(*args, control);
  }
}
