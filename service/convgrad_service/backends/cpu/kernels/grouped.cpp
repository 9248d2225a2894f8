// Grouped convolution with few channels per group: forward and backward data.
//
// GEMM view, for each group: M = positions, N = dst channels, K = src channels x taps. A task is a
// tile of positions of one image, for a block of groups. It packs the source box into padded planes
// (one per channel and stride phase) and the weights in the order of use, and computes register
// blocks of 8 channels x 3 vectors of positions. With a stride, bwd_data is one correlation per
// phase of the result. Planes that are stored as a box without padding would be are read in place.
//
// Requires: PlanarArgs from plans/planar.py, with scratch_bytes of scratch. Deterministic: each
// element is summed by one thread in an order that depends only on the problem. Indices are 64-bit.
// Padding is multiplied as zeros, so an infinite weight gives NaN there, in its own result channel.
#include "matrix_copy.hpp"
#include "planar_plan.hpp"

namespace convgrad {
namespace {

// Packs the weights of a block of groups as [group][phase][register block][term][channel].
template <class E>
void pack_weights(const PlanarArgs& args, const TileOrigin& tile, typename E::Acc* packed) {
  const auto* weights = static_cast<const typename E::Storage*>(args.weight.data);
  for (i64 g = tile.group; g < tile.group + tile.groups; ++g) {
    for (i64 p = 0; p < args.dst_phases; ++p) {
      for (i64 k = 0; k < args.dst_channels;) {
        const int channels = tile_channels(args.dst_channels - k);
        for (i64 c = 0; c < args.src_channels; ++c) {
          for (i64 i = args.first_tap[p]; i < args.first_tap[p + 1]; ++i) {
            for (int kk = 0; kk < channels; ++kk) {
              *packed++ = load_one<E>(weights + g * args.weight.stride[0] +
                                      (k + kk) * args.weight.stride[1] +
                                      c * args.weight.stride[2] + args.tap[i].weight);
            }
          }
        }
        k += channels;
      }
    }
  }
}

// Source planes: a tile's packed box, or the tensor itself. `offsets` are those of the terms.
template <class T>
struct Source {
  const T* planes;
  i64 group;  // elements from group to group
  const i64* offsets;
};

// Whether the tensor is stored as boxes without padding are.
template <class E>
bool stored_as_boxes(const PlanarArgs& args) {
  const View& src = args.src;
  if (sizeof(typename E::Storage) != sizeof(typename E::Acc) || args.src_phases != 1) return false;
  if (src.stride[5] != 1 || (args.box[1] > 1 && src.stride[4] != args.box[2])) return false;
  if (args.box[0] > 1 && src.stride[3] != args.box[1] * args.box[2]) return false;
  for (int d = 0; d < 3; ++d) {
    const i64 last = args.origin[d] + ceil_div(args.dst_size[d], args.dst_step[d]) +
                     args.box[d] - args.tile[d];
    if (args.src_step[d] != 1 || args.origin[d] < 0 || last > args.src_size[d]) return false;
  }
  for (const i64 stride : src.stride) {
    if (stride < 0) return false;
  }
  return true;
}

// The results of a tile in one phase, in planes whose pitches the caller sets.
CONVGRAD_INLINE Box result_of(const PlanarArgs& args, const TileOrigin& tile, i64 p) {
  Box box;
  box.batch = tile.batch;
  box.group = tile.group;
  box.groups = tile.groups;
  box.channels = args.dst_channels;
  box.row_pitch = args.box[2];
  box.slice_pitch = args.box[1] * args.box[2];
  for (int d = 0; d < 3; ++d) {
    box.size[d] = args.dst_size[d];
    box.step[d] = args.dst_step[d];
    box.phase[d] = args.dst_phase[p * 3 + d];
    box.first[d] = tile.start[d];
    box.extent[d] = tile.extent[d];
    box.limit[d] = tile.extent[d];
  }
  return box;
}

// One tile of a group, from planes to planes. What does not fill a vector is copied first.
template <class T>
void correlate_planes(const PlanarArgs& args, const T* src, const T* weights, T* dst, i64 positions,
                      i64* offsets, T* source, T* sums) {
  constexpr i64 L = kLanes<T>;
  const i64 terms = args.src_channels, channels = args.dst_channels, pitch = args.dst.stride[2];
  const i64 whole = positions / L * L;
  for (i64 c = 0; c < terms; ++c) offsets[c] = c * args.src.stride[2];
  correlate<T>(src, offsets, terms, weights, channels, dst, whole / L, pitch);
  const int rest = static_cast<int>(positions - whole);
  if (rest == 0) return;
  read_ends(src + whole, args.src.stride[2], terms, rest, source);
  for (i64 c = 0; c < terms; ++c) offsets[c] = c * L;
  correlate<T>(source, offsets, terms, weights, channels, sums, 1, L);
  for (i64 k = 0; k < channels; ++k) {
    store_raw_first<T, L>(dst + k * pitch + whole, load_raw<Vec<T>>(sums + k * L), rest);
  }
}

template <class E>
void correlate_tasks(const PlanarArgs& args, Control* control, void* scratch) {
  using T = typename E::Acc;
  constexpr i64 L = kLanes<T>;
  const Planes full = Planes::of<T>(args, args.tile);
  const i64 pitch = full.vectors * L;
  const i64 weights_of_group = args.dst_channels * args.src_channels * args.taps;
  const i64 source_of_group = args.src_phases * args.src_channels * full.plane;
  Arena arena{static_cast<char*>(scratch)};
  const i64 terms = args.src_channels * args.taps;
  i64* offsets = arena.take<i64>(terms);
  i64* stored_offsets = arena.take<i64>(terms);
  T* weights = arena.take<T>(args.group_block * weights_of_group);
  T* source = arena.take<T>(args.group_block * source_of_group + kSlackVectors * L);
  // The two phases of every other column are written together, if columns are contiguous.
  const bool adds = Epilogue<T>::accumulates(args);
  const bool pairs = args.paired && args.dst.stride[5] == 1 &&
                     (!adds || args.accumulate.stride[5] == 1);
  const i64 sums_of_phase = args.group_block * args.dst_channels * pitch;
  T* sums = arena.take<T>((pairs ? 2 : 1) * sums_of_phase);
  tap_offsets(args, full.plane, offsets);
  i64 stored_end = INT64_MIN, furthest = 0;
  if (stored_as_boxes<E>(args)) {
    tap_offsets(args, args.src.stride[2], stored_offsets);
    stored_end = span(args.src, args.batch, args.groups, args.src_channels, args.src_size);
    for (i64 i = 0; i < terms; ++i) furthest = most(furthest, stored_offsets[i]);
  }
  const Epilogue<T> epilogue(args);
  const bool as_planes = !adds && stored_as_planes<E>(args);
  const bool epilogue_follows = epilogue.scales || args.bias.data || args.activation != kNone;

  const i64 units = args.batch * tiles_of(args);
  const i64 tasks = ceil_div(args.groups, args.group_block) * units;
  const bool streams = streams_result<E>(args);
  i64 packed_block = -1;
  for (i64 task; (task = take_task(control, 0, tasks)) >= 0;) {
    const i64 block = task / units;
    const TileOrigin tile = tile_at(args, block, task % units);
    if (block != packed_block) {
      pack_weights<E>(args, tile, weights);
      packed_block = block;
    }
    if (as_planes) {
      const auto* src = static_cast<const T*>(args.src.data) + first_of(args.src, tile);
      auto* dst = static_cast<T*>(args.dst.data) + first_of(args.dst, tile);
      const i64 positions = tile.extent[0] * tile.extent[1] * tile.extent[2];
      for (i64 g = 0; g < tile.groups; ++g) {
        correlate_planes<T>(args, src + g * args.src.stride[1], weights + g * weights_of_group,
                            dst + g * args.dst.stride[1], positions, stored_offsets, source, sums);
      }
      if (epilogue_follows) {
        Box box = result_of(args, tile, 0);
        box.channel_pitch = args.dst.stride[2];
        box.group_pitch = args.dst.stride[1];
        write_box<E>(args.dst, args.accumulate, args.bias, epilogue, box,
                     reinterpret_cast<const T*>(dst));
      }
      continue;
    }
    const i64 vectors = Planes::of<T>(args, tile.extent).vectors;
    Source<T> from{source, source_of_group, offsets};
    // The last vector may extend past the tile, but not past the tensor.
    i64 at = tile.batch * args.src.stride[0] + tile.group * args.src.stride[1];
    for (int d = 0; d < 3; ++d) at += (tile.start[d] + args.origin[d]) * args.src.stride[3 + d];
    const i64 read = at + (tile.groups - 1) * args.src.stride[1] + furthest + vectors * L;
    if (read <= stored_end) {
      const auto* stored = static_cast<const typename E::Storage*>(args.src.data) + at;
      from = {reinterpret_cast<const T*>(stored), args.src.stride[1], stored_offsets};
    } else {
      read_source<E>(args, tile, full.plane, source);
    }
    for (i64 p = 0; p < args.dst_phases; ++p) {
      Box box = result_of(args, tile, p);
      box.channel_pitch = pitch;
      box.group_pitch = args.dst_channels * pitch;
      box.streams = streams;
      const i64 first = args.first_tap[p] * args.src_channels;
      const i64 count = args.first_tap[p + 1] * args.src_channels - first;
      for (i64 g = 0; g < tile.groups; ++g) {
        const T* w = weights + g * weights_of_group + first * args.dst_channels;
        T* out = sums + (pairs ? p % 2 * sums_of_phase : 0) + g * args.dst_channels * pitch;
        correlate<T>(from.planes + g * from.group, from.offsets + first, count, w,
                     args.dst_channels, out, vectors, pitch);
      }
      if (pairs && p % 2 == 0) continue;
      if (pairs) box.phase[2] = 0;
      write_box<E>(args.dst, args.accumulate, args.bias, epilogue, box, sums,
                   pairs ? sums + sums_of_phase : nullptr);
    }
  }
  if (streams) finish_streams();
}

}  // namespace
}  // namespace convgrad

extern "C" CONVGRAD_EXPORT void convgrad_grouped_correlate(const convgrad::PlanarArgs* args,
                                                           convgrad::Control* control,
                                                           void* scratch) {
  using namespace convgrad;
  switch (args->dtype) {
    case kFloat16: return correlate_tasks<F16>(*args, control, scratch);
    case kBfloat16: return correlate_tasks<BF16>(*args, control, scratch);
    case kFloat32: return correlate_tasks<F32>(*args, control, scratch);
    case kFloat64: return correlate_tasks<F64>(*args, control, scratch);
  }
}
