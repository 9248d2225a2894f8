// The gradient of max pooling from its input, for overlapping square windows, channels last, with a
// 32-bit word of channels per thread. The host's side is pool_strips.py.
//
// grad_x[i] = sum of grad[o] over the windows o whose maximum is at i. The maximum of a window is the
// maximum of its rows' maxima. Its gradient is routed back the same way: to the first row with that
// maximum, then to the first position of that row (of several NaNs, to the last). ptx/word_keys.cuh
// compares words.
//
// A thread owns ROWS rows of a strip of the input and walks along W from window to window. It holds
// the keys of the last KERNEL columns, of all rows in windows that overlap its own rows, and the sums
// of its own rows. Adjacent threads hold adjacent channels: an access is 4 bytes per thread, and the
// next columns are prefetched. The warps of a block have adjacent tiles along H, whose common rows
// are in the L1 cache.
// Block: 128 threads; shared memory: none. Grid: ceil(threads / 128). Relies on its launcher for
// contiguous channels in whole words, padding PAD before H and W, strips that start at a multiple of
// STRIDE, and an image's extent below 2^31 bytes. Deterministic, no atomics, sums in float32.
#include "pool/pool_words.cuh"

using namespace convgrad;

namespace {

using T = ELEMENT;
constexpr int kPer = kPerWord<T>, kBytes = sizeof(T);

constexpr int kFirstWindow = -((KERNEL - 1 - PAD) / STRIDE);
constexpr int kLastWindow = (ROWS - 1 + PAD) / STRIDE;
constexpr int kWindows = kLastWindow - kFirstWindow + 1;
constexpr int kFirstRow = kFirstWindow * STRIDE - PAD;
constexpr int kReached = (kWindows - 1) * STRIDE + KERNEL;  // rows
constexpr int kOwn = -kFirstRow;                            // index of the first own row
static_assert(ROWS % STRIDE == 0 && kReached < 32, "rows are bits of a word");

struct StripArgs {
  const void* x;
  const void* grad;
  void* grad_x;
  i64 x_stride[5];  // N C D H W, in elements
  i64 grad_stride[5];
  i64 grad_x_stride[5];
  i64 threads;
  int words;  // of channels
  int x_size[3];
  int y_size[3];
  int tiles;   // along H
  int strips;  // along W
  int strip;   // columns
};

}  // namespace

