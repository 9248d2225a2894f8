// The part of the planes that a block computes, channels first, and its copy in shared memory. Host side:
// window_box.py.
//
// A block computes a tile of y in `planes` adjacent planes. The box of x is what the tile's windows
// cover. Both are copied in 16-byte chunks whatever the alignment of lines, in segments: all planes at
// once, otherwise the lines of a slice along axis 0, or with `by_lines` each line. A segment has the
// same misalignment in shared memory. Relies on tensors aligned to 16 bytes, and on pitches that are
// equal to those of the tensors modulo a chunk.
#pragma once

#include "pool/windows.cuh"
#include "ptx/mma.cuh"

namespace convgrad {

constexpr int kBoxThreads = 256;

struct BoxArgs {
  WindowArgs windows;
  int tile[3];   // positions of y; of one slice unless whole
  int tiles[3];  // of a plane, along each axis
  int box[3];    // the most positions of x under a tile
  int planes;    // of a block, a multiple of kTogether for window_planes.cu
  int pitch[3];  // elements of x between planes, slices and lines, in shared memory
  int y_pitch;   // elements of y between lines, in shared memory
  int whole;     // whether a block has whole planes
  int by_lines;  // whether each line is a segment
  int indices_at, y_at, ranges_at, weights_at;  // bytes, in shared memory
  int ranges;       // windows of a table: along axis 1, window_scatter.cu also along axis 2
  int phases[3];    // window_scatter.cu: the most windows that contain a position
  int in_phase[3];  // windows of a phase
  Divider by_tile[3];  // axis 1: by the runs of a column
  Divider by_tiles[3], by_phase[3], by_y_size[3];
};

struct Box {
  int base[3], count[3];    // positions of y
  int first[3], extent[3];  // positions of x
  int plane, planes;

  __device__ __forceinline__ explicit Box(const BoxArgs& args) {
    int rest = static_cast<int>(blockIdx.x);
#pragma unroll
    for (int axis = 2; axis >= 0; --axis) {
      base[axis] = first[axis] = 0;
      count[axis] = args.tile[axis];
      extent[axis] = args.windows.x_size[axis];
      if (args.whole) continue;
      const int outer = divide(rest, args.by_tiles[axis]);
      base[axis] = (rest - outer * args.tiles[axis]) * args.tile[axis];
      rest = outer;
      count[axis] = min(args.tile[axis], args.windows.y_size[axis] - base[axis]);
      if (axis == 2 && !args.by_lines) continue;
      const WindowRange& range = args.windows.window[axis];
      first[axis] = window_start(range, base[axis]);
      extent[axis] = max(0, window_stop(range, base[axis] + count[axis] - 1) - first[axis]);
    }
    plane = rest * args.planes;
    planes = min(args.planes, args.windows.batch - plane);
  }

  // Copies the box of a tensor of x's shape; returns its first position.
  template <class E>
  __device__ __forceinline__ const E* load(const BoxArgs& args, const void* tensor,
                                           unsigned char* to) const {
    constexpr int kChunk = 16 / sizeof(E);
    const int(&size)[3] = args.windows.x_size;
    const i64 slice = static_cast<i64>(size[1]) * size[2], plane_size = slice * size[0];
    const i64 all = plane_size * args.windows.batch;
    const i64 begin = plane * plane_size + first[0] * slice +
                      static_cast<i64>(first[1]) * size[2] + first[2];
    const int lead = static_cast<int>(begin % kChunk);
    const auto copy = [&](i64 from, int into, int length) {
      if (length <= 0) return;
      const int head = into % kChunk, chunks = (head + length + kChunk - 1) / kChunk;
      const u32 target = shared_address(to) + (into - head) * static_cast<int>(sizeof(E));
      const E* const source = static_cast<const E*>(tensor) + (from - head);
      const i64 left = all - (from - head);
      for (int c = static_cast<int>(threadIdx.x); c < chunks; c += kBoxThreads) {
        const int there = static_cast<int>(min(left - c * kChunk, static_cast<i64>(kChunk)));
        cp_async<16>(target + c * 16, source + c * kChunk, there * static_cast<int>(sizeof(E)));
      }
    };
    if (args.whole) {
      copy(begin, lead, planes * static_cast<int>(plane_size));
    } else {
      for (int part = 0; part < planes * extent[0]; ++part) {
        const int p = part / extent[0], i0 = part - p * extent[0];
        const i64 from = begin + p * plane_size + i0 * slice;
        const int into = lead + p * args.pitch[0] + i0 * args.pitch[1];
        if (!args.by_lines) {
          copy(from, into, extent[1] * size[2]);
          continue;
        }
        for (int i1 = 0; i1 < extent[1]; ++i1) {
          copy(from + static_cast<i64>(i1) * size[2], into + i1 * args.pitch[2], extent[2]);
        }
      }
    }
    cp_async_commit();
    return reinterpret_cast<const E*>(to) + lead;
  }

  // The first element of the tile in y.
  __device__ __forceinline__ i64 y_begin(const WindowArgs& windows) const {
    const i64 slice = static_cast<i64>(windows.y_size[1]) * windows.y_size[2];
    return (static_cast<i64>(plane) * windows.y_size[0] + base[0]) * slice +
           static_cast<i64>(base[1]) * windows.y_size[2] + base[2];
  }

  // Stores element(cell) for each cell of the tile. Cells are in shared memory, lines y_pitch apart;
  // the first one has the misalignment of y's element. Elements beside the tile stay as they are.
  template <class T, class Cell, class Element>
  __device__ __forceinline__ void store(const BoxArgs& args, const Cell* cells,
                                        Element element) const {
    constexpr int kChunk = 16 / sizeof(T);
    constexpr int kCells = sizeof(Cell) < sizeof(T) ? kChunk : 16 / sizeof(Cell);
    const int(&size)[3] = args.windows.y_size;
    const i64 begin = y_begin(args.windows);
    const auto copy = [&](i64 to, int at, int length) {
      const int head = static_cast<int>(to % kChunk);
      const int chunks = (head + length + kChunk - 1) / kChunk;
      T* const target = static_cast<T*>(args.windows.y) + (to - head);
      at -= head;
      for (int c = static_cast<int>(threadIdx.x); c < chunks; c += kBoxThreads) {
        const int low = c * kChunk, high = low + kChunk;
        if (low < head || high > head + length) {
          for (int e = max(low, head); e < min(high, head + length); ++e) {
            target[e] = element(cells[at + e]);
          }
          continue;
        }
        Vector<T, kChunk> values;
#pragma unroll
        for (int e = 0; e < kChunk; e += kCells) {
          const auto some = Vector<Cell, kCells>::load(cells + at + low + e);
#pragma unroll
          for (int i = 0; i < kCells; ++i) values.at[e + i] = element(some.at[i]);
        }
        values.store(target + low);
      }
    };
    if (args.whole) {
      copy(begin, 0, planes * size[0] * size[1] * size[2]);
    } else if (!args.by_lines) {
      copy(begin, 0, count[1] * size[2]);
    } else {
      for (int i = 0; i < count[1]; ++i) {
        copy(begin + static_cast<i64>(i) * size[2], i * args.y_pitch, count[2]);
      }
    }
  }
};

}  // namespace convgrad
