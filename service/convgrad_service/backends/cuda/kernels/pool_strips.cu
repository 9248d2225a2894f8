// The gradient of max pooling from its input, where square windows overlap: 16-bit types, channels
// last, two channels a thread. The host's side is pool_strips.py.
//
// grad_x[i] = sum of grad[o] over the windows o whose maximum is at i. With the keys of pool_keys.cuh
// the maximum over a window is that of its columns' maxima, and its gradient goes back the same way:
// to the column, then to the row.
//
// A thread owns ROWS rows of a strip of the input and walks along W, from window to window; it holds
// the last KERNEL columns, of all rows that the windows reach which touch its own: their keys, the
// columns' maxima for each row of windows, and the gradients that those have got. When the walk has
// left a column its gradients go to its rows. Neighbouring threads hold neighbouring channels: every
// access is 4 bytes a thread, and the next columns are on their way while one is worked on.
// Block: 128 threads; shared memory: none. Grid: ceil(threads / 128). Relies on its launcher for an
// even number of channels side by side, padding PAD on the sides before, strips that start at a
// multiple of STRIDE and, halos included, have fewer than 4,096 columns, and an image's extent below
// 2^31 elements. Deterministic, no atomics, sums in float32.
#include "accesses.cuh"
#include "tensor_core.cuh"

using namespace convgrad;

namespace {

using T = ELEMENT;

constexpr int kFirstWindow = -((KERNEL - 1 - PAD) / STRIDE);
constexpr int kLastWindow = (ROWS - 1 + PAD) / STRIDE;
constexpr int kWindows = kLastWindow - kFirstWindow + 1;
constexpr int kFirstRow = kFirstWindow * STRIDE - PAD;
constexpr int kReached = (kWindows - 1) * STRIDE + KERNEL;  // rows
constexpr int kOwn = -kFirstRow;                            // the first own row among them
constexpr int kColumnBits = 12;
constexpr int kNone = -0x7fffffff - 1;  // below every key
static_assert(ROWS % STRIDE == 0 && kReached <= 16, "positions have 16 bits");

struct StripArgs {
  const void* x;
  const void* grad;
  void* grad_x;
  i64 x_stride[5];  // N C D H W, in elements
  i64 grad_stride[5];
  i64 grad_x_stride[5];
  i64 threads;
  int pairs;  // of channels
  int x_size[3];
  int y_size[3];
  int tiles;   // along H
  int strips;  // along W
  int strip;   // columns
};

// Both keys of two neighbouring channels. A key is the value, made an integer of the same order,
// above the position, such that of equal values the first has the larger key; NaN is above every
// number, and of several the last is the largest; -0 and +0 are equal.
__device__ __forceinline__ u32 nans_of(u32 two) {
  constexpr u32 kBeyondInfinity = sizeof(T) == 2 ? NAN_STEP : 0;
  return ((two & 0x7fff7fff) + kBeyondInfinity) & 0x80008000;
}
__device__ __forceinline__ void keys_of(u32 two, int position, int (&keys)[2]) {
  const u32 negative = two >> 15 & 0x00010001;
  const u32 ordered = (two & 0x7fff7fff) ^ negative * 0xffff;
  const u32 code = 0xffff - position;
  keys[0] = static_cast<int>((ordered << 16) + (negative << 16) + code);
  keys[1] = static_cast<int>(((ordered + (negative & 0xffff0000)) & 0xffff0000) + code);
}
__device__ __forceinline__ void mark_nans(u32 nans, int position, int (&keys)[2]) {
  if (nans & 0x8000) keys[0] = 0x7fff0000 + position;
  if (nans & 0x80000000) keys[1] = 0x7fff0000 + position;
}

struct Column {
  int keys[ROWS][2];
  int most[kWindows][2];
  float given[kWindows][2];
};

}  // namespace

