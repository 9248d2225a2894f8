// Windows of a first layer's input in shared memory. The host's side is first_windows.py.
//
// With channels last the S taps of a kernel row meet S*C neighbouring numbers of a row of x, from the
// (q*stride - pad)*C-th on. Rows of x are laid out once as
//   windows[h][q][(s, c)] = x[n, d, h, q*stride - pad + s, c], zeros outside,
// matrices of positions q by S*C columns, rounded up to whole tiles of 8, for every kernel row and
// row of y that meet there.
// A unit is `unit_rows` rows of y by `segment` positions. Its rows of x come to shared memory as they
// lie, by asynchronous copies, and become windows in a ring of rows, where the next unit down finds
// those that it shares.
#pragma once

#include "tensor_core.cuh"
#include "vectors.cuh"

namespace convgrad {

struct WindowArgs {
  int channels;
  int x_size[3];
  int y_size[3];
  int kernel[3];
  int stride[3];
  int pad[3];
  int column_tiles;  // of a kernel row
  int rows;          // kernel rows of a block, at most
  int unit_rows;
  int segment;  // 32 or 64
  int segments;
  int row_units;  // units along H
  int units;
  int row_words;  // of shared memory, for a row of x as it comes
};

// Where a unit is in x and y, for one tap along D.
struct Unit {
  int n, z, d, q0, width, p0, h0;
  bool inside;  // whether the tap meets x
  bool fresh;   // whether it shares no rows of x with the one before
};

template <class T>
struct Windows {
  static constexpr bool kWide = sizeof(T) == 4;
  static constexpr int kBytes = static_cast<int>(sizeof(T));
  static constexpr int kChunk = 16 / kBytes;

  const WindowArgs& args;
  const i64 (&stride)[6];  // of x: N G C D H W
  const T* x;
  int first_row, rows;  // kernel rows of this block
  char* windows;
  char* raws;
  // What this warp lays out: see deal_out.
  int warp_item, warp_row, warp_rows;

  __device__ __forceinline__ void deal_out() {
    const int warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const int items = args.column_tiles * 8 / kChunk << (args.segment >> 6);
    warp_rows = max(1, warps / items);
    warp_row = warps < items ? 0 : warp / items;
    warp_item = warps < items ? warp : warp - warp_row * items;
    if (warp_row >= warp_rows) warp_item = items;
  }

  // Rows of x that a unit meets, and those that the next one down adds.
  __device__ __forceinline__ int met() const {
    return args.stride[1] * (args.unit_rows - 1) + rows;
  }
  __device__ __forceinline__ int ahead() const { return args.stride[1] * args.unit_rows; }
  __device__ __forceinline__ int ring_rows() const { return met() + ahead(); }
  __device__ __forceinline__ int columns() const { return args.kernel[2] * args.channels; }
  __device__ __forceinline__ int row_elements() const { return args.x_size[2] * args.channels; }
  __device__ __forceinline__ u32 pitch() const { return (args.column_tiles | 1) * 8 * kBytes; }
  __device__ __forceinline__ u32 row_bytes() const { return args.segment * pitch(); }
  __device__ __forceinline__ u32 raw_bytes() const {
    return (args.stride[1] * (args.unit_rows - 1) + args.rows) * args.row_words * 4;
  }
  // Of the ring, in the largest block.
  __device__ __forceinline__ u32 ring_bytes() const {
    return (args.stride[1] * (2 * args.unit_rows - 1) + args.rows) * row_bytes();
  }

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
    unit.h0 = unit.p0 * args.stride[1] - args.pad[1] + first_row;
    unit.inside = unit.d >= 0 && unit.d < args.x_size[0];
    unit.fresh = first || row_unit == 0;
    return unit;
  }
  __device__ __forceinline__ i64 row_of(const Unit& unit, int h) const {
    return unit.n * stride[0] + unit.d * stride[3] + h * stride[4];
  }
  // Of a row, where a position's window begins; may be outside.
  __device__ __forceinline__ int window_at(int q) const {
    return (q * args.stride[2] - args.pad[2]) * args.channels;
  }
  __device__ __forceinline__ int first_element(const Unit& unit) const {
    return min(row_elements(), max(0, window_at(unit.q0)));
  }
  // Copies begin at multiples of 16 bytes, so a row may come with elements before it.
  __device__ __forceinline__ int lead_of(const Unit& unit, int h, int first) const {
    return static_cast<int>(row_of(unit, h) + first) & (kChunk - 1);
  }
  __device__ __forceinline__ int skipped(const Unit& unit) const {
    return unit.fresh ? 0 : met() - min(met(), ahead());
  }

