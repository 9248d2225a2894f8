// Max pooling backward: each input position gathers the gradients of the windows whose maximum it
// is, in the windows' order, summed in float (double for F64) and rounded once.
//
// A task is a vector's worth of channels and a tile of input positions. First the flat indices of
// the maxima of all windows that the tile may meet: searched for in the input, or read and checked.
// Then, position by position, the gradients of those windows whose index is the position. Windows
// on a tile's border are looked at by more than one task; none writes outside its tile.
//
// Relies on: PoolArgs as plans/pooling.py makes it. Deterministic: no atomics, and each sum's order
// is the windows'. An index outside its window's valid taps adds to nothing and is reported:
// Control.error becomes 1 + the position, in (N, C, output) order, of the first such index.
#include "pool.hpp"

namespace convgrad {
namespace {

void report(Control* control, i64 position) {
  i64 seen = __atomic_load_n(&control->error, __ATOMIC_RELAXED);
  while ((seen == 0 || position + 1 < seen) &&
         !__atomic_compare_exchange_n(&control->error, &seen, position + 1, false,
                                      __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

// Compares each index with the flat positions of its window's taps inside the input; those that
// are none of them become -1.
template <class T>
void check_indices(const PoolArgs& args, Control* control, const PoolTile& tile, const i64* first,
                   const i64* count, T* index) {
  constexpr int L = kLanes<T>;
  using I = Mask<T>;
  using Lane = typename detail::MaskElement<T>::type;
  I used = I(Lane(0));
  for (int lane = 0; lane < tile.lanes; ++lane) used[lane] = Lane(-1);
  for (i64 w0 = 0; w0 < count[0]; ++w0) {
    const i64 o0 = first[0] + w0;
    if (o0 < 0 || o0 >= args.output[0]) continue;
    for (i64 w1 = 0; w1 < count[1]; ++w1) {
      const i64 o1 = first[1] + w1;
      if (o1 < 0 || o1 >= args.output[1]) continue;
      for (i64 w2 = 0; w2 < count[2]; ++w2) {
        const i64 o2 = first[2] + w2;
        if (o2 < 0 || o2 >= args.output[2]) continue;
        T* at = index + ((w0 * count[1] + w1) * count[2] + w2) * L;
        const I given = load_raw<I>(at);
        I found = I(Lane(0));
        for (i64 r0 = 0; r0 < args.kernel[0]; ++r0) {
          const i64 i0 = coordinate(args, 0, o0, r0);
          if (i0 < 0 || i0 >= args.input[0]) continue;
          for (i64 r1 = 0; r1 < args.kernel[1]; ++r1) {
            const i64 i1 = coordinate(args, 1, o1, r1);
            if (i1 < 0 || i1 >= args.input[1]) continue;
            for (i64 r2 = first_tap_inside(args, 2, o2); r2 < args.kernel[2]; ++r2) {
              const i64 i2 = coordinate(args, 2, o2, r2);
              if (i2 >= args.input[2]) break;
              found |= given == static_cast<Lane>(flat_index(args, i0, i1, i2));
            }
          }
        }
        if (__builtin_reduce_or(~found & used) == 0) continue;
        store_raw(at, given | ~found);
        Lane lanes[L];
        store_raw(lanes, found);
        for (int lane = 0; lane < tile.lanes; ++lane) {
          if (lanes[lane] != 0) continue;
          const i64 plane = tile.batch * args.channels + tile.channel + lane;
          report(control,
                 ((plane * args.output[0] + o0) * args.output[1] + o1) * args.output[2] + o2);
        }
      }
    }
  }
}

// The windows that meet input position i along one dimension: the largest tap first, so that
// windows come in order.
struct Meeting {
  i64 window;
  i64 tap;
};
CONVGRAD_INLINE bool next_meeting(const PoolArgs& args, int d, i64 i, Meeting& m) {
  for (--m.tap; m.tap >= 0; --m.tap) {
    const i64 reach = i + args.pad[d] - m.tap * args.dilation[d];
    if (reach < 0 || reach % args.stride[d] != 0) continue;
    m.window = reach / args.stride[d];
    return m.window < args.output[d];
  }
  return false;
}

// One row of grad_input: row[i2] = sum of the gradients of the windows whose index is (i0, i1, i2).
template <class T>
void gather_row(const PoolArgs& args, const PoolTile& tile, const i64* first, const i64* count,
                const T* index, const T* gradient, i64 i0, i64 i1, T* row) {
  constexpr int L = kLanes<T>;
  using I = Mask<T>;
  using Lane = typename detail::MaskElement<T>::type;
  const i64 s2 = args.stride[2];
  for (i64 v = 0; v < tile.extent[2]; ++v) store_raw(row + v * L, splat(T(0)));
  for (Meeting m0{0, args.kernel[0]}; next_meeting(args, 0, i0, m0);) {
    for (Meeting m1{0, args.kernel[1]}; next_meeting(args, 1, i1, m1);) {
      const i64 base = ((m0.window - first[0]) * count[1] + m1.window - first[1]) * count[2];
      for (i64 r2 = args.kernel[2] - 1; r2 >= 0; --r2) {
        // Windows o2 with o2 * stride + r2 * dilation - pad inside the tile and the output.
        const i64 shift = r2 * args.dilation[2] - args.pad[2];
        i64 o2 = ceil_quotient(tile.start[2] - shift, s2);
        i64 v = o2 * s2 + shift - tile.start[2];
        const i64 flat = flat_index(args, i0, i1, tile.start[2]);
        for (; v < tile.extent[2] && o2 < args.output[2]; ++o2, v += s2) {
          const i64 at = (base + o2 - first[2]) * L;
          const I chosen = load_raw<I>(index + at) == static_cast<Lane>(flat + v);
          const Vec<T> sum = load_raw<Vec<T>>(row + v * L);
          const Vec<T> more = sum + load_raw<Vec<T>>(gradient + at);
          store_raw(row + v * L, chosen ? more : sum);
        }
      }
    }
  }
}

template <class E, class Index>
void backward_tasks(const PoolArgs& args, Control* control, void* scratch) {
  using T = typename E::Acc;
  constexpr int L = kLanes<T>;
  const i64 windows = args.windows[0] * args.windows[1] * args.windows[2];
  T* row = static_cast<T*>(scratch);
  T* index = row + args.tile[2] * L;
  T* gradient = index + windows * L;
  T* x = gradient + windows * L;
  const i64 tasks = pool_tasks<T>(args);
  for (i64 task; (task = take_task(control, 0, tasks)) >= 0;) {
    const PoolTile tile = pool_tile<T>(args, args.input, task);
    i64 first[3], count[3];
    for (int d = 0; d < 3; ++d) {
      const i64 last = (tile.start[d] + tile.extent[d] - 1 + args.pad[d]) / args.stride[d];
      first[d] = ceil_quotient(
          tile.start[d] + args.pad[d] - (args.kernel[d] - 1) * args.dilation[d], args.stride[d]);
      count[d] = (last < args.output[d] ? last : args.output[d] - 1) - first[d] + 1;
      if (count[d] < 0) count[d] = 0;
    }
    if (count[0] > 0 && count[1] > 0 && count[2] > 0) {
      const BlockBox box = block_box(tile, args.output, first, count);
      read_block<ValueLanes<E>>(args.y, box, splat(T(0)), gradient);
      if (args.from_indices) {
        read_block<IndexLanes<T, Index>>(args.indices, box, splat(T(0)), index);
        check_indices<T>(args, control, tile, first, count, index);
      } else {
        i64 start[3], extent[3];
        windows_reach(args, first, count, start, extent);
        read_block<ValueLanes<E>>(args.x, block_box(tile, args.input, start, extent),
                                  minus_infinity<T>(), x);
        arg_max<T>(args, first, count, extent, x, static_cast<T*>(nullptr), index);
      }
    }
    const BlockBox out = block_box(tile, args.input, tile.start, tile.extent);
    for (i64 v0 = 0; v0 < tile.extent[0]; ++v0) {
      for (i64 v1 = 0; v1 < tile.extent[1]; ++v1) {
        gather_row<T>(args, tile, first, count, index, gradient, tile.start[0] + v0,
                      tile.start[1] + v1, row);
        write_row<ValueLanes<E>>(element_at<typename E::Storage>(args.grad_input, out, v0, v1, 0),
                                 args.grad_input.stride[1], args.grad_input.stride[4], tile.lanes,
                                 tile.extent[2], row);
      }
    }
  }
}

template <class E>
void backward(const PoolArgs& args, Control* control, void* scratch) {
  args.index_bytes == 4 ? backward_tasks<E, i32>(args, control, scratch)
                        : backward_tasks<E, i64>(args, control, scratch);
}

}  // namespace
}  // namespace convgrad

extern "C" CONVGRAD_EXPORT void convgrad_pool_backward(const convgrad::PoolArgs* args,
                                                       convgrad::Control* control, void* scratch) {
  using namespace convgrad;
  switch (args->dtype) {
    case kFloat16: return backward<F16>(*args, control, scratch);
    case kBfloat16: return backward<BF16>(*args, control, scratch);
    case kFloat32: return backward<F32>(*args, control, scratch);
    case kFloat64: return backward<F64>(*args, control, scratch);
  }
}
