// Max pooling backward from given indices without dilation, for contiguous planes: each window's
// gradient is added at its index.
//
// A task is a few planes. Some rows of windows at a time, vectors of indices are compared with the
// ranges of their windows, which are the same in all planes and come from tables. If all are valid,
// the gradients are added one by one, in window order, in a plane of accumulators (for float32, the
// result itself), which is cleared just ahead of use, so that it stays in L1.
//
// Requires: PoolArgs whose grad_output and indices are planes of contiguous windows, with the planes
// of a task in tile[0] and the rows of windows together in tile[1]; a scratch of four tables of the
// windows and a plane of accumulators. Deterministic: one thread processes a plane. Invalid indices
// contribute nothing. Control.done[1] counts the valid ones, as in pool_backward.cpp.
#include "pool_planes.hpp"

namespace convgrad {
namespace {

// For each window: the flat index of its first tap inside the input, the number of taps inside along
// W, and the distances from the first to one past the last in a slice, and in all of them. An index is
// valid if its distance from the first tap is less than the last of these, and in some slice of taps
// less than the one before and, in some row of them, less than the width.
template <class T>
struct Ranges {
  using Lane = typename detail::MaskElement<T>::type;
  using Unsigned = __make_unsigned(Lane);
  Lane* first;
  Unsigned* width;
  Unsigned* area;
  Unsigned* length;
  i64 slices, rows;  // of taps
  i64 slice_pitch, row_pitch;  // of the input