  // The low word of two neighbours, `shift` bits on.
  __device__ static __forceinline__ u32 shifted(u32 low, u32 high, u32 shift) {
    return static_cast<u32>((static_cast<u64>(high) << 32 | low) >> shift);
  }
  // A word's elements below `wanted`, zeros beyond.
  __device__ static __forceinline__ u32 first_of(u32 word, int wanted) {
    return wanted >= 4 / kBytes ? word : wanted > 0 ? word & 0xffff : 0;
  }

  // Starts the copies of a unit's new rows, a warp each.
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
      const T* const start = x + (from + first - lead);
      const u32 to = shared_address(raws) + stage * raw_bytes() + row * (args.row_words * 4);
      for (int at = lane * kChunk; at < count; at += 32 * kChunk) {
        copy_async<16>(to + at * kBytes, start + at, min(16, (count - at) * kBytes));
      }
    }
  }

  // A unit's new rows, as they came, become windows from slot `ring` on. A warp has 32 positions and
  // 16 bytes of columns, of every row or, where there are warps to spare, of every so many.
  __device__ __forceinline__ void lay_out(const Unit& unit, int stage, int ring) const {
    const int lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    const int skip = skipped(unit), rows_there = met() - skip;
    const int first = first_element(unit), step = args.stride[2] * args.channels;
    const int parts_log = args.segment >> 6;  // of one 32 or two
    const int chunks = args.column_tiles * 8 / kChunk << parts_log;
    const i64 first_row_at = row_of(unit, unit.h0 + skip) + first;
    const char* const raw = raws + stage * raw_bytes();
    for (int item = warp_item; item < chunks; item += warps) {
      const int chunk = item >> parts_log, q = (item - (chunk << parts_log)) * 32 + lane;
      const int element = window_at(unit.q0 + q) + chunk * kChunk;
      const int wanted = min(kChunk, columns() - chunk * kChunk);
      const bool there = q < unit.width && wanted > 0;
      const bool whole = there && element >= 0 && element + wanted <= row_elements();
      char* const to = windows + q * pitch() + chunk * 16;
      for (int row = warp_row; row < rows_there; row += warp_rows) {
        const int h = unit.h0 + skip + row;
        int slot = ring + skip + row;
        if (slot >= ring_rows()) slot -= ring_rows();
        auto values = Vector<T, kChunk>::zero();
        if (h >= 0 && h < args.x_size[1]) {
          const int lead = static_cast<int>(first_row_at + row * stride[4]) & (kChunk - 1);
          const int at = element - first + lead;
          const char* const from = raw + row * (args.row_words * 4);
          if (whole) {
            values.raw = some_of(from, at, wanted);
          } else if (there) {
#pragma unroll
            for (int e = 0; e < kChunk; ++e) {
              if (e < wanted && element + e >= 0 && element + e < row_elements()) {
                values.at[e] = reinterpret_cast<const T*>(from)[at + e];
              }
            }
          }
        }
        values.store(reinterpret_cast<T*>(to + slot * row_bytes()));
      }
    }
  }

  // Elements of a row as it came, from the `at`-th on; zeros beyond those wanted.
  __device__ static __forceinline__ uint4 some_of(const char* from, int at, int wanted) {
    const u32* const words = reinterpret_cast<const u32*>(from) + (kWide ? at : at >> 1);
    uint4 some = make_uint4(words[0], words[1], words[2], words[3]);
    if constexpr (!kWide) {
      const u32 shift = (at & 1) * 16;
      some = make_uint4(shifted(some.x, some.y, shift), shifted(some.y, some.z, shift),
                        shifted(some.z, some.w, shift), shifted(some.w, words[4], shift));
    }
    if (wanted < kChunk) {
      some = make_uint4(first_of(some.x, wanted), first_of(some.y, wanted - 4 / kBytes),
                        first_of(some.z, wanted - 8 / kBytes),
                        first_of(some.w, wanted - 12 / kBytes));
    }
    return some;
  }
};

}  // namespace convgrad
