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
constexpr int kLineRun = 4;  // lines of a thread in window_lines.cuh

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
  int y_at, places_at, ranges_at, weights_at;  // bytes, in shared memory; sums of lines are at y_at
  int staged;       // whether y, and indices of 32 bits, are copied to shared memory first
  Divider by_tile[3];  // axis 1: by the runs of a column
  Divider by_tiles[3];
  Divider by_columns, by_line_runs, by_slices;  // tile[2]; runs of box[1]; box[0]
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
      u32 target = shared_address(to) + (into - head) * static_cast<int>(sizeof(E));
      const char* source = reinterpret_cast<const char*>(static_cast<const E*>(tensor) + (from - head));
      // The tensor may end within the last chunk.
      const i64 left = all - (from - head);
      const int whole = left < static_cast<i64>(chunks) * kChunk ? chunks - 1 : chunks;
      const int thread = static_cast<int>(threadIdx.x);
      if (whole < chunks && thread == 0) {
        const int rest = static_cast<int>(left) - whole * kChunk;
        cp_async<16>(target + whole * 16, source + whole * 16, rest * static_cast<int>(sizeof(E)));
      }
      target += thread * 16;
      source += thread * 16;
#pragma unroll 4
      for (int c = thread; c < whole; c += kBoxThreads) {
        cp_async<16>(target, source);
        target += kBoxThreads * 16;
        source += kBoxThreads * 16;
      }
    };
    const int lines = args.by_lines ? extent[1] : 1, length = args.by_lines ? extent[2] : extent[1] * size[2];
    const int segments = args.whole ? 1 : planes * extent[0] * lines;
#pragma unroll 1
    for (int segment = 0, p = 0, i0 = 0, i1 = 0; segment < segments; ++segment) {
      copy(begin + p * plane_size + i0 * slice + static_cast<i64>(i1) * size[2],
           lead + p * args.pitch[0] + i0 * args.pitch[1] + i1 * args.pitch[2],
           args.whole ? planes * static_cast<int>(plane_size) : length);
      if (++i1 < lines) continue;
      i1 = 0;
      if (++i0 < extent[0]) continue;
      i0 = 0;
      ++p;
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

  // Stores element(cell) to y or another tensor of its shape for each cell of the tile of one plane, or of
  // whole planes. Cells are in shared
  // memory, lines y_pitch apart; the first one has the misalignment of y's element. Elements beside the
  // tile stay as they are.
  template <class T, class Cell, class Element>
  __device__ __forceinline__ void store(const BoxArgs& args, void* tensor, const Cell* cells,
                                        Element element) const {
    constexpr int kChunk = 16 / sizeof(T);
    constexpr int kCells = sizeof(Cell) < sizeof(T) ? kChunk : 16 / sizeof(Cell);
    const int(&size)[3] = args.windows.y_size;
    const i64 begin = y_begin(args.windows);
    const auto copy = [&](i64 to, int at, int length) {
      const int head = static_cast<int>(to % kChunk);
      const int chunks = (head + length + kChunk - 1) / kChunk;
      T* const target = static_cast<T*>(tensor) + (to - head);
      at -= head;
      const int whole = (head + length) / kChunk;  // chunks up to the last whole one
      const int thread = static_cast<int>(threadIdx.x);
      // Of the chunks that the segment covers in part, an element for each thread.
      for (int e = thread; e < 2 * kChunk; e += kBoxThreads) {
        const int c = e < kChunk ? 0 : whole;
        const int own = c * kChunk + e % kChunk;
        const bool part = e < kChunk ? head > 0 : whole < chunks && (whole > 0 || head == 0);
        if (part && own >= head && own < head + length) target[own] = element(cells[at + own]);
      }
#pragma unroll 4
      for (int c = thread + (head > 0); c < whole; c += kBoxThreads) {
        const int low = c * kChunk;
        Vector<T, kChunk> values;
#pragma unroll
        for (int e = 0; e < kChunk; e += kCells) {
          const auto part = Vector<Cell, kCells>::load(cells + at + low + e);
#pragma unroll
          for (int i = 0; i < kCells; ++i) values.at[e + i] = element(part.at[i]);
        }
        values.store(target + low);
      }
    };
    const int lines = args.by_lines ? count[1] : 1, length = args.by_lines ? count[2] : count[1] * size[2];
#pragma unroll 1
    for (int i = 0; i < (args.whole ? 1 : lines); ++i) {
      copy(begin + static_cast<i64>(i) * size[2], i * args.y_pitch,
           args.whole ? planes * size[0] * size[1] * size[2] : length);
    }
  }
};

}  // namespace convgrad