extern "C" __global__ void __launch_bounds__(128, BLOCKS)
    pool_strips(const __grid_constant__ StripArgs args) {
  i64 index = static_cast<i64>(blockIdx.x) * 128 + threadIdx.x;
  if (index >= args.threads) return;
  i64 pair, strip, tile, d;
  index = divide(index, args.pairs, pair);
  index = divide(index, args.strips, strip);
  index = divide(index, args.tiles, tile);
  const i64 n = divide(index, args.x_size[0], d);

  const int h0 = static_cast<int>(tile) * ROWS, w0 = static_cast<int>(strip) * args.strip;
  const int w1 = min(w0 + args.strip, args.x_size[2]);
  const int p0 = h0 / STRIDE + kFirstWindow, q0 = w0 / STRIDE + kFirstWindow;
  const int q1 = (w1 - 1 + PAD) / STRIDE;
  const int x_row = static_cast<int>(args.x_stride[3]), x_step = static_cast<int>(args.x_stride[4]);
  const int grad_row = static_cast<int>(args.grad_stride[3]);
  const int grad_step = static_cast<int>(args.grad_stride[4]);
  // Of the first row that is reached, and the first row of windows; may be outside.
  const T* const x = static_cast<const T*>(args.x) + n * args.x_stride[0] + d * args.x_stride[2] +
                     pair * 2 + static_cast<i64>(h0 + kFirstRow) * x_row;
  const T* const grad = static_cast<const T*>(args.grad) + n * args.grad_stride[0] +
                        d * args.grad_stride[2] + pair * 2 + static_cast<i64>(p0) * grad_row;
  T* const grad_x = static_cast<T*>(args.grad_x) + n * args.grad_x_stride[0] +
                    d * args.grad_x_stride[2] + pair * 2 + h0 * args.grad_x_stride[3];
  // Rows that are there, of those reached, and of windows.
  const int x_low = -(h0 + kFirstRow), x_high = args.x_size[1] + x_low;
  const int y_low = -p0, y_high = args.y_size[1] + y_low;

  Column columns[KERNEL];
  u32 coming[STRIDE][kReached], gradients[kWindows];
  const auto fetch = [&](int first, int count) {
#pragma unroll
    for (int i = 0; i < STRIDE; ++i) {
      if (i >= count) continue;
      const int w = first + i;
      const bool there = w >= 0 && w < args.x_size[2];
      const T* from = x + static_cast<i64>(w) * x_step;
#pragma unroll
      for (int r = 0; r < kReached; ++r) {
        load_if(there && r >= x_low && r < x_high, from, coming[i][r]);
        from += x_row;
      }
    }
  };
  const auto fetch_gradients = [&](int q) {
    const bool there = q >= 0 && q < args.y_size[2];
    const T* from = grad + static_cast<i64>(q) * grad_step;
#pragma unroll
    for (int p = 0; p < kWindows; ++p) {
      load_if(there && p >= y_low && p < y_high, from, gradients[p]);
      from += grad_row;
    }
  };
  // What came becomes a column.
  const auto take = [&](Column& column, int w, const u32 (&words)[kReached]) {
    const bool there = w >= 0 && w < args.x_size[2];
    const int place = w - (q0 * STRIDE - PAD);
    int keys[kReached][2];
    u32 nans = 0;
#pragma unroll
    for (int r = 0; r < kReached; ++r) {
      keys_of(words[r], (r << kColumnBits) + place, keys[r]);
      nans |= nans_of(words[r]);
    }
    if (nans != 0) {
#pragma unroll
      for (int r = 0; r < kReached; ++r) {
        mark_nans(nans_of(words[r]), (r << kColumnBits) + place, keys[r]);
      }
    }
    if (!there || x_low > 0 || x_high < kReached) {
#pragma unroll
      for (int r = 0; r < kReached; ++r) {
        if (!there || r < x_low || r >= x_high) keys[r][0] = keys[r][1] = kNone;
      }
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) {
#pragma unroll
      for (int p = 0; p < kWindows; ++p) {
        int most = keys[p * STRIDE][c];
#pragma unroll
        for (int r = 1; r < KERNEL; ++r) most = max(most, keys[p * STRIDE + r][c]);
        column.most[p][c] = most;
        column.given[p][c] = 0;
      }
#pragma unroll
      for (int r = 0; r < ROWS; ++r) column.keys[r][c] = keys[kOwn + r][c];
    }
  };
  const auto leave = [&](const Column& column, int w) {
    const bool owned = w >= w0 && w < w1;
    T* to = grad_x + static_cast<i64>(w) * args.grad_x_stride[4];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      float sums[2] = {};
#pragma unroll
      for (int p = 0; p < kWindows; ++p) {
        const int tap = kOwn + r - p * STRIDE;
        if (tap < 0 || tap >= KERNEL) continue;
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          if (column.keys[r][c] == column.most[p][c]) sums[c] += column.given[p][c];
        }
      }
      store_if(owned && h0 + r < args.x_size[1], to, narrow_two<T>(sums[0], sums[1]));
      to += args.grad_x_stride[3];
    }
  };

  // The columns that the first window shares with one before it.
  const int first = q0 * STRIDE - PAD;
#pragma unroll
  for (int start = 0; start < KERNEL - STRIDE; start += STRIDE) {
    fetch(first + start, min(STRIDE, KERNEL - STRIDE - start));
#pragma unroll
    for (int i = 0; i < STRIDE; ++i) {
      if (start + i < KERNEL - STRIDE) take(columns[start + i], first + start + i, coming[i]);
    }
  }
  fetch(first + KERNEL - STRIDE, STRIDE);
  fetch_gradients(q0);
  for (int q = q0; q <= q1;) {
    // As many steps as it takes until columns have their places again.
#pragma unroll
    for (int turn = 0; turn < KERNEL; ++turn) {
      if (q > q1) break;
      const int base = turn * STRIDE;
      const int w = q * STRIDE - PAD;
#pragma unroll
      for (int i = 0; i < STRIDE; ++i) {
        const int j = KERNEL - STRIDE + i;
        take(columns[(base + j) % KERNEL], w + j, coming[i]);
      }
      u32 here[kWindows];
#pragma unroll
      for (int p = 0; p < kWindows; ++p) here[p] = gradients[p];
      if (q < q1) {
        fetch(w + KERNEL, STRIDE);
        fetch_gradients(q + 1);
      }
#pragma unroll
      for (int p = 0; p < kWindows; ++p) {
        const float value[2] = {widen(T{static_cast<unsigned short>(here[p] & 0xffff)}),
                                widen(T{static_cast<unsigned short>(here[p] >> 16)})};
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          int most = columns[base % KERNEL].most[p][c];
#pragma unroll
          for (int j = 1; j < KERNEL; ++j) {
            most = max(most, columns[(base + j) % KERNEL].most[p][c]);
          }
#pragma unroll
          for (int j = 0; j < KERNEL; ++j) {
            Column& column = columns[(base + j) % KERNEL];
            if (column.most[p][c] == most) column.given[p][c] += value[c];
          }
        }
      }
#pragma unroll
      for (int i = 0; i < STRIDE; ++i) leave(columns[(base + i) % KERNEL], w + i);
      ++q;
    }
  }
}
