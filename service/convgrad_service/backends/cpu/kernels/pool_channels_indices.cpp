// Max pooling backward from given indices without dilation, for contiguous channels: each window's
// gradients are added at its indices.
//
// A task is a block of channels of one image. The indices of a window, one for each channel, are compared
// with the window's range as vectors. If all are valid, the gradients are added one by one, in window
// order, in the result, which is cleared just ahead of use.
//
// Requires: PoolArgs whose tensors have contiguous channels and equally spaced positions, in the type of
// the sums; the channels of a task in tile[0]. Deterministic: one thread processes a channel of an
// image. Invalid indices contribute nothing. Control.done[1] counts the valid ones, as in
// pool_backward.cpp.
#include "pool.hpp"

namespace convgrad {
namespace {

// The positions of a window inside the input: the flat index of the first, and their extents.
template <class T>
struct WindowPositions {
  using Lane = typename detail::MaskElement<T>::type;
  using Unsigned = __make_unsigned(Lane);
  i64 first;
  i64 extent[3];
  i64 slice_pitch, row_pitch;

  // Which lanes are positions of the window: all bits set.
  CONVGRAD_INLINE Mask<T> contain(Mask<T> index) const {
    using U = VecN<Unsigned, kLanes<T>>;
    const U from = __builtin_bit_cast(U, index - static_cast<Lane>(first));
    Mask<T> met{};
    for (i64 t = 0; t < extent[0]; ++t) {
      for (i64 r = 0; r < extent[1]; ++r) {
        const U in_row = from - static_cast<Unsigned>(t * slice_pitch + r * row_pitch);
        met |= in_row < static_cast<Unsigned>(extent[2]);
      }
    }
    return met;
  }
};

template <class T>
CONVGRAD_INLINE void clear_channels(T* to, i64 pitch, i64 positions, i64 channels) {
  if (positions <= 0) return;
  if (pitch == channels) {
    channels *= positions;
    positions = 1;
  }
  for (i64 i = 0; i < positions; ++i) {
    __builtin_memset(to + i * pitch, 0, static_cast<u64>(channels) * sizeof(T));
  }
}

template <class T, class Index>
void scatter_channels(const PoolArgs& args, Control* control) {
  using E = IndexLanes<T, Index>;
  using Lane = typename detail::MaskElement<T>::type;
  constexpr i64 L = kLanes<T>;
  const i64 blocks = (args.channels + args.tile[0] - 1) / args.tile[0];
  const i64 row = args.input[2], slice = args.input[1] * row, size = args.input[0] * slice;
  const i64 pitch = args.grad_input.stride[4];
  Mask<T> lane{};
  for (int i = 0; i < L; ++i) lane[i] = static_cast<Lane>(i);
  i64 valid = 0;
  for (i64 task; (task = take_task(control, 0, args.batch * blocks)) >= 0;) {
    const i64 n = task / blocks, c0 = task % blocks * args.tile[0];
    const i64 channels = least(args.tile[0], args.channels - c0);
    T* sums = static_cast<T*>(args.grad_input.data) + n * args.grad_input.stride[0] + c0;
    const T* y = static_cast<const T*>(args.y.data) + n * args.y.stride[0] + c0;
    const Index* index = static_cast<const Index*>(args.indices.data) + n * args.indices.stride[0] + c0;
    i64 cleared = 0;
    for (i64 o0 = 0; o0 < args.output[0]; ++o0) {
      for (i64 o1 = 0; o1 < args.output[1]; ++o1) {
        const TapRange taps[2] = {taps_inside(args, 0, o0), taps_inside(args, 1, o1)};
        const i64 slices = least(args.input[0], coordinate(args, 0, o0, args.kernel[0]));
        const i64 rows = least(args.input[1], coordinate(args, 1, o1, args.kernel[1]));
        const i64 reached = args.output[0] == 1 && slices == 1 ? rows * row : slices * slice;
        clear_channels(sums + cleared * pitch, pitch, reached - cleared, channels);
        cleared = most(cleared, reached);
        for (i64 o2 = 0; o2 < args.output[2]; ++o2) {
          const TapRange columns = taps_inside(args, 2, o2);
          const WindowPositions<T> window{
              flat_index(args, coordinate(args, 0, o0, taps[0].low),
                         coordinate(args, 1, o1, taps[1].low), coordinate(args, 2, o2, columns.low)),
              {taps[0].high - taps[0].low, taps[1].high - taps[1].low,
               most(columns.high - columns.low, 0)},
              slice, row};
          Mask<T> right = Mask<T>{} - 1;
          const auto contained = [&](i64 c) {
            const int lanes = static_cast<int>(least(L, channels - c));
            const Vec<T> given = lanes == L ? E::get(index + c) : E::get(index + c, lanes);
            return window.contain(__builtin_bit_cast(Mask<T>, given)) |
                   (lane >= static_cast<Lane>(lanes));
          };
          for (i64 c = 0; c < channels; c += L) right &= contained(c);
          if (__builtin_reduce_and(right) != 0) {
            for (i64 c = 0; c < channels; ++c) sums[index[c] * pitch + c] += y[c];
            valid += channels;
          } else {
            for (i64 c = 0; c < channels; ++c) {
              if (contained(c / L * L)[c % L] == 0) continue;
              sums[index[c] * pitch + c] += y[c];
              ++valid;
            }
          }
          y += args.y.stride[4];
          index += args.indices.stride[4];
        }
      }
    }
    clear_channels(sums + cleared * pitch, pitch, size - cleared, channels);
  }
  __atomic_fetch_add(&control->done[1], valid, __ATOMIC_RELAXED);
}

template <class T>
void scatter(const PoolArgs& args, Control* control) {
  args.index_bytes == 4 ? scatter_channels<T, i32>(args, control)
                        : scatter_channels<T, i64>(args, control);
}

}  // namespace
}  // namespace convgrad

extern "C" CONVGRAD_EXPORT void convgrad_pool_channels_indices(const convgrad::PoolArgs* args,
                                                               convgrad::Control* control, void*) {
  using namespace convgrad;
  args->dtype == kFloat64 ? scatter<double>(*args, control) : scatter<float>(*args, control);
}