  CONVGRAD_INLINE bool contains(i64 w, Lane index) const {
    const auto from = static_cast<Unsigned>(index - first[w]);
    bool met = false;
    for (i64 t = 0; t < slices; ++t) {
      const auto in_slice = static_cast<Unsigned>(from - static_cast<Unsigned>(t * slice_pitch));
      bool in_row = false;
      for (i64 r = 0; r < rows; ++r) {
        in_row |= in_slice - static_cast<Unsigned>(r * row_pitch) < width[w];
      }
      met |= in_row && in_slice < area[w];
    }
    return met && from < length[w];
  }
  // The same for a vector of windows: all bits set in the lanes of valid indices.
  CONVGRAD_INLINE Mask<T> contain(i64 w, Mask<T> index) const {
    using U = VecN<Unsigned, kLanes<T>>;
    const U from = __builtin_bit_cast(U, index - load_raw<Mask<T>>(first + w));
    const U across = load_raw<U>(width + w), down = load_raw<U>(area + w);
    Mask<T> met{};
    for (i64 t = 0; t < slices; ++t) {
      const U in_slice = from - static_cast<Unsigned>(t * slice_pitch);
      Mask<T> in_row{};
      for (i64 r = 0; r < rows; ++r) {
        in_row |= in_slice - static_cast<Unsigned>(r * row_pitch) < across;
      }
      met |= in_row & (in_slice < down);
    }
    return met & (from < load_raw<U>(length + w));
  }
};

template <class T>
Ranges<T> list_ranges(const PoolArgs& args, char* scratch) {
  using R = Ranges<T>;
  using Unsigned = typename R::Unsigned;
  const i64 windows = args.output[0] * args.output[1] * args.output[2];
  const i64 table_bytes = (windows * static_cast<i64>(sizeof(T)) + 63) / 64 * 64;
  const i64 row_pitch = args.input[2], slice_pitch = args.input[1] * row_pitch;
  Ranges<T> ranges{reinterpret_cast<typename R::Lane*>(scratch),
                   reinterpret_cast<Unsigned*>(scratch + table_bytes),
                   reinterpret_cast<Unsigned*>(scratch + 2 * table_bytes),
                   reinterpret_cast<Unsigned*>(scratch + 3 * table_bytes),
                   args.kernel[0], args.kernel[1], slice_pitch, row_pitch};
  i64 w = 0;
  for (i64 o0 = 0; o0 < args.output[0]; ++o0) {
    const TapRange slices = taps_inside(args, 0, o0);
    for (i64 o1 = 0; o1 < args.output[1]; ++o1) {
      const TapRange rows = taps_inside(args, 1, o1);
      for (i64 o2 = 0; o2 < args.output[2]; ++o2, ++w) {
        const TapRange columns = taps_inside(args, 2, o2);
        const i64 width = columns.high - columns.low, high = rows.high - rows.low;
        const i64 deep = slices.high - slices.low;
        const bool inside = width > 0 && high > 0 && deep > 0;
        const i64 area = inside ? (high - 1) * row_pitch + width : 0;
        ranges.first[w] = static_cast<typename R::Lane>(
            flat_index(args, coordinate(args, 0, o0, slices.low), coordinate(args, 1, o1, rows.low),
                       coordinate(args, 2, o2, columns.low)));
        ranges.width[w] = static_cast<Unsigned>(most(width, 0));
        ranges.area[w] = static_cast<Unsigned>(area);
        ranges.length[w] = static_cast<Unsigned>(inside ? (deep - 1) * slice_pitch + area : 0);
      }
    }
  }
  return ranges;
}

template <class E, class Index>
void scatter_planes(const PoolArgs& args, Control* control, void* scratch) {
  using T = typename E::Acc;
  using S = typename E::Storage;
  using Lane = typename detail::MaskElement<T>::type;
  constexpr i64 L = kLanes<T>;
  const i64 rows = args.output[0] * args.output[1], windows = rows * args.output[2];
  const i64 slice = args.input[1] * args.input[2], size = args.input[0] * slice;
  auto* tables = static_cast<char*>(scratch);
  const Ranges<T> ranges = list_ranges<T>(args, tables);
  const View& result = args.grad_input;
  const bool in_place = sizeof(S) == sizeof(T);
  T* plane = reinterpret_cast<T*>(tables + 4 * ((windows * static_cast<i64>(sizeof(T)) + 63) / 64 * 64));
  const i64 planes = args.batch * args.channels;
  const i64 tasks = (planes + args.tile[0] - 1) / args.tile[0];
  i64 valid = 0;
  for (i64 task; (task = take_task(control, 0, tasks)) >= 0;) {
    const i64 end = least(planes, (task + 1) * args.tile[0]);
    for (i64 p = task * args.tile[0]; p < end; ++p) {
      const i64 n = p / args.channels, c = p % args.channels;
      const auto of = [&](const View& view) { return n * view.stride[0] + c * view.stride[1]; };
      const Index* index = static_cast<const Index*>(args.indices.data) + of(args.indices);
      const S* y = static_cast<const S*>(args.y.data) + of(args.y);
      S* target = static_cast<S*>(result.data) + of(result);
      T* sums = in_place ? reinterpret_cast<T*>(target) : plane;
      i64 cleared = 0;
      for (i64 row = 0; row < rows; row += args.tile[1]) {
        const i64 past = least(rows, row + args.tile[1]);
        const i64 low = row * args.output[2], high = past * args.output[2];
        const i64 o0 = (past - 1) / args.output[1], o1 = (past - 1) % args.output[1];
        const i64 slices = least(args.input[0], coordinate(args, 0, o0, args.kernel[0]));
        i64 reached = slices * slice;
        if (args.output[0] == 1 && slices == 1) {
          reached = least(args.input[1], coordinate(args, 1, o1, args.kernel[1])) * args.input[2];
        }
        if (reached > cleared) {
          fill_zero(sums + cleared, reached - cleared);
          cleared = reached;
        }
        Mask<T> right = Mask<T>{} - 1;
        for (i64 w = low; w < high && windows >= L; w += L) {
          const i64 at = least(w, windows - L);
          right &= ranges.contain(
              at, __builtin_bit_cast(Mask<T>, IndexLanes<T, Index>::get(index + at)));
        }
        if (windows >= L && __builtin_reduce_and(right) != 0) {
          for (i64 w = low; w < high; ++w) sums[index[w]] += load_one<E>(y + w);
          valid += high - low;
          continue;
        }
        for (i64 w = low; w < high; ++w) {
          const auto lane = static_cast<Lane>(index[w]);
          if (lane != index[w] || !ranges.contains(w, lane)) continue;
          sums[lane] += load_one<E>(y + w);
          ++valid;
        }
      }
      if (cleared < size) fill_zero(sums + cleared, size - cleared);
      if (!in_place) write_line<E>(target, 1, size, plane);
    }
  }
  __atomic_fetch_add(&control->done[1], valid, __ATOMIC_RELAXED);
}

template <class E>
void scatter(const PoolArgs& args, Control* control, void* scratch) {
  args.index_bytes == 4 ? scatter_planes<E, i32>(args, control, scratch)
                        : scatter_planes<E, i64>(args, control, scratch);
}

}  // namespace
}  // namespace convgrad

extern "C" CONVGRAD_EXPORT void convgrad_pool_planes_indices(const convgrad::PoolArgs* args,
                                                             convgrad::Control* control,
                                                             void* scratch) {
  using namespace convgrad;
  switch (args->dtype) {
    case kFloat16: return scatter<F16>(*args, control, scratch);
    case kBfloat16: return scatter<BF16>(*args, control, scratch);
    case kFloat32: return scatter<F32>(*args, control, scratch);
    case kFloat64: return scatter<F64>(*args, control, scratch);
  }
}