extern "C" __global__ void __launch_bounds__(128, blocks_here(BLOCKS))
    pool_strips(const __grid_constant__ StripArgs args) {
  i64 index = static_cast<i64>(blockIdx.x) * 128 + threadIdx.x;
  if (index >= args.threads) return;
  i64 word, strip, tile, d;
  index = divide(index, args.words, word);
  index = divide(index, args.tiles, tile);
  index = divide(index, args.strips, strip);
  const i64 n = divide(index, args.x_size[0], d);

  const int h0 = static_cast<int>(tile) * ROWS, w0 = static_cast<int>(strip) * args.strip;
  const int w1 = min(w0 + args.strip, args.x_size[2]);
  const int p0 = h0 / STRIDE + kFirstWindow, q0 = w0 / STRIDE + kFirstWindow;
  const int q1 = (w1 - 1 + PAD) / STRIDE;
  const int one = opaque_one(args.words);
  // Strides in bytes.
  const int x_row = static_cast<int>(args.x_stride[3] * kBytes);
  const int x_step = static_cast<int>(args.x_stride[4] * kBytes);
  const int grad_row = static_cast<int>(args.grad_stride[3] * kBytes);
  const int grad_step = static_cast<int>(args.grad_stride[4] * kBytes);
  const int out_row = static_cast<int>(args.grad_x_stride[3] * kBytes);
  const int out_step = static_cast<int>(args.grad_x_stride[4] * kBytes);
  // Addresses of the first row read and the first row of windows; may be outside.
  const char* const x =
      reinterpret_cast<const char*>(static_cast<const T*>(args.x) + n * args.x_stride[0] +
                                    d * args.x_stride[2] + word * kPer) +
      static_cast<i64>(h0 + kFirstRow) * x_row;
  const char* const grad =
      reinterpret_cast<const char*>(static_cast<const T*>(args.grad) + n * args.grad_stride[0] +
                                    d * args.grad_stride[2] + word * kPer) +
      static_cast<i64>(p0) * grad_row;
  char* const grad_x =
      reinterpret_cast<char*>(static_cast<T*>(args.grad_x) + n * args.grad_x_stride[0] +
                              d * args.grad_x_stride[2] + word * kPer) +
      static_cast<i64>(h0) * out_row;
  // Valid rows: of those read, of windows, and of this thread's own.
  const int top = h0 + kFirstRow;
  const u32 x_rows = bits_between(-top, min(args.x_size[1] - top, kReached));
  const u32 y_rows = bits_between(-p0, min(args.y_size[1] - p0, kWindows));
  const u32 own_rows = bits_between(0, min(args.x_size[1] - h0, ROWS));

  u32 keys[KERNEL][kReached];
  float sums[KERNEL][ROWS][kPer] = {};
  u32 coming[STRIDE][kReached], gradients[kWindows];
  const auto fetch = [&](int first, int count) {
#pragma unroll
    for (int i = 0; i < STRIDE; ++i) {
      if (i >= count) continue;
      const int w = first + i;
      const bool there = w >= 0 && w < args.x_size[2];
      fetch_rows(there ? x_rows : 0, x + static_cast<i64>(w) * x_step, x_row, one, coming[i]);
    }
  };
  const auto fetch_gradients = [&](int q) {
    const bool there = q >= 0 && q < args.y_size[2];
    fetch_rows(there ? y_rows : 0, grad + static_cast<i64>(q) * grad_step, grad_row, one, gradients);
  };
  // Convert the words that have arrived to a column of keys.
  const auto take = [&](u32 (&column)[kReached], int w, const u32 (&words)[kReached]) {
    keys_of_rows<T>(w >= 0 && w < args.x_size[2] ? x_rows : 0, words, column);
  };
  const auto leave = [&](const float (&column)[ROWS][kPer], int w) {
    const u32 rows = w >= w0 && w < w1 ? own_rows : 0;
    store_rows<T>(rows, grad_x + static_cast<i64>(w) * out_step, out_row, one, column);
  };

  // Columns that the first window shares with the previous one.
  const int first = q0 * STRIDE - PAD;
#pragma unroll
  for (int start = 0; start < KERNEL - STRIDE; start += STRIDE) {
    fetch(first + start, min(STRIDE, KERNEL - STRIDE - start));
#pragma unroll
    for (int i = 0; i < STRIDE; ++i) {
      if (start + i < KERNEL - STRIDE) take(keys[start + i], first + start + i, coming[i]);
    }
  }
  fetch(first + KERNEL - STRIDE, STRIDE);
  fetch_gradients(q0);
  UnusedResult unneeded;
  for (int q = q0; q <= q1;) {
    // Unrolled until the ring of columns repeats.
#pragma unroll
    for (int turn = 0; turn < KERNEL; ++turn) {
      if (q > q1) break;
      const int base = turn * STRIDE;
      const int w = q * STRIDE - PAD;
#pragma unroll
      for (int i = 0; i < STRIDE; ++i) {
        const int j = KERNEL - STRIDE + i;
        take(keys[(base + j) % KERNEL], w + j, coming[i]);
      }
      u32 here[kWindows];
#pragma unroll
      for (int p = 0; p < kWindows; ++p) here[p] = gradients[p];
      if (q < q1) {
        fetch(w + KERNEL, STRIDE);
        fetch_gradients(q + 1);
      }
      u32 most[kReached];  // maximum of each row
#pragma unroll
      for (int r = 0; r < kReached; ++r) {
        most[r] = keys[(base + KERNEL - 1) % KERNEL][r];
#pragma unroll
        for (int j = KERNEL - 2; j >= 0; --j) {
          most[r] = max_keys<kPer>(keys[(base + j) % KERNEL][r], most[r]);
        }
        // The last NaN is the greatest.
        most[r] = rank_nan<kPer>(most[r], kReached - 1 - r);
      }
      // Route each window's gradient to a row, then each row's to its positions.
      float rows[ROWS][kPer];
#pragma unroll
      for (int p = 0; p < kWindows; ++p) {
        u32 of[KERNEL];
#pragma unroll
        for (int r = 0; r < KERNEL; ++r) of[r] = most[p * STRIDE + r];
        float rest[kPer];
        widen_word<T>(here[p], rest);
        route<kPer>(of, 0, KERNEL, rest, unneeded, [&](int tap, int c, bool taken, float value) {
          const int row = p * STRIDE + tap - kOwn;
          if (row < 0 || row >= ROWS) return;
          add_taken(p == 0 || tap + STRIDE >= KERNEL, taken, value, rows[row][c]);
        });
      }
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        u32 of[KERNEL];
#pragma unroll
        for (int j = 0; j < KERNEL; ++j) {
          of[j] = rank_nan<kPer>(keys[(base + j) % KERNEL][kOwn + r], KERNEL - 1 - j);
        }
        route<kPer>(of, 0, KERNEL, rows[r], unneeded, [&](int tap, int c, bool taken, float value) {
          add_taken(tap >= KERNEL - STRIDE, taken, value, sums[(base + tap) % KERNEL][r][c]);
        });
      }
#pragma unroll
      for (int i = 0; i < STRIDE; ++i) leave(sums[(base + i) % KERNEL], w + i);
      ++q;
    }
  }
  unneeded.use();
}
