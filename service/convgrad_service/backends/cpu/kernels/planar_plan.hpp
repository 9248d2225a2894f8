// Shared by the planar kernels: scratch allocation, tap offsets and tile extents.
#pragma once

#include "planar_args.hpp"
#include "planar_box.hpp"
#include "planar_core.hpp"
#include "streams.hpp"

namespace convgrad {

// Allocates from a thread's scratch, 64-byte aligned. plans/planar.py computes the same total.
struct Arena {
  char* at;
  template <class T>
  T* take(i64 count) {
    T* p = reinterpret_cast<T*>(at);
    at += (count * static_cast<i64>(sizeof(T)) + 63) / 64 * 64;
    return p;
  }
};

// Register blocks read at most this many vectors past the end of a plane.
inline constexpr i64 kSlackVectors = 9;

struct TileOrigin {
  i64 start[3];   // in t
  i64 extent[3];  // clipped to the result
  i64 batch;
  i64 group;  // first group of the block
  i64 groups;
};

CONVGRAD_INLINE i64 ceil_div(i64 a, i64 b) { return (a + b - 1) / b; }

CONVGRAD_INLINE i64 tiles_of(const PlanarArgs& args) {
  return args.tiles[0] * args.tiles[1] * args.tiles[2];
}

// `unit` is the index of an (image, tile).
CONVGRAD_INLINE TileOrigin tile_at(const PlanarArgs& args, i64 group_block, i64 unit) {
  TileOrigin tile;
  tile.group = group_block * args.group_block;
  const i64 left = args.groups - tile.group;
  tile.groups = left < args.group_block ? left : args.group_block;
  i64 rest = unit;
  for (int d = 2; d >= 0; --d) {
    tile.start[d] = rest % args.tiles[d] * args.tile[d];
    rest /= args.tiles[d];
    const i64 more = ceil_div(args.dst_size[d], args.dst_step[d]) - tile.start[d];
    tile.extent[d] = more < args.tile[d] ? more : args.tile[d];
  }
  tile.batch = rest;
  return tile;
}

// Whether a result with contiguous channels is streamed: it is large, and each position's channels are
// whole vectors.
template <class E>
bool streams_result(const PlanarArgs& args) {
  using T = typename E::Acc;
  const View& dst = args.dst;
  i64 bytes = args.batch * args.groups * args.dst_channels * static_cast<i64>(sizeof(T));
  bool aligned = sizeof(typename E::Storage) == sizeof(T) &&
                 streams_at(static_cast<const T*>(dst.data), dst.stride[0]);
  for (int d = 0; d < 3; ++d) {
    bytes *= args.dst_size[d];
    aligned = aligned && dst.stride[3 + d] % kLanes<T> == 0;
  }
  return aligned && bytes >= kStreamedBytes;
}

struct Planes {
  i64 plane;    // elements of a padded src plane
  i64 vectors;  // number of vectors that cover a tile's positions

  template <class T>
  static Planes of(const PlanarArgs& args, const i64* extent) {
    constexpr i64 L = kLanes<T>;
    Planes planes;
    planes.plane = ceil_div(args.box[0] * args.box[1] * args.box[2], L) * L;
    planes.vectors = ceil_div(
        ((extent[0] - 1) * args.box[1] + extent[1] - 1) * args.box[2] + extent[2], L);
    return planes;
  }
};

// Whether the layer has one tap, and a tile's positions are contiguous in the planes of both tensors,
// which are read and written in place.
template <class E>
bool stored_as_planes(const PlanarArgs& args) {
  if (sizeof(typename E::Storage) != sizeof(typename E::Acc)) return false;
  if (args.taps != 1 || args.src_phases != 1 || args.dst_phases != 1) return false;
  for (int d = 0; d < 3; ++d) {
    if (args.src_step[d] != 1 || args.dst_step[d] != 1 || args.origin[d] != 0) return false;
    if (args.box[d] != args.tile[d] || args.src_size[d] != args.dst_size[d]) return false;
  }
  const int64_t* size = args.dst_size;
  const bool rows = args.tile[0] > 1 || args.tile[1] > 1;
  if (rows && args.tile[2] != size[2]) return false;
  if (args.tile[0] > 1 && args.tile[1] != size[1]) return false;
  const auto contiguous = [&](const int64_t* stride) {
    return stride[5] == 1 && (args.tile[1] == 1 || stride[4] == size[2]) &&
           (args.tile[0] == 1 || stride[3] == size[1] * size[2]);
  };
  return contiguous(args.src.stride) && contiguous(args.dst.stride);
}

// The first element of a tile in such a tensor.
CONVGRAD_INLINE i64 first_of(const View& view, const TileOrigin& tile) {
  i64 at = tile.batch * view.stride[0] + tile.group * view.stride[1];
  for (int d = 0; d < 3; ++d) at += tile.start[d] * view.stride[3 + d];
  return at;
}

// Copies the last few positions of planes, fewer than a vector, and zeros after them.
template <class T>
CONVGRAD_INLINE void read_ends(const T* planes, i64 pitch, i64 channels, int positions, T* ends) {
  for (i64 c = 0; c < channels; ++c) {
    store_raw(ends + c * kLanes<T>, load_raw_first<T, kLanes<T>>(planes + c * pitch, positions));
  }
}

// Writes offsets[c * taps + i] for the taps of each dst phase, consecutively.
CONVGRAD_INLINE void tap_offsets(const PlanarArgs& args, i64 plane, i64* offsets) {
  for (i64 p = 0; p < args.dst_phases; ++p) {
    const i64 begin = args.first_tap[p], end = args.first_tap[p + 1];
    for (i64 c = 0; c < args.src_channels; ++c) {
      for (i64 i = begin; i < end; ++i) {
        const PlanarTap& tap = args.tap[i];
        *offsets++ = (tap.src_phase * args.src_channels + c) * plane +
                     (tap.offset[0] * args.box[1] + tap.offset[1]) * args.box[2] + tap.offset[2];
      }
    }
  }
}

// Packs all phases of a tile's source box into planes with a pitch of `plane` elements.
template <class E>
void read_source(const PlanarArgs& args, const TileOrigin& tile, i64 plane,
                 typename E::Acc* planes, double fill = 0) {
  Box box;
  box.fill = fill;
  box.batch = tile.batch;
  box.group = tile.group;
  box.groups = tile.groups;
  box.channels = args.src_channels;
  box.row_pitch = args.box[2];
  box.slice_pitch = args.box[1] * args.box[2];
  box.channel_pitch = plane;
  box.group_pitch = args.src_phases * args.src_channels * plane;
  for (i64 p = 0; p < args.src_phases; ++p) {
    for (int d = 0; d < 3; ++d) {
      box.size[d] = args.src_size[d];
      box.step[d] = args.src_step[d];
      box.phase[d] = args.src_phase[p * 3 + d];
      box.first[d] = tile.start[d] + args.origin[d];
      // The whole box is packed, since vectors may read past the end of a clipped tile.
      box.extent[d] = args.box[d];
      box.limit[d] = args.box[d];
    }
    read_box<E>(args.src, box, planes + p * args.src_channels * plane);
  }
}

}  // namespace convgrad
