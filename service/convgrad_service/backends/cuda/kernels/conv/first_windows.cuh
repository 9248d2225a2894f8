// Windows of a first layer's input in shared memory (im2col along W). Launched by first_forward.py.
//
// With channels last, the S taps of a kernel row read S*C consecutive elements of a row of x, from
// element (q*stride - pad)*C. Each row of x is expanded once into
//   windows[h][q][(s, c)] = x[n, d, h, q*stride - pad + s, c], zeros outside,
// a matrix of positions q by S*C columns, rounded up to tiles of 8, which every kernel row and row
// of y that read row h share. A unit is `unit_rows` rows of y by `segment` positions. Its rows of x
// are copied to shared memory by cp.async and expanded into a ring of rows, where the next unit
// down reuses those that overlap.
#pragma once

#include "ptx/mma.cuh"
#include "core/vectors.cuh"

namespace convgrad {

struct WindowArgs {
  i64 x_end;  // one past the last element of x
  int channels;
  int x_size[3];
  int y_size[3];
  int kernel[3];
  int stride[3];
  int pad[3];
  int column_tiles;  // column tiles of a kernel row
  int unit_rows;
  int segment;  // 32 or 64
  int segments;
  int row_units;  // units along H
  int units;
  int row_words;  // words of shared memory for a row of x as loaded
};

// The coordinates of a unit in x and y, for one tap along D.
struct Unit {
  int n, z, d, q0, width, p0, h0;
  bool inside;  // whether the tap reads inside x
  bool fresh;   // whether it shares no rows of x with the previous unit
};

template <class T>
struct Windows {
  static constexpr bool kWide = sizeof(T) == 4;
  static constexpr int kBytes = static_cast<int>(sizeof(T));
  static constexpr int kChunk = 16 / kBytes;

  const WindowArgs& args;
  const i64 (&stride)[6];  // of x: N G C D H W
  const T* x;
  char* windows;
  char* raws;

  // Rows of x that a unit reads, and the new rows of the next unit down.
  __device__ __forceinline__ int met() const {
    return args.stride[1] * (args.unit_rows - 1) + args.kernel[1];
  }
  __device__ __forceinline__ int ahead() const { return args.stride[1] * args.unit_rows; }
  __device__ __forceinline__ int ring_rows() const { return met() + ahead(); }
  __device__ __forceinline__ int columns() const { return args.kernel[2] * args.channels; }
  __device__ __forceinline__ int row_elements() const { return args.x_size[2] * args.channels; }
  __device__ __forceinline__ u32 pitch() const { return (args.column_tiles | 1) * 8 * kBytes; }
  __device__ __forceinline__ u32 row_bytes() const { return args.segment * pitch(); }
  __device__ __forceinline__ u32 raw_bytes() const { return met() * args.row_words * 4; }
  __device__ __forceinline__ u32 ring_bytes() const { return ring_rows() * row_bytes(); }

  __device__ __forceinline__ Unit unit_of(int index, int tap, bool first) const {
    Unit unit;
    const u32 rest1 = static_cast<u32>(index) / args.row_units;
    const int row_unit = index - rest1 * args.row_units;
    const u32 rest2 = rest1 / args.segments;
    unit.q0 = (rest1 - rest2 * args.segments) * args.segment;
    unit.n = rest2 / args.y_size[0];
    unit.z = rest2 - unit.n * args.y_size[0];
    unit.d = unit.z * args.stride[0] + tap - args.pad[0];
    unit.width = min(args.segment, args.y_size[2] - unit.q0);
    unit.p0 = row_unit * args.unit_rows;
    unit.h0 = unit.p0 * args.stride[1] - args.pad[1];
    unit.inside = unit.d >= 0 && unit.d < args.x_size[0];
    unit.fresh = first || row_unit == 0;
    return unit;
  }
  __device__ __forceinline__ i64 row_of(const Unit& unit, int h) const {
    return unit.n * stride[0] + unit.d * stride[3] + h * stride[4];
  }
  // The first element of a position's window in a row, which may be outside.
  __device__ __forceinline__ int window_at(int q) const {
    return (q * args.stride[2] - args.pad[2]) * args.channels;
  }
  __device__ __forceinline__ int first_element(const Unit& unit) const {
    return min(row_elements(), max(0, window_at(unit.q0)));
  }
  __device__ __forceinline__ int skipped(const Unit& unit) const {
    return unit.fresh ? 0 : met() - min(met(), ahead());
  }

