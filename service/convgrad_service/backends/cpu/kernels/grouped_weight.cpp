// Grouped convolution with few channels per group: backward weight.
//
// GEMM view, for each group: M = dst channels, N = src channels x taps, K = images x positions. A
// task is a block of groups and one of `splits` parts of K. The source box is packed into padded
// planes as in grouped.cpp, grad_output into planes of the same pitch with zeros in the gaps.
// Register blocks of 4 channels x 6 (channel, tap) pairs are summed over vectors of positions. Each
// split stores partial sums in the workspace; a second phase sums the splits in order, applies
// alpha and beta * accumulate and rounds once.
//
// Requires: PlanarArgs from plans/planar.py (one dst phase, dst = grad_output, workspace of splits
// * groups * dst channels * src channels * taps accumulators). Deterministic: the splits depend
// only on the problem. Indices are 64-bit. Gaps and padding are multiplied as zeros, within one
// pair of channels: a vector that extends past the end of a plane reads zeros, not the next
// channel, so that non-finite values stay in the sums of their channel.
#include "planar_plan.hpp"

namespace convgrad {
namespace {

template <class E, class Result>
void finish_group(const PlanarArgs& args, const typename E::Acc* partials, i64 g) {
  using T = typename E::Acc;
  using R = typename Result::Storage;
  const i64 terms = args.taps * args.src_channels;
  const i64 each = args.groups * args.dst_channels * terms;
  const T alpha = static_cast<T>(args.alpha), beta = static_cast<T>(args.beta);
  R* weights = static_cast<R*>(args.weight.data);
  const R* add = args.beta != 0.0 ? static_cast<const R*>(args.accumulate.data) : nullptr;
  for (i64 k = 0; k < args.dst_channels; ++k) {
    for (i64 c = 0; c < args.src_channels; ++c) {
      for (i64 i = 0; i < args.taps; ++i) {
        const T* partial = partials + (g * args.dst_channels + k) * terms + c * args.taps + i;
        T sum = partial[0];
        for (i64 split = 1; split < args.splits; ++split) sum += partial[split * each];
        const i64 at = g * args.weight.stride[0] + k * args.weight.stride[1] +
                       c * args.weight.stride[2] + args.tap[i].weight;
        sum *= alpha;
        // The host ensures that accumulate has the strides of the weight.
        if (add != nullptr) sum += beta * static_cast<T>(load_one<Result>(add + at));
        store_one<Result>(weights + at, sum);
      }
    }
  }
}

// One tile of a group, of planes in place. What does not fill a vector is copied first.
template <class T>
void contract_planes(const PlanarArgs& args, const T* x, const T* y, i64 positions, i64* offsets,
                     T* source, T* gradient, T* products) {
  constexpr i64 L = kLanes<T>;
  const i64 terms = args.src_channels, channels = args.dst_channels;
  const i64 x_pitch = args.src.stride[2], y_pitch = args.dst.stride[2];
  const i64 whole = positions / L * L;
  for (i64 c = 0; c < terms; ++c) offsets[c] = c * x_pitch;
  contract<T>(y, channels, y_pitch, x, offsets, terms, whole / L, products);
  const int rest = static_cast<int>(positions - whole);
  if (rest == 0) return;
  read_ends(x + whole, x_pitch, terms, rest, source);
  read_ends(y + whole, y_pitch, channels, rest, gradient);
  for (i64 c = 0; c < terms; ++c) offsets[c] = c * L;
  contract<T>(gradient, channels, L, source, offsets, terms, 1, products);
}

template <class E, class Result>
void contract_tasks(const PlanarArgs& args, Control* control, void* scratch) {
  using T = typename E::Acc;
  constexpr i64 L = kLanes<T>;
  const Planes full = Planes::of<T>(args, args.tile);
  const i64 pitch = ceil_div(args.tile[0] * args.box[1] * args.box[2], L) * L;
  const i64 terms = args.taps * args.src_channels;
  const i64 plane = full.plane + L;  // the last vector may extend past the end
  const i64 source_of_group = args.src_phases * args.src_channels * plane;
  Arena arena{static_cast<char*>(scratch)};
  i64* offsets = arena.take<i64>(terms);
  T* source = arena.take<T>(args.group_block * source_of_group + kSlackVectors * L);
  T* gradient = arena.take<T>(args.group_block * args.dst_channels * pitch);
  T* partials = static_cast<T*>(args.workspace);
  const bool as_planes = stored_as_planes<E>(args);
  if (!as_planes) {
    tap_offsets(args, plane, offsets);
    fill_zero(source, args.group_block * source_of_group + kSlackVectors * L);
    fill_zero(gradient, args.group_block * args.dst_channels * pitch);
  }

  const i64 units = args.batch * tiles_of(args);
  const i64 blocks = ceil_div(args.groups, args.group_block);
  const i64 tasks = blocks * args.splits;
  for (i64 task; (task = take_task(control, 0, tasks)) >= 0;) {
    const i64 block = task / args.splits, split = task % args.splits;
    const i64 last = (split + 1) * units / args.splits;
    for (i64 unit = split * units / args.splits, first = unit; unit < last; ++unit) {
      const TileOrigin tile = tile_at(args, block, unit);
      T* products = partials + (split * args.groups + tile.group) * args.dst_channels * terms;
      if (unit == first) fill_zero(products, tile.groups * args.dst_channels * terms);
      if (as_planes) {
        const auto* x = static_cast<const T*>(args.src.data) + first_of(args.src, tile);
        const auto* y = static_cast<const T*>(args.dst.data) + first_of(args.dst, tile);
        for (i64 g = 0; g < tile.groups; ++g) {
          contract_planes<T>(args, x + g * args.src.stride[1], y + g * args.dst.stride[1],
                             tile.extent[0] * tile.extent[1] * tile.extent[2], offsets, source,
                             gradient, products + g * args.dst_channels * terms);
        }
        continue;
      }
      read_source<E>(args, tile, plane, source);
      Box box;
      box.batch = tile.batch;
      box.group = tile.group;
      box.groups = tile.groups;
      box.channels = args.dst_channels;
      box.row_pitch = args.box[2];
      box.slice_pitch = args.box[1] * args.box[2];
      box.channel_pitch = pitch;
      box.group_pitch = args.dst_channels * pitch;
      for (int d = 0; d < 3; ++d) {
        box.size[d] = args.dst_size[d];
        box.step[d] = 1;
        box.phase[d] = 0;
        box.first[d] = tile.start[d];
        box.extent[d] = d == 0 ? tile.extent[d] : args.box[d];
        box.limit[d] = tile.extent[d];
      }
      read_box<E>(args.dst, box, gradient);
      const i64 vectors = Planes::of<T>(args, tile.extent).vectors;
      const i64 read = tile.extent[0] * args.box[1] * args.box[2];
      for (i64 plane = 0; plane < tile.groups * args.dst_channels && read < pitch; ++plane) {
        fill_zero(gradient + plane * pitch + read, pitch - read);
      }
      for (i64 g = 0; g < tile.groups; ++g) {
        const T* x = source + g * source_of_group;
        const T* y = gradient + g * args.dst_channels * pitch;
        T* out = products + g * args.dst_channels * terms;
        contract<T>(y, args.dst_channels, pitch, x, offsets, terms, vectors, out);
      }
    }
    finish_task(control, 0);
  }
  if (!wait_phase(control, 0, tasks)) return;
  for (i64 g; (g = take_task(control, 1, args.groups)) >= 0;) {
    finish_group<E, Result>(args, partials, g);
  }
}

}  // namespace
}  // namespace convgrad

extern "C" CONVGRAD_EXPORT void convgrad_grouped_bwd_weight(const convgrad::PlanarArgs* args,
                                                            convgrad::Control* control,
                                                            void* scratch) {
  using namespace convgrad;
  const bool single = args->result_dtype == kFloat32;
  switch (args->dtype) {
    case kFloat16:
      return single ? contract_tasks<F16, F32>(*args, control, scratch)
                    : contract_tasks<F16, F16>(*args, control, scratch);
    case kBfloat16:
      return single ? contract_tasks<BF16, F32>(*args, control, scratch)
                    : contract_tasks<BF16, BF16>(*args, control, scratch);
    case kFloat32: return contract_tasks<F32, F32>(*args, control, scratch);
    case kFloat64: return contract_tasks<F64, F64>(*args, control, scratch);
  }
}
