// Max pooling forward: the maximum of each window and, optionally, its flat index.
//
// A task is a tile of windows, for a vector of channels. It packs the input of the tile into a
// block (one vector per position, -Inf outside), and searches each window tap by tap. Requires:
// PoolArgs from plans/pooling.py. Deterministic. Flat indices are 32-bit for float accumulators
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

template <class E>
void forward(const PoolArgs& args, Control* control, void* scratch) {
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