  // The low word of two adjacent words shifted right by `shift` bits.
  __device__ static __forceinline__ u32 shifted(u32 low, u32 high, u32 shift) {
    return static_cast<u32>((static_cast<u64>(high) << 32 | low) >> shift);
  }
  // Issues the copies of a unit's new rows, one warp per row, in whole chunks, which may include
  // elements before and after those needed.
  __device__ __forceinline__ void copy(const Unit& unit, int stage) const {
    const int first = first_element(unit), skip = skipped(unit);
    const int last = min(row_elements(), window_at(unit.q0 + unit.width - 1) + columns());
    const int lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    for (int row = threadIdx.x >> 5; row < met() - skip; row += warps) {
      const int h = unit.h0 + skip + row;
      if (h < 0 || h >= args.x_size[1] || last <= first) continue;
      const i64 from = row_of(unit, h);
      const int lead = static_cast<int>(from + first) & (kChunk - 1);
      const int count = last - first + lead;
      const i64 start = from + first - lead;
      const T* const row_x = x + start;
      T* const to = reinterpret_cast<T*>(raws + stage * raw_bytes() + row * (args.row_words * 4));
      for (int at = lane * kChunk; at < count; at += 32 * kChunk) {
        if (start + at + kChunk <= args.x_end) {
          cp_async<16>(shared_address(to + at), row_x + at);
        } else {  // the last, partial chunk of x
          for (int i = at; i < count; ++i) to[i] = row_x[i];
        }
      }
    }
  }

  // Expands a unit's new rows into windows, starting at slot `ring`. A warp has 32 positions of a
  // row. Columns past the last are zeros.
  __device__ __forceinline__ void lay_out(const Unit& unit, int stage, int ring) const {
    const int lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    const int skip = skipped(unit), first = first_element(unit);
    const int parts_log = args.segment >> 6;  // log2 of the warps per row of 32 or 64 positions
    const int row_chunks = args.column_tiles * 8 / kChunk;
    const int first_row_at = static_cast<int>(row_of(unit, unit.h0 + skip) + first);
    const int row_step = static_cast<int>(stride[4]);
    const char* const raw = raws + stage * raw_bytes();
    const int items = met() - skip << parts_log;
    for (int item = threadIdx.x >> 5; item < items; item += warps) {
      const int row = item >> parts_log, q = (item - (row << parts_log)) * 32 + lane;
      const int h = unit.h0 + skip + row;
      int slot = ring + skip + row;
      if (slot >= ring_rows()) slot -= ring_rows();
      T* const to = reinterpret_cast<T*>(windows + slot * row_bytes() + q * pitch());
      const int element = window_at(unit.q0 + q);
      // Columns in [low, high) are in the row.
      int low = max(0, -element), high = min(row_elements() - element, columns());
      if (h < 0 || h >= args.x_size[1] || q >= unit.width) high = 0;
      const int lead = (first_row_at + row * row_step) & (kChunk - 1);
      const int at = element - first + lead;
      const u32* words = reinterpret_cast<const u32*>(raw + row * (args.row_words * 4)) +
                         (kWide ? at : at >> 1);
      const u32 shift = (at & 1) * 16;
      if (high <= low) {  // all of it is padding
        for (int chunk = 0; chunk < row_chunks; ++chunk) {
          Vector<T, kChunk>::zero().store(to + chunk * kChunk);
        }
        continue;
      }
      u32 next = words[0];
      for (int chunk = 0; chunk < row_chunks; ++chunk, words += 4) {
        u32 some[5] = {next, words[1], words[2], words[3], 0};
        if constexpr (!kWide) {
          next = some[4] = words[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) some[i] = shifted(some[i], some[i + 1], shift);
        } else if (chunk + 1 < row_chunks) {
          next = words[4];
        }
        if (low > chunk * kChunk || high < (chunk + 1) * kChunk) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            some[i] = inside_of(some[i], chunk * kChunk + i * (4 / kBytes), low, high);
          }
        }
        Vector<T, kChunk> values;
        values.raw = make_uint4(some[0], some[1], some[2], some[3]);
        values.store(to + chunk * kChunk);
      }
    }
  }

  // The word that starts at column `column`, with zeros outside [low, high).
  __device__ static __forceinline__ u32 inside_of(u32 word, int column, int low, int high) {
    const bool first = column >= low && column < high;
    if constexpr (kWide) return first ? word : 0;
    const bool second = column + 1 >= low && column + 1 < high;
    return (first ? word & 0xffff : 0) | (second ? word & 0xffff0000 : 0);
  }
};

}  // namespace convgrad
