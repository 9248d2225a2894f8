// Max pooling forward: the maximum of each window and, optionally, its flat index.
//
// A task is a tile of windows, for a vector of channels. It packs the input of the tile into a
// block (one vector per position, -Inf outside), and searches each window tap by tap. If channels are
// contiguous in all tensors, a task is a row of windows for all channels, and nothing is packed.
// Requires: PoolArgs from plans/pooling.py. Deterministic. Flat indices are 32-bit for float accumulators
// (the host rejects larger planes), 64-bit for double.
#include "pool.hpp"

namespace convgrad {
namespace {

template <class E, class Index>
void forward_tasks(const PoolArgs& args, Control* control, void* scratch) {
  using T = typename E::Acc;
  constexpr int L = kLanes<T>;
  const i64 most = args.tile[0] * args.tile[1] * args.tile[2];
  T* values = static_cast<T*>(scratch);
  T* index = values + most * L;
  T* x = index + most * L;
  const i64 tasks = pool_tasks<T>(args);
  for (i64 task; (task = take_task(control, 0, tasks)) >= 0;) {
    const PoolTile tile = pool_tile<T>(args, args.output, task);
    const Windows windows = windows_of(args, tile.start, tile.extent);
    i64 start[3];
    for (int d = 0; d < 3; ++d) start[d] = coordinate(args, d, windows.first[d], 0);
    read_block<ValueLanes<E>>(args.x, block_box(tile, args.input, start, windows.extent),
                              minus_infinity<T>(), x);
    arg_max<T>(args, windows, x, values, index);
    const BlockBox out = block_box(tile, args.output, tile.start, tile.extent);
    for (i64 w0 = 0; w0 < tile.extent[0]; ++w0) {
      for (i64 w1 = 0; w1 < tile.extent[1]; ++w1) {
        const i64 row = (w0 * tile.extent[1] + w1) * tile.extent[2] * L;
        write_row<ValueLanes<E>>(element_at<typename E::Storage>(args.y, out, w0, w1, 0),
                                 args.y.stride[1], args.y.stride[4], tile.lanes, tile.extent[2],
                                 values + row);
        if (args.indices.data == nullptr) continue;
        write_row<IndexLanes<T, Index>>(element_at<Index>(args.indices, out, w0, w1, 0),
                                        args.indices.stride[1], args.indices.stride[4], tile.lanes,
                                        tile.extent[2], index + row);
      }
    }
  }
}

// Searches a window of W vectors of channels, from `c` on, of which only `lanes` channels count if W is 1.
template <class E, class Index, int W>
CONVGRAD_INLINE void search_channels(const PoolArgs& args, const TapRange* taps, const i64* base,
                                     const typename E::Storage* x, typename E::Storage* y,
                                     Index* indices, i64 c, int lanes) {
  using T = typename E::Acc;
  constexpr int L = kLanes<T>;
  using I = Mask<T>;
  using Lane = typename detail::MaskElement<T>::type;
  const auto place = [&](int d, i64 tap) { return base[d] + tap * args.dilation[d]; };
  Vec<T> best[W];
  I at[W];
#pragma clang loop unroll(full)
  for (int w = 0; w < W; ++w) {
    best[w] = minus_infinity<T>();
    at[w] = I(static_cast<Lane>(flat_index(args, place(0, taps[0].low), place(1, taps[1].low),
                                           place(2, taps[2].low))));
  }
  for (i64 r0 = taps[0].low; r0 < taps[0].high; ++r0) {
    for (i64 r1 = taps[1].low; r1 < taps[1].high; ++r1) {
      const auto* row = x + place(0, r0) * args.x.stride[2] + place(1, r1) * args.x.stride[3] + c;
      for (i64 r2 = taps[2].low; r2 < taps[2].high; ++r2) {
        const auto* from = row + place(2, r2) * args.x.stride[4];
        const I here =
            I(static_cast<Lane>(flat_index(args, place(0, r0), place(1, r1), place(2, r2))));
#pragma clang loop unroll(full)
        for (int w = 0; w < W; ++w) {
          const Vec<T> value =
              W > 1 || lanes == L ? load<E>(from + w * L) : load_first<E>(from, lanes);
          const I replaces = (value > best[w]) | (value != value);
          best[w] = replaces ? value : best[w];
          at[w] = replaces ? here : at[w];
        }
      }
    }
  }
#pragma clang loop unroll(full)
  for (int w = 0; w < W; ++w) {
    const auto found = __builtin_bit_cast(Vec<T>, at[w]);
    if (W > 1 || lanes == L) {
      ValueLanes<E>::put(y + c + w * L, best[w]);
      if (indices != nullptr) IndexLanes<T, Index>::put(indices + c + w * L, found);
    } else {
      ValueLanes<E>::put(y + c, best[w], lanes);
      if (indices != nullptr) IndexLanes<T, Index>::put(indices + c, found, lanes);
    }
  }
}

template <class E, class Index>
void forward_rows(const PoolArgs& args, Control* control) {
  using S = typename E::Storage;
  constexpr i64 L = kLanes<typename E::Acc>, W = 4;
  const i64 tasks = args.batch * args.output[0] * args.output[1];
  for (i64 task; (task = take_task(control, 0, tasks)) >= 0;) {
    const i64 n = task / args.output[1] / args.output[0];
    const i64 o[2] = {task / args.output[1] % args.output[0], task % args.output[1]};
    const auto row_of = [&](const View& view) {
      return n * view.stride[0] + o[0] * view.stride[2] + o[1] * view.stride[3];
    };
    const S* x = static_cast<const S*>(args.x.data) + n * args.x.stride[0];
    S* y = static_cast<S*>(args.y.data) + row_of(args.y);
    auto* indices = static_cast<Index*>(args.indices.data);
    if (indices != nullptr) indices += row_of(args.indices);
    TapRange taps[3];
    i64 base[3];
    for (int d = 0; d < 2; ++d) {
      taps[d] = taps_inside(args, d, o[d]);
      base[d] = coordinate(args, d, o[d], 0);
    }
    for (i64 o2 = 0; o2 < args.output[2]; ++o2, y += args.y.stride[4]) {
      taps[2] = taps_inside(args, 2, o2);
      base[2] = coordinate(args, 2, o2, 0);
      i64 c = 0;
      for (; c + W * L <= args.channels; c += W * L) {
        search_channels<E, Index, W>(args, taps, base, x, y, indices, c, L);
      }
      for (; c < args.channels; c += L) {
        search_channels<E, Index, 1>(args, taps, base, x, y, indices, c,
                                     static_cast<int>(least(L, args.channels - c)));
      }
      if (indices != nullptr) indices += args.indices.stride[4];
    }
  }
}

template <class E>
void forward(const PoolArgs& args, Control* control, void* scratch) {
  const bool indexed = args.indices.data != nullptr;
  if (args.x.stride[1] == 1 && args.y.stride[1] == 1 &&
      (!indexed || args.indices.stride[1] == 1)) {
    return args.index_bytes == 4 ? forward_rows<E, i32>(args, control)
                                 : forward_rows<E, i64>(args, control);
  }
  args.index_bytes == 4 ? forward_tasks<E, i32>(args, control, scratch)
                        : forward_tasks<E, i64>(args, control, scratch);
}

}  // namespace
}  // namespace convgrad

extern "C" CONVGRAD_EXPORT void convgrad_pool_forward(const convgrad::PoolArgs* args,
                                                      convgrad::Control* control, void* scratch) {
  using namespace convgrad;
  switch (args->dtype) {
    case kFloat16: return forward<F16>(*args, control, scratch);
    case kBfloat16: return forward<BF16>(*args, control, scratch);
    case kFloat32: return forward<F32>(*args, control, scratch);
    case kFloat64: return forward<F64>(*args, control, scratch);
  }
}
